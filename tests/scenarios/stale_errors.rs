//! An out-of-memory that was recovered leaves its error behind, and the next innocent call reports it; an error
//! that struck inside a destructor surfaces somewhere else; the report of an out-of-memory itself fails. Reported
//! as pytorch/pytorch PR 13751 and #185240, NVIDIA/cub #47, llama.cpp PR 7376, cudarc #590.

use crate::dsl::{Gpu, Kind as _, MIB, driver_error, each_config, each_kind};
use crate::kinds::expandable;
use vramalloc::Cause;
use vramalloc::driver::sim::Fault;
use vramalloc::driver::{Call, Driver, DriverErrorKind as Kind};

/// That nothing is left of earlier failures: neither here nor with the driver.
#[track_caller]
fn assert_no_echo(gpu: &Gpu) {
    assert_eq!(gpu.allocator.take_deferred_error(), None, "a handled failure was kept");
    gpu.sim.memory_info().expect("an unrelated call must work");
    let event = gpu.sim.create_event().expect("an unrelated call must work");
    gpu.sim.destroy_event(event).expect("an unrelated call must work");
    let small = gpu.alloc(512, &gpu.s1);
    gpu.free(small);
    gpu.check();
}

#[test]
fn a_recovered_out_of_memory_leaves_nothing_behind() {
    each_config(|config| {
        let gpu = Gpu::new(64, config.clone().roundup_power2_divisions(Default::default()));
        let a = gpu.alloc(40 * MIB, &gpu.s0);
        // In the way of growing in place.
        let pin = gpu.alloc(config.pick(0, 2 * MIB), &gpu.s0);
        gpu.free(a);
        let b = gpu.alloc(50 * MIB, &gpu.s0);
        let refused: Vec<_> = gpu.sim.log().into_iter().filter(|entry| !entry.ok()).collect();
        // Without slack, pages are moved before the driver is asked.
        if config.gc_threshold.is_none() && config.slack > 1.0 {
            assert_eq!(refused.len(), 1, "one driver call had to fail: {refused:?}, {pin:?}");
            assert_eq!((refused[0].call, refused[0].error), (config.takes(), Some(Kind::OutOfMemory)));
        }
        assert_eq!((b.bytes(), gpu.stats().num_ooms), (50 * MIB, 0));
        assert_no_echo(&gpu);
    });
}

#[test]
fn a_final_out_of_memory_leaves_nothing_behind() {
    each_config(|config| {
        let gpu = Gpu::new(64, config);
        let _a = gpu.alloc(40 * MIB, &gpu.s0);
        for _ in 0..3 {
            let report = gpu.oom(50 * MIB, &gpu.s0);
            assert_eq!(report.cause, Cause::Device, "{report}");
        }
        assert_no_echo(&gpu);
    });
}

#[test]
fn a_failed_event_is_kept_and_the_block_withheld() {
    for call in [Call::EventCreate, Call::EventRecord, Call::EventQuery] {
        each_config(|config| {
            let gpu = Gpu::new(64, config);
            let other = gpu.alloc(4 * MIB, &gpu.s0);
            let a = gpu.alloc(4 * MIB, &gpu.s0);
            let at = a.ptr();
            gpu.use_on(&gpu.s1, &a);
            gpu.sim.fail(Fault::nth(call, 1, Kind::Other(999)));
            gpu.free(a);
            gpu.poll();
            let kept = gpu.allocator.take_deferred_error().expect("the error must not be lost");
            assert_eq!((kept.call, kept.kind), (call, Kind::Other(999)), "{kept}");
            assert!(gpu.pending() > 0, "{call}: the block was cached though nobody knows whether it is unused");

            gpu.free(other);
            let next = gpu.alloc(4 * MIB, &gpu.s0);
            assert_ne!(next.ptr(), at, "{call}: the withheld block was handed out");
            gpu.launch(&gpu.s0, &next);
            assert_eq!(gpu.allocator.take_deferred_error(), None, "{call}: the error was kept twice");
        });
    }
}

#[test]
fn after_a_failed_event_the_block_comes_back_in_time() {
    for call in [Call::EventCreate, Call::EventRecord, Call::EventQuery] {
        each_config(|config| {
            let gpu = Gpu::new(64, config);
            let a = gpu.alloc(4 * MIB, &gpu.s0);
            gpu.use_on(&gpu.s1, &a);
            gpu.sim.fail(Fault::nth(call, 1, Kind::Other(999)));
            gpu.free(a);
            gpu.poll();
            gpu.poll();
            assert_eq!(gpu.sim.unfinished(), 1, "{call}: polling waited");
            assert!(gpu.pending() > 0, "{call}: the block was cached before its work was done");
            gpu.complete(&gpu.s1);
            gpu.poll();
            assert_eq!(
                gpu.pending(),
                0,
                "{call}: the work is done and the driver in order, the block stays withheld"
            );
            gpu.empty_cache();
            assert_eq!(gpu.reserved(), 0, "{call}");
        });
    }
}

#[test]
fn after_a_failed_event_a_full_device_can_still_wait() {
    for call in [Call::EventCreate, Call::EventRecord, Call::EventQuery] {
        each_config(|config| {
            let gpu = Gpu::new(64, config);
            let a = gpu.alloc(64 * MIB, &gpu.s0);
            gpu.use_on(&gpu.s1, &a);
            gpu.free(a);
            gpu.sim.fail(Fault::nth(call, 1, Kind::Other(999)));
            gpu.poll();
            let b = gpu.alloc(64 * MIB, &gpu.s0);
            assert_eq!(gpu.sim.unfinished(), 0, "{call}: {b:?} is still in use");
            gpu.launch(&gpu.s0, &b);
        });
    }
}

#[test]
fn the_report_stands_when_the_driver_will_not_say_what_is_free() {
    each_config(|config| {
        let gpu = Gpu::new(64, config);
        let _a = gpu.alloc(40 * MIB, &gpu.s0);
        gpu.sim.fail(Fault::always(Call::MemoryInfo, Kind::Other(999)));
        let report = gpu.oom(50 * MIB, &gpu.s0);
        assert_eq!((report.device_free, report.foreign()), (None, None), "{report}");
        assert!(report.to_string().contains("unknown"), "{report}");
        gpu.sim.clear_faults();
        assert_no_echo(&gpu);
    });
}

#[test]
fn another_error_of_the_driver_is_not_taken_for_full() {
    each_config(|config| {
        let gpu = Gpu::new(64, config.clone());
        let idle = gpu.alloc(12 * MIB, &gpu.s1);
        gpu.free(idle);
        let before = gpu.stats();
        gpu.sim.clear_log();
        gpu.sim.fail(Fault::nth(config.takes(), 1, Kind::Other(801)));
        assert_eq!(driver_error(gpu.try_alloc(16 * MIB, &gpu.s0)), Kind::Other(801));
        // Without slack, what is idle is moved first.
        let flushed = if config.slack > 1.0 { gpu.givings() } else { gpu.count(Call::ReleasePages) };
        assert_eq!((gpu.count(config.takes()), flushed), (1, 0), "it was tried again, or the cache flushed");
        assert_eq!(gpu.stats(), before, "the failure changed a figure");
        let again = gpu.alloc(16 * MIB, &gpu.s0);
        assert_eq!(gpu.allocator.take_deferred_error(), None, "{again:?}");
    });
}

#[test]
fn a_segment_that_the_driver_will_not_take_is_cached_again() {
    each_config(|config| {
        let gpu = Gpu::new(64, config.clone());
        let a = gpu.alloc(12 * MIB, &gpu.s0);
        gpu.free(a);
        let reserved = gpu.reserved();
        gpu.sim.fail(Fault::nth(config.gives(), 1, Kind::Other(999)));
        assert_eq!(driver_error(gpu.allocator.empty_cache()), Kind::Other(999));
        gpu.check();
        assert_eq!(gpu.reserved(), reserved, "the books say it is gone");
        assert_eq!(gpu.empty_cache(), reserved);
        assert_no_echo(&gpu);
    });
}

#[test]
fn an_error_at_release_keeps_the_rest_usable() {
    each_kind(|config| {
        let gpu = Gpu::new(64, config.clone());
        let blocks = [20, 22, 22].map(|mib| gpu.alloc(mib * MIB, &gpu.s0));
        blocks.into_iter().for_each(|block| gpu.free(block));
        gpu.sim.fail(Fault::nth(config.gives(), 2, Kind::Other(999)));
        assert_eq!(driver_error(gpu.allocator.empty_cache()), Kind::Other(999));
        gpu.check();
        assert!(gpu.reserved() > 0);
        gpu.empty_cache();
        assert_eq!(gpu.reserved(), 0);
    });
}

#[test]
fn pages_that_the_driver_will_not_take_are_given_back_later() {
    for failing in 1..=3 {
        let gpu = Gpu::new(64, expandable());
        let a = gpu.alloc(40 * MIB, &gpu.s0);
        gpu.free(a);
        gpu.sim.fail(Fault::nth(Call::ReleasePages, failing, Kind::Other(999)));
        let freed = gpu.empty_cache();
        let kept = gpu.allocator.take_deferred_error().expect("the error must not be lost");
        assert_eq!((kept.call, kept.kind), (Call::ReleasePages, Kind::Other(999)), "{kept}");
        assert_eq!(freed + gpu.empty_cache(), 40 * MIB, "release {failing} failed: the bytes given back");
        assert_eq!(gpu.reserved(), 0, "release {failing} failed: the pages are stranded");
        assert_no_echo(&gpu);
    }
}
