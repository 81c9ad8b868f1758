//! A memory limit that miscounts: an allocation that failed stays on the books; two threads pass the check
//! together; the check forgets the bytes that are about to come; a fraction becomes one byte too few; an initial
//! reservation equal to the maximum is refused. Reported as RMM PR 869 and #527, apache/mxnet #1130 and
//! pytorch/pytorch #157256 (PR 179444).

use crate::dsl::{GIB, Gpu, Kind as _, MIB, each_kind};
use crate::hooked::Hooked;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use vramalloc::driver::Call;
use vramalloc::driver::sim::SimDriver;
use vramalloc::{CachingAllocator, Cause, Config, Error, Limit, OutOfMemory, Stream};

fn limit(config: &Config, mib: u64) -> Config {
    config.clone().limit(Limit::Bytes(mib * MIB))
}

#[track_caller]
fn oom(allocator: &CachingAllocator, mib: u64, stream: &Stream) -> OutOfMemory {
    match allocator.alloc(mib * MIB, stream) {
        Err(Error::OutOfMemory(report)) => *report,
        other => panic!("{mib} MiB must be out of memory, but: {other:?}"),
    }
}

#[test]
fn what_failed_is_not_on_the_books() {
    each_kind(|config| {
        // The device refuses: once a request larger than itself, once one that a neighbour leaves no room for.
        for (device, foreign) in [(64, 0), (100, 36)] {
            let gpu = Gpu::new(device, limit(&config, 100));
            gpu.sim.set_foreign_bytes(foreign * MIB);
            for _ in 0..3 {
                let report = gpu.oom(80 * MIB, &gpu.s0);
                assert_eq!((report.cause, report.reserved), (Cause::Device, 0), "{report}");
            }
            assert_eq!(gpu.stats().reserved_bytes.all.allocated, 0, "failed requests were booked");
            assert_eq!(gpu.stats().reserved_bytes.all.peak, 0, "failed requests raised the peak");
            let a = gpu.alloc(60 * MIB, &gpu.s0);
            assert_eq!(gpu.reserved(), 60 * MIB, "{a:?}");
        }
    });
}

#[test]
fn failures_leave_the_whole_limit() {
    each_kind(|config| {
        let gpu = Gpu::new(150, limit(&config, 100));
        gpu.sim.set_foreign_bytes(100 * MIB);
        for _ in 0..5 {
            gpu.oom(60 * MIB, &gpu.s0);
        }
        gpu.sim.set_foreign_bytes(0);
        let a = gpu.alloc(100 * MIB, &gpu.s0);
        assert_eq!(gpu.reserved(), 100 * MIB, "{a:?}");
    });
}

/// Fixed segments only: of two streams that need pages, one waits for the other.
#[test]
fn the_second_request_sees_the_first_one_under_way() {
    let sim = SimDriver::builder().capacity(GIB).build();
    let driver = Hooked::new(&sim);
    let gpu = Gpu::over(&sim, driver.clone(), limit(&Config::default(), 100));
    let refused = Arc::new(Mutex::new(None));
    let (allocator, s1, seen) = (gpu.allocator.clone(), gpu.s1.clone(), Arc::clone(&refused));
    // While the driver serves the first request, another stream asks for as much.
    driver.once_in(Call::Alloc, move || {
        *seen.lock().expect("no panic") = Some(oom(&allocator, 60, &s1));
    });
    let a = gpu.alloc(60 * MIB, &gpu.s0);
    driver.unhook();
    let report = refused.lock().expect("no panic").take().expect("the hook ran");
    assert_eq!((report.cause, report.limit), (Cause::Limit, Some(100 * MIB)), "{report}");
    assert_eq!(gpu.reserved(), 60 * MIB, "{a:?}");
    let b = gpu.alloc(40 * MIB, &gpu.s1);
    assert_eq!(gpu.reserved(), 100 * MIB, "{b:?} fits, to the byte");
}

#[test]
fn of_two_threads_exactly_one_gets_in() {
    each_kind(|config| {
        for round in 0..100 {
            let sim = SimDriver::builder().capacity(GIB).build();
            let driver = Hooked::new(&sim);
            let gpu = Gpu::over(&sim, driver.clone(), limit(&config, 100));
            let most = Arc::new(AtomicU64::new(0));
            let (device, seen) = (Arc::clone(&sim), Arc::clone(&most));
            driver.on_call(move |_| {
                seen.fetch_max(device.used_bytes(), Ordering::SeqCst);
            });
            let results = std::thread::scope(|scope| {
                let threads =
                    [&gpu.s0, &gpu.s1].map(|stream| scope.spawn(|| gpu.allocator.alloc(60 * MIB, stream)));
                threads.map(|thread| thread.join().expect("allocating does not panic"))
            });
            most.fetch_max(sim.used_bytes(), Ordering::SeqCst);
            assert!(
                most.load(Ordering::SeqCst) <= 100 * MIB,
                "round {round}: {most:?} bytes in use, past the limit"
            );
            let causes: Vec<_> =
                results.iter().filter_map(|result| result.as_ref().err()?.out_of_memory()).collect();
            assert_eq!(causes.len(), 1, "round {round}: exactly one must fail: {results:?}");
            assert_eq!(causes[0].cause, Cause::Limit, "round {round}: {}", causes[0]);
            gpu.check();
        }
    });
}

#[test]
fn the_check_counts_what_is_about_to_come() {
    each_kind(|config| {
        let gpu = Gpu::new(1024, limit(&config, 40));
        let report = gpu.oom(50 * MIB, &gpu.s0);
        assert_eq!((report.cause, report.limit), (Cause::Limit, Some(40 * MIB)), "{report}");
        assert_eq!((report.requested, report.reserved), (50 * MIB, 0), "{report}");
        assert_eq!(gpu.memory_calls(), 0, "the driver was asked for what the limit forbids");
        let a = gpu.alloc(40 * MIB, &gpu.s0);
        assert_eq!(gpu.reserved(), 40 * MIB, "{a:?}: the limit is inclusive");
        assert_eq!(gpu.oom(512, &gpu.s0).cause, Cause::Limit);
    });
}

#[test]
fn the_cache_makes_way_under_a_limit() {
    each_kind(|config| {
        let gpu = Gpu::new(1024, limit(&config, 100));
        let a = gpu.alloc(60 * MIB, &gpu.s0);
        gpu.free(a);
        let b = gpu.alloc(80 * MIB, &gpu.s1);
        if !config.is_expandable() {
            assert_eq!(gpu.segment_calls(), "alloc 60 MiB, free 60 MiB, alloc 80 MiB", "{b:?}");
        }
        assert_eq!(gpu.reserved(), 80 * MIB, "{b:?}");
        assert_eq!(gpu.stats().num_ooms, 0);
    });
}

#[test]
fn under_a_limit_the_smallest_segment_will_do() {
    // 5 MiB usually come from a segment of 20 MiB, which the limit has no room for.
    let gpu = Gpu::new(1024, limit(&Config::default(), 38));
    let a = gpu.alloc(30 * MIB, &gpu.s0);
    let b = gpu.alloc(5 * MIB, &gpu.s0);
    assert_eq!(gpu.reserved(), 36 * MIB, "{a:?}, {b:?}");
}

#[test]
fn fractions_are_exact_to_the_byte() {
    each_kind(|config| {
        for (total, mib) in [(85_024_112_640u64, 22u64), (150_123_446_272, 782)] {
            #[allow(clippy::cast_precision_loss)]
            let part = (mib * MIB) as f64 / total as f64;
            let sim = SimDriver::builder().capacity(total).build();
            let gpu = Gpu::over(&sim, sim.clone(), config.clone().limit(Limit::Fraction(part)));
            assert_eq!(gpu.allocator.limit(), Some(mib * MIB), "{part} of {total}");
            let a = gpu.alloc(mib * MIB, &gpu.s0);
            assert_eq!(gpu.reserved(), mib * MIB, "{a:?}");
            assert_eq!(gpu.oom(512, &gpu.s0).cause, Cause::Limit);
        }
    });
}

#[test]
fn every_whole_step_survives_the_way_through_a_fraction() {
    for total in [85_024_112_640u64, 150_123_446_272, 80 * GIB, 11 * GIB + 12_345 * 512] {
        for steps in (1..2000).chain([9_999, 12_345]) {
            let bytes = steps * 2 * MIB;
            #[allow(clippy::cast_precision_loss)]
            let part = bytes as f64 / total as f64;
            if part < 1.0 {
                assert_eq!(Limit::Fraction(part).bytes(total), Some(bytes), "{bytes} of {total}");
            }
        }
    }
}

#[test]
fn an_initial_reservation_may_equal_the_limit() {
    each_kind(|config| {
        let odd = 3 * MIB + 1;
        let gpu = Gpu::new(64, config.clone().limit(Limit::Bytes(odd)).initial(odd));
        assert_eq!((gpu.allocator.limit(), gpu.reserved()), (Some(2 * MIB), 2 * MIB));
        let gpu = Gpu::new(64, limit(&config, 64).initial(64 * MIB));
        assert_eq!((gpu.reserved(), gpu.allocated()), (64 * MIB, 0));
    });
}

#[test]
fn an_initial_reservation_past_the_limit_fails_and_leaves_nothing() {
    each_kind(|config| {
        let sim = SimDriver::builder().capacity(64 * MIB).build();
        let error = CachingAllocator::new(sim.clone(), limit(&config, 30).initial(32 * MIB))
            .expect_err("32 is more than 30");
        assert_eq!(error.out_of_memory().map(|report| report.cause), Some(Cause::Limit), "{error}");
        assert!(sim.leaks().is_empty(), "{:?}", sim.leaks());
    });
}

#[test]
fn limits_that_cannot_be_meant_are_refused() {
    each_kind(|config| {
        for part in [f64::NAN, -0.1, -f64::INFINITY, 1.000_001, f64::INFINITY] {
            let sim = SimDriver::builder().capacity(64 * MIB).build();
            let result = CachingAllocator::new(sim.clone(), config.clone().limit(Limit::Fraction(part)));
            assert!(matches!(result, Err(Error::InvalidConfig(_))), "fraction {part}: {result:?}");
            assert!(sim.log().is_empty(), "fraction {part}: the driver was called: {:?}", sim.log());
        }
    });
}

#[test]
fn the_last_page_under_a_limit_or_of_a_device_can_be_had() {
    // Expandable segments take more than is needed at once, ahead of need, where there is room for it.
    each_kind(|config| {
        for used in [256, 320, 512, 1022] {
            for (device, config) in [(4096, limit(&config, used + 2)), (used + 2, config.clone())] {
                let gpu = Gpu::new(device, config);
                let a = gpu.alloc(used * MIB, &gpu.s0);
                let b = gpu.alloc(2 * MIB, &gpu.s0);
                assert_eq!(gpu.reserved(), (used + 2) * MIB, "{a:?}, {b:?}");
                let report = gpu.oom(2 * MIB, &gpu.s0);
                assert_eq!(report.reserved, (used + 2) * MIB, "{report}");
            }
        }
    });
}
