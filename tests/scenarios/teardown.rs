//! The end of a program: buffers outlive their pool, pools outlive the driver, a panic unwinds while the driver
//! fails, and what follows is a crash at exit, an error printed by a destructor, or an abort. Reported as RMM #2203
//! and PR 2367, raft #2922, PaddlePaddle PR 78171, onnxruntime PR 31961, risc0 #1370. For forks see [`super::fork`].

use crate::dsl::{Gpu, Kind as _, MIB, each_config, each_kind};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use vramalloc::BlockState;
use vramalloc::driver::sim::{Fault, SimDriver};
use vramalloc::driver::{Call, DriverErrorKind as Kind};

/// Lets go of the allocator and its streams; what is left is the device.
fn close(gpu: Gpu) -> Arc<SimDriver> {
    let Gpu { sim, allocator, s0, s1 } = gpu;
    drop((allocator, s0, s1));
    sim
}

fn count(sim: &SimDriver, call: Call) -> usize {
    sim.log().iter().filter(|entry| entry.call == call).count()
}

#[track_caller]
fn assert_nothing_left(sim: &SimDriver) {
    sim.assert_clean();
    assert!(sim.leaks().is_empty(), "the program is over, but: {:?}", sim.leaks());
}

#[test]
fn a_block_outlives_its_allocator() {
    each_config(|config| {
        for bytes in [512, 4 * MIB, 12 * MIB] {
            let gpu = Gpu::new(64, config.clone());
            let a = gpu.alloc(bytes, &gpu.s0);
            let idle = gpu.alloc(30 * MIB, &gpu.s1);
            gpu.free(idle);
            let sim = close(gpu);
            assert!(sim.used_bytes() < 30 * MIB, "what was idle must go with the allocator");
            sim.write(a.ptr(), b"use").expect("the block is still live");
            a.record_stream(&a.stream()).expect("its own stream");
            sim.clear_log();
            let used = sim.used_bytes();
            drop(a);
            if config.is_expandable() {
                let log = sim.log();
                let bytes =
                    |call| log.iter().filter(|entry| entry.call == call).map(|entry| entry.bytes).sum::<u64>();
                let gone = [Call::Unmap, Call::ReleasePages].map(bytes);
                assert_eq!(gone, [used; 2], "each page must go once: {log:?}");
            } else {
                assert_eq!(count(&sim, Call::Free), 1, "the segment must be freed once: {:?}", sim.log());
            }
            assert_nothing_left(&sim);
        }
    });
}

#[test]
fn the_last_of_several_blocks_takes_the_segment_along() {
    each_config(|config| {
        let gpu = Gpu::new(64, config.clone());
        let mut blocks: Vec<_> = (0..4).map(|_| gpu.alloc(2 * MIB, &gpu.s0)).collect();
        let sim = close(gpu);
        sim.clear_log();
        while blocks.len() > 1 {
            blocks.remove(blocks.len() / 2);
            let live = 2 * MIB * blocks.len() as u64; // pages go one by one
            assert_eq!(sim.used_bytes(), config.pick(20 * MIB, live), "freed under {} live blocks", blocks.len());
            assert!(config.is_expandable() || count(&sim, Call::Free) == 0);
            sim.read(blocks[0].ptr(), &mut [0; 8]).expect("the block is still live");
        }
        blocks.clear();
        assert_nothing_left(&sim);
    });
}

#[test]
fn pending_work_ends_before_its_memory_goes() {
    each_config(|config| {
        for free_first in [true, false] {
            let gpu = Gpu::new(64, config.clone());
            let a = gpu.alloc(4 * MIB, &gpu.s0);
            gpu.use_on(&gpu.s1, &a);
            let sim = if free_first {
                gpu.free(a);
                close(gpu)
            } else {
                let sim = close(gpu);
                drop(a);
                sim
            };
            assert_eq!(sim.unfinished(), 0, "memory went while work was queued on it");
            assert_nothing_left(&sim);
        }
    });
}

#[test]
fn raw_addresses_stay_valid_when_nobody_is_left_to_free_them() {
    each_kind(|config| {
        let gpu = Gpu::new(64, config.clone());
        let raw = gpu.allocator.alloc_raw(4 * MIB, &gpu.s0).expect("there is room");
        let idle = gpu.alloc(30 * MIB, &gpu.s0);
        gpu.free(idle);
        let sim = close(gpu);
        sim.write(raw, b"use").expect("a raw address may still be in use");
        assert_eq!(sim.used_bytes(), config.pick(20, 4) * MIB, "only its own segment stays");
        sim.assert_clean();
    });
}

#[test]
fn threads_may_drop_blocks_while_the_allocator_goes() {
    each_kind(|config| {
        for round in 0..100 {
            let gpu = Gpu::new(64, config.clone());
            let blocks: Vec<_> = (0..8).map(|index| gpu.alloc((1 + index % 3) * 600_000, &gpu.s0)).collect();
            let sim = std::thread::scope(|scope| {
                scope.spawn(|| drop(blocks));
                close(gpu)
            });
            sim.assert_clean();
            assert!(sim.leaks().is_empty(), "round {round}: {:?}", sim.leaks());
        }
    });
}

#[test]
fn a_driver_that_is_shut_down_is_left_alone() {
    each_config(|config| {
        for blocks_first in [true, false] {
            let gpu = Gpu::new(256, config.clone());
            let blocks = [512, 4 * MIB, 12 * MIB].map(|bytes| gpu.alloc(bytes, &gpu.s0));
            for _ in 0..2 {
                // Two idle segments and a used event, all of which would be given back.
                let idle = [40 * MIB, 30 * MIB].map(|bytes| gpu.alloc(bytes, &gpu.s1));
                gpu.use_on(&gpu.s0, &idle[0]);
                idle.into_iter().for_each(|block| gpu.free(block));
                gpu.complete(&gpu.s0);
                gpu.poll();
            }
            gpu.sim.deinitialize();
            gpu.sim.clear_log();
            let allocator = gpu.allocator.clone();
            let sim = if blocks_first {
                drop(blocks);
                assert_eq!(allocator.take_deferred_error(), None, "the end of the process is nobody's error");
                drop(allocator);
                close(gpu)
            } else {
                drop(allocator);
                let sim = close(gpu);
                drop(blocks);
                sim
            };
            let frees = count(&sim, config.gives());
            assert!(frees <= 1, "after the first refusal the rest is to be skipped: {frees} frees were tried");
            sim.assert_clean();
        }
    });
}

#[test]
fn a_panic_with_a_failing_driver_is_one_panic() {
    for kind in [Kind::DeviceLost, Kind::Deinitialized, Kind::InvalidValue, Kind::Other(999)] {
        each_config(|config| {
            let others = [Call::FreeAddresses, Call::EventRecord, Call::EventDestroy, Call::Synchronize];
            for call in config.moves_memory().into_iter().chain(others) {
                let gpu = Gpu::new(64, config.clone());
                let outcome = catch_unwind(AssertUnwindSafe(|| {
                    let [a, b] = [4 * MIB, 12 * MIB].map(|bytes| gpu.alloc(bytes, &gpu.s0));
                    gpu.use_on(&gpu.s1, &b);
                    gpu.sim.fail(Fault::always(call, kind));
                    let _held = (gpu, a, b);
                    std::panic::resume_unwind(Box::new("the program's own panic"));
                }));
                // A second panic while unwinding would have aborted the process.
                let panic = outcome.expect_err("the program panicked");
                assert_eq!(panic.downcast_ref::<&str>(), Some(&"the program's own panic"), "{call}: {kind}");
            }
        });
    }
}

#[test]
fn a_driver_that_will_not_take_memory_at_the_end_is_survived() {
    each_config(|config| {
        let gpu = Gpu::new(64, config.clone());
        let a = gpu.alloc(4 * MIB, &gpu.s0);
        let b = gpu.alloc(12 * MIB, &gpu.s0);
        gpu.free(b);
        gpu.sim.fail(Fault::always(config.gives(), Kind::Other(999)));
        let sim = close(gpu);
        drop(a);
        sim.assert_clean();
        assert!(sim.used_bytes() > 0, "the driver refused, so the memory must still be there");
    });
}

#[test]
fn what_is_live_can_be_listed() {
    each_config(|config| {
        let gpu = Gpu::new(64, config);
        let a = gpu.alloc(3 * MIB + 7, &gpu.s1);
        let idle = gpu.alloc(600, &gpu.s0);
        gpu.free(idle);
        let snapshot = gpu.allocator.snapshot();
        let live: Vec<_> = (snapshot.segments.iter())
            .flat_map(|segment| segment.blocks.iter().map(move |block| (segment.stream, block)))
            .filter(|(_, block)| block.state == BlockState::Live)
            .map(|(stream, block)| (block.address, block.requested, block.bytes, stream))
            .collect();
        assert_eq!(live, [(a.ptr(), 3 * MIB + 7, a.block_bytes(), gpu.s1.key())], "the leak report");
    });
}

#[test]
fn everything_goes_when_the_last_clone_does() {
    each_config(|config| {
        let gpu = Gpu::new(64, config);
        let clone = gpu.allocator.clone();
        let a = gpu.alloc(4 * MIB, &gpu.s0);
        let b = gpu.alloc(600, &gpu.s1);
        gpu.use_on(&gpu.s1, &a);
        gpu.free(a);
        gpu.free(b);
        gpu.poll();
        let sim = close(gpu);
        assert!(sim.used_bytes() > 0, "a clone is left, so the cache must be");
        drop(clone);
        assert_nothing_left(&sim);
    });
}
