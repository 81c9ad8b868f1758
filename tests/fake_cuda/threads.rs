//! Per-thread default streams: other threads, and threads that have ended.

use crate::bench::bench;
use crate::streams::{BYTES, reuse};
use vramalloc::{DriverErrorKind, Error};

#[test]
fn threads_that_ended_strand_nothing() {
    let Some(bench) = bench("threads_that_ended_strand_nothing") else { return };
    let (lasting, _) = bench.streams();
    let events = || bench.fake.calls("cuEventCreate") - bench.fake.calls("cuEventDestroy_v2");
    bench.memory.alloc_zeros::<u8>(BYTES, &lasting).expect("zeros");
    let before = events();
    for _ in 0..20 {
        std::thread::scope(|scope| {
            let ended = scope.spawn(|| {
                bench.context.bind_to_thread().expect("bind");
                let own = bench.context.per_thread_stream();
                drop(bench.memory.alloc_zeros::<u8>(BYTES, &own).expect("zeros"));
                bench.memory.alloc_zeros::<u8>(100, &own).expect("zeros")
            });
            drop(ended.join().expect("thread")); // dropped by another thread, after the stream's end
        });
    }
    bench.memory.empty_cache().expect("empty cache");
    assert_eq!(bench.memory.memory_reserved(), 0, "what was cached for them goes back");
    // Two of cudarc's for the lasting stream's block, and a few that clocks keep for reuse.
    assert!(events() - before <= 4, "{} events are left of threads that ended", events() - before);
    reuse(&bench, &lasting, "the memory of threads that ended");
}

#[test]
fn another_threads_stream_is_an_error_that_says_what_to_do() {
    let Some(bench) = bench("another_threads_stream_is_an_error_that_says_what_to_do") else { return };
    let own = bench.context.per_thread_stream();
    let mut x = bench.memory.clone_htod(&[1_u32, 2, 3], &own).expect("upload");
    own.synchronize().expect("synchronize");
    std::thread::scope(|scope| {
        let theirs = scope.spawn(|| {
            bench.context.bind_to_thread().expect("bind");
            let refused =
                [x.to_vec().map(drop), x.set_zero(), x.copy_from_slice(&[4, 5, 6]), x.try_clone().map(drop)];
            for result in refused {
                let Err(Error::Driver(error)) = result else { panic!("it is another thread's stream") };
                assert_eq!(error.kind, DriverErrorKind::StreamGone);
                let text = error.to_string();
                assert!(text.contains("another thread") && text.contains("_on"), "{text}");
            }
            let here = bench.memory.stream(&bench.context.per_thread_stream()).expect("this thread's");
            let mut values = [0; 3];
            x.as_view().copy_to_slice_on(&mut values, &here).expect("on this thread's stream");
            assert_eq!(values, [1, 2, 3]);
            x.as_view_mut().set_zero_on(&here).expect("on this thread's stream");
            let mut copy = bench.memory.alloc_uninit(3, &bench.context.per_thread_stream()).expect("alloc");
            copy.as_view_mut().copy_from_on(&x.as_view(), &here).expect("on this thread's stream");
            assert_eq!(copy.to_vec().expect("its own"), [0; 3]);
        });
        theirs.join().expect("thread");
    });
    bench.context.synchronize().expect("synchronize");
    assert_eq!(x.to_vec().expect("download"), [0; 3]);
}
