//! Uses on other streams are noticed: memory is not reused before they have passed. The simulated device refuses what
//! races, so that a launch that works is the proof.

use crate::bench::{Bench, FOREVER, ONE, bench};
use cudarc::driver::{CudaContext, CudaStream, PushKernelArg, result, sys};
use std::sync::Arc;
use vramalloc::DeviceBuffer;

pub(crate) const BYTES: usize = 1 << 20;

/// How a buffer is used on the other stream.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Use {
    Reading,
    Writing,
    ReadingAView,
    WritingAView,
}

pub(crate) const USES: [Use; 4] = [Use::Reading, Use::Writing, Use::ReadingAView, Use::WritingAView];

/// Queues a kernel that never ends by itself.
pub(crate) fn launch(bench: &Bench, stream: &Arc<CudaStream>, x: &mut DeviceBuffer<u8>, how: Use) {
    let (bytes, half) = (BYTES as u64, BYTES as u64 / 2);
    // SAFETY: the kernels touch no more than the buffer.
    unsafe {
        match how {
            Use::Reading => {
                stream.launch_builder(&bench.read).arg(&*x).arg(&bytes).arg(&FOREVER).launch(ONE).expect("launch")
            }
            Use::Writing => {
                let mut builder = stream.launch_builder(&bench.fill);
                builder.arg(x).arg(&bytes).arg(&3_u32).arg(&FOREVER).launch(ONE).expect("launch")
            }
            Use::ReadingAView => {
                let view = x.slice(BYTES / 2..);
                stream.launch_builder(&bench.read).arg(&view).arg(&half).arg(&FOREVER).launch(ONE).expect("launch")
            }
            Use::WritingAView => {
                let mut view = x.slice_mut(BYTES / 2..);
                let mut builder = stream.launch_builder(&bench.fill);
                builder.arg(&mut view).arg(&half).arg(&3_u32).arg(&FOREVER).launch(ONE).expect("launch")
            }
        }
    };
}

/// Copies by cudarc's functions, which say where they run.
fn copy(stream: &Arc<CudaStream>, x: &mut DeviceBuffer<u8>, sink: &mut DeviceBuffer<u8>, how: Use) {
    match how {
        Use::Reading => stream.memcpy_dtod(&*x, sink),
        Use::Writing => stream.memcpy_dtod(&*sink, x),
        Use::ReadingAView => stream.memcpy_dtod(&x.slice(BYTES / 2..), sink),
        Use::WritingAView => stream.memcpy_dtod(&sink.slice(..BYTES / 2), &mut x.slice_mut(BYTES / 2..)),
    }
    .expect("copy");
}

/// Takes the memory that was just freed, or other memory, and writes all of it on `stream`.
pub(crate) fn reuse(bench: &Bench, stream: &Arc<CudaStream>, what: &str) {
    let next: Vec<_> = (0..4)
        .map(|_| {
            let mut next = bench.memory.alloc_uninit::<u8>(BYTES, stream).expect("alloc");
            let mut builder = stream.launch_builder(&bench.fill);
            builder.arg(&mut next).arg(&(BYTES as u64)).arg(&9_u32).arg(&1_u64);
            // SAFETY: the kernel writes the buffer.
            unsafe { builder.launch(ONE) }.unwrap_or_else(|error| panic!("{what}: {error:?}"));
            next
        })
        .collect();
    for buffer in next {
        assert_eq!(buffer.slice(BYTES - 1..).to_vec().expect("download"), [9], "{what}");
    }
}

/// The same on the bare stream, where no event of cudarc's that stays with the memory orders anything.
pub(crate) fn reuse_bare(bench: &Bench, stream: &Arc<CudaStream>, what: &str) {
    let bare = bench.memory.stream(stream).expect("stream");
    let next: Vec<DeviceBuffer<u8>> = (0..4)
        .map(|_| {
            bench.memory.allocator().alloc_zeros(BYTES, &bare).unwrap_or_else(|error| panic!("{what}: {error}"))
        })
        .collect();
    drop(next);
}

fn every_use(bench: &Bench, is_known: bool) {
    for how in USES {
        let (stream, other) = bench.streams();
        if is_known {
            bench.memory.stream(&other).expect("stream");
        }
        let what = format!("launch {how:?}, known: {is_known}");
        let mut x = bench.memory.alloc_zeros::<u8>(BYTES, &stream).expect("zeros");
        other.join(&stream).expect("join");
        launch(bench, &other, &mut x, how);
        drop(x);
        reuse(bench, &stream, &what);
        other.synchronize().expect("synchronize");
        bench.memory.empty_cache().expect("empty cache");
        assert_eq!(bench.memory.memory_stats().active.all.current, 0, "{what}");

        let what = format!("copy {how:?}, known: {is_known}");
        let mut x = bench.memory.alloc_zeros::<u8>(BYTES, &stream).expect("zeros");
        let mut sink = bench.memory.alloc_zeros::<u8>(BYTES, &other).expect("zeros");
        if !is_known {
            bench.memory.retire_stream(&other).expect("retire");
        }
        other.join(&stream).expect("join");
        copy(&other, &mut x, &mut sink, how);
        drop(x);
        reuse(bench, &stream, &what);
        drop(sink);
        other.synchronize().expect("synchronize");
        bench.memory.empty_cache().expect("empty cache");
        assert_eq!(bench.memory.memory_stats().active.all.current, 0, "{what}");
    }
}

#[test]
fn known_streams_with_tracking() {
    let Some(bench) = bench("known_streams_with_tracking") else { return };
    every_use(&bench, true);
}

#[test]
fn known_streams_without_tracking() {
    let Some(bench) = bench("known_streams_without_tracking") else { return };
    every_use(&bench.without_tracking(), true);
}

#[test]
fn unknown_streams_with_tracking() {
    let Some(bench) = bench("unknown_streams_with_tracking") else { return };
    every_use(&bench, false);
}

#[test]
fn unknown_streams_without_tracking() {
    let Some(bench) = bench("unknown_streams_without_tracking") else { return };
    every_use(&bench.without_tracking(), false);
}

#[test]
fn several_unknown_readers_are_all_waited_for() {
    let Some(bench) = bench("several_unknown_readers_are_all_waited_for") else { return };
    let (stream, one) = bench.streams();
    let (two, _) = bench.streams();
    let mut x = bench.memory.alloc_zeros::<u8>(BYTES, &stream).expect("zeros");
    // cudarc's one event for reads ends up standing for the second of them.
    launch(&bench, &one, &mut x, Use::Reading);
    launch(&bench, &two, &mut x, Use::Reading);
    two.synchronize().expect("synchronize");
    drop(x);
    reuse(&bench, &stream, "the first reader still runs");
}

#[test]
fn a_known_use_costs_no_call_when_the_buffer_is_dropped() {
    let Some(bench) = bench("a_known_use_costs_no_call_when_the_buffer_is_dropped") else { return };
    let (stream, other) = bench.streams();
    bench.memory.stream(&other).expect("stream");
    let mut x = bench.memory.alloc_zeros::<u8>(BYTES, &stream).expect("zeros");
    launch(&bench, &other, &mut x, Use::Writing);
    let calls =
        ["cuStreamWaitEvent", "cuEventRecord", "cuEventQuery", "cuStreamSynchronize", "cuEventSynchronize"];
    let before = calls.map(|call| bench.fake.calls(call));
    drop(x);
    assert_eq!(calls.map(|call| bench.fake.calls(call)), before);
    assert_eq!(bench.memory.memory_stats().active_bytes.all.current, BYTES as u64, "still used");
    other.synchronize().expect("synchronize");
    assert_eq!(bench.memory.poll(), 1);
}

#[test]
fn destroyed_streams_strand_nothing() {
    let Some(bench) = bench("destroyed_streams_strand_nothing") else { return };
    let (lasting, _) = bench.streams();
    let destroyed = bench.fake.calls("cuStreamDestroy_v2");
    let mut handles = Vec::new();
    for round in 0..20_u8 {
        let stream = bench.context.new_stream().expect("stream");
        handles.push(stream.cu_stream());
        let mut x = bench.memory.alloc_zeros::<u8>(BYTES, &stream).expect("zeros");
        launch(&bench, &lasting, &mut x, Use::Reading);
        launch(&bench, &stream, &mut x, Use::Writing);
        lasting.synchronize().expect("synchronize");
        drop((x, stream)); // the stream's work is still under way
        reuse(&bench, &lasting, &format!("round {round}"));
    }
    bench.memory.empty_cache().expect("empty cache");
    assert!(bench.fake.calls("cuStreamDestroy_v2") - destroyed >= 20, "streams that nobody has are let go");
    handles.sort_unstable();
    handles.dedup();
    assert!(handles.len() < 20, "handles came back");
    bench.context.synchronize().expect("synchronize");
    bench.memory.empty_cache().expect("empty cache");
    assert_eq!(bench.memory.memory_reserved(), 0);
}

#[test]
fn a_stream_that_was_handed_out_stays() {
    let Some(bench) = bench("a_stream_that_was_handed_out_stays") else { return };
    let (cuda, _) = bench.streams();
    let stream = bench.memory.stream(&cuda).expect("stream");
    drop(cuda);
    bench.memory.empty_cache().expect("empty cache");
    let x = bench.memory.allocator().alloc_zeros::<u8>(8, &stream).expect("the stream is alive");
    assert_eq!(x.to_vec().expect("download"), [0; 8]);
}

#[test]
fn default_streams_of_each_thread_are_others() {
    let Some(bench) = bench("default_streams_of_each_thread_are_others") else { return };
    let own = bench.context.per_thread_stream();
    let mut x = bench.memory.alloc_zeros::<u8>(BYTES, &own).expect("zeros");
    own.synchronize().expect("synchronize");
    std::thread::scope(|scope| {
        let theirs = scope.spawn(|| {
            bench.context.bind_to_thread().expect("bind");
            launch(&bench, &own, &mut x, Use::Writing); // the same handle, another stream
            drop(x);
        });
        theirs.join().expect("thread");
    });
    assert_eq!(
        bench.memory.memory_stats().active_bytes.all.current,
        BYTES as u64,
        "the other thread's work goes on"
    );
    reuse(&bench, &own, "per-thread default streams");
    bench.context.synchronize().expect("synchronize");
}

#[test]
fn default_and_borrowed_streams_work_alone() {
    let Some(bench) = bench("default_and_borrowed_streams_work_alone") else { return };
    let default = bench.context.default_stream();
    let mut x = bench.memory.alloc_zeros::<u8>(BYTES, &default).expect("zeros");
    default.synchronize().expect("synchronize");
    // No stream of cudarc's own, so that it orders nothing.
    assert!(!bench.context.is_managing_stream_synchronization());
    launch(&bench, &bench.context.per_thread_stream(), &mut x, Use::Writing);
    drop(x);
    reuse(&bench, &default, "the thread's default stream is noticed");
    // SAFETY: a stream of this test, which outlives the wrapper.
    let owner = bench.context.new_stream().expect("stream");
    // SAFETY: as above.
    let borrowed = unsafe { bench.context.wrap_borrowed_stream(owner.cu_stream()) };
    let y = bench.memory.alloc_zeros::<u8>(16, &borrowed).expect("zeros");
    assert_eq!(owner.clone_dtoh(&y).expect("one stream, two wrappers"), [0; 16]);
    drop(y);
    bench.memory.retire_stream(&borrowed).expect("before its owner destroys it");
    bench.context.synchronize().expect("synchronize");
}

#[test]
fn another_context_value_of_the_same_device_is_the_same_context() {
    let Some(bench) = bench("another_context_value_of_the_same_device_is_the_same_context") else { return };
    let (stream, _) = bench.streams();
    let second = CudaContext::new(0).expect("context");
    for is_tracking in [true, false] {
        if !is_tracking {
            // SAFETY: what follows is in order.
            unsafe { second.disable_event_tracking() };
        }
        let other = second.new_stream().expect("stream");
        for how in USES {
            let mut x = bench.memory.alloc_zeros::<u8>(BYTES, &stream).expect("zeros");
            stream.synchronize().expect("synchronize");
            launch(&bench, &other, &mut x, how);
            drop(x);
            reuse(&bench, &stream, &format!("{how:?}, tracking {is_tracking}"));
            other.synchronize().expect("synchronize");
        }
        let x = bench.memory.alloc_zeros::<u8>(8, &other).expect("a stream of the other value");
        assert_eq!(stream.clone_dtoh(&x).expect("dtoh"), [0; 8]);
    }
}

#[test]
fn a_drop_during_a_capture_does_not_break_it() {
    let Some(bench) = bench("a_drop_during_a_capture_does_not_break_it") else { return };
    let (stream, other) = bench.streams();
    let mut x = bench.memory.alloc_zeros::<u8>(BYTES, &stream).expect("zeros");
    launch(&bench, &other, &mut x, Use::Writing);
    let waits = bench.fake.calls("cuStreamWaitEvent");
    // SAFETY: the handles are alive, and the graph is destroyed once.
    unsafe {
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_GLOBAL;
        result::stream::begin_capture(stream.cu_stream(), mode).expect("begin");
        drop(x);
        let graph = result::stream::end_capture(stream.cu_stream()).expect("the capture is whole");
        assert_eq!(sys::cuGraphDestroy(graph), sys::CUresult::CUDA_SUCCESS);
    }
    assert_eq!(bench.fake.calls("cuStreamWaitEvent"), waits, "no wait became part of the graph");
    reuse(&bench, &stream, "dropped in a capture");
    bench.memory.empty_cache().expect("empty cache");
    assert_eq!(bench.memory.memory_stats().active.all.current, 0, "the device was waited for");
}

#[test]
fn a_stream_destroyed_before_the_buffer_is_no_trouble() {
    let Some(bench) = bench("a_stream_destroyed_before_the_buffer_is_no_trouble") else { return };
    let (stream, _) = bench.streams();
    for is_tracking in [true, false] {
        if !is_tracking {
            // SAFETY: what follows is in order.
            unsafe { bench.context.disable_event_tracking() };
        }
        for how in USES {
            let mut x = bench.memory.alloc_zeros::<u8>(BYTES, &stream).expect("zeros");
            stream.synchronize().expect("synchronize");
            let other = bench.context.new_stream().expect("stream");
            let handle = other.cu_stream();
            launch(&bench, &other, &mut x, how);
            drop(other); // destroyed; its work goes on
            let recycled = bench.context.new_stream().expect("stream");
            assert_eq!(recycled.cu_stream(), handle, "the handle is another stream's now");
            drop(x);
            reuse(&bench, &stream, &format!("{how:?}, tracking {is_tracking}"));
            reuse(&bench, &recycled, &format!("{how:?}, tracking {is_tracking}, the recycled handle"));
            bench.context.synchronize().expect("synchronize");
            drop(recycled);
            bench.memory.empty_cache().expect("empty cache");
            assert_eq!(bench.memory.memory_reserved(), 0);
        }
    }
}
