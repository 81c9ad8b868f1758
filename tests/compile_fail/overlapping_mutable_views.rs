//! Two mutable views that overlap; `split_at_mut` gives two that do not.

use vramalloc::DeviceBuffer;

fn shift(buffer: &mut DeviceBuffer<u8>) {
    let mut front = buffer.slice_mut(..6);
    let back = buffer.slice_mut(2..);
    front.copy_from(&back.as_view()).unwrap();
}

fn main() {}
