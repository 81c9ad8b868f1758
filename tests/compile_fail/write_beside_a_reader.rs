//! A write while a view to read is in use.

use vramalloc::DeviceBuffer;

fn twice(buffer: &mut DeviceBuffer<u8>) -> Vec<u8> {
    let before = buffer.slice(..2);
    buffer.set_zero().unwrap();
    before.to_vec().unwrap()
}

fn main() {}
