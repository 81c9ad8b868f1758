//! Recording: what is kept, in which order, and that it agrees with what the allocator holds.

use crate::viewer;
use proptest::prelude::*;
use std::sync::Arc;
use vramalloc::driver::sim::{Fault, SimDriver, Work};
use vramalloc::pytorch::Action;
use vramalloc::{
    Allocation, CachingAllocator, Config, DriverErrorKind, Error, HistoryOptions, Segments, Stacks, Stream,
};

const MIB: u64 = 1 << 20;

pub(crate) fn setup(capacity: u64, segments: Segments) -> (Arc<SimDriver>, CachingAllocator, [Stream; 2]) {
    let sim = SimDriver::builder().capacity(capacity).build();
    let allocator = CachingAllocator::new(sim.clone(), Config::default().segments(segments)).unwrap();
    let streams = [allocator.default_stream().unwrap(), allocator.stream(sim.create_stream()).unwrap()];
    (sim, allocator, streams)
}

fn actions(allocator: &CachingAllocator) -> Vec<String> {
    allocator.pytorch_snapshot().device_traces[0].iter().map(|entry| entry.action.name().to_owned()).collect()
}

#[test]
fn every_event_is_kept_in_order() {
    let (sim, allocator, [stream, other]) = setup(64 * MIB, Segments::Fixed);
    allocator.record_history(Some(HistoryOptions::default())).unwrap();
    let a = allocator.alloc(30 * MIB - 5, &stream).unwrap();
    a.record_stream(&other).unwrap();
    sim.launch(other.key().handle, Work::reading(a.ptr(), 1)).unwrap();
    let address = a.ptr().0;
    drop(a);
    let oom = allocator.alloc(100 * MIB, &stream).unwrap_err();
    assert!(oom.out_of_memory().is_some());
    sim.complete(other.key().handle);
    allocator.poll();
    allocator.empty_cache().unwrap();
    let expected = ["segment_alloc", "alloc", "free_requested", "oom", "free_completed", "segment_free"];
    let snapshot = allocator.pytorch_snapshot();
    assert_eq!(actions(&allocator), expected);
    let trace = &snapshot.device_traces[0];
    assert_eq!((trace[1].addr, trace[1].size, trace[1].block_size), (address, 30 * MIB - 5, 30 * MIB));
    assert_eq!((trace[3].addr, trace[3].size), (34 * MIB, 100 * MIB), "free bytes and the rounded request");
    viewer::check(&snapshot, true);
}

#[test]
fn it_is_off_by_default_and_off_again_when_told() {
    let (_, allocator, [stream, _]) = setup(64 * MIB, Segments::Fixed);
    let a = allocator.alloc(5 * MIB, &stream).unwrap();
    assert!(actions(&allocator).is_empty());
    allocator.record_history(Some(HistoryOptions::default())).unwrap();
    drop(a);
    assert_eq!(actions(&allocator), ["free_requested", "free_completed"]);
    allocator.record_history(None).unwrap();
    drop(allocator.alloc(5 * MIB, &stream).unwrap());
    assert!(actions(&allocator).is_empty() && !allocator.is_recording_history());
    allocator.record_history(Some(HistoryOptions::default())).unwrap();
    assert!(actions(&allocator).is_empty(), "a new recording");
}

#[test]
fn the_newest_events_are_kept_over_all_streams() {
    let (_, allocator, [stream, other]) = setup(64 * MIB, Segments::Fixed);
    for events in [1, 3, 1000, 5000] {
        allocator.record_history(Some(HistoryOptions::default().events(events))).unwrap();
        for round in 0..4000u64 {
            let stream = if round % 7 == 0 { &other } else { &stream };
            drop(allocator.alloc(512 + round, stream).unwrap());
        }
        let snapshot = allocator.pytorch_snapshot();
        let trace = &snapshot.device_traces[0];
        // A free at once is one event and two entries.
        let kept = trace.iter().filter(|entry| entry.action != Action::FreeRequested).count();
        assert_eq!(kept, events, "of 8000");
        let mut sizes: Vec<u64> =
            trace.iter().filter(|entry| entry.action == Action::Alloc).map(|entry| entry.size).collect();
        assert!(sizes.is_sorted(), "in order");
        if let Some(last) = sizes.pop() {
            assert_eq!(last, 512 + 3999);
        }
        viewer::check(&snapshot, false);
    }
}

#[test]
fn with_no_events_only_what_is_live_is_known() {
    let (_, allocator, [stream, _]) = setup(64 * MIB, Segments::Fixed);
    allocator.record_history(Some(HistoryOptions::default().events(0))).unwrap();
    let _a = allocator.alloc(5 * MIB, &stream).unwrap();
    let snapshot = allocator.pytorch_snapshot();
    assert!(snapshot.device_traces[0].is_empty());
    assert_eq!(snapshot.segments[0].allocated_size, 5 * MIB);
}

#[test]
fn scopes_are_tags_and_annotations() {
    let (_, allocator, [stream, _]) = setup(64 * MIB, Segments::Fixed);
    allocator.record_history(Some(HistoryOptions::default())).unwrap();
    let step = allocator.scope("step");
    let forward = allocator.scope("forward");
    allocator.annotate("loss 0.25");
    let a = allocator.alloc(5 * MIB, &stream).unwrap();
    drop((forward, step));
    drop(a);
    let snapshot = allocator.pytorch_snapshot();
    let tag = |action| {
        let entry = snapshot.device_traces[0].iter().find(|entry| entry.action == action).unwrap();
        entry.user_metadata.to_string()
    };
    assert_eq!(tag(Action::Alloc), "step/forward");
    assert_eq!(tag(Action::FreeCompleted), "step/forward", "a free has its allocation's tag");
    let marks: Vec<String> = snapshot
        .external_annotations
        .iter()
        .map(|annotation| format!("{:?} {:?}", annotation.get("stage").unwrap(), annotation.get("name").unwrap()))
        .collect();
    let mark = |stage: &str, name: &str| format!("Str({stage:?}) Str({name:?})");
    let expected =
        [mark("START", "step"), mark("START", "step/forward"), mark("END", "step/forward"), mark("END", "step")];
    // Within a microsecond it may be on either side of its neighbours.
    let (notes, scopes): (Vec<String>, Vec<String>) = marks.into_iter().partition(|mark| mark.contains("INSTANT"));
    assert_eq!((scopes.as_slice(), notes), (&expected[..], vec![mark("INSTANT", "loss 0.25")]));
}

#[test]
fn events_of_streams_that_are_gone_are_kept() {
    let (sim, allocator, [stream, _]) = setup(64 * MIB, Segments::Fixed);
    allocator.record_history(Some(HistoryOptions::default())).unwrap();
    for _ in 0..50 {
        let handle = sim.create_stream();
        let short = allocator.stream(handle).unwrap();
        drop(allocator.alloc(5 * MIB, &short).unwrap());
        allocator.retire_stream(&short).unwrap();
        drop(short);
        allocator.empty_cache().unwrap();
    }
    drop(allocator.alloc(5 * MIB, &stream).unwrap());
    let snapshot = allocator.pytorch_snapshot();
    let allocs = snapshot.device_traces[0].iter().filter(|entry| entry.action == Action::Alloc).count();
    assert_eq!(allocs, 51);
    viewer::check(&snapshot, true);
}

#[test]
#[cfg(not(feature = "stacks"))]
fn stacks_need_the_feature() {
    let (_, allocator, _) = setup(64 * MIB, Segments::Fixed);
    let error = allocator.record_history(Some(HistoryOptions::default().stacks(Stacks::Alloc))).unwrap_err();
    assert_eq!(error, Error::NoStacks);
    assert!(error.to_string().contains("feature `stacks`"));
}

#[test]
#[cfg(feature = "stacks")]
fn stacks_name_the_caller() {
    #[inline(never)]
    fn makes_activations(allocator: &CachingAllocator, stream: &Stream) -> Allocation {
        allocator.alloc(5 * MIB, stream).unwrap()
    }
    let (_, allocator, [stream, _]) = setup(64 * MIB, Segments::Fixed);
    allocator.record_history(Some(HistoryOptions::default().stacks(Stacks::All))).unwrap();
    let a = makes_activations(&allocator, &stream);
    let snapshot = allocator.pytorch_snapshot();
    let entry = snapshot.device_traces[0].iter().find(|entry| entry.action == Action::Alloc).unwrap();
    let frames = entry.frames.frames();
    assert!(frames[0].name.contains("makes_activations"), "{:?}", frames[0]);
    assert!(frames[0].filename.ends_with("history.rs") && frames[0].line > 0, "{:?}", frames[0]);
    assert!(frames[1].name.contains("stacks_name_the_caller"), "{:?}", frames[1]);
    assert_eq!(snapshot.segments[0].blocks[0].frames, entry.frames, "of the live block, too");
    drop(a);
    let _: Error = Error::NoStacks;
}

/// One step of a random program.
#[derive(Clone, Debug)]
enum Step {
    Alloc { bytes: u64, stream: usize },
    Free { which: usize, recorded: bool },
    Complete,
    Poll,
    EmptyCache,
}

fn step() -> impl Strategy<Value = Step> {
    let bytes = prop_oneof![1..4096u64, 1..(3 * MIB), (5 * MIB)..(40 * MIB)];
    prop_oneof![
        5 => (bytes, 0..2usize).prop_map(|(bytes, stream)| Step::Alloc { bytes, stream }),
        4 => (any::<usize>(), prop::bool::weighted(0.3)).prop_map(|(which, recorded)| Step::Free { which, recorded }),
        1 => Just(Step::Complete),
        1 => Just(Step::Poll),
        1 => Just(Step::EmptyCache),
    ]
}

/// Runs a program; what is live at its end is returned. With faults, the calls of these numbers fail.
fn run(steps: &[Step], expandable: bool, faults: Option<&[u64]>) -> (CachingAllocator, Vec<(Allocation, usize)>) {
    let segments = if expandable { Segments::Expandable } else { Segments::Fixed };
    let (sim, allocator, streams) = setup(160 * MIB, segments);
    allocator.record_history(Some(HistoryOptions::default())).unwrap();
    for &number in faults.unwrap_or_default() {
        sim.fail(Fault::nth_any(number, DriverErrorKind::Other(719)));
    }
    let mut live: Vec<(Allocation, usize)> = Vec::new();
    for step in steps {
        match *step {
            Step::Alloc { bytes, stream } => {
                if let Ok(allocation) = allocator.alloc(bytes, &streams[stream]) {
                    live.push((allocation, stream));
                }
            }
            Step::Free { which, recorded } if !live.is_empty() => {
                let (allocation, stream) = live.swap_remove(which % live.len());
                if recorded {
                    let other = &streams[1 - stream];
                    allocation.record_stream(other).unwrap();
                    sim.launch(other.key().handle, Work::reading(allocation.ptr(), 1)).unwrap();
                }
            }
            Step::Free { .. } => {}
            Step::Complete => streams.iter().for_each(|stream| sim.complete(stream.key().handle)),
            Step::Poll => drop(allocator.poll()),
            Step::EmptyCache => {
                let result = allocator.empty_cache();
                assert!(result.is_ok() || faults.is_some(), "{result:?}");
            }
        }
    }
    (allocator, live)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 150, failure_persistence: None, ..ProptestConfig::default() })]

    /// Whatever a program does, on a device that is too small for it: the events lead from nothing to what is held.
    #[test]
    fn the_events_lead_to_the_segments(steps in prop::collection::vec(step(), 1..120), expandable: bool) {
        let (allocator, _live) = run(&steps, expandable, None);
        let snapshot = allocator.pytorch_snapshot();
        viewer::check(&snapshot, true);
        let stats = allocator.memory_stats();
        let sum = |of: fn(&vramalloc::pytorch::Segment) -> u64| snapshot.segments.iter().map(of).sum::<u64>();
        prop_assert_eq!(sum(|segment| segment.total_size), stats.reserved_bytes.all.current);
        prop_assert_eq!(sum(|segment| segment.allocated_size), stats.allocated_bytes.all.current);
        prop_assert_eq!(sum(|segment| segment.active_size), stats.active_bytes.all.current);
        prop_assert_eq!(sum(|segment| segment.requested_size), stats.requested_bytes.all.current);
        let count = |action| snapshot.device_traces[0].iter().filter(|entry| entry.action == action).count() as u64;
        prop_assert_eq!(count(Action::Alloc), stats.allocation.all.allocated);
        prop_assert_eq!(count(Action::FreeRequested), stats.allocation.all.freed);
        prop_assert_eq!(count(Action::SegmentAlloc), stats.segment.all.allocated);
        prop_assert_eq!(count(Action::Oom), stats.num_ooms);
        // Pages that were created in a growth which then failed are events, and no part of the statistics.
        let (peak, counted) = (snapshot.peak_usage(0).reserved, stats.reserved_bytes.all.peak);
        prop_assert!(peak == counted || (peak > counted && expandable), "{peak}, {counted}");
    }

    /// The same while driver calls fail: a segment that the driver would not take is back, pages that could not be
    /// opened were never there.
    #[test]
    fn they_do_so_whatever_fails(
        steps in prop::collection::vec(step(), 1..60),
        expandable: bool,
        faults in prop::collection::vec(1..60u64, 1..6),
    ) {
        let (allocator, _live) = run(&steps, expandable, Some(&faults));
        viewer::check(&allocator.pytorch_snapshot(), true);
    }
}

/// Threads on their own streams and on a shared one, with pages moving between them: every snapshot taken meanwhile
/// agrees with its events.
#[test]
fn snapshots_are_consistent_while_threads_run() {
    for segments in [Segments::Fixed, Segments::Expandable] {
        let (sim, allocator, [shared, _]) = setup(256 * MIB, segments);
        allocator.record_history(Some(HistoryOptions::default().events(3000))).unwrap();
        std::thread::scope(|threads| {
            let workers: Vec<_> = (0..3u64)
                .map(|thread| {
                    let own = allocator.stream(sim.create_stream()).unwrap();
                    let (allocator, shared) = (&allocator, &shared);
                    threads.spawn(move || {
                        let mut live = Vec::new();
                        for round in 0..400u64 {
                            let _scope = allocator.scope("round");
                            let stream = if round % 3 == 0 { shared } else { &own };
                            let bytes = 1 + (round * 7_919 + thread * 104_729) % (6 * MIB);
                            // The device is too small for all of it at times.
                            live.extend(allocator.alloc(bytes, stream).ok());
                            if live.len() > 12 {
                                drop(live.swap_remove((round as usize * 5) % live.len()));
                            }
                        }
                    })
                })
                .collect();
            let mut snapshots = 0;
            while workers.iter().any(|worker| !worker.is_finished()) || snapshots == 0 {
                viewer::check(&allocator.pytorch_snapshot(), false);
                snapshots += 1;
                if snapshots % 5 == 0 {
                    allocator.empty_cache().unwrap();
                }
                if snapshots % 7 == 0 {
                    // A new recording in the middle of everything.
                    allocator.record_history(Some(HistoryOptions::default().events(500))).unwrap();
                }
            }
        });
        viewer::check(&allocator.pytorch_snapshot(), false);
        allocator.validate().unwrap();
    }
}
