//! Captures into graphs, as `docs/cudarc.md` says they are to be made.

use crate::bench::{Bench, ONE, bench};
use crate::streams::BYTES;
use cudarc::driver::{CudaStream, PushKernelArg, result, sys};
use std::sync::Arc;
use vramalloc::{DriverErrorKind, Error};

/// Captures what `body` queues on a stream, and throws the graph away. Whether the capture was whole.
fn captured(stream: &Arc<CudaStream>, body: impl FnOnce()) -> bool {
    // SAFETY: the handle is alive, and the graph is destroyed once.
    unsafe {
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_GLOBAL;
        result::stream::begin_capture(stream.cu_stream(), mode).expect("begin");
        body();
        let graph = result::stream::end_capture(stream.cu_stream());
        graph.is_ok_and(|graph| sys::cuGraphDestroy(graph) == sys::CUresult::CUDA_SUCCESS)
    }
}

fn read(bench: &Bench, stream: &Arc<CudaStream>, x: &vramalloc::DeviceBuffer<u8>) {
    let mut args = stream.launch_builder(&bench.read);
    // SAFETY: the kernel reads the buffer.
    unsafe { args.arg(x).arg(&(BYTES as u64)).arg(&1_u64).launch(ONE) }.expect("launch");
}

#[test]
fn a_capture_as_the_documentation_says() {
    let Some(bench) = bench("a_capture_as_the_documentation_says") else { return };
    let (stream, other) = bench.streams();
    bench.memory.stream(&stream).expect("stream");
    // Of the captured stream, and of another, whose uses are recorded as the captured one is known.
    let mut x = bench.memory.alloc_zeros::<u8>(BYTES, &stream).expect("zeros");
    let mut y = bench.memory.alloc_zeros::<u8>(BYTES, &other).expect("zeros");
    let host = bench.memory.pin_slice(&vec![1_u8; BYTES]).expect("pinned");
    bench.context.synchronize().expect("what comes before is in order");
    let pool = bench.memory.private_pool();
    let capturing = pool.capture();
    // SAFETY: all that follows is on one stream.
    unsafe { bench.context.disable_event_tracking() };
    let is_whole = captured(&stream, || {
        x.set_zero().expect("ours");
        stream.memset_zeros(&mut y).expect("cudarc's");
        stream.memcpy_htod(&host, &mut x).expect("page-locked memory");
        read(&bench, &stream, &x);
        read(&bench, &stream, &y);
        let Err(Error::Driver(error)) = x.copy_from_slice(&vec![2; BYTES]) else { panic!("the slice ends here") };
        assert_eq!(error.kind, DriverErrorKind::Capturing);
        assert!(error.to_string().contains("PinnedBuffer"), "{error}");
        let Err(Error::Driver(error)) = x.to_vec() else { panic!("the values come with the launch") };
        assert_eq!(error.kind, DriverErrorKind::Capturing);
    });
    assert!(is_whole, "nothing has spoilt it");
    // SAFETY: as above.
    unsafe { bench.context.enable_event_tracking() };
    drop(capturing);
    drop((x, y, host, pool));
    bench.memory.empty_cache().expect("empty cache");
    bench.memory.empty_host_cache().expect("empty");
    assert_eq!(bench.memory.memory_reserved(), 0);
}

#[test]
fn with_tracking_a_wait_for_what_came_before_spoils_a_capture() {
    let Some(bench) = bench("with_tracking_a_wait_for_what_came_before_spoils_a_capture") else { return };
    let (stream, _other) = bench.streams();
    let mut x = bench.memory.alloc_zeros::<u8>(BYTES, &stream).expect("zeros");
    let is_whole = captured(&stream, || {
        let refused = x.set_zero();
        assert!(refused.is_err(), "why tracking is switched off");
    });
    assert!(!is_whole);
    bench.fake.violations(); // the device has noted it
}

#[test]
fn copies_of_nothing_spoil_no_capture() {
    let Some(bench) = bench("copies_of_nothing_spoil_no_capture") else { return };
    let bench = bench.without_tracking();
    let (stream, _other) = bench.streams();
    let mut x = bench.memory.alloc_zeros::<u8>(100, &stream).expect("zeros");
    bench.context.synchronize().expect("synchronize");
    let is_whole = captured(&stream, || {
        assert!(x.slice(..0).to_vec().expect("nothing to wait for").is_empty());
        x.slice_mut(..0).copy_from_slice(&[]).expect("nothing to copy");
    });
    assert!(is_whole);
}

/// What was used before the capture, and has passed for all but the allocator, is used again in it: twice, by either kind
/// of copy.
#[test]
fn page_locked_memory_of_a_warm_up_is_copied_to_in_a_capture() {
    let Some(bench) = bench("page_locked_memory_of_a_warm_up_is_copied_to_in_a_capture") else { return };
    for warmed_elsewhere in [false, true] {
        let (stream, other) = bench.streams();
        let [known, elsewhere] = [&stream, &other].map(|stream| bench.memory.stream(stream).expect("stream"));
        let x = bench.memory.alloc_zeros::<u8>(BYTES, &stream).expect("zeros");
        let [mut ours, mut theirs] = [(); 2].map(|()| bench.memory.pin_slice(&vec![1_u8; BYTES]).expect("pinned"));
        bench.context.synchronize().expect("synchronize");
        let (warm, warm_bare) = if warmed_elsewhere { (&elsewhere, &other) } else { (&known, &stream) };
        x.as_view().copy_to_pinned_on(&mut ours, warm).expect("warm-up");
        warm_bare.memcpy_dtoh(&x, &mut theirs).expect("warm-up");
        bench.context.synchronize().expect("synchronize");
        let pool = bench.memory.private_pool();
        let capturing = pool.capture();
        // SAFETY: all that follows is on one stream.
        unsafe { bench.context.disable_event_tracking() };
        let is_whole = captured(&stream, || {
            for _ in 0..2 {
                x.copy_to_pinned(&mut ours).expect("ours");
                stream.memcpy_dtoh(&x, &mut theirs).expect("cudarc's");
            }
        });
        // SAFETY: as above.
        unsafe { bench.context.enable_event_tracking() };
        drop(capturing);
        assert!(is_whole, "nothing has spoilt it; warmed elsewhere: {warmed_elsewhere}");
        assert_eq!(bench.memory.take_deferred_error(), None);
        x.copy_to_pinned(&mut theirs).expect("after the capture");
        assert_eq!(theirs.as_slice().expect("waits")[BYTES - 1], 0);
        drop((x, ours, theirs, pool));
        assert!(bench.memory.empty_host_cache().expect("empty") > 0);
        assert_eq!(bench.memory.host_memory_stats().reserved_bytes.current, 0);
    }
}
