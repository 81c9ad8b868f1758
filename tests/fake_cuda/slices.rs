//! Buffers as `CudaSlice`s, and back.

use crate::bench::{FOREVER, ONE, bench};
use cudarc::driver::{CudaSlice, PushKernelArg};

fn sum(stream: &std::sync::Arc<cudarc::driver::CudaStream>, slice: &CudaSlice<u32>) -> u32 {
    stream.clone_dtoh(slice).expect("dtoh").iter().sum()
}

#[test]
fn a_guard_is_a_slice_and_returns_the_memory() {
    let Some(bench) = bench("a_guard_is_a_slice_and_returns_the_memory") else { return };
    let (stream, other) = bench.streams();
    let mut x = bench.memory.clone_htod(&[1_u32, 2, 3], &stream).expect("upload");
    other.memcpy_htod(&[10_u32], &mut x.slice_mut(..1)).expect("tracked before it became a slice");
    let place = x.ptr();
    let slice = x.into_cuda_slice().expect("slice");
    assert_eq!(sum(&stream, &slice), 15);
    assert_eq!(sum(&other, &slice), 15, "tracked by cudarc");
    let x = slice.into_buffer();
    assert_eq!((x.ptr(), x.to_vec().expect("download")), (place, vec![10, 2, 3]));
    let frees = ["cuMemFreeAsync", "cuMemFree_v2"];
    let before = frees.map(|call| bench.fake.calls(call));
    drop(x.into_cuda_slice().expect("slice"));
    assert_eq!(frees.map(|call| bench.fake.calls(call)), before, "cudarc frees nothing");
    assert_eq!(bench.memory.memory_allocated(), 0);
    let again = bench.memory.alloc_uninit::<u32>(3, &stream).expect("alloc");
    assert_eq!(again.ptr(), place);
}

#[test]
fn a_slice_is_written_and_lent_by_value() {
    let Some(bench) = bench("a_slice_is_written_and_lent_by_value") else { return };
    let (stream, other) = bench.streams();
    let x = bench.memory.clone_htod(&[1_u32, 2, 3], &stream).expect("upload");
    let mut slice = x.into_cuda_slice().expect("slice");
    // SAFETY: the slice stays where it is.
    other.memset_zeros(unsafe { slice.as_mut() }).expect("memset");
    // SAFETY: the slice comes back below.
    let (bare, lease) = unsafe { slice.release() };
    assert_eq!(sum(&other, &bare), 0);
    let foreign = stream.alloc_zeros::<u32>(3).expect("cudarc's own");
    let (lease, foreign) = *lease.adopt(foreign).expect_err("not the one");
    drop(foreign);
    let x = lease.adopt(bare).map_err(|_| "refused").expect("the one").into_buffer();
    assert_eq!(x.to_vec().expect("download"), [0; 3]);
    drop(x);
    assert_eq!(bench.memory.memory_allocated(), 0);
}

#[test]
fn a_lease_that_is_dropped_keeps_the_memory_from_everyone() {
    let Some(bench) = bench("a_lease_that_is_dropped_keeps_the_memory_from_everyone") else { return };
    let (stream, _) = bench.streams();
    let x = bench.memory.clone_htod(&[1_u32, 2, 3], &stream).expect("upload");
    // SAFETY: the slice is given up by `leak`, which frees nothing.
    let (bare, lease) = unsafe { x.into_cuda_slice().expect("slice").release() };
    drop(lease);
    assert_eq!(sum(&stream, &bare), 6);
    let place = bare.leak();
    assert_eq!(bench.memory.memory_allocated(), 512, "held for good");
    let next = bench.memory.alloc_uninit::<u32>(3, &stream).expect("alloc");
    assert_ne!(next.ptr().0, place);
}

#[test]
fn uses_through_a_slice_are_waited_for_even_if_their_stream_is_gone() {
    let Some(bench) = bench("uses_through_a_slice_are_waited_for_even_if_their_stream_is_gone") else { return };
    let default = bench.context.default_stream();
    let x = bench.memory.alloc_zeros::<u32>(1 << 18, &default).expect("zeros");
    default.synchronize().expect("synchronize");
    let bytes = 1_u64 << 20;
    let other = bench.context.new_stream().expect("stream");
    let mut slice = x.into_cuda_slice().expect("slice");
    // SAFETY: the slice stays where it is, and the kernel writes no more than it.
    unsafe {
        let mut args = other.launch_builder(&bench.fill);
        args.arg(slice.as_mut()).arg(&bytes).arg(&1_u32).arg(&FOREVER).launch(ONE).expect("launch");
    }
    drop(other);
    assert!(!bench.context.is_managing_stream_synchronization(), "cudarc would not wait any more");
    drop(slice);
    let mut next = bench.memory.alloc_uninit::<u32>(1 << 18, &default).expect("alloc");
    let mut args = default.launch_builder(&bench.fill);
    // SAFETY: the kernel writes the buffer.
    unsafe { args.arg(&mut next).arg(&bytes).arg(&2_u32).arg(&1_u64).launch(ONE) }.expect("no race");
    assert_eq!(next.slice(..1).to_vec().expect("download"), [0x0202_0202]);
    bench.context.synchronize().expect("synchronize");
}
