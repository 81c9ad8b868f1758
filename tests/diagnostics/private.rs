//! Private pools, as the tools see them.

use crate::history::setup;
use vramalloc::pytorch::Action;
use vramalloc::{HistoryOptions, Segments};

const MIB: u64 = 1 << 20;

#[test]
fn snapshots_name_the_pool() {
    for segments in [Segments::Fixed, Segments::Expandable] {
        let (_, allocator, [stream, _]) = setup(256 * MIB, segments);
        let (ours, theirs) = (allocator.private_pool(), allocator.private_pool_of((7, 9)));
        assert_eq!(theirs.id(), (7, 9));
        assert_ne!(ours.id(), allocator.private_pool().id());
        let before = allocator.alloc(4 * MIB, &ours.stream(&stream).unwrap()).unwrap(); // known before the history
        allocator.record_history(Some(HistoryOptions::default())).unwrap();
        let live = [
            allocator.alloc(8 * MIB, &stream).unwrap(),
            allocator.alloc(4 * MIB, &ours.stream(&stream).unwrap()).unwrap(),
            allocator.alloc(4 * MIB, &theirs.stream(&stream).unwrap()).unwrap(),
        ];
        let snapshot = allocator.pytorch_snapshot();
        for (allocation, id) in live.iter().zip([(0, 0), ours.id(), (7, 9)]) {
            let address = allocation.ptr().0;
            let within = snapshot
                .segments
                .iter()
                .find(|segment| (segment.address..segment.address + segment.total_size).contains(&address));
            assert_eq!(within.unwrap().segment_pool_id, id, "{segments:?}");
            let mut entries = snapshot.device_traces[0].iter();
            let entry = entries.find(|entry| entry.action == Action::Alloc && entry.addr == address);
            assert_eq!(entry.unwrap().pool_id, id, "{segments:?}");
        }
        drop((before, live));
        let id = ours.id();
        drop((ours, theirs));
        let after = allocator.pytorch_snapshot();
        assert!(after.segments.iter().all(|segment| segment.segment_pool_id == (0, 0)), "they are released");
        let freed = after.device_traces[0].iter().filter(|entry| entry.action == Action::FreeRequested);
        assert_eq!(freed.filter(|entry| entry.pool_id == id).count(), 2, "what was, was");
    }
}

#[test]
fn what_a_pool_keeps_is_nobodys_to_give_back() {
    for segments in [Segments::Fixed, Segments::Expandable] {
        let (_, allocator, [stream, _]) = setup(256 * MIB, segments);
        let pool = allocator.private_pool();
        let private = pool.stream(&stream).unwrap();
        let sizes = [12 * MIB, 3 * MIB, 12 * MIB, 3 * MIB];
        let mut kept: Vec<_> = sizes.iter().map(|bytes| allocator.alloc(*bytes, &private).unwrap()).collect();
        // Large blocks go, small ones stay beside free room: moving and freeing would help, were it not private.
        kept.retain(|allocation| allocation.bytes() < 4 * MIB);
        let cached = allocator.alloc(30 * MIB, &stream).unwrap();
        drop(cached);
        let report = allocator.fragmentation_report();
        let parts = [report.allocated, report.pending, report.cached, report.pinned, report.private];
        assert_eq!(parts.iter().sum::<u64>(), report.reserved, "{segments:?}");
        assert_eq!(report.private, pool.memory_reserved() - report.allocated, "{segments:?}");
        assert_eq!(
            (report.moving_gives_back, report.pinning.len(), report.units.len()),
            (0, 0, 0),
            "{segments:?}"
        );
        assert!(report.to_string().contains("free in private pools, until they are released"));
        assert_eq!(allocator.empty_cache().unwrap(), report.cached, "as the report said");
        drop((private, pool));
        let report = allocator.fragmentation_report();
        assert_eq!(report.private, 0, "{segments:?}");
        assert!(report.cached + report.pinned > 0, "now it counts like all other");
    }
}

/// A run whose graph keeps 40 MiB needs that beside what comes after it.
#[cfg(feature = "replay")]
#[test]
fn a_replay_keeps_the_pool_apart() {
    use vramalloc::driver::sim::SimDriver;
    use vramalloc::replay::Replay;
    use vramalloc::{CachingAllocator, Config, StreamHandle};

    let (_, allocator, [stream, _]) = setup(256 * MIB, Segments::Expandable);
    allocator.record_history(Some(HistoryOptions::default())).unwrap();
    let pool = allocator.private_pool();
    drop(allocator.alloc(40 * MIB, &pool.stream(&stream).unwrap()).unwrap());
    drop(allocator.alloc(40 * MIB, &stream).unwrap());
    let trace = allocator.pytorch_snapshot().to_trace(0, "captured").unwrap();
    assert_eq!((trace.streams.len(), &trace.private[..]), (2, &[Some(0), None][..]));
    assert_eq!(trace.streams[0], trace.streams[1], "it is one stream");
    for segments in [Segments::Fixed, Segments::Expandable] {
        let sim = SimDriver::builder().capacity(256 * MIB).build();
        let replayed = CachingAllocator::new(sim, Config::default().segments(segments)).unwrap();
        let mut replay = Replay::new(&replayed, &trace, &[StreamHandle::DEFAULT; 2]).unwrap();
        replay.pass().unwrap();
        assert_eq!(replayed.max_memory_reserved(), 80 * MIB, "{segments:?}");
    }
}

#[test]
fn a_history_can_be_configured() {
    use vramalloc::driver::sim::SimDriver;
    use vramalloc::{CachingAllocator, Config};

    let sim = SimDriver::builder().capacity(256 * MIB).build();
    let config: Config = "segments:expandable,initial:20MiB,history:4".parse().unwrap();
    let allocator = CachingAllocator::new(sim, config).unwrap();
    assert!(allocator.is_recording_history());
    let entries = &allocator.pytorch_snapshot().device_traces[0];
    assert!(entries.iter().any(|entry| entry.action == Action::SegmentMap), "from the first page on: {entries:?}");
    let stream = allocator.default_stream().unwrap();
    (0..10).for_each(|_| drop(allocator.alloc(MIB, &stream).unwrap()));
    let entries = &allocator.pytorch_snapshot().device_traces[0];
    let allocations = entries.iter().filter(|entry| entry.action == Action::Alloc);
    assert_eq!(allocations.count(), 2, "the newest four events");
}
