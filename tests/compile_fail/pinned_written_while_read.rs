//! Page-locked values that are read while the buffer is written.

use vramalloc::PinnedBuffer;

fn sum(buffer: &mut PinnedBuffer<u32>) -> u32 {
    let values = buffer.as_slice().unwrap();
    buffer.as_mut_slice().unwrap().fill(0);
    values.iter().sum()
}

fn main() {}
