//! Which queued work has passed, found out without the allocator and without asking the driver: each piece of work
//! is followed, on its stream, by one that writes a byte of its own to device memory when it ends.

use std::collections::HashMap;
use vramalloc::DevicePtr;
use vramalloc::driver::sim::{SimDriver, Work};
use vramalloc::driver::{Driver, EventHandle, StreamKey};

#[derive(Debug)]
pub(crate) struct Marks {
    pub(crate) base: DevicePtr,
    bytes: u64,
    next: u64,
    /// By stream identity: the last mark queued.
    last: HashMap<u64, u64>,
    event: EventHandle,
}

impl Marks {
    pub(crate) fn new(sim: &SimDriver, bytes: u64) -> Self {
        let base = sim.alloc(bytes).expect("the device is empty");
        let event = sim.create_event().expect("the device is sound");
        Self { base, bytes, next: 0, last: HashMap::new(), event }
    }

    /// Queues a mark on a stream.
    pub(crate) fn queue(&mut self, sim: &SimDriver, stream: StreamKey) {
        assert!(self.next < self.bytes, "the marks are used up");
        let at = DevicePtr(self.base.0 + self.next);
        if sim.launch(stream, Work::writing(at, 1).filling(1)).is_ok() {
            self.last.insert(stream.id, self.next);
            self.next += 1;
        }
    }

    /// The last mark of a stream, if it has one.
    pub(crate) fn last(&self, stream: u64) -> Option<u64> {
        self.last.get(&stream).copied()
    }

    /// Whether the work before a mark has passed.
    pub(crate) fn has_passed(&self, sim: &SimDriver, mark: Option<u64>) -> bool {
        let mut byte = [0];
        mark.is_none_or(|mark| sim.read(DevicePtr(self.base.0 + mark), &mut byte).is_ok() && byte == [1])
    }

    /// Makes `user` wait for what is queued on `home`; false if that was not possible.
    pub(crate) fn order(&self, sim: &SimDriver, home: StreamKey, user: StreamKey) -> bool {
        sim.record_event(self.event, home).and_then(|()| sim.stream_wait_event(user, self.event)).is_ok()
    }

    /// Gives back what the marks took.
    pub(crate) fn finish(self, sim: &SimDriver) {
        // On a lost device neither works.
        let _ = sim.destroy_event(self.event);
        let _ = sim.free(self.base);
    }
}
