//! Who holds the memory.

use crate::history::setup;
use vramalloc::driver::Driver;
use vramalloc::driver::sim::{SimDriver, SimMachine, Work};
use vramalloc::pytorch::Action;
use vramalloc::{Allocators, Config, HistoryOptions, Segments, StreamHandle};

const MIB: u64 = 1 << 20;

#[test]
fn by_stream_and_by_tag() {
    for segments in [Segments::Fixed, Segments::Expandable] {
        let (sim, allocator, [stream, other]) = setup(256 * MIB, segments);
        allocator.record_history(Some(HistoryOptions::default().events(0))).unwrap();
        let weights = {
            let _scope = allocator.scope("weights");
            [allocator.alloc(30 * MIB, &stream).unwrap(), allocator.alloc(10 * MIB, &other).unwrap()]
        };
        let untagged = allocator.alloc(1000, &other).unwrap();
        let pending = allocator.alloc(5 * MIB, &other).unwrap();
        pending.record_stream(&stream).unwrap();
        sim.launch(stream.key().handle, Work::reading(pending.ptr(), 1)).unwrap();
        drop(pending);
        let breakdown = allocator.memory_breakdown();
        let stats = allocator.memory_stats();
        let sum = |of: fn(&vramalloc::StreamUsage) -> u64| breakdown.streams.iter().map(of).sum::<u64>();
        assert_eq!(sum(|usage| usage.reserved), stats.reserved_bytes.all.current);
        assert_eq!(sum(|usage| usage.allocated), stats.allocated_bytes.all.current);
        assert_eq!(sum(|usage| usage.pending), 5 * MIB);
        assert!(
            breakdown.streams.iter().all(|usage| usage.reserved == usage.allocated + usage.pending + usage.cached)
        );
        let of = |key| breakdown.streams.iter().find(|usage| usage.stream == key).unwrap();
        assert_eq!((of(stream.key()).allocated, of(stream.key()).allocations), (30 * MIB, 1));
        assert_eq!((of(other.key()).allocated, of(other.key()).allocations), (10 * MIB + 1024, 2));
        let tags: Vec<(&str, usize, u64)> =
            breakdown.tags.iter().map(|usage| (&*usage.tag, usage.allocations, usage.allocated)).collect();
        assert_eq!(tags, [("weights", 2, 40 * MIB), ("", 1, 1024)]);
        let text = breakdown.to_string();
        for part in ["device 0, stream", "default", "30.00 MiB", "device 0, tag", "weights", "(no tag)"] {
            assert!(text.contains(part), "{part}:\n{text}");
        }
        drop((weights, untagged));
    }
}

#[test]
fn several_devices_in_one_summary_and_one_snapshot() {
    let machine = SimMachine::new(3, &SimDriver::builder().capacity(64 * MIB));
    // Device 1 is not ours; and not in order.
    let drivers = [2, 0].map(|ordinal| machine.device(ordinal) as std::sync::Arc<dyn Driver>);
    let allocators = Allocators::new(drivers, &Config::default()).unwrap();
    let mut live = Vec::new();
    for allocator in &allocators {
        allocator.record_history(Some(HistoryOptions::default())).unwrap();
        let stream = allocator.stream(StreamHandle::DEFAULT).unwrap();
        live.push(allocator.alloc(u64::from(allocator.device() + 1) * 1000, &stream).unwrap());
    }
    let summary = allocators.memory_summary();
    assert!(
        summary.contains("device ID 0") && summary.contains("device ID 2") && !summary.contains("device ID 1")
    );
    let snapshot = allocators.pytorch_snapshot();
    crate::viewer::check(&snapshot, true);
    assert_eq!(snapshot.segments.iter().map(|segment| segment.device).collect::<Vec<_>>(), [0, 2]);
    let allocs = |device: usize| {
        let allocs = snapshot.device_traces[device].iter().filter(|entry| entry.action == Action::Alloc);
        allocs.map(|entry| entry.size).collect::<Vec<_>>()
    };
    assert_eq!((allocs(0), allocs(1), allocs(2)), (vec![1000], vec![], vec![3000]));
    drop(live);
}
