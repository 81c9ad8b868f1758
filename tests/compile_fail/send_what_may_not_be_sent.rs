//! Buffers of values that may not be sent to another thread, or not be shared.

use std::cell::Cell;
use vramalloc::{DeviceBuffer, DeviceView, PinnedBuffer};

fn send<T: Send>() {}
fn share<T: Sync>() {}

fn main() {
    send::<DeviceBuffer<u8>>();
    send::<DeviceBuffer<*const u8>>();
    send::<DeviceView<'static, Cell<u8>>>();
    share::<DeviceBuffer<Cell<u8>>>();
    send::<PinnedBuffer<*const u8>>();
    share::<PinnedBuffer<Cell<u8>>>();
}
