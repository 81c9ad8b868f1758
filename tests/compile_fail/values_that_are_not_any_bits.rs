//! Whatever is in memory is not a value of every type.

use vramalloc::{CachingAllocator, DeviceBuffer, Stream};

fn unset<T: Copy>(allocator: &CachingAllocator, stream: &Stream) -> DeviceBuffer<T> {
    allocator.alloc_uninit(8, stream).unwrap()
}

fn reinterpreted<T: Copy>(buffer: DeviceBuffer<u8>) -> DeviceBuffer<T> {
    buffer.cast().unwrap()
}

fn read<T: Copy>(buffer: &DeviceBuffer<T>) -> Vec<T> {
    buffer.to_vec().unwrap()
}

fn main() {}
