//! Figures that were not true, and memory that was booked to the wrong account.

use crate::bench::{Bench, MIB, each_kind};
use crate::soak::Random;
use vramalloc::Segments;
use vramalloc::driver::sim::Fault;
use vramalloc::driver::{Call, DriverErrorKind};

#[test]
fn initial_memory_is_no_allocation() {
    // The memory reserved at the start was counted as allocated once and freed again, and set the peak.
    let bench = Bench::new(1024, Segments::Fixed, "initial:64MiB");
    let stats = bench.allocator.memory_stats();
    assert_eq!((bench.allocator.max_memory_allocated(), stats.allocation.all.allocated), (0, 0));
    assert_eq!(bench.allocator.memory_reserved(), 64 * MIB);
    bench.end([]);
}

#[test]
fn initial_memory_is_as_large_as_was_asked() {
    // A small amount at the start was rounded up to a segment's usual size.
    let bench = Bench::new(1024, Segments::Fixed, "initial:4MiB");
    assert_eq!(bench.allocator.memory_reserved(), 4 * MIB);
    bench.end([]);
}

#[test]
fn a_small_aligned_request_takes_a_small_segment() {
    // The alignment was added before the class of size was chosen: 512 bytes took a large segment.
    each_kind(|segments| {
        let bench = Bench::new(1024, segments, "");
        let block = bench.allocator.alloc_aligned(512, 2 * MIB, &bench.stream()).unwrap();
        assert_eq!(block.ptr().0 % (2 * MIB), 0);
        let reserved = bench.allocator.memory_reserved();
        assert!(reserved <= 4 * MIB, "{reserved} bytes for 512");
    });
}

#[test]
fn a_handles_address_freed_by_hand_is_told_so() {
    // Freeing the address of an allocation that a handle owns was answered as if there were no such allocation.
    each_kind(|segments| {
        let bench = Bench::new(64, segments, "");
        let block = bench.alloc(512, &bench.stream());
        let error = bench.allocator.free_raw(block.ptr()).unwrap_err().to_string();
        assert!(!error.contains("is not the start of an allocation"), "{error}");
        drop(block);
        bench.end([]);
    });
}

#[test]
fn the_peak_is_exact_over_several_streams() {
    // Peaks were raised at the end of bursts, pool by pool: what was live on several streams at once could be missed.
    each_kind(|segments| {
        let bench = Bench::light(8192, segments, "");
        let streams = [(); 2].map(|()| bench.stream());
        let mut random = Random::new(1);
        let (mut live, mut current, mut peak) = (Vec::new(), 0, 0);
        for _ in 0..20_000 {
            if live.is_empty() || random.below(2) == 0 {
                let bytes = 1 + random.below(200_000);
                let block = bench.allocator.alloc(bytes, &streams[random.index(2)]).expect("there is room");
                current += block.block_bytes();
                peak = peak.max(current);
                live.push(block);
            } else {
                current -= live.swap_remove(random.index(live.len())).block_bytes();
            }
            assert_eq!(bench.allocator.max_memory_allocated(), peak);
        }
        drop(live);
        bench.end(streams);
    });
}

#[test]
fn a_page_that_failed_to_move_stays_with_its_class() {
    // A page on its way from a large hole to a small pool, whose mapping failed, was booked to the small class and
    // taken off the large one when it went.
    for call in [Call::Map, Call::SetAccess] {
        let bench = Bench::new(64, Segments::Expandable, "slack:1.0");
        let stream = bench.stream();
        let mut blocks: Vec<_> = (0..32).map(|_| Some(bench.alloc(2 * MIB, &stream))).collect();
        blocks[3] = None;
        blocks[9] = None;
        bench.sim.fail(Fault::nth(call, 1, DriverErrorKind::Other(999)));
        drop(bench.allocator.alloc(512, &stream));
        assert_eq!(bench.sim.pending_faults(), 0, "{call} was not made");
        bench.check();
        drop(bench.alloc(512, &stream));
        drop(blocks);
        bench.end([stream]);
    }
}
