//! A view of a buffer that is freed.

use vramalloc::DeviceBuffer;

fn last_value(buffer: DeviceBuffer<u32>) -> Vec<u32> {
    let view = buffer.slice(3..);
    drop(buffer);
    view.to_vec().unwrap()
}

fn main() {}
