//! A garbage collection threshold that multiplies by a limit nobody set: the product is zero, and collection
//! either never runs or runs on every allocation. Reported as pytorch/pytorch #106660; the feature is PR 76648.

use crate::dsl::{GIB, Gpu, MIB, each_kind};
use crate::kinds::expandable;
use vramalloc::driver::Call;
use vramalloc::{Allocation, Config, Limit};

/// 64 MiB reserved of 100, of which the first segment, of 30 MiB, is handed back to the caller.
#[track_caller]
fn sixty_four_reserved(gpu: &Gpu) -> (Allocation, [Allocation; 2]) {
    let [a, b, c] = [30, 20, 14].map(|mib| gpu.alloc(mib * MIB, &gpu.s0));
    assert_eq!(gpu.reserved(), 64 * MIB);
    (a, [b, c])
}

#[test]
fn without_a_limit_the_base_is_the_device() {
    let gpu = Gpu::new(100, Config::default().garbage_collection_threshold(0.6));
    let (a, _live) = sixty_four_reserved(&gpu);
    gpu.free(a);
    let d = gpu.alloc(32 * MIB, &gpu.s0);
    assert_eq!(gpu.segment_calls(), "alloc 30 MiB, alloc 20 MiB, alloc 14 MiB, free 30 MiB, alloc 32 MiB");
    assert_eq!((gpu.reserved(), gpu.host_waits()), (66 * MIB, 0), "{d:?}");
}

#[test]
fn with_a_limit_the_base_is_the_limit() {
    for limit in [Limit::Bytes(100 * MIB), Limit::Fraction(100.0 / 1024.0)] {
        let gpu = Gpu::new(GIB / MIB, Config::default().garbage_collection_threshold(0.6).limit(limit));
        let (a, _live) = sixty_four_reserved(&gpu);
        gpu.free(a);
        let d = gpu.alloc(32 * MIB, &gpu.s0);
        assert_eq!(gpu.reserved(), 66 * MIB, "{limit:?}, {d:?}");
    }
}

#[test]
fn below_the_threshold_or_without_one_nothing_is_collected() {
    for config in [Config::default().garbage_collection_threshold(0.7), Config::default()] {
        let gpu = Gpu::new(100, config);
        let (a, _live) = sixty_four_reserved(&gpu);
        gpu.free(a);
        let d = gpu.alloc(32 * MIB, &gpu.s0);
        assert_eq!(gpu.segment_calls(), "alloc 30 MiB, alloc 20 MiB, alloc 14 MiB, alloc 32 MiB");
        assert_eq!(gpu.reserved(), 96 * MIB, "{d:?}");
    }
}

#[test]
fn what_queued_work_still_uses_is_not_collected() {
    each_kind(|config| {
        let gpu = Gpu::new(100, config.garbage_collection_threshold(0.6));
        let (a, _live) = sixty_four_reserved(&gpu);
        gpu.use_on(&gpu.s1, &a);
        gpu.free(a);
        let d = gpu.alloc(32 * MIB, &gpu.s0);
        assert_eq!((gpu.reserved(), gpu.host_waits()), (96 * MIB, 0), "{d:?}");
        assert_eq!((gpu.pending(), gpu.sim.unfinished()), (30 * MIB, 1), "the work must not be waited for");
    });
}

#[test]
fn segments_partly_in_use_are_not_collected() {
    let gpu = Gpu::new(100, Config::default().garbage_collection_threshold(0.6));
    let (a, _live) = sixty_four_reserved(&gpu);
    gpu.free(a);
    let nibble = gpu.alloc(11 * MIB, &gpu.s0);
    let d = gpu.alloc(32 * MIB, &gpu.s0);
    assert_eq!(gpu.reserved(), 96 * MIB, "{nibble:?} keeps its segment; {d:?}");
}

#[test]
fn a_cache_hit_collects_nothing() {
    each_kind(|config| {
        let gpu = Gpu::new(100, config.garbage_collection_threshold(0.1));
        let [idle, hit] = [30, 20].map(|mib| gpu.alloc(mib * MIB, &gpu.s0));
        gpu.free(idle);
        gpu.free(hit);
        gpu.sim.clear_log();
        for turn in 0..100 {
            let hit = gpu.alloc(20 * MIB, &gpu.s0);
            assert!(gpu.sim.log().is_empty(), "hit {turn} needed {:?}", gpu.sim.log());
            gpu.free(hit);
        }
        assert_eq!(gpu.reserved(), 50 * MIB);
    });
}

#[test]
fn the_oldest_goes_first() {
    let gpu = Gpu::new(200, Config::default().garbage_collection_threshold(0.5));
    let small = gpu.alloc(512, &gpu.s0);
    let [old, young, live] = [40, 30, 40].map(|mib| gpu.alloc(mib * MIB, &gpu.s0));
    gpu.free(old);
    for _ in 0..10 {
        let hit = gpu.alloc(512, &gpu.s0);
        gpu.free(hit);
    }
    gpu.free(young);
    gpu.sim.clear_log();
    // 112 MiB are reserved, 100 is the mark: giving back the older one is enough.
    let more = gpu.alloc(50 * MIB, &gpu.s0);
    assert_eq!(gpu.segment_calls(), "free 40 MiB, alloc 50 MiB", "{small:?}, {live:?}, {more:?}");
}

#[test]
fn every_streams_cache_is_collected() {
    let gpu = Gpu::new(100, Config::default().garbage_collection_threshold(0.5));
    let a = gpu.alloc(40 * MIB, &gpu.s0);
    let b = gpu.alloc(20 * MIB, &gpu.s1);
    gpu.free(a);
    gpu.sim.clear_log();
    let c = gpu.alloc(30 * MIB, &gpu.s1);
    assert_eq!(gpu.segment_calls(), "free 40 MiB, alloc 30 MiB", "{b:?}, {c:?}");
}

#[test]
fn the_soft_limit_collects_alike() {
    let gpu = Gpu::new(100, Config::default().soft_limit(60 * MIB));
    let (a, _live) = sixty_four_reserved(&gpu);
    gpu.free(a);
    let d = gpu.alloc(32 * MIB, &gpu.s0);
    assert_eq!(gpu.reserved(), 66 * MIB, "{d:?}");
    // Live memory may pass it: it is soft.
    let e = gpu.alloc(30 * MIB, &gpu.s0);
    assert_eq!(gpu.reserved(), 96 * MIB, "{e:?}");
}

#[test]
fn a_threshold_that_cannot_be_meant_is_refused() {
    for part in [0.0, 1.0, -0.5, 1.5, f64::NAN] {
        let error = Config::default().garbage_collection_threshold(part).check();
        assert!(error.is_err(), "a threshold of {part} was taken");
    }
}

#[test]
fn idle_pages_go_before_new_ones_come() {
    for config in [expandable().garbage_collection_threshold(0.6), expandable().soft_limit(60 * MIB)] {
        let gpu = Gpu::new(100, config);
        let (a, _live) = sixty_four_reserved(&gpu);
        gpu.free(a);
        gpu.sim.clear_log();
        // At 60 MiB or less the collection ends; then come 32 MiB at most.
        let d = gpu.alloc(32 * MIB, &gpu.s0);
        let released = gpu.sim.log().into_iter().filter(|entry| entry.call == Call::ReleasePages);
        let released: u64 = released.map(|entry| entry.bytes).sum();
        assert!((4 * MIB..=30 * MIB).contains(&released), "{}", gpu.segment_calls());
        assert!((66 * MIB..=92 * MIB).contains(&gpu.reserved()), "{} reserved, {d:?}", gpu.reserved());
        assert_eq!(gpu.host_waits(), 0);
    }
}

#[test]
fn of_idle_pages_the_oldest_go_first() {
    let gpu = Gpu::new(200, expandable().garbage_collection_threshold(0.5));
    let [old, live, young] = [8, 80, 30].map(|mib| gpu.alloc(mib * MIB, &gpu.s0));
    let (at, small) = (old.ptr(), gpu.alloc(512, &gpu.s0));
    gpu.free(old);
    for _ in 0..10 {
        let hit = gpu.alloc(1024, &gpu.s0);
        gpu.free(hit);
    }
    gpu.free(young);
    gpu.sim.clear_log();
    // 120 MiB are reserved, 100 is the mark.
    let more = gpu.alloc(50 * MIB, &gpu.s0);
    let log = gpu.sim.log();
    let first = log.iter().find(|entry| entry.call == Call::Unmap).map(|entry| entry.ptr);
    assert_eq!(first, Some(at), "{}; {live:?}, {small:?}, {more:?}", gpu.segment_calls());
}
