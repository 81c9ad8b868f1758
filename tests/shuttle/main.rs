//! Models of threads in every order that a seeded scheduler comes up with:
//! `RUSTFLAGS="--cfg vramalloc_shuttle" cargo test --no-default-features --test shuttle`.
//!
//! A failing schedule is printed by shuttle, for `shuttle::replay`.

#![cfg(vramalloc_shuttle)]

mod lock;
#[allow(dead_code)] // the crate uses more of it
#[path = "../../src/lock.rs"]
mod pool_lock;
mod sync;

use shuttle::scheduler::{PctScheduler, RandomScheduler};
use shuttle::{Config as Explorer, Runner, thread};
use std::sync::Arc;
use vramalloc::driver::sim::{SimDriver, Work};
use vramalloc::driver::{StreamHandle, StreamKey};
use vramalloc::{Allocation, BlockState, CachingAllocator, Config, Limit, Stream};

const MIB: u64 = 1 << 20;
const SEED: u64 = 0x7072_616d;
const SCHEDULES: usize = 1_500;

fn explore(model: impl Fn() + Send + Sync + Clone + 'static) {
    let random = RandomScheduler::new_from_seed(SEED, SCHEDULES);
    Runner::new(random, Explorer::new()).run(model.clone());
    let priorities = PctScheduler::new_from_seed(SEED, 3, SCHEDULES);
    Runner::new(priorities, Explorer::new()).run(model);
}

#[derive(Clone)]
struct World {
    sim: Arc<SimDriver>,
    allocator: CachingAllocator,
    streams: Vec<(StreamHandle, Stream)>,
}

impl World {
    fn new(streams: usize, config: Config) -> Self {
        let sim = SimDriver::builder().capacity(256 * MIB).backing(false).log(false).build();
        let allocator = CachingAllocator::new(sim.clone(), config).unwrap();
        let streams = (0..streams)
            .map(|_| sim.create_stream())
            .map(|handle| (handle, allocator.stream(handle).unwrap()))
            .collect();
        Self { sim, allocator, streams }
    }

    fn alloc(&self, bytes: u64, stream: usize) -> Allocation {
        self.allocator.alloc(bytes, &self.streams[stream].1).unwrap()
    }

    /// A thread with a copy of its own, all of which is dropped when the thread ends.
    fn spawn<T: 'static>(&self, run: impl FnOnce(Self) -> T + Send + 'static) -> thread::JoinHandle<T>
    where
        T: Send,
    {
        let world = self.clone();
        thread::spawn(move || run(world))
    }

    fn key(&self, stream: usize) -> StreamKey {
        self.streams[stream].1.key()
    }

    /// A kernel that overwrites an allocation on its own stream. The device refuses it if unfinished work of another
    /// stream still uses the memory.
    fn overwrite(&self, allocation: &Allocation, stream: usize) {
        self.sim.launch(self.key(stream), Work::writing(allocation.ptr(), allocation.bytes())).unwrap();
    }

    fn read_on(&self, allocation: &Allocation, stream: usize) {
        self.sim.launch(self.key(stream), Work::reading(allocation.ptr(), allocation.bytes())).unwrap();
        allocation.record_stream(&self.streams[stream].1).unwrap();
    }

    /// Checks everything, and that nothing is left once all is freed.
    fn finish(self) {
        self.allocator.validate().unwrap();
        let stats = self.allocator.memory_stats();
        assert_eq!(stats.allocation.all.current, 0);
        self.sim.complete_all();
        self.allocator.empty_cache().unwrap();
        let stats = self.allocator.memory_stats();
        assert_eq!((stats.active_bytes.all.current, self.allocator.memory_reserved()), (0, 0));
        assert_eq!(stats.allocated_bytes.all.allocated, stats.allocated_bytes.all.freed);
        let sim = Arc::clone(&self.sim);
        drop(self);
        sim.assert_clean();
        assert!(sim.leaks().is_empty(), "{:?}", sim.leaks());
    }
}

#[test]
fn memory_with_an_unfinished_use_is_not_reused() {
    explore(|| {
        let world = World::new(2, Config::default());
        let shared = world.alloc(MIB, 0);
        world.read_on(&shared, 1);
        let threads = [
            world.spawn(|world| {
                drop(shared);
                world.allocator.poll();
            }),
            world.spawn(|world| {
                world.allocator.poll();
                let allocation = world.alloc(MIB, 0);
                world.overwrite(&allocation, 0);
            }),
        ];
        let mine = world.alloc(MIB, 0);
        world.overwrite(&mine, 0);
        drop(mine);
        threads.into_iter().for_each(|thread| thread.join().unwrap());
        world.finish();
    });
}

#[test]
fn an_epoch_closes_while_blocks_are_freed_in_it() {
    explore(|| {
        let world = World::new(2, Config::default());
        let (first, second) = (world.alloc(MIB, 0), world.alloc(MIB, 0));
        world.read_on(&first, 1);
        world.read_on(&second, 1);
        drop(first);
        let threads = [
            world.spawn(|world| {
                world.allocator.poll();
            }),
            world.spawn(|world| {
                // More work comes before the free: the epoch that is open then must stand for it, too.
                world.sim.complete(world.key(1));
                world.read_on(&second, 1);
                drop(second);
            }),
        ];
        world.allocator.poll();
        let allocations = [world.alloc(MIB, 0), world.alloc(MIB, 0)];
        allocations.iter().for_each(|allocation| world.overwrite(allocation, 0));
        drop(allocations);
        threads.into_iter().for_each(|thread| thread.join().unwrap());
        world.finish();
    });
}

#[test]
fn two_threads_share_a_pool() {
    explore(|| {
        let world = World::new(1, Config::default());
        let spawn = |bytes: u64| {
            world.spawn(move |world| {
                let (first, second) = (world.alloc(bytes, 0), world.alloc(3 * bytes, 0));
                world.overwrite(&first, 0);
                drop(first);
                let third = world.alloc(bytes / 2, 0);
                let ends = |a: &Allocation| (a.ptr().0, a.ptr().0 + a.block_bytes());
                let (a, b) = (ends(&second), ends(&third));
                assert!(a.1 <= b.0 || b.1 <= a.0);
                world.allocator.validate().unwrap();
            })
        };
        [spawn(4096), spawn(300 << 10)].into_iter().for_each(|thread| thread.join().unwrap());
        let stats = world.allocator.memory_stats();
        assert_eq!((stats.allocation.all.allocated, stats.allocation.all.freed), (6, 6));
        assert_eq!(stats.requested_bytes.all.allocated, (4096 + (300 << 10)) * 9 / 2);
        world.finish();
    });
}

#[test]
fn peaks_over_two_pools_are_never_too_low() {
    explore(|| {
        let world = World::new(2, Config::default());
        let spawn = |stream: usize| {
            world.spawn(move |world| {
                drop(world.alloc(8192, stream));
                world.alloc(4096, stream)
            })
        };
        let threads = [spawn(0), spawn(1)];
        let reading = world.allocator.memory_stats();
        assert!(reading.allocated_bytes.all.peak >= reading.allocated_bytes.all.current);
        let held = threads.map(|thread| thread.join().unwrap());
        let stats = world.allocator.memory_stats();
        let allocated = stats.allocated_bytes.all;
        assert_eq!((allocated.current, allocated.allocated, allocated.freed), (8192, 24_576, 16_384));
        assert!((8192..=16_384).contains(&allocated.peak), "{allocated:?}");
        assert!(stats.active_bytes.all.peak >= 8192 && stats.active_bytes.all.peak <= 16_384);
        let more = world.alloc(12_288, 0); // one thread alone: exact from here on
        let peak = world.allocator.memory_stats().allocated_bytes.all.peak;
        assert_eq!(peak, 20_480);
        drop((more, held));
        world.finish();
    });
}

#[test]
fn a_stream_that_comes_while_all_are_locked_is_not_missed() {
    explore(|| {
        let world = World::new(1, Config::default());
        let moved = world.alloc(4096, 0);
        let thread = world.spawn(move |world| {
            // There are always 4096 bytes at least, and only here more of them.
            let stream = world.allocator.stream(world.sim.create_stream()).unwrap();
            let new = world.allocator.alloc(4096, &stream).unwrap();
            drop(moved);
            new
        });
        let seen = [world.allocator.memory_allocated(), world.allocator.snapshot().bytes_in(BlockState::Live)];
        assert!(seen.iter().all(|bytes| (4096..=8192).contains(bytes)), "{seen:?}");
        let stats = world.allocator.memory_stats();
        let allocated = stats.allocated_bytes.all;
        assert!(
            (4096..=8192).contains(&allocated.current) && allocated.current <= allocated.peak,
            "{allocated:?}"
        );
        world.allocator.validate().unwrap();
        drop(thread.join().unwrap());
        world.finish();
    });
}

#[test]
fn a_stream_comes_and_goes_while_all_are_locked() {
    explore(|| {
        let world = World::new(1, Config::default());
        let held = world.alloc(4096, 0);
        let thread = world.spawn(|world| {
            let stream = world.allocator.stream(world.sim.create_stream()).unwrap();
            drop(world.allocator.alloc(4096, &stream).unwrap());
            world.allocator.empty_cache().unwrap();
            world.allocator.retire_stream(&stream).unwrap();
        });
        for _ in 0..2 {
            let counted = world.allocator.memory_stats().allocation.all;
            assert!((1..=2).contains(&counted.allocated) && counted.allocated - counted.freed == counted.current);
        }
        thread.join().unwrap();
        let counted = world.allocator.memory_stats().allocation.all;
        assert_eq!((counted.current, counted.allocated, counted.freed), (1, 2, 1));
        drop(held);
        world.finish();
    });
}

#[test]
fn statistics_start_anew_while_a_stream_comes() {
    explore(|| {
        let world = World::new(1, Config::default());
        let thread = world.spawn(|world| {
            let stream = world.allocator.stream(world.sim.create_stream()).unwrap();
            drop(world.allocator.alloc(8192, &stream).unwrap());
            world.allocator.alloc(4096, &stream).unwrap()
        });
        world.allocator.reset_peak_memory_stats();
        world.allocator.reset_accumulated_memory_stats();
        let held = thread.join().unwrap();
        let allocated = world.allocator.memory_stats().allocated_bytes.all;
        // Each reset came before, between or after the two allocations, with nothing, the first or the last held.
        assert_eq!(allocated.current, 4096);
        assert!([4096, 8192].contains(&allocated.peak), "{allocated:?}");
        let counted = (allocated.allocated, allocated.freed);
        assert!([(12_288, 8192), (4096, 8192), (4096, 0), (0, 0)].contains(&counted), "{allocated:?}");
        drop(held);
        let all = world.allocator.memory_stats().allocated_bytes.all;
        assert_eq!(all.freed, counted.1 + 4096);
        world.allocator.reset_accumulated_memory_stats();
        world.finish();
    });
}

#[test]
fn the_cache_is_emptied_while_it_is_used() {
    explore(|| {
        let world = World::new(2, Config::default());
        drop(world.alloc(12 * MIB, 0));
        let threads = [
            world.spawn(|world| {
                let freed = world.allocator.empty_cache().unwrap();
                assert!(freed.is_multiple_of(12 * MIB) && freed <= 36 * MIB);
            }),
            world.spawn(|world| drop(world.alloc(12 * MIB, 1))),
        ];
        let allocation = world.alloc(12 * MIB, 0);
        world.overwrite(&allocation, 0);
        drop(allocation);
        world.allocator.validate().unwrap();
        threads.into_iter().for_each(|thread| thread.join().unwrap());
        world.finish();
    });
}

#[test]
fn a_limit_holds_for_two_threads_at_once() {
    explore(|| {
        let world = World::new(2, Config::default().limit(Limit::Bytes(30 * MIB)));
        let spawn =
            |stream: usize| world.spawn(move |world| world.allocator.alloc(20 * MIB, &world.streams[stream].1));
        let threads = [spawn(0), spawn(1)];
        assert!(world.allocator.memory_reserved() <= 30 * MIB);
        let answers = threads.map(|thread| thread.join().unwrap());
        let won = answers.iter().filter(|answer| answer.is_ok()).count();
        assert_eq!(won, 1, "both hold their memory at the end, so just one of them got it");
        let stats = world.allocator.memory_stats();
        assert_eq!((stats.reserved_bytes.all.peak, stats.num_ooms), (20 * MIB, 1));
        drop(answers);
        world.finish();
    });
}

#[test]
fn threads_meet_at_a_pool_and_share_it_by_magazines() {
    explore(|| {
        let world = World::new(2, Config::default());
        let spawn = || {
            world.spawn(|world| {
                for _ in 0..3 {
                    let allocation = world.alloc(4096, 0);
                    world.overwrite(&allocation, 0);
                }
                let shared = world.alloc(4096, 0);
                shared.record_stream(&world.streams[1].1).unwrap();
                shared
            })
        };
        let threads = [spawn(), spawn()];
        let stats = world.allocator.memory_stats();
        assert!(stats.allocated_bytes.all.peak >= stats.allocated_bytes.all.current);
        world.allocator.validate().unwrap();
        let held = threads.map(|thread| thread.join().unwrap());
        let ends: Vec<_> = held.iter().map(|a| (a.ptr().0, a.ptr().0 + a.block_bytes())).collect();
        assert!(ends[0].1 <= ends[1].0 || ends[1].1 <= ends[0].0);
        let stats = world.allocator.memory_stats();
        let allocated = stats.allocated_bytes.all;
        assert_eq!((allocated.current, allocated.allocated, allocated.freed), (8192, 32_768, 24_576));
        assert!((8192..=16_384).contains(&allocated.peak), "{allocated:?}");
        drop(held);
        world.finish();
    });
}

#[test]
fn a_stream_is_retired_while_threads_share_it() {
    explore(|| {
        let world = World::new(1, Config::default());
        let spawn = || {
            world.spawn(|world| {
                for _ in 0..2 {
                    // Refused once the stream is retired.
                    let Ok(allocation) = world.allocator.alloc(4096, &world.streams[0].1) else { return };
                    drop(allocation);
                }
            })
        };
        let threads = [spawn(), spawn()];
        world.allocator.retire_stream(&world.streams[0].1).unwrap();
        threads.into_iter().for_each(|thread| thread.join().unwrap());
        world.finish();
    });
}

#[test]
fn the_allocator_goes_while_its_memory_is_freed() {
    explore(|| {
        let world = World::new(1, Config::default());
        let (first, second) = (world.alloc(MIB, 0), world.alloc(MIB, 0));
        let sim = Arc::clone(&world.sim);
        let threads = [thread::spawn(move || drop(first)), thread::spawn(move || drop(second))];
        drop(world);
        threads.into_iter().for_each(|thread| thread.join().unwrap());
        sim.assert_clean();
        assert!(sim.leaks().is_empty(), "{:?}", sim.leaks());
    });
}
