//! "Half of the device" that means "half of what happens to be free": whoever starts second gets less, and the
//! budget depends on the order of launches. And a neighbour that gives memory back trips an assertion, because
//! the difference of two readings goes below zero. Reported as jax #4310, vLLM #56830, pytorch/pytorch #58466 and
//! #107667.

use crate::checks::check_allocator;
use crate::dsl::{MIB, each_kind};
use std::sync::Arc;
use vramalloc::driver::sim::SimDriver;
use vramalloc::{CachingAllocator, Cause, Config, Error, Limit, Stream};

fn half(sim: &Arc<SimDriver>, config: &Config) -> (CachingAllocator, Stream) {
    let allocator = CachingAllocator::new(sim.clone(), config.clone().limit(Limit::Fraction(0.5)))
        .expect("a fraction of one half is legal");
    let stream = allocator.stream(sim.create_stream()).expect("the stream was just created");
    (allocator, stream)
}

#[track_caller]
fn alloc(allocator: &CachingAllocator, sim: &SimDriver, mib: u64, stream: &Stream) -> vramalloc::Allocation {
    let block = allocator.alloc(mib * MIB, stream).expect("there is room");
    check_allocator(allocator, sim);
    block
}

#[test]
fn the_base_is_the_whole_device_and_neighbours_come_and_go() {
    each_kind(|config| {
        let sim = SimDriver::builder().capacity(100 * MIB).foreign_bytes(40 * MIB).build();
        let (a, stream) = half(&sim, &config);
        let _x = alloc(&a, &sim, 30, &stream);
        let (b, _) = half(&sim, &config);
        assert_eq!(
            (a.limit(), b.limit()),
            (Some(50 * MIB), Some(50 * MIB)),
            "the launch order decides the budget"
        );

        let _y = alloc(&a, &sim, 20, &stream);
        let error = a.alloc(MIB, &stream).expect_err("the limit is reached");
        let report = error.out_of_memory().expect("it is out of memory");
        assert_eq!((report.cause, report.device_free), (Cause::Limit, Some(10 * MIB)), "{report}");
        assert_eq!(report.foreign(), Some(40 * MIB), "{report}");

        for foreign in [0, 40, 50, 0] {
            sim.set_foreign_bytes(foreign * MIB);
            let seen = a.foreign_memory().expect("the driver answers");
            assert_eq!(seen, foreign * MIB, "foreign bytes are wrong after a neighbour's change");
            check_allocator(&a, &sim);
        }
        assert_eq!(a.memory_reserved(), 50 * MIB);
    });
}

#[test]
fn two_allocators_share_a_device_and_see_each_other_as_foreign() {
    each_kind(|config| {
        let sim = SimDriver::builder().capacity(100 * MIB).build();
        let ((a, on_a), (b, on_b)) = (half(&sim, &config), half(&sim, &config));
        let x = alloc(&a, &sim, 50, &on_a);
        let y = alloc(&b, &sim, 50, &on_b);
        assert_eq!(a.foreign_memory().ok(), Some(50 * MIB), "the other allocator's bytes are foreign");
        for (allocator, stream) in [(&a, &on_a), (&b, &on_b)] {
            let error = allocator.alloc(512, stream).expect_err("both budgets are spent");
            assert_eq!(error.out_of_memory().map(|report| report.cause), Some(Cause::Limit), "{error}");
        }
        drop((x, y));
        for allocator in [&a, &b] {
            assert_eq!(allocator.empty_cache().ok(), Some(50 * MIB));
            check_allocator(allocator, &sim);
        }
        assert_eq!(sim.used_bytes(), 0);
    });
}

#[test]
fn a_neighbour_that_fills_the_device_leaves_no_doubt_who_did() {
    each_kind(|config| {
        let sim = SimDriver::builder().capacity(100 * MIB).build();
        let (a, stream) = half(&sim, &config);
        let _x = alloc(&a, &sim, 10, &stream);
        sim.set_foreign_bytes(85 * MIB);
        let Err(Error::OutOfMemory(report)) = a.alloc(30 * MIB, &stream) else { panic!("5 MiB are free, not 30") };
        assert_eq!((report.cause, report.foreign()), (Cause::Device, Some(85 * MIB)), "{report}");
        assert!(report.to_string().contains("others"), "the advice must name the neighbour: {report}");
        check_allocator(&a, &sim);
    });
}

#[test]
fn a_neighbour_that_takes_more_than_there_is_underflows_nothing() {
    each_kind(|config| {
        let sim = SimDriver::builder().capacity(100 * MIB).build();
        let (a, stream) = half(&sim, &config);
        let _x = alloc(&a, &sim, 40, &stream);
        // A driver may count what it shares, so that the sum is more than the device.
        sim.set_foreign_bytes(90 * MIB);
        let info = a.mem_get_info().expect("the driver answers");
        assert_eq!(info.free_bytes, 0);
        assert_eq!(a.foreign_memory().ok(), Some(60 * MIB), "all that is not ours and not free");
        let error = a.alloc(2 * MIB, &stream).expect_err("nothing is free");
        assert_eq!(error.out_of_memory().and_then(vramalloc::OutOfMemory::foreign), Some(60 * MIB), "{error}");
        check_allocator(&a, &sim);
    });
}

#[test]
fn a_whole_device_is_no_limit() {
    each_kind(|config| {
        let sim = SimDriver::builder().capacity(100 * MIB).build();
        let config = config.limit(Limit::Fraction(1.0));
        let allocator = CachingAllocator::new(sim.clone(), config).expect("all of the device is legal");
        let stream = allocator.default_stream().expect("every device has one");
        let all = alloc(&allocator, &sim, 100, &stream);
        assert_eq!((all.bytes(), allocator.memory_reserved()), (100 * MIB, 100 * MIB));
    });
}
