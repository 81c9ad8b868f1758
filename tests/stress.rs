//! Threads on streams, shared and not: every thread runs its own fixed sequence of operations, and marks its
//! memory's real bytes. Whatever the interleaving, nobody's bytes change and nothing is left at the end.

use std::sync::{Arc, Barrier};
use vramalloc::driver::Driver;
use vramalloc::driver::sim::{SimDriver, Work};
use vramalloc::{Allocation, CachingAllocator, Config, DevicePtr, Error, Stream, StreamHandle};

const THREADS: u64 = 8;
const STREAMS: usize = 4;
const STEPS: usize = 1_500;
const MIB: u64 = 1 << 20;

/// A small generator whose every number follows from the thread's own.
struct Random(u64);

impl Random {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % bound
    }
}

struct Held {
    allocation: Allocation,
    mark: u64,
}

impl Held {
    fn new(sim: &SimDriver, allocation: Allocation, mark: u64) -> Self {
        let held = Self { allocation, mark };
        held.places().iter().for_each(|&at| sim.write(at, &mark.to_le_bytes()).unwrap());
        held
    }

    fn places(&self) -> [DevicePtr; 2] {
        let last = self.allocation.block_bytes() - 8;
        [self.allocation.ptr(), self.allocation.ptr().checked_add(last).unwrap()]
    }

    fn check(&self, sim: &SimDriver) {
        for at in self.places() {
            let mut found = [0; 8];
            sim.read(at, &mut found).unwrap();
            assert_eq!(u64::from_le_bytes(found), self.mark, "at {at}");
        }
    }
}

struct Worker<'a> {
    sim: &'a SimDriver,
    allocator: &'a CachingAllocator,
    streams: &'a [(StreamHandle, Stream)],
    random: Random,
    number: u64,
    held: Vec<Held>,
}

impl Worker<'_> {
    fn run(mut self) {
        for step in 0..STEPS {
            match self.random.below(16) {
                0..6 => self.alloc(step as u64),
                6..12 => self.free(),
                12 | 13 => self.use_elsewhere(),
                14 => {
                    let stream = self.random.below(STREAMS as u64) as usize;
                    self.sim.complete(self.streams[stream].0);
                }
                _ => self.look(),
            }
        }
        while !self.held.is_empty() {
            self.free();
        }
    }

    fn alloc(&mut self, step: u64) {
        let bytes = match self.random.below(4) {
            0 | 1 => 1 + self.random.below(64 << 10),
            2 => 1 + self.random.below(2 * MIB),
            _ => 1 + self.random.below(24 * MIB),
        };
        // Every second thread keeps to one stream, the others wander.
        let stream =
            if self.number.is_multiple_of(2) { self.number / 2 } else { self.random.below(STREAMS as u64) };
        match self.allocator.alloc(bytes, &self.streams[stream as usize].1) {
            Ok(allocation) => {
                assert!(allocation.block_bytes() >= bytes);
                self.held.push(Held::new(self.sim, allocation, self.number << 32 | step));
            }
            Err(Error::OutOfMemory(_)) => self.free(), // the device is too small for all of them, on purpose
            Err(why) => panic!("{why}"),
        }
    }

    fn free(&mut self) {
        if !self.held.is_empty() {
            let index = self.random.below(self.held.len() as u64) as usize;
            let held = self.held.swap_remove(index);
            held.check(self.sim);
        }
    }

    fn use_elsewhere(&mut self) {
        let stream = self.random.below(STREAMS as u64) as usize;
        if let Some(held) = self.held.last() {
            let (handle, stream) = &self.streams[stream];
            held.allocation.record_stream(stream).unwrap();
            let work = Work::reading(held.allocation.ptr(), held.allocation.bytes());
            self.sim.launch(*handle, work).unwrap();
        }
    }

    fn look(&mut self) {
        match self.random.below(4) {
            0 => drop(self.allocator.empty_cache().unwrap()),
            1 => drop(self.allocator.poll()),
            2 => self.allocator.validate().unwrap(),
            _ => {
                let stats = self.allocator.memory_stats();
                let (allocated, active) = (stats.allocated_bytes.all, stats.active_bytes.all);
                assert!(allocated.current <= active.current && active.current <= stats.reserved_bytes.all.current);
                assert!(allocated.current <= allocated.peak && active.current <= active.peak);
                assert_eq!(allocated.current, allocated.allocated - allocated.freed);
            }
        }
    }
}

fn stress(config: &str, capacity: u64) {
    let sim = SimDriver::builder().capacity(capacity).log(false).build();
    let config: Config = config.parse().unwrap();
    let allocator = CachingAllocator::new(sim.clone(), config).unwrap();
    let streams: Vec<_> = (0..STREAMS)
        .map(|_| sim.create_stream())
        .map(|handle| (handle, allocator.stream(handle).unwrap()))
        .collect();
    let start = Arc::new(Barrier::new(THREADS as usize));
    std::thread::scope(|scope| {
        for number in 0..THREADS {
            let (sim, allocator, streams, start) = (&*sim, &allocator, &streams[..], Arc::clone(&start));
            scope.spawn(move || {
                start.wait();
                let random = Random(0x9e37_79b9_7f4a_7c15 ^ (number + 1));
                Worker { sim, allocator, streams, random, number, held: Vec::new() }.run();
            });
        }
    });
    allocator.validate().unwrap();
    let stats = allocator.memory_stats();
    assert_eq!((stats.allocation.all.current, stats.allocated_bytes.all.current), (0, 0));
    assert_eq!(stats.allocation.all.allocated, stats.allocation.all.freed);
    assert!(stats.allocated_bytes.all.peak <= stats.reserved_bytes.all.peak);
    sim.complete_all();
    allocator.empty_cache().unwrap();
    assert_eq!((allocator.memory_reserved(), sim.used_bytes()), (0, 0));
    assert_eq!(allocator.take_deferred_error(), None);
    drop((allocator, streams));
    sim.assert_clean();
    assert!(sim.leaks().is_empty(), "{:?}", sim.leaks());
    assert_eq!(sim.memory_info().unwrap().free_bytes, capacity);
}

#[test]
fn threads_share_a_device_with_room() {
    stress("", 16 << 30);
}

#[test]
fn threads_fight_for_a_small_device() {
    stress("", 256 * MIB);
}

#[test]
fn threads_share_a_limit() {
    stress("limit:200MiB,max_split_size_mb:20", 16 << 30);
}

#[test]
fn threads_share_expandable_segments() {
    stress("segments:expandable", 256 * MIB);
}
