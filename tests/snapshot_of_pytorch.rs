//! A real run of PyTorch 2.11 on its native allocator (a small training loop, two streams, `record_stream`), its
//! allocations and frees replayed here: the same requests must lead to the same statistics.
//!
//! `data/mlp_events.csv` is the device trace of that run's snapshot, from an empty allocator to its end, with
//! allocations numbered in their order; `data/mlp.stats.json` is what `torch.cuda.memory_stats()` said then.

use std::collections::{BTreeMap, HashMap};
use vramalloc::driver::sim::{SimDriver, Work};
use vramalloc::{Allocation, BlockState, CachingAllocator, Config};

const EVENTS: &str = include_str!("data/mlp_events.csv");
const STATS: &str = include_str!("data/mlp.stats.json");
const SUMMARY: &str = include_str!("data/mlp.summary.txt");

struct Event<'a> {
    action: &'a str,
    allocation: Option<u64>,
    bytes: u64,
    stream: usize,
}

fn events() -> Vec<Event<'static>> {
    let parse = |line: &'static str| {
        let fields: Vec<_> = line.split(',').collect();
        let [action, allocation, bytes, stream] = fields[..] else { panic!("{line}") };
        Event {
            action,
            allocation: allocation.parse().ok(),
            bytes: bytes.parse().unwrap(),
            stream: stream.parse().unwrap(),
        }
    };
    EVENTS.lines().skip(1).map(parse).collect()
}

/// Runs the events; `look` sees every one with the allocator after it.
fn replay(mut look: impl FnMut(usize, &Event<'_>, &CachingAllocator)) -> CachingAllocator {
    let sim = SimDriver::builder().capacity(8 << 30).build();
    let allocator = CachingAllocator::new(sim.clone(), Config::default()).unwrap();
    let handles = [vramalloc::StreamHandle::DEFAULT, sim.create_stream()];
    let streams = handles.map(|handle| allocator.stream(handle).unwrap());
    let mut live: HashMap<u64, Allocation> = HashMap::new();
    let events = events();
    for (at, event) in events.iter().enumerate() {
        match (event.action, event.allocation) {
            ("alloc", Some(number)) => {
                let allocation = allocator.alloc(event.bytes, &streams[event.stream]).unwrap();
                assert!(live.insert(number, allocation).is_none());
            }
            ("free_requested", Some(number)) => {
                let allocation = live.remove(&number).unwrap();
                let next = events.get(at + 1);
                let is_at_once =
                    next.is_some_and(|next| next.action == "free_completed" && next.allocation == Some(number));
                if !is_at_once {
                    // Another stream used it, and had not passed by the end of the run.
                    let other = 1 - event.stream;
                    allocation.record_stream(&streams[other]).unwrap();
                    sim.launch(handles[other], Work::reading(allocation.ptr(), event.bytes)).unwrap();
                }
                drop(allocation);
            }
            ("free_completed", _) | ("segment_alloc", _) => {}
            other => panic!("event {other:?}"),
        }
        look(at, event, &allocator);
    }
    allocator.validate().unwrap();
    sim.assert_clean();
    // What is live at the end of the recording stays live while the figures are looked at.
    live.into_values().for_each(std::mem::forget);
    allocator
}

fn recorded() -> BTreeMap<String, i64> {
    serde_json::from_str(STATS).unwrap()
}

#[test]
fn the_statistics_are_pytorchs() {
    let ours = replay(|_, _, _| ()).memory_stats().to_map();
    let theirs = recorded();
    let keys: Vec<_> = ours.keys().collect();
    assert_eq!(keys, theirs.keys().collect::<Vec<_>>(), "the keys are the same");
    let different: Vec<_> = theirs.iter().filter(|(key, value)| ours[*key] != **value).collect();
    let shown: Vec<_> =
        different.iter().map(|(key, value)| format!("{key}: PyTorch {value}, here {}", ours[*key])).collect();
    assert!(shown.is_empty(), "{} figures differ:\n{}", shown.len(), shown.join("\n"));
}

#[test]
fn segments_are_reserved_at_the_same_moments() {
    let mut reserved = 0;
    replay(|at, event, allocator| {
        if event.action == "segment_alloc" {
            reserved += event.bytes; // the request that needs it is the next event
        } else {
            assert_eq!(allocator.memory_reserved(), reserved, "after event {at}, {}", event.action);
        }
    });
}

#[test]
fn the_pending_block_is_seen_as_such() {
    let snapshot = replay(|_, _, _| ()).snapshot();
    assert_eq!(snapshot.bytes_in(BlockState::Pending), 2_551_808);
    assert_eq!(snapshot.bytes_in(BlockState::Live), 370_257_920);
    assert_eq!(snapshot.segments.len(), 20);
}

/// The rows of a summary: everything below the line with the columns' names.
fn rows(text: &str) -> Vec<Vec<&str>> {
    text.lines()
        .skip_while(|line| !line.contains("Cur Usage"))
        .map(|line| line.trim_matches('|').split('|').map(str::trim).collect())
        .collect()
}

#[test]
fn the_summary_has_pytorchs_rows() {
    let ours = replay(|_, _, _| ()).memory_summary();
    assert_eq!(rows(&ours), rows(SUMMARY));
    let widths: Vec<_> = ours.lines().map(str::len).collect();
    assert!(widths.iter().all(|width| *width == 77), "{widths:?}");
}
