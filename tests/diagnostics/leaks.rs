//! What is live, and who hears of it.

use crate::history::setup;
use std::sync::{Arc, Mutex};
use vramalloc::driver::sim::{SimDriver, Work};
use vramalloc::{CachingAllocator, Config, HistoryOptions, Segments};

const MIB: u64 = 1 << 20;

#[test]
fn the_report_has_what_is_live_oldest_first() {
    let (sim, allocator, [stream, other]) = setup(256 * MIB, Segments::Fixed);
    let unrecorded = allocator.alloc(4 * MIB, &stream).unwrap();
    allocator.record_history(Some(HistoryOptions::default().events(0))).unwrap();
    let step = allocator.scope("step");
    let weights = allocator.alloc(12 * MIB, &stream).unwrap();
    let forward = allocator.scope("forward");
    let activation = allocator.alloc(1000, &other).unwrap();
    let gone = allocator.alloc(1000, &other).unwrap();
    drop(gone);
    let pending = allocator.alloc(1000, &other).unwrap();
    pending.record_stream(&stream).unwrap();
    sim.launch(stream.key().handle, Work::reading(pending.ptr(), 1)).unwrap();
    drop(pending);
    drop((forward, step));
    let later = allocator.alloc(5000, &stream).unwrap();

    let report = allocator.leak_report();
    let seen: Vec<(u64, &str, bool)> = report
        .allocations
        .iter()
        .map(|allocation| (allocation.requested, &*allocation.tag, allocation.age.is_some()))
        .collect();
    let expected =
        [(4 * MIB, "", false), (12 * MIB, "step", true), (1000, "step/forward", true), (5000, "", true)];
    assert_eq!(seen, expected);
    assert_eq!(report.bytes(), allocator.memory_allocated());
    assert!(report.allocations[1].age >= report.allocations[3].age);
    let tags: Vec<(String, usize, u64)> =
        report.by_tag().into_iter().map(|group| (group.name, group.count, group.bytes)).collect();
    let expected = [
        ("step".to_owned(), 1, 12 * MIB),
        ("(no tag)".to_owned(), 2, 4 * MIB + 5120),
        ("step/forward".to_owned(), 1, 1024),
    ];
    assert_eq!(tags, expected);
    assert_eq!(report.by_tag()[1].oldest, None, "one of them was not recorded");
    let text = report.to_string();
    for part in
        ["device 0: 4 live allocations, 16.01 MiB", "by tag:", "step/forward", "oldest first:", "age unknown"]
    {
        assert!(text.contains(part), "{part}: {text}");
    }
    drop((unrecorded, weights, activation, later));
    assert_eq!(allocator.leak_report().to_string(), "device 0: 0 live allocations, 0 B (0 bytes)");
}

#[test]
fn growth_is_what_was_allocated_between_two_marks_and_stays() {
    let (_, allocator, [stream, other]) = setup(256 * MIB, Segments::Fixed);
    allocator.record_history(Some(HistoryOptions::default())).unwrap();
    let mut kept = Vec::new();
    let mut marks = vec![allocator.mark()];
    for step in 0..4u64 {
        let temporary = allocator.alloc(3 * MIB, &stream).unwrap();
        if step >= 2 {
            let _scope = allocator.scope("leaky");
            kept.push(allocator.alloc(1000 * step, &other).unwrap());
        }
        drop(temporary);
        marks.push(allocator.mark());
    }
    let report = allocator.leak_report();
    let grown: Vec<usize> =
        marks.windows(2).map(|pair| report.between(pair[0], pair[1]).allocations.len()).collect();
    assert_eq!(grown, [0, 0, 1, 1]);
    let all = report.between(marks[0], marks[4]);
    assert_eq!((all.by_tag()[0].name.as_str(), all.by_tag()[0].count), ("leaky", 2));
    drop(kept);
    assert!(allocator.leak_report().between(marks[0], marks[4]).allocations.is_empty());
}

#[test]
fn an_observer_hears_of_what_is_live_at_the_end() {
    let heard = Arc::new(Mutex::new(Vec::new()));
    let build = || {
        let sim = SimDriver::builder().capacity(64 * MIB).build();
        let allocator = CachingAllocator::new(sim, Config::default()).unwrap();
        let heard = Arc::clone(&heard);
        allocator.on_leak(move |report| heard.lock().unwrap().push(report.allocations.len()));
        allocator
    };
    let clean = build();
    let stream = clean.default_stream().unwrap();
    drop(clean.alloc(1000, &stream).unwrap());
    drop(stream);
    drop(clean);
    assert_eq!(*heard.lock().unwrap(), [0usize; 0]);

    let leaky = build();
    let stream = leaky.default_stream().unwrap();
    let handle = leaky.alloc(1000, &stream).unwrap();
    let _raw = leaky.alloc_raw(1000, &stream).unwrap();
    drop(leaky.clone());
    assert_eq!(*heard.lock().unwrap(), [0usize; 0], "a handle is left");
    drop(leaky);
    assert_eq!(*heard.lock().unwrap(), [2]);
    drop(handle); // as before: it outlives the allocator
}

/// Run by the next test in a process of its own, whose standard error it reads.
#[test]
#[ignore = "a part of `without_an_observer_a_recording_program_is_warned`"]
fn leaks_in_a_process_of_its_own() {
    for history in [None, Some(HistoryOptions::default())] {
        let sim = SimDriver::builder().capacity(64 * MIB).build();
        let allocator = CachingAllocator::new(sim, Config::default()).unwrap();
        allocator.record_history(history).unwrap();
        let stream = allocator.default_stream().unwrap();
        let _scope = allocator.scope("evening");
        let allocation = allocator.alloc(if history.is_none() { 111 } else { 222 }, &stream).unwrap();
        drop(allocator);
        drop(allocation);
    }
}

#[test]
fn without_an_observer_a_recording_program_is_warned() {
    let output = std::process::Command::new(std::env::current_exe().unwrap())
        .args(["leaks::leaks_in_a_process_of_its_own", "--exact", "--ignored", "--nocapture"])
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{text}");
    for part in [
        "vramalloc: the allocator is dropped while memory of it is in use",
        "1 live allocation,",
        "222 bytes",
        "evening",
    ] {
        assert!(text.contains(part), "{part}: {text}");
    }
    assert!(!text.contains("111 bytes"), "a program that records nothing is told nothing: {text}");
}
