//! Whose errors are whose, and whose context is current.

use crate::bench::bench;
use cudarc::driver::sys::cudaError_enum::CUDA_ERROR_UNKNOWN;
use cudarc::driver::{CudaContext, DriverError};

#[test]
fn what_cudarc_has_parked_stays_parked() {
    let Some(bench) = bench("what_cudarc_has_parked_stays_parked") else { return };
    let (stream, _) = bench.streams();
    bench.context.record_err::<()>(Err(DriverError(CUDA_ERROR_UNKNOWN)));
    let x = bench.memory.clone_htod(&[1_u8, 2], &stream).expect("an error of others is none of ours");
    assert_eq!(x.to_vec().expect("download"), [1, 2]);
    let slice = x.into_cuda_slice().expect("slice");
    drop(slice);
    bench.memory.empty_cache().expect("empty cache");
    assert_eq!(bench.context.check_err(), Err(DriverError(CUDA_ERROR_UNKNOWN)), "and is still there");
}

#[test]
fn the_current_context_stays() {
    let Some(bench) = bench("the_current_context_stays") else { return };
    let (stream, _) = bench.streams();
    let second = CudaContext::new(1).expect("the second device");
    second.bind_to_thread().expect("bind");
    let current = || cudarc::driver::result::ctx::get_current().expect("current");
    let x = bench.memory.clone_htod(&[1_u8, 2], &stream).expect("upload");
    assert_eq!(current(), Some(second.cu_ctx()));
    let y = x.try_clone().expect("clone");
    assert_eq!(y.to_vec().expect("download"), [1, 2]);
    drop(x);
    drop(y.into_cuda_slice().expect("slice"));
    bench.memory.empty_cache().expect("empty cache");
    assert_eq!(current(), Some(second.cu_ctx()));
}

#[test]
fn buffers_outlive_the_allocator() {
    let Some(bench) = bench("buffers_outlive_the_allocator") else { return };
    let (stream, other) = bench.streams();
    let memory =
        vramalloc::cuda::CudaAllocator::new(&bench.context, vramalloc::Config::default()).expect("allocator");
    let mut x = memory.clone_htod(&[4_u32; 100], &stream).expect("upload");
    drop(memory);
    other.memset_zeros(&mut x).expect("memset");
    assert_eq!(x.to_vec().expect("download"), [0; 100]);
    drop(x);
}
