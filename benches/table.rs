//! One table, on one device in one run: pairs by size, churn and threads, beside the driver's own calls on a GPU.
//!
//! `VRAMALLOC_BENCH_QUICK=1` makes it short and the figures rough.

mod common;

use common::{Churn, allocator, device, threads};
use std::hint::black_box;
use std::time::Instant;
#[cfg(feature = "cuda")]
use vramalloc::{Driver, StreamHandle};
use vramalloc::{HistoryOptions, OpenDevice, Stacks};

/// Nanoseconds of one call of `f`: the best of several rounds, each long enough to measure. A round has a thread of its
/// own, since on a shared machine one processor can be slower than another all the time.
fn best_ns(rounds: u32, calls: u32, mut f: impl FnMut() + Send) -> f64 {
    let mut round = || {
        f();
        let start = Instant::now();
        for _ in 0..calls {
            f();
        }
        start.elapsed().as_nanos() as f64 / f64::from(calls)
    };
    let mut apart = || std::thread::scope(|scope| scope.spawn(&mut round).join().expect("no panic"));
    (0..rounds).map(|_| apart()).fold(f64::INFINITY, f64::min)
}

fn main() {
    let quick = std::env::var_os("VRAMALLOC_BENCH_QUICK").is_some();
    let scale = if quick { 1 } else { 50 };
    let device = device();
    let allocator = allocator(&device);
    let stream = allocator.default_stream().expect("the default stream");
    println!("device: {} ({})", device.driver().name(), device.driver().label());
    println!("configuration: {:?}", allocator.config());
    println!();
    println!("alloc and free, ns a pair");
    println!(
        "{:>12} {:>10} {:>10} {:>14} {:>14} {:>10}",
        "bytes", "handle", "pointer", "cuMemAlloc", "cuMemAllocAsync", "raw/ours"
    );
    for log in 9..=29 {
        let bytes = 1u64 << log;
        drop(allocator.alloc(bytes, &stream).expect("room"));
        let before = allocator.driver().calls();
        let handle =
            best_ns(21, 2_000 * scale, || drop(black_box(allocator.alloc(bytes, &stream).expect("cached"))));
        let pointer = best_ns(21, 2_000 * scale, || {
            let ptr = allocator.alloc_raw(bytes, &stream).expect("cached");
            allocator.free_raw(ptr).expect("live");
        });
        assert_eq!(allocator.driver().calls().since(&before).total().calls, 0, "the cache was not hit");
        let (raw, asynchronous) = driver_pairs(&device, bytes);
        let cell = |ns: Option<f64>| ns.map_or("-".to_owned(), |ns| format!("{ns:.0}"));
        let faster = raw.map_or("-".to_owned(), |raw| format!("{:.0}x", raw / handle));
        println!(
            "{bytes:>12} {handle:>10.1} {pointer:>10.1} {:>14} {:>15} {faster:>9}",
            cell(raw),
            cell(asynchronous)
        );
    }
    allocator.empty_cache().expect("the cache is emptied");

    println!();
    println!("churn: one block freed and one allocated, 512 B to 16 MiB, ns a pair");
    for blocks in [1_000, 10_000, 100_000] {
        let mut churn = Churn::new(&allocator, &stream, blocks);
        println!("{blocks:>12} live {:>10.1}", best_ns(9, 4_000 * scale, || churn.step()));
        drop(churn);
        allocator.validate().expect("valid");
        allocator.empty_cache().expect("the cache is emptied");
    }

    println!();
    println!("threads: 1 MiB, ns a pair of each thread");
    println!("{:>12} {:>12} {:>12}", "threads", "own streams", "one stream");
    for count in [1usize, 2, 4, 8, 16] {
        let own: Vec<_> = (0..count)
            .map(|_| allocator.stream(device.create_stream().expect("a stream")).expect("its pool"))
            .collect();
        let one = vec![own[0].clone(); count];
        let pairs = 4_000 * u64::from(scale);
        let best = |streams: &[_]| {
            (0..5)
                .map(|_| threads(&allocator, streams, pairs).as_nanos() as f64 / pairs as f64)
                .fold(f64::INFINITY, f64::min)
        };
        println!("{count:>12} {:>12.1} {:>12.1}", best(&own), best(&one));
    }
    println!();
    println!("history: 1 MiB, ns a pair, which is two events");
    let mut recorded = vec![("off", None), ("on", Some(HistoryOptions::default()))];
    if cfg!(feature = "stacks") {
        recorded.push(("with stacks", Some(HistoryOptions::default().stacks(Stacks::All))));
    }
    for (name, options) in recorded {
        allocator.record_history(options).expect("recorded");
        let pair =
            best_ns(21, 2_000 * scale, || drop(black_box(allocator.alloc(1 << 20, &stream).expect("cached"))));
        println!("{name:>12} {pair:>12.1}");
    }
    let events = allocator.pytorch_snapshot().device_traces.iter().map(Vec::len).sum::<usize>();
    assert!(events > 0, "the events are there");
    allocator.record_history(None).expect("off");
    assert_eq!(allocator.memory_allocated(), 0, "every block was freed");
    allocator.validate().expect("valid");
}

/// The driver's own calls on a GPU, ns a pair: plain and stream-ordered.
#[cfg(feature = "cuda")]
fn driver_pairs(device: &OpenDevice, bytes: u64) -> (Option<f64>, Option<f64>) {
    let OpenDevice::Cuda(cuda) = device else { return (None, None) };
    cuda.set_default_pool_release_threshold(u64::MAX).expect("the default pool");
    let raw = best_ns(3, 20, || cuda.free(cuda.alloc(bytes).expect("room")).expect("freed"));
    let asynchronous = best_ns(5, 500, || {
        let ptr = cuda.alloc_async(bytes, StreamHandle::DEFAULT).expect("room");
        cuda.free_async(ptr, StreamHandle::DEFAULT).expect("freed");
    });
    cuda.trim_default_pool(0).expect("trimmed");
    (Some(raw), Some(asynchronous))
}

#[cfg(not(feature = "cuda"))]
fn driver_pairs(_: &OpenDevice, _: u64) -> (Option<f64>, Option<f64>) {
    (None, None)
}
