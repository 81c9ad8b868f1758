//! A view that would outlive its buffer.

use vramalloc::{CachingAllocator, DeviceView, Stream};

fn view<'a>(allocator: &CachingAllocator, stream: &Stream) -> DeviceView<'a, f32> {
    let buffer = allocator.alloc_zeros::<f32>(8, stream).unwrap();
    buffer.as_view()
}

fn main() {}
