//! Out of memory that was none, or that was blamed on the wrong thing.

use crate::bench::{Bench, KIB, MIB, each_kind};
use vramalloc::driver::sim::{CaptureMode, Fault};
use vramalloc::driver::{Call, DriverErrorKind};
use vramalloc::{Cause, Error, Segments};

#[test]
fn a_lost_device_is_not_out_of_memory() {
    // A device found lost while pending frees were polled, with the limit in the way, was reported as out of memory.
    each_kind(|segments| {
        let bench = Bench::new(1024, segments, "limit:40MiB");
        let (own, other) = (bench.stream(), bench.stream());
        let block = bench.alloc(30 * MIB, &own);
        bench.free_in_use_by(&other, block);
        bench.sim.fail(Fault::nth(Call::EventQuery, 1, DriverErrorKind::DeviceLost));
        let error = bench.allocator.alloc(20 * MIB, &own).unwrap_err();
        assert!(matches!(error, Error::Driver(_)), "{error}");
    });
}

#[test]
fn a_captured_stream_does_not_hold_back_what_others_freed() {
    // The oldest pending free was on a stream under capture, which cannot be waited for, and hid all the others.
    each_kind(|segments| {
        let bench = Bench::new(1024, segments, "limit:60MiB");
        let (own, captured, other) = (bench.stream(), bench.stream(), bench.stream());
        let [first, second] = [20, 30].map(|mib| bench.alloc(mib * MIB, &own));
        bench.sim.begin_capture(captured.key(), CaptureMode::Relaxed).unwrap();
        first.record_stream(&captured).unwrap();
        drop(first);
        bench.free_in_use_by(&other, second);
        bench.alloc(30 * MIB, &own);
    });
}

#[test]
fn a_captured_owner_does_not_hold_back_what_others_freed() {
    // Idle pages of a stream under capture came first in the order of waiting, and ended the search.
    for policy in ["grow", "wait"] {
        let bench = Bench::new(64, Segments::Expandable, &format!("on_pending:{policy}"));
        let [captured, other, third] = [(); 3].map(|()| bench.stream());
        let _pins = [&captured, &other].map(|stream| bench.alloc(512, stream));
        let (older, newer) = (bench.alloc(20 * MIB, &captured), bench.alloc(40 * MIB, &other));
        bench.launch(&captured, &older);
        bench.launch(&other, &newer);
        drop(older);
        (0..50).for_each(|_| drop(bench.alloc(512, &other)));
        drop(newer);
        bench.sim.begin_capture(captured.key(), CaptureMode::Relaxed).unwrap();
        bench.alloc(30 * MIB, &third);
    }
}

#[test]
fn a_fitting_block_behind_many_others_is_found() {
    // With nothing left to ask the driver for, only a few of the blocks in the size's bin were looked at, and a
    // larger one behind them was not found.
    let bench = Bench::new(1024, Segments::Fixed, "limit:20MiB");
    let stream = bench.stream();
    let fits = bench.alloc(131 * KIB + 512, &stream);
    let mut filling: Vec<_> = std::iter::from_fn(|| bench.allocator.alloc(130 * KIB, &stream).ok()).collect();
    let _rest: Vec<_> = std::iter::from_fn(|| bench.allocator.alloc(512, &stream).ok()).collect();
    drop(fits);
    let mut kept = false;
    filling.retain(|_| {
        kept = !kept;
        kept
    });
    assert!(filling.len() > 32, "too few blocks for the test to say anything");
    bench.alloc(130 * KIB + 512, &stream);
}

#[test]
fn memory_made_ahead_of_need_leaves_room_for_what_is_needed() {
    // The slack of a large growth took the last of the device, or of the limit, in a pool that the next request
    // could not use.
    for (capacity, config) in [(1024, ""), (8192, "limit:1024MiB")] {
        let bench = Bench::light(capacity, Segments::Expandable, config);
        let stream = bench.stream();
        let _large = bench.alloc(1016 * MIB, &stream);
        bench.alloc(2 * MIB, &stream);
    }
}

#[test]
fn the_whole_device_serves_blocks_of_a_page() {
    // Near the end of the memory, slack left a few pages that nobody could have.
    let bench = Bench::light(1024, Segments::Expandable, "");
    let stream = bench.stream();
    let blocks: Vec<_> = std::iter::from_fn(|| bench.allocator.alloc(2 * MIB, &stream).ok()).collect();
    assert_eq!(blocks.len(), 512, "of 2 MiB on a device of 1 GiB");
}

#[test]
fn used_up_addresses_are_named_as_the_cause() {
    // Cached memory that no new range could take in was reported as fragmentation.
    let bench = Bench::new(256, Segments::Expandable, "");
    let stream = bench.stream();
    // The first range is as short as it can be, and there is no second one.
    for nth in 1..=3 {
        bench.sim.fail(Fault::nth(Call::ReserveAddresses, nth, DriverErrorKind::AddressSpace));
    }
    drop(bench.alloc(64 * MIB, &stream));
    bench.sim.fail(Fault::always(Call::ReserveAddresses, DriverErrorKind::AddressSpace));
    let mut blocks: Vec<_> = (0..16).map(|_| Some(bench.alloc(4 * MIB, &stream))).collect();
    blocks.iter_mut().step_by(2).for_each(|block| *block = None);
    assert_eq!(bench.refusal(16 * MIB, &stream), Cause::AddressSpace);
}

#[test]
fn memory_that_may_not_be_waited_for_is_named_as_the_cause() {
    // Freed memory under queued work, with a policy that forbids waiting, was reported as a full device.
    let bench = Bench::new(64, Segments::Expandable, "on_pending:fail");
    let (owner, other) = (bench.stream(), bench.stream());
    let block = bench.alloc(60 * MIB, &owner);
    bench.launch(&owner, &block);
    drop(block);
    assert_eq!(bench.refusal(30 * MIB, &other), Cause::PendingWork);
    bench.end([owner, other]);
}
