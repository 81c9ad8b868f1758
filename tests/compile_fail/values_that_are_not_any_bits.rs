//! Whatever is in memory is not a `bool`, and not a reference.

use vramalloc::{CachingAllocator, DeviceBuffer, Stream};

fn unset(allocator: &CachingAllocator, stream: &Stream) {
    let _ = allocator.alloc_uninit::<bool>(8, stream);
    let _ = allocator.alloc_zeros::<&'static u8>(8, stream);
}

fn reinterpreted(buffer: DeviceBuffer<u8>) {
    let _ = buffer.cast::<bool>();
}

fn main() {}
