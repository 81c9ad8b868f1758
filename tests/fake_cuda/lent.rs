//! What is lent to cudarc by value, as views or as slices, is still waited for.

use crate::bench::{Bench, FOREVER, ONE, bench};
use crate::streams::{BYTES, Use, launch, reuse_bare};
use cudarc::driver::{CudaStream, CudaView, PushKernelArg, result, sys};
use std::sync::Arc;

fn read(bench: &Bench, stream: &Arc<CudaStream>, view: &CudaView<'_, u8>) {
    let mut args = stream.launch_builder(&bench.read);
    // SAFETY: the kernel reads the view.
    unsafe { args.arg(view).arg(&(BYTES as u64)).arg(&FOREVER).launch(ONE) }.expect("launch");
}

#[test]
fn a_cuda_view_is_waited_for_where_it_was_used_instead() {
    let Some(bench) = bench("a_cuda_view_is_waited_for_where_it_was_used_instead") else { return };
    for (reads, names_own) in [(true, true), (true, false), (false, true), (false, false)] {
        let (stream, other) = bench.streams();
        let (known, _) = bench.streams();
        bench.memory.stream(&known).expect("stream");
        let named = if names_own { &stream } else { &known };
        let mut x = bench.memory.alloc_zeros::<u8>(BYTES, &stream).expect("zeros");
        if reads {
            read(&bench, &other, &x.slice(..).cuda_view(named));
        } else {
            let mut part = x.slice_mut(..);
            let mut view = part.cuda_view_mut(named);
            let mut args = other.launch_builder(&bench.fill);
            args.arg(&mut view).arg(&(BYTES as u64)).arg(&3_u32).arg(&FOREVER);
            // SAFETY: the kernel writes the view.
            unsafe { args.launch(ONE) }.expect("launch");
        }
        drop(x);
        bench.memory.poll(); // nothing is queued on the stream that was named
        reuse_bare(&bench, &stream, &format!("reads: {reads}, names its own: {names_own}"));
        bench.context.synchronize().expect("synchronize");
        bench.memory.empty_cache().expect("empty cache");
        assert_eq!(bench.memory.memory_stats().active.all.current, 0);
    }
}

#[test]
fn a_cuda_view_used_where_it_says_costs_no_wait_for_the_device() {
    let Some(bench) = bench("a_cuda_view_used_where_it_says_costs_no_wait_for_the_device") else { return };
    let (stream, other) = bench.streams();
    bench.memory.stream(&other).expect("stream");
    let x = bench.memory.alloc_zeros::<u8>(BYTES, &stream).expect("zeros");
    assert_eq!(x.slice(..1).to_vec().expect("read on its own stream, too"), [0]);
    read(&bench, &other, &x.slice(..).cuda_view(&other));
    drop(x);
    let waits = bench.fake.calls("cuCtxSynchronize");
    other.synchronize().expect("synchronize");
    assert_eq!((bench.memory.poll(), bench.fake.calls("cuCtxSynchronize")), (1, waits));
}

#[test]
fn what_read_before_the_lending_still_counts_after_it() {
    let Some(bench) = bench("what_read_before_the_lending_still_counts_after_it") else { return };
    for readers in [1, 2] {
        let (stream, one) = bench.streams();
        let (two, _) = bench.streams();
        let mut x = bench.memory.alloc_zeros::<u8>(BYTES, &stream).expect("zeros");
        for reader in [&one, &two].into_iter().take(readers) {
            launch(&bench, reader, &mut x, Use::Reading);
        }
        drop(x.into_cuda_slice().expect("slice"));
        reuse_bare(&bench, &stream, &format!("{readers} readers"));
        bench.context.synchronize().expect("synchronize");
    }
}

#[test]
fn a_writer_from_before_the_lending_counts_though_tracking_was_off_meanwhile() {
    let Some(bench) = bench("a_writer_from_before_the_lending_counts_though_tracking_was_off_meanwhile") else {
        return;
    };
    let (stream, other) = bench.streams();
    let mut x = bench.memory.alloc_zeros::<u8>(BYTES, &stream).expect("zeros");
    launch(&bench, &other, &mut x, Use::Writing);
    // SAFETY: nothing else happens meanwhile.
    let slice = unsafe {
        bench.context.disable_event_tracking();
        let slice = x.into_cuda_slice().expect("slice");
        bench.context.enable_event_tracking();
        slice
    };
    drop(slice);
    reuse_bare(&bench, &stream, "the write event stands for the return alone");
    bench.context.synchronize().expect("synchronize");
}

#[test]
fn an_announced_use_of_the_bare_address_counts() {
    let Some(bench) = bench("an_announced_use_of_the_bare_address_counts") else { return };
    for is_known in [true, false] {
        let (stream, other) = bench.streams();
        if is_known {
            bench.memory.stream(&other).expect("stream");
        }
        let slice =
            bench.memory.alloc_zeros::<u8>(BYTES, &stream).expect("zeros").into_cuda_slice().expect("slice");
        let address = slice.as_view().view_ptr(&stream).0;
        let mut args = other.launch_builder(&bench.read);
        other.join(&stream).expect("join");
        // SAFETY: the kernel reads the slice's memory.
        unsafe { args.arg(&address).arg(&(BYTES as u64)).arg(&FOREVER).launch(ONE) }.expect("launch");
        slice.record_stream(&other);
        drop(slice);
        reuse_bare(&bench, &stream, &format!("known: {is_known}"));
        bench.context.synchronize().expect("synchronize");
    }
}

#[test]
fn a_slice_returned_during_a_capture_does_not_break_it() {
    let Some(bench) = bench("a_slice_returned_during_a_capture_does_not_break_it") else { return };
    let (stream, other) = bench.streams();
    let x = bench.memory.alloc_zeros::<u8>(BYTES, &stream).expect("zeros");
    let slice = x.into_cuda_slice().expect("slice");
    read(&bench, &other, &slice.as_view());
    // SAFETY: the handle is alive, and the graph is destroyed once.
    unsafe {
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_GLOBAL;
        result::stream::begin_capture(stream.cu_stream(), mode).expect("begin");
        drop(slice);
        let graph = result::stream::end_capture(stream.cu_stream()).expect("the capture is whole");
        assert_eq!(sys::cuGraphDestroy(graph), sys::CUresult::CUDA_SUCCESS);
    }
    reuse_bare(&bench, &stream, "returned in a capture");
    bench.memory.empty_cache().expect("empty cache");
    assert_eq!(bench.memory.memory_stats().active.all.current, 0, "the device was waited for");
}

#[test]
fn a_cuda_view_is_waited_for_though_the_buffer_is_read_again() {
    let Some(bench) = bench("a_cuda_view_is_waited_for_though_the_buffer_is_read_again") else { return };
    for reads_by_cudarc in [false, true] {
        let (stream, other) = bench.streams();
        let x = bench.memory.alloc_zeros::<u8>(BYTES, &stream).expect("zeros");
        read(&bench, &other, &x.slice(..).cuda_view(&stream));
        if reads_by_cudarc {
            assert_eq!(stream.clone_dtoh(&x.slice(..1)).expect("cudarc's"), [0]);
        } else {
            assert_eq!(x.slice(..1).to_vec().expect("ours"), [0]);
        }
        drop(x);
        reuse_bare(&bench, &stream, &format!("lent, then read by cudarc: {reads_by_cudarc}"));
        bench.context.synchronize().expect("synchronize");
        bench.memory.empty_cache().expect("empty cache");
        assert_eq!(bench.memory.memory_stats().active.all.current, 0);
    }
}

#[test]
fn a_reader_that_is_not_known_counts_though_a_view_was_lent_in_its_name() {
    let Some(bench) = bench("a_reader_that_is_not_known_counts_though_a_view_was_lent_in_its_name") else {
        return;
    };
    let (stream, one) = bench.streams();
    let (two, _) = bench.streams();
    let mut x = bench.memory.alloc_zeros::<u8>(BYTES, &stream).expect("zeros");
    launch(&bench, &one, &mut x, Use::Reading);
    read(&bench, &two, &x.slice(..).cuda_view(&one));
    drop(x);
    reuse_bare(&bench, &stream, "the event stands for the view's use alone");
    bench.context.synchronize().expect("synchronize");
}

#[test]
fn an_announced_read_through_a_slice_counts_though_another_follows() {
    let Some(bench) = bench("an_announced_read_through_a_slice_counts_though_another_follows") else { return };
    let (stream, other) = bench.streams();
    let x = bench.memory.alloc_zeros::<u8>(BYTES, &stream).expect("zeros").into_cuda_slice().expect("slice");
    read(&bench, &other, &x.as_view());
    x.record_stream(&other);
    assert_eq!(stream.clone_dtoh(&x.slice(..1)).expect("the last read"), [0]);
    drop(x);
    reuse_bare(&bench, &stream, "a slice, read elsewhere and then on its own stream");
    bench.context.synchronize().expect("synchronize");
}
