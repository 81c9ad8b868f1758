//! What the typed API costs in driver calls.

use crate::bench::bench;

const CALLS: [&str; 8] = [
    "cuEventCreate",
    "cuEventDestroy_v2",
    "cuMemAlloc_v2",
    "cuMemFree_v2",
    "cuMemAllocAsync",
    "cuMemFreeAsync",
    "cuStreamSynchronize",
    "cuCtxSynchronize",
];

#[test]
fn a_cached_allocation_creates_no_event() {
    let Some(bench) = bench("a_cached_allocation_creates_no_event") else { return };
    let (stream, other) = bench.streams();
    assert!(bench.context.is_managing_stream_synchronization());
    let step = || {
        let mut x = bench.memory.alloc_zeros::<f32>(1000, &stream).expect("zeros");
        let mut y = bench.memory.alloc_uninit::<f32>(300, &stream).expect("alloc");
        other.memset_zeros(&mut x).expect("memset");
        stream.memset_zeros(&mut y).expect("memset");
    };
    step();
    let before = CALLS.map(|call| bench.fake.calls(call));
    for _ in 0..100 {
        step();
    }
    let after = CALLS.map(|call| bench.fake.calls(call));
    for ((call, before), after) in CALLS.iter().zip(before).zip(after) {
        assert_eq!(after - before, 0, "{call}");
    }
}

#[test]
fn cudarc_alone_creates_two_events_each_time() {
    let Some(bench) = bench("cudarc_alone_creates_two_events_each_time") else { return };
    let (stream, _other) = bench.streams();
    let calls = ["cuEventCreate", "cuEventDestroy_v2", "cuMemAllocAsync", "cuMemFreeAsync"];
    let before = calls.map(|call| bench.fake.calls(call));
    for _ in 0..100 {
        drop(stream.alloc_zeros::<f32>(1000).expect("zeros"));
    }
    let after = calls.map(|call| bench.fake.calls(call));
    let made: Vec<u64> = after.iter().zip(before).map(|(after, before)| after - before).collect();
    assert_eq!(made, [200, 200, 100, 100], "what the test above saves");
}

#[test]
fn a_cached_allocation_makes_no_call_at_all() {
    let Some(bench) = bench("a_cached_allocation_makes_no_call_at_all") else { return };
    let (stream, _other) = bench.streams();
    drop(bench.memory.alloc_uninit::<u8>(5000, &stream).expect("alloc"));
    let all = ["cuCtxGetCurrent", "cuCtxPushCurrent_v2", "cuStreamGetId", "cuStreamWaitEvent", "cuEventRecord"];
    let before = all.map(|call| bench.fake.calls(call));
    drop(bench.memory.alloc_uninit::<u8>(5000, &stream).expect("alloc"));
    assert_eq!(all.map(|call| bench.fake.calls(call)), before);
}

#[test]
fn without_tracking_there_are_no_events() {
    let Some(bench) = bench("without_tracking_there_are_no_events") else { return };
    let bench = bench.without_tracking();
    let (stream, other) = bench.streams();
    bench.memory.stream(&other).expect("stream");
    let events = bench.fake.calls("cuEventCreate");
    let mut x = bench.memory.alloc_zeros::<u8>(64, &stream).expect("zeros");
    stream.synchronize().expect("synchronize");
    other.memset_zeros(&mut x).expect("memset");
    drop(x);
    assert_eq!(bench.fake.calls("cuEventCreate"), events);
    other.synchronize().expect("synchronize");
    // A shell made without events is of no use once cudarc tracks.
    // SAFETY: nothing is under way.
    unsafe { bench.context.enable_event_tracking() };
    bench.memory.poll();
    let mut x = bench.memory.alloc_zeros::<u8>(64, &stream).expect("zeros");
    assert_eq!(
        bench.fake.calls("cuEventCreate") - events,
        3,
        "two of cudarc's, and one that asked the other stream"
    );
    other.memset_zeros(&mut x).expect("memset");
    assert_eq!(x.to_vec().expect("ordered by events"), [0; 64]);
}
