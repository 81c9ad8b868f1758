//! The timeline for trace viewers.

use crate::history::setup;
use serde_json::Value;
use vramalloc::{HistoryOptions, Segments};

const MIB: u64 = 1 << 20;

fn written(snapshot: &vramalloc::pytorch::Snapshot) -> Vec<Value> {
    let mut bytes = Vec::new();
    snapshot.write_chrome_trace(&mut bytes).unwrap();
    let trace: Value = serde_json::from_slice(&bytes).unwrap();
    trace["traceEvents"].as_array().unwrap().clone()
}

fn of_phase<'a>(events: &'a [Value], phase: &str) -> Vec<&'a Value> {
    events.iter().filter(|event| event["ph"] == phase).collect()
}

/// Slices open and close in pairs, the inner ones first, and time goes forward on each thread.
fn check_slices(events: &[Value]) {
    let mut open: std::collections::BTreeMap<u64, Vec<String>> = std::collections::BTreeMap::new();
    let mut last: std::collections::BTreeMap<u64, u64> = std::collections::BTreeMap::new();
    for event in events.iter().filter(|event| event["ph"] == "B" || event["ph"] == "E") {
        let (thread, name) = (event["tid"].as_u64().unwrap(), event["name"].as_str().unwrap().to_owned());
        let time = event["ts"].as_u64().unwrap();
        assert!(*last.get(&thread).unwrap_or(&0) <= time);
        last.insert(thread, time);
        if event["ph"] == "B" {
            open.entry(thread).or_default().push(name);
        } else {
            assert_eq!(open.get_mut(&thread).unwrap().pop(), Some(name));
        }
    }
    assert!(open.values().all(Vec::is_empty), "{open:?}");
}

#[test]
fn counters_slices_and_instants() {
    let (_, allocator, [stream, _]) = setup(64 * MIB, Segments::Fixed);
    let before = allocator.scope("before");
    allocator.record_history(Some(HistoryOptions::default())).unwrap();
    let step = allocator.scope("step");
    let forward = allocator.scope("forward");
    let a = allocator.alloc(30 * MIB, &stream).unwrap();
    drop(forward);
    std::thread::scope(|threads| {
        threads.spawn(|| {
            let _loader = allocator.scope("loader");
            drop(allocator.alloc(1000, &stream).unwrap());
        });
    });
    allocator.annotate("epoch 3");
    let _oom = allocator.alloc(100 * MIB, &stream).unwrap_err();
    drop(before); // ends all that is open, without a beginning of its own
    let events = written(&allocator.pytorch_snapshot());
    check_slices(&events);
    let names: Vec<&str> = of_phase(&events, "B").iter().map(|event| event["name"].as_str().unwrap()).collect();
    assert_eq!(names, ["before/step", "before/step/forward", "loader"]);
    let instants: Vec<&str> = of_phase(&events, "i").iter().map(|event| event["name"].as_str().unwrap()).collect();
    assert_eq!(instants, ["segment_alloc", "segment_alloc", "out of memory", "epoch 3"]);
    let counters = of_phase(&events, "C");
    let most = |key: &str| counters.iter().map(|event| event["args"][key].as_u64().unwrap()).max();
    let stats = allocator.memory_stats();
    assert_eq!(most("allocated"), Some(stats.allocated_bytes.all.peak), "peaks within a microsecond are not lost");
    assert_eq!(most("reserved"), Some(stats.reserved_bytes.all.peak));
    let last = &counters[counters.len() - 1]["args"];
    assert_eq!(last["allocated"].as_u64(), Some(allocator.memory_allocated()));
    drop((a, step));
}

#[test]
#[cfg(feature = "replay")]
fn pytorchs_snapshots_have_timelines_too() {
    let path = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/snapshots/mlp.pickle.gz");
    let snapshot = vramalloc::pytorch::Snapshot::read(path).unwrap();
    let events = written(&snapshot);
    check_slices(&events);
    assert_eq!(of_phase(&events, "B").len(), 8, "the optimizer's ranges");
    let reserved = of_phase(&events, "C").iter().map(|event| event["args"]["reserved"].as_u64().unwrap()).max();
    assert_eq!(reserved, Some(673_185_792), "as in its memory_stats");
}
