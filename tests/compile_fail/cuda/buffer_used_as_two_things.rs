//! A buffer that became a `CudaSlice`, still used as a buffer.

use vramalloc::DeviceBuffer;

fn both(buffer: DeviceBuffer<f32>) -> Vec<f32> {
    let _slice = buffer.into_cuda_slice().unwrap();
    buffer.to_vec().unwrap()
}

fn main() {}
