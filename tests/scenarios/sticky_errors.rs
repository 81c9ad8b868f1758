//! A kernel crashed, every later call of the driver fails, and the allocator reports "out of memory", flushes its
//! whole cache and retries; or destructors of what was live print and panic. Reported as cub #47, llama.cpp PR 7376
//! and cudarc #590. What must hold: the true error at once, and silence from destructors.

use crate::dsl::{Gpu, Kind as _, MIB, driver_error, each_config};
use vramalloc::driver::sim::Fault;
use vramalloc::driver::{Call, DriverErrorKind as Kind};

#[test]
fn a_lost_device_is_reported_as_that_and_nothing_is_tried() {
    each_config(|config| {
        let gpu = Gpu::new(64, config);
        let live = gpu.alloc(4 * MIB, &gpu.s0);
        let idle = gpu.alloc(12 * MIB, &gpu.s1);
        gpu.free(idle);
        gpu.sim.lose_device();
        gpu.sim.clear_log();
        assert_eq!(driver_error(gpu.try_alloc(30 * MIB, &gpu.s0)), Kind::DeviceLost);
        assert_eq!((gpu.givings(), gpu.stats().num_ooms), (0, 0), "the cache was flushed for nothing");
        assert!(gpu.memory_calls() <= 1, "it was tried again: {:?}", gpu.sim.log());
        drop(live);
        let Gpu { sim, allocator, s0, s1 } = gpu;
        drop((allocator, s0, s1));
        sim.assert_clean();
    });
}

#[test]
fn a_loss_noticed_in_the_allocation_sticks() {
    each_config(|config| {
        let gpu = Gpu::new(64, config.clone());
        let live = gpu.alloc(4 * MIB, &gpu.s0);
        let idle = gpu.alloc(4 * MIB, &gpu.s0);
        gpu.free(idle);
        gpu.sim.clear_log();
        gpu.sim.fail(Fault::nth(config.takes(), 1, Kind::DeviceLost));
        assert_eq!(driver_error(gpu.try_alloc(30 * MIB, &gpu.s0)), Kind::DeviceLost);
        assert_eq!((gpu.count(config.takes()), gpu.givings()), (1, 0), "it was tried again, or the cache flushed");

        // From now on nothing works, not even what the cache could serve.
        for bytes in [4 * MIB, 512, 30 * MIB] {
            assert_eq!(driver_error(gpu.try_alloc(bytes, &gpu.s0)), Kind::DeviceLost, "{bytes} bytes");
        }
        assert_eq!(driver_error(gpu.allocator.alloc_raw(512, &gpu.s0)), Kind::DeviceLost);
        assert_eq!(driver_error(gpu.allocator.empty_cache()), Kind::DeviceLost);
        assert_eq!(driver_error(gpu.allocator.stream(gpu.s1.key().handle)), Kind::DeviceLost);
        assert_eq!(gpu.stats().num_ooms, 0, "a crash was counted as out of memory");
        gpu.free(live);
        assert_eq!(gpu.allocator.take_deferred_error(), None, "a free left an error behind");
    });
}

#[test]
fn freeing_and_dropping_stay_silent() {
    each_config(|config| {
        let gpu = Gpu::new(64, config);
        let raw = gpu.allocator.alloc_raw(4096, &gpu.s0).expect("there is room");
        let [plain, shared] = [(); 2].map(|()| gpu.alloc(4 * MIB, &gpu.s0));
        gpu.use_on(&gpu.s1, &shared);
        gpu.sim.lose_device();
        gpu.allocator.free_raw(raw).expect("freeing a live block is always right");
        plain.record_stream(&gpu.s1).expect("recording needs no driver");
        gpu.free(plain);
        gpu.free(shared);
        gpu.poll();
        let _ = gpu.allocator.take_deferred_error();
        let Gpu { sim, allocator, s0, s1 } = gpu;
        drop((allocator, s0, s1));
        sim.assert_clean();
    });
}

#[test]
fn a_loss_noticed_while_polling_or_waiting_is_told_as_that() {
    for call in [Call::EventRecord, Call::EventQuery, Call::EventSynchronize] {
        each_config(|config| {
            let gpu = Gpu::new(64, config);
            let a = gpu.alloc(64 * MIB, &gpu.s0);
            gpu.use_on(&gpu.s1, &a);
            gpu.free(a);
            gpu.sim.fail(Fault::nth(call, 1, Kind::DeviceLost));
            let error = driver_error(gpu.try_alloc(32 * MIB, &gpu.s0));
            assert_eq!(error, Kind::DeviceLost, "lost in {call}");
            assert_eq!(gpu.stats().num_ooms, 0, "a crash in {call} was counted as out of memory");
        });
    }
}

#[test]
fn a_loss_noticed_while_giving_back_is_told_as_that() {
    each_config(|config| {
        let gpu = Gpu::new(64, config.clone());
        let a = gpu.alloc(40 * MIB, &gpu.s0);
        let pin = gpu.alloc(config.pick(0, 2 * MIB), &gpu.s0); // in the way of growing in place
        gpu.free(a);
        gpu.sim.fail(Fault::nth(config.gives(), 1, Kind::DeviceLost));
        assert_eq!(driver_error(gpu.try_alloc(62 * MIB, &gpu.s1)), Kind::DeviceLost, "{pin:?}");
        assert_eq!(driver_error(gpu.try_alloc(512, &gpu.s0)), Kind::DeviceLost);
        assert_eq!(gpu.stats().num_ooms, 0);
    });
}
