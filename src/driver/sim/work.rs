//! What a program queues on a stream of the simulated device.

use crate::driver::{DevicePtr, HostPtr, StreamHandle, StreamKey};

/// One operation for a stream: the memory it touches and how long it takes.
///
/// Without a duration it runs until someone completes it: [`SimDriver::complete`](super::SimDriver::complete),
/// or a host call that waits for it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Work {
    pub(super) reads: Vec<(DevicePtr, u64)>,
    pub(super) writes: Vec<(DevicePtr, u64)>,
    pub(super) nanos: Option<u64>,
    pub(super) effect: Option<Effect>,
}

/// What an operation does to memory at the moment it ends.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Effect {
    /// Fills all that it writes.
    Fill(u8),
    /// Writes these bytes.
    Store(Vec<u8>),
    /// Writes what page-locked host memory holds then.
    FromHost(HostPtr),
    /// Copies what it reads to page-locked host memory.
    ToHost(HostPtr),
    /// Copies what it reads to what it writes.
    Copy,
}

impl Work {
    /// Work that touches no memory.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Work that reads `bytes` at `ptr`.
    #[must_use]
    pub fn reading(ptr: DevicePtr, bytes: u64) -> Self {
        Self::new().and_reading(ptr, bytes)
    }

    /// Work that writes `bytes` at `ptr`.
    #[must_use]
    pub fn writing(ptr: DevicePtr, bytes: u64) -> Self {
        Self::new().and_writing(ptr, bytes)
    }

    /// The same work, reading this as well.
    #[must_use]
    pub fn and_reading(mut self, ptr: DevicePtr, bytes: u64) -> Self {
        self.reads.push((ptr, bytes));
        self
    }

    /// The same work, writing this as well.
    #[must_use]
    pub fn and_writing(mut self, ptr: DevicePtr, bytes: u64) -> Self {
        self.writes.push((ptr, bytes));
        self
    }

    /// Ends after so many nanoseconds of virtual time, counted from when it can start.
    #[must_use]
    pub fn lasting(mut self, nanos: u64) -> Self {
        self.nanos = Some(nanos);
        self
    }

    /// Really fills all that it writes with `byte`, at the moment it ends.
    #[must_use]
    pub fn filling(mut self, byte: u8) -> Self {
        self.effect = Some(Effect::Fill(byte));
        self
    }

    pub(super) fn with_effect(mut self, effect: Option<Effect>) -> Self {
        self.effect = effect;
        self
    }

    /// All that it touches.
    pub(super) fn ranges(&self) -> impl Iterator<Item = (DevicePtr, u64)> + '_ {
        self.reads.iter().chain(&self.writes).copied()
    }
}

/// A stream, by its handle as the calling thread sees it or by its identity.
///
/// Only the identity reaches a destroyed stream whose work goes on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StreamRef {
    /// By handle.
    Handle(StreamHandle),
    /// By identity.
    Key(StreamKey),
}

impl From<StreamHandle> for StreamRef {
    fn from(handle: StreamHandle) -> Self {
        Self::Handle(handle)
    }
}

impl From<StreamKey> for StreamRef {
    fn from(key: StreamKey) -> Self {
        Self::Key(key)
    }
}
