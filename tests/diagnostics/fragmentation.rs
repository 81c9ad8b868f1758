//! Why more is reserved than allocated.

use crate::history::setup;
use proptest::prelude::*;
use vramalloc::driver::sim::Work;
use vramalloc::{BlockState, HistoryOptions, Segments};

const MIB: u64 = 1 << 20;

#[test]
fn a_small_block_pins_its_segment() {
    let (_, allocator, [stream, _]) = setup(256 * MIB, Segments::Fixed);
    allocator.record_history(Some(HistoryOptions::default().events(0))).unwrap();
    // Two segments of 20 MiB, each with a block of 2 MiB in use; one whole segment cached; one full.
    let mut pins = Vec::new();
    for name in ["first", "second"] {
        let rest: Vec<_> = (0..4).map(|_| allocator.alloc(4 * MIB, &stream).unwrap()).collect();
        let _scope = allocator.scope(name);
        pins.push(allocator.alloc(4 * MIB, &stream).unwrap());
        drop(rest);
        pins.push(allocator.alloc(16 * MIB + 1, &stream).unwrap()); // takes a segment of its own
        // Fill what is free of the first segment, so that the second round needs another one.
        if name == "first" {
            pins.push(allocator.alloc(4 * MIB, &stream).unwrap());
        }
    }
    let report = allocator.fragmentation_report();
    assert_eq!(report.reserved, allocator.memory_reserved());
    assert_eq!(report.allocated, allocator.memory_allocated());
    assert_eq!(report.allocated + report.pending + report.cached + report.pinned, report.reserved);
    assert!(report.units.iter().all(|unit| !unit.expandable && unit.free > 0 && !unit.pinned_by.is_empty()));
    let text = report.to_string();
    assert!(text.contains("pinned") && text.contains("segment at 0x"), "{text}");
    drop(pins);
    let report = allocator.fragmentation_report();
    assert_eq!((report.allocated, report.pinned), (0, 0));
    assert_eq!(report.cached, report.reserved);
    assert_eq!(allocator.empty_cache().unwrap(), report.cached, "as the report said");
}

#[test]
fn what_one_block_pins_goes_back_when_it_is_freed() {
    // Five of the blocks fill a segment of 20 MiB, seven a handle of 2 MiB.
    for (segments, bytes) in [(Segments::Fixed, 4 * MIB), (Segments::Expandable, 300 << 10)] {
        let (_, allocator, [stream, _]) = setup(512 * MIB, segments);
        let mut live: Vec<_> = (0..40).map(|_| allocator.alloc(bytes, &stream).unwrap()).collect();
        // One of five stays.
        let mut index = 0;
        live.retain(|_| {
            index += 1;
            index % 5 == 1
        });
        allocator.empty_cache().unwrap();
        let report = allocator.fragmentation_report();
        assert_eq!(report.reserved, allocator.memory_reserved(), "{segments:?}");
        assert_eq!(report.cached, 0, "{segments:?}");
        assert!(report.pinned > 0, "{segments:?}");
        let best = &report.pinning[0];
        assert!(best.gives_back > best.bytes);
        let at = live.iter().position(|allocation| allocation.ptr() == best.address).unwrap();
        drop(live.swap_remove(at));
        assert_eq!(allocator.empty_cache().unwrap(), best.gives_back, "{segments:?}: as the report said");
    }
}

#[test]
fn moving_is_worth_what_it_empties() {
    let (_, allocator, [stream, _]) = setup(512 * MIB, Segments::Fixed);
    let mut live: Vec<_> = (0..10).map(|_| allocator.alloc(4 * MIB, &stream).unwrap()).collect();
    // Two segments of five blocks: one of the first and three of the second stay.
    let mut index = 0;
    live.retain(|_| {
        index += 1;
        [1, 6, 7, 8].contains(&index)
    });
    let report = allocator.fragmentation_report();
    assert_eq!((report.moving_gives_back, report.moving_copies), (20 * MIB, 4 * MIB));
    // Done as a program does it: allocate (the tightest free block is in the fuller segment), copy, free.
    let moved = allocator.alloc(4 * MIB, &stream).unwrap();
    drop(live.remove(0));
    assert_eq!(allocator.empty_cache().unwrap(), 20 * MIB);
    drop(moved);
    // With no room elsewhere nothing is promised.
    drop(live);
    allocator.empty_cache().unwrap();
    let _alone = allocator.alloc(4 * MIB, &stream).unwrap();
    assert_eq!(allocator.fragmentation_report().moving_gives_back, 0);
}

#[test]
fn pending_blocks_are_told_apart() {
    let (sim, allocator, [stream, other]) = setup(256 * MIB, Segments::Fixed);
    let a = allocator.alloc(4 * MIB, &stream).unwrap();
    a.record_stream(&other).unwrap();
    sim.launch(other.key().handle, Work::reading(a.ptr(), 1)).unwrap();
    drop(a);
    let report = allocator.fragmentation_report();
    assert_eq!((report.allocated, report.pending, report.pinned), (0, 4 * MIB, 16 * MIB));
    assert_eq!(report.units[0].pinned_by[0].state, BlockState::Pending);
    assert_eq!(report.moving_gives_back, 0);
    assert!(report.to_string().contains("pending"));
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 100, failure_persistence: None, ..ProptestConfig::default() })]

    /// Whatever is held: the parts add up, and emptying the cache gives back what the report says.
    #[test]
    fn the_parts_add_up(
        sizes in prop::collection::vec((prop_oneof![1..4096u64, 1..(9 * MIB), (9 * MIB)..(30 * MIB)], 0..2usize, any::<bool>()), 1..60),
        expandable: bool,
    ) {
        let segments = if expandable { Segments::Expandable } else { Segments::Fixed };
        let (_, allocator, streams) = setup(2048 * MIB, segments);
        let mut live = Vec::new();
        for &(bytes, stream, _) in &sizes {
            live.push(allocator.alloc(bytes, &streams[stream]).unwrap());
        }
        let mut keep = sizes.iter();
        live.retain(|_| keep.next().unwrap().2);
        let report = allocator.fragmentation_report();
        prop_assert_eq!(report.reserved, allocator.memory_reserved());
        prop_assert_eq!(report.allocated, allocator.memory_allocated());
        prop_assert_eq!(report.allocated + report.pending + report.cached + report.pinned, report.reserved);
        prop_assert!(report.moving_gives_back <= report.reserved - report.cached);
        prop_assert_eq!(allocator.empty_cache().unwrap(), report.cached);
        // The best single block, freed, gives back what was said.
        if let Some(best) = report.pinning.first() {
            live.retain(|allocation| allocation.ptr() != best.address);
            prop_assert_eq!(allocator.empty_cache().unwrap(), best.gives_back);
        }
    }
}
