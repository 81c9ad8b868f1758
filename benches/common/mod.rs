//! What the benchmarks share: the device, a generator of numbers, the workloads.

#![allow(dead_code, unreachable_pub)] // each benchmark uses a part

use vramalloc::driver::sim::SimDriver;
use vramalloc::{Allocation, CachingAllocator, Config, DeviceChoice, OpenDevice, Stream};

pub const MIB: u64 = 1 << 20;

/// The device that `VRAMALLOC_BENCH_DEVICE` names: auto, cuda:N or sim.
pub fn device() -> OpenDevice {
    let choice: DeviceChoice = match std::env::var("VRAMALLOC_BENCH_DEVICE") {
        Ok(text) => text.parse().expect("VRAMALLOC_BENCH_DEVICE"),
        Err(_) => DeviceChoice::Auto,
    };
    OpenDevice::open(choice, simulated()).expect("the device opens")
}

/// A simulated device with room for every workload and nothing behind its addresses.
fn simulated() -> vramalloc::driver::sim::SimBuilder {
    SimDriver::builder().capacity(1 << 40).backing(false).log(false)
}

/// An allocator with the configuration of `VRAMALLOC_CONF`.
pub fn allocator(device: &OpenDevice) -> CachingAllocator {
    CachingAllocator::new(device.driver(), Config::from_env().expect("VRAMALLOC_CONF")).expect("an allocator")
}

/// xorshift: the same numbers in every run.
pub struct Numbers(u64);

impl Numbers {
    pub fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1)
    }

    pub fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    pub fn below(&mut self, end: u64) -> u64 {
        self.next() % end
    }

    /// A size from 512 bytes to `2^max_log` bytes, every power of two as likely.
    pub fn size(&mut self, max_log: u64) -> u64 {
        let log = 9 + self.below(max_log - 9);
        (1 << log) + self.below(1 << log)
    }
}

/// Blocks of random sizes, one of which is freed and another allocated at each step.
pub struct Churn<'a> {
    allocator: &'a CachingAllocator,
    stream: &'a Stream,
    live: Vec<Option<Allocation>>,
    numbers: Numbers,
    max_log: u64,
}

impl<'a> Churn<'a> {
    /// `blocks` live blocks of up to 16 MiB, or less where the device is too small for that many.
    pub fn new(allocator: &'a CachingAllocator, stream: &'a Stream, blocks: usize) -> Self {
        let total = allocator.driver().capabilities().total_bytes;
        let mut max_log = 24;
        while max_log > 12 && (blocks as u64).saturating_mul(1 << (max_log - 2)) > total {
            max_log -= 1;
        }
        let mut churn = Self { allocator, stream, live: Vec::new(), numbers: Numbers::new(7), max_log };
        for _ in 0..blocks {
            let bytes = churn.numbers.size(max_log);
            churn.live.push(Some(allocator.alloc(bytes, stream).expect("room for the blocks")));
        }
        for _ in 0..4 * blocks {
            churn.step();
        }
        churn
    }

    pub fn step(&mut self) {
        let victim = self.numbers.below(self.live.len() as u64) as usize;
        let bytes = self.numbers.size(self.max_log);
        self.live[victim] = None;
        self.live[victim] = Some(self.allocator.alloc(bytes, self.stream).expect("room for the block"));
    }
}

/// Runs `pairs` alloc-and-free pairs in each of `streams.len()` threads at once; the time of the slowest.
pub fn threads(allocator: &CachingAllocator, streams: &[Stream], pairs: u64) -> std::time::Duration {
    let barrier = std::sync::Barrier::new(streams.len());
    std::thread::scope(|scope| {
        let threads: Vec<_> = streams
            .iter()
            .map(|stream| {
                let barrier = &barrier;
                scope.spawn(move || {
                    drop(allocator.alloc(MIB, stream).expect("the first block"));
                    barrier.wait();
                    let start = std::time::Instant::now();
                    for _ in 0..pairs {
                        drop(std::hint::black_box(allocator.alloc(MIB, stream).expect("a cached block")));
                    }
                    start.elapsed()
                })
            })
            .collect();
        threads.into_iter().map(|thread| thread.join().expect("no panic")).max().unwrap_or_default()
    })
}
