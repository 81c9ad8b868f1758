//! Each of cudarc's traits, on buffers and on views.

use crate::bench::{ONE, bench};
use cudarc::driver::{CudaContext, DevicePtr, DevicePtrMut, DeviceSlice, PushKernelArg};
use std::panic::{AssertUnwindSafe, catch_unwind};
use vramalloc::{DeviceBuffer, StreamHandle};

#[test]
fn copies_of_cudarc_take_buffers() {
    let Some(bench) = bench("copies_of_cudarc_take_buffers") else { return };
    let (stream, _) = bench.streams();
    let mut x = bench.memory.alloc_uninit::<f32>(4, &stream).expect("alloc");
    stream.memcpy_htod(&[1.0_f32, 2.0, 3.0, 4.0], &mut x).expect("htod");
    let mut y = bench.memory.alloc_zeros::<f32>(4, &stream).expect("zeros");
    stream.memcpy_dtod(&x, &mut y).expect("dtod");
    stream.memset_zeros(&mut x).expect("memset");
    assert_eq!(stream.clone_dtoh(&y).expect("dtoh"), [1.0, 2.0, 3.0, 4.0]);
    assert_eq!(x.to_vec().expect("download"), [0.0; 4]);
    let owned = stream.clone_dtod(&y).expect("to a slice of cudarc's own");
    assert_eq!(stream.clone_dtoh(&owned).expect("dtoh"), y.to_vec().expect("download"));
    let mut host = [0.0_f32; 4];
    stream.memcpy_dtoh(&y, &mut host).expect("dtoh");
    assert_eq!(host, [1.0, 2.0, 3.0, 4.0]);
}

#[test]
fn copies_of_cudarc_take_views() {
    let Some(bench) = bench("copies_of_cudarc_take_views") else { return };
    let (stream, _) = bench.streams();
    let mut x = bench.memory.clone_htod(&[0_u16, 1, 2, 3, 4, 5, 6, 7], &stream).expect("upload");
    let y = bench.memory.clone_htod(&[70_u16, 80], &stream).expect("upload");
    stream.memcpy_dtod(&y.slice(1..), &mut x.slice_mut(2..3)).expect("dtod");
    let (mut left, mut right) = x.split_at_mut(4);
    stream.memcpy_dtod(&left.as_view(), &mut right).expect("dtod");
    stream.memset_zeros(&mut left.slice_mut(..1)).expect("memset");
    stream.memcpy_htod(&[9_u16], &mut left.slice_mut(3..)).expect("htod");
    assert_eq!(stream.clone_dtoh(&right.slice(1..3)).expect("dtoh"), [1, 80]);
    assert_eq!(stream.clone_dtoh(&left).expect("a mutable view is read, too"), [0, 1, 80, 9]);
    assert_eq!(x.to_vec().expect("download"), [0, 1, 80, 9, 0, 1, 80, 3]);
    let view = x.slice(2..4).cuda_view(&stream);
    assert_eq!(stream.clone_dtoh(&view).expect("cudarc's own view"), [80, 9]);
    let mut part = x.slice_mut(..2);
    stream.memset_zeros(&mut part.cuda_view_mut(&stream)).expect("memset");
    assert_eq!(x.slice(..3).to_vec().expect("download"), [0, 0, 80]);
}

#[test]
fn slices_say_where_they_are() {
    let Some(bench) = bench("slices_say_where_they_are") else { return };
    let (stream, _) = bench.streams();
    let mut x = bench.memory.alloc_zeros::<u64>(6, &stream).expect("zeros");
    fn facts<S: DeviceSlice<u64>>(slice: &S) -> (usize, usize, bool) {
        (slice.len(), slice.num_bytes(), slice.is_empty())
    }
    assert_eq!(facts(&x), (6, 48, false));
    assert_eq!(facts(&x.slice(1..3)), (2, 16, false));
    assert_eq!(facts(&x.slice_mut(6..)), (0, 0, true));
    assert!(DeviceSlice::stream(&x) == &stream);
    let base = x.ptr().0;
    assert_eq!(x.device_ptr(&stream).0, base);
    assert_eq!(x.device_ptr_mut(&stream).0, base);
    assert_eq!(x.slice(2..).device_ptr(&stream).0, base + 16);
    assert_eq!(x.slice_mut(3..).device_ptr_mut(&stream).0, base + 24);
    let bits = x.slice(1..).cast::<u32>().expect("cast");
    assert_eq!((bits.device_ptr(&stream).0, DeviceSlice::len(&bits)), (base + 8, 10));
}

#[test]
fn kernels_take_buffers_and_views() {
    let Some(bench) = bench("kernels_take_buffers_and_views") else { return };
    let (stream, _) = bench.streams();
    let mut x = bench.memory.alloc_zeros::<u8>(8, &stream).expect("zeros");
    let (all, part, nanos) = (8_u64, 2_u64, 1000_u64);
    // SAFETY: the kernels touch no more than these buffers.
    unsafe {
        stream.launch_builder(&bench.fill).arg(&mut x).arg(&all).arg(&7_u32).arg(&nanos).launch(ONE).expect("all");
        let mut view = x.slice_mut(2..4);
        stream
            .launch_builder(&bench.fill)
            .arg(&mut view)
            .arg(&part)
            .arg(&9_u32)
            .arg(&nanos)
            .launch(ONE)
            .expect("part");
        let (_, mut right) = x.split_at_mut(6);
        stream
            .launch_builder(&bench.fill)
            .arg(&mut right)
            .arg(&part)
            .arg(&1_u32)
            .arg(&nanos)
            .launch(ONE)
            .expect("end");
        stream.launch_builder(&bench.read).arg(&x).arg(&all).arg(&nanos).launch(ONE).expect("read");
        let view = x.slice(4..);
        stream.launch_builder(&bench.read).arg(&view).arg(&part).arg(&nanos).launch(ONE).expect("read a part");
    }
    assert_eq!(x.to_vec().expect("download"), [7, 7, 9, 9, 7, 7, 1, 1]);
}

#[test]
fn no_values_go_everywhere() {
    let Some(bench) = bench("no_values_go_everywhere") else { return };
    let (stream, other) = bench.streams();
    let mut empties: Vec<DeviceBuffer<f64>> =
        (0..3).map(|_| bench.memory.alloc_zeros(0, &stream).expect("nothing")).collect();
    for empty in &mut empties {
        stream.memset_zeros(empty).expect("memset");
        other.memcpy_htod(&[0.0_f64; 0], empty).expect("htod");
        assert_eq!(other.clone_dtoh(empty).expect("dtoh"), Vec::<f64>::new());
    }
    drop(empties);
    let events = bench.fake.calls("cuEventCreate");
    let again = bench.memory.alloc_zeros::<u8>(0, &stream).expect("nothing");
    assert_eq!((again.len(), bench.fake.calls("cuEventCreate")), (0, events));
}

#[test]
fn a_copy_to_another_device_goes_on_cudas_way() {
    let Some(bench) = bench("a_copy_to_another_device_goes_on_cudas_way") else { return };
    let (stream, _) = bench.streams();
    let context = CudaContext::new(1).expect("the second device");
    let there = context.new_stream().expect("stream");
    let memory = vramalloc::cuda::CudaAllocator::new(&context, vramalloc::Config::default()).expect("allocator");
    let x = bench.memory.clone_htod(&[5_u8, 6, 7], &stream).expect("upload");
    let mut y = memory.alloc_zeros::<u8>(3, &there).expect("zeros");
    there.memcpy_dtod(&x, &mut y).expect("from one device to the other");
    assert_eq!(y.to_vec().expect("download"), [5, 6, 7]);
    let error = bench.memory.alloc_zeros::<u8>(3, &there).expect_err("a stream of the other device");
    assert!(matches!(error, vramalloc::Error::WrongDevice { theirs: 1, ours: 0, .. }), "{error}");
}

#[test]
fn try_clone_stays_at_home_in_cudarc() {
    let Some(bench) = bench("try_clone_stays_at_home_in_cudarc") else { return };
    let (stream, _) = bench.streams();
    let x = bench.memory.clone_htod(&[1_i64, -2], &stream).expect("upload");
    let y = x.try_clone().expect("clone");
    assert_eq!(stream.clone_dtoh(&y).expect("cudarc takes the clone"), [1, -2]);
}

#[test]
fn a_buffer_on_a_plain_stream_says_why_cudarc_cannot_have_it() {
    let Some(bench) = bench("a_buffer_on_a_plain_stream_says_why_cudarc_cannot_have_it") else { return };
    let plain = bench.memory.allocator().stream(StreamHandle::DEFAULT).expect("stream");
    let x = bench.memory.allocator().clone_htod(&[1_u8], &plain).expect("upload");
    assert_eq!(x.to_vec().expect("download"), [1], "all else works");
    let refused = catch_unwind(AssertUnwindSafe(|| DeviceSlice::stream(&x).cu_stream().is_null()));
    let text = refused.expect_err("no stream to show");
    let text = text.downcast_ref::<&str>().expect("a fixed text");
    assert!(text.contains("CudaAllocator"), "{text}");
}
