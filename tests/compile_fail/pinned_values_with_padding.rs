//! Values that may have padding, and so uninitialized bytes, in page-locked memory that is reused as other values.

use vramalloc::PinnedBuffer;
use vramalloc::bytemuck::AnyBitPattern;

fn write<T: AnyBitPattern>(buffer: &mut PinnedBuffer<T>, value: T) {
    buffer.as_mut_slice().unwrap().fill(value);
}

fn main() {}
