//! Shells: a `CudaSlice` around a block, for its two events.
//!
//! cudarc orders uses on several streams by two events that only a `CudaSlice` has and only cudarc can reach. So every
//! block that is lent out gets a `CudaSlice` that never frees. When the block is freed, the shell is kept, and the next
//! allocation at the same address finds it: events are created once for a block, not once for an allocation.

use super::errors::{Events, slice_around};
use crate::driver::cuda::CudaDriver;
use crate::driver::{DevicePtr, DriverError};
use cudarc::driver::{CudaSlice, CudaStream};
use rustc_hash::FxHashMap;
use std::mem::ManuallyDrop;
use std::sync::Arc;

/// How many shells a stream keeps for blocks that nobody has now.
const MOST_IDLE: usize = 1 << 14;

/// A `CudaSlice` of a block of ours, which it must not free.
#[derive(Debug)]
pub(super) struct Shell {
    slice: ManuallyDrop<CudaSlice<u8>>,
    pub(super) events: Option<Events>,
}

impl Shell {
    /// Creates two events if the stream's context tracks by events. To be called in the driver's context.
    pub(super) fn new(
        driver: &CudaDriver,
        stream: &Arc<CudaStream>,
        ptr: DevicePtr,
        bytes: u64,
    ) -> Result<Self, DriverError> {
        let len = usize::try_from(bytes).unwrap_or(usize::MAX);
        // SAFETY: a block of ours of that size, of bytes. It is never freed through the slice.
        let (slice, events) = unsafe { slice_around(driver, stream, ptr.0, len) }?;
        Ok(Self { slice, events })
    }

    pub(super) fn slice(&self) -> &CudaSlice<u8> {
        &self.slice
    }

    pub(super) fn slice_mut(&mut self) -> &mut CudaSlice<u8> {
        &mut self.slice
    }

    pub(super) fn fits(&self, bytes: u64) -> bool {
        let tracked = self.slice.context().is_event_tracking();
        self.slice.len() as u64 >= bytes && (self.events.is_some() || !tracked)
    }
}

impl Drop for Shell {
    /// To be dropped in the driver's context, and only while cudarc may make the stream wait for the events.
    fn drop(&mut self) {
        // SAFETY: the field is not used any more.
        let slice = unsafe { ManuallyDrop::take(&mut self.slice) };
        slice.leak(); // frees nothing
    }
}

/// The shells of a stream's blocks that nobody has now.
#[derive(Debug, Default)]
pub(super) struct Shells {
    /// By address.
    idle: FxHashMap<u64, Box<Shell>>,
    /// Those of allocations of no bytes, which have no address.
    #[allow(clippy::vec_box, reason = "they come and go as boxes")]
    empty: Vec<Box<Shell>>,
    /// Of no use any more, and to be dropped when the stream may wait for their events.
    #[allow(clippy::vec_box, reason = "as above")]
    waste: Vec<Box<Shell>>,
}

impl Shells {
    /// A kept shell for a block at `ptr`, which may be too small for it now.
    pub(super) fn take(&mut self, ptr: DevicePtr) -> Option<Box<Shell>> {
        if ptr.is_null() { self.empty.pop() } else { self.idle.remove(&ptr.0) }
    }

    /// Keeps a shell; whether there is waste now.
    pub(super) fn put(&mut self, ptr: DevicePtr, shell: Box<Shell>) -> bool {
        if ptr.is_null() {
            self.empty.push(shell);
            return !self.waste.is_empty();
        }
        let any = if self.idle.len() < MOST_IDLE { None } else { self.idle.keys().next().copied() };
        let evicted = any.and_then(|any| self.idle.remove(&any));
        let replaced = self.idle.insert(ptr.0, shell);
        self.waste.extend(evicted.into_iter().chain(replaced));
        !self.waste.is_empty()
    }

    pub(super) fn waste(&mut self, shell: Box<Shell>) {
        self.waste.push(shell);
    }

    /// Makes waste of everything.
    pub(super) fn waste_all(&mut self) {
        self.waste.extend(self.idle.drain().map(|(_, shell)| shell).chain(self.empty.drain(..)));
    }

    /// Lets go of everything without a call.
    pub(super) fn forget(&mut self) {
        self.waste_all();
        self.waste.drain(..).for_each(std::mem::forget);
    }

    #[allow(clippy::vec_box, reason = "as above")]
    pub(super) fn take_waste(&mut self) -> Vec<Box<Shell>> {
        std::mem::take(&mut self.waste)
    }

    pub(super) fn len(&self) -> usize {
        self.idle.len() + self.empty.len() + self.waste.len()
    }
}
