//! A `CudaSlice` taken out of its guard, where its own drop would free memory that is not its own.

use cudarc::driver::CudaSlice;
use vramalloc::cuda::CudaSliceGuard;

fn steal(mut guard: CudaSliceGuard<f32>, other: CudaSlice<f32>) -> CudaSlice<f32> {
    std::mem::replace(&mut *guard, other)
}

fn main() {}
