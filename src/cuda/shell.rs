//! Shells: a `CudaSlice` around a block, for its two events.
//!
//! cudarc orders uses on several streams by two events that only a `CudaSlice` has and only cudarc can reach. So every
//! block that is lent out gets a `CudaSlice` that never frees. When the block is freed, the shell is kept, and the next
//! allocation at the same address finds it: events are created once for a block, not once for an allocation.

use super::errors::apart;
use crate::driver::{Call, DevicePtr, DriverError, EventHandle};
use cudarc::driver::{CudaSlice, CudaStream, DevicePtr as _, DevicePtrMut as _, SyncOnDrop};
use rustc_hash::FxHashMap;
use std::mem::{self, ManuallyDrop};
use std::sync::Arc;

/// How many shells a stream keeps for blocks that nobody has now.
const MOST_IDLE: usize = 1 << 14;

/// The events of a tracked `CudaSlice`.
#[derive(Clone, Copy, Debug)]
pub(super) struct Events {
    pub(super) read: EventHandle,
    pub(super) write: EventHandle,
}

/// A `CudaSlice` of a block of ours, which it must not free.
#[derive(Debug)]
pub(super) struct Shell {
    slice: ManuallyDrop<CudaSlice<u8>>,
    pub(super) events: Option<Events>,
}

impl Shell {
    /// Creates two events if the stream's context tracks by events.
    pub(super) fn new(stream: &Arc<CudaStream>, ptr: DevicePtr, bytes: u64) -> Result<Self, DriverError> {
        let len = usize::try_from(bytes).unwrap_or(usize::MAX);
        let context = stream.context();
        apart(context, Call::EventCreate, || {
            // SAFETY: a block of ours of that size, of bytes. It is never freed through the slice.
            let mut slice = ManuallyDrop::new(unsafe { stream.upgrade_device_ptr::<u8>(ptr.0, len) });
            let events = events_of(&mut slice);
            Self { slice, events }
        })
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

/// The events of a slice.
pub(super) fn events_of<T>(slice: &mut CudaSlice<T>) -> Option<Events> {
    let stream = Arc::clone(slice.stream());
    let read = event(slice.device_ptr(&stream).1);
    let write = event(slice.device_ptr_mut(&stream).1);
    read.zip(write).map(|(read, write)| Events { read, write })
}

/// The event that a guard would record, without recording it.
fn event(guard: SyncOnDrop<'_>) -> Option<EventHandle> {
    let handle = match &guard {
        SyncOnDrop::Record(Some((event, _))) => Some(EventHandle(event.cu_event().expose_provenance() as u64)),
        _ => None,
    };
    mem::forget(guard);
    handle
}

impl Drop for Shell {
    fn drop(&mut self) {
        let context = Arc::clone(self.slice.context());
        // SAFETY: the field is not used any more.
        let slice = unsafe { ManuallyDrop::take(&mut self.slice) };
        // Frees nothing. What the driver says about two events at their end helps nobody, and is not cudarc's user's.
        let _ = apart(&context, Call::EventDestroy, || slice.leak());
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
}

impl Shells {
    /// A kept shell for a block at `ptr`, which may be too small for it now.
    pub(super) fn take(&mut self, ptr: DevicePtr) -> Option<Box<Shell>> {
        if ptr.is_null() { self.empty.pop() } else { self.idle.remove(&ptr.0) }
    }

    /// Keeps a shell; what has to go instead is returned.
    pub(super) fn put(&mut self, ptr: DevicePtr, shell: Box<Shell>) -> Option<Box<Shell>> {
        if ptr.is_null() {
            self.empty.push(shell);
            return None;
        }
        let any = if self.idle.len() < MOST_IDLE { None } else { self.idle.keys().next().copied() };
        let evicted = any.and_then(|any| self.idle.remove(&any));
        self.idle.insert(ptr.0, shell);
        evicted
    }

    pub(super) fn len(&self) -> usize {
        self.idle.len() + self.empty.len()
    }
}
