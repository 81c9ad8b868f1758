//! An allocation: the handle that a user holds, and what its drop does.

use crate::block::NONE;
use crate::device::Device;
use crate::driver::DevicePtr;
use crate::error::{Error, Result};
use crate::event::StreamClock;
use crate::pool::{BlockHandle, RECORDED};
use crate::stream::{LastReference, Stream, StreamPool};
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Device memory that is freed when the value is dropped. It outlives the allocator if need be.
///
/// Freeing returns the block to its stream's pool; work that is queued on that stream may still use it, since what
/// is queued later comes later. Use on another stream must be announced by [`record_stream`](Self::record_stream).
pub struct Allocation {
    /// Not counted as a reference: a pool outlives its live blocks (see [`StreamPool`]). Of an allocation of zero bytes,
    /// which has no block, it is a counted reference.
    pool: NonNull<StreamPool>,
    requested: u64,
    addr: u64,
    /// Of the [`BlockHandle`]; changed only to note that other streams use the block.
    tag: AtomicU64,
}

const _: () = assert!(std::mem::size_of::<Allocation>() == 32);

/// What an [`Allocation`] is made of.
#[derive(Clone, Copy)]
pub(crate) struct Parts {
    pub(crate) pool: NonNull<StreamPool>,
    pub(crate) requested: u64,
    pub(crate) block: BlockHandle,
}

// SAFETY: the pointer is to a pool that may be used by any thread, and is only ever used by shared reference.
unsafe impl Send for Parts {}
// SAFETY: as above.
unsafe impl Sync for Parts {}

impl Parts {
    /// For zero bytes: no block, and a counted reference to the pool.
    #[cold]
    pub(crate) fn empty(pool: &Arc<StreamPool>) -> Self {
        let counted = std::mem::ManuallyDrop::new(Arc::clone(pool));
        Self { pool: NonNull::from(&**counted), requested: 0, block: BlockHandle::EMPTY }
    }

    /// Frees the block, of which there must be one.
    ///
    /// # Safety
    /// They are those of an allocation that was taken apart, and no copy of them is used any more.
    #[inline(always)]
    pub(crate) unsafe fn free(self) {
        // SAFETY: a pool lives as long as its live blocks, of which this is one.
        let last = unsafe { self.pool.as_ref() }.free(self.requested, self.block);
        // Dropped here, outside of the pool's own method, when no reference to it is left: the last one of a pool that
        // nobody else has ends the pool.
        if last.is_some() {
            drop_last(last);
        }
    }
}

// SAFETY: the pointer is to a pool that may be used by any thread, and is only ever used by shared reference.
unsafe impl Send for Allocation {}
// SAFETY: as above.
unsafe impl Sync for Allocation {}

impl Allocation {
    #[inline(always)]
    pub(crate) fn new(parts: Parts) -> Self {
        let Parts { pool, requested, block } = parts;
        Self { pool, requested, addr: block.addr, tag: AtomicU64::new(block.tag) }
    }

    #[inline(always)]
    fn parts(&self) -> Parts {
        Parts { pool: self.pool, requested: self.requested, block: self.block() }
    }

    /// Takes it apart, without freeing.
    #[inline(always)]
    pub(crate) fn into_parts(self) -> Parts {
        std::mem::ManuallyDrop::new(self).parts()
    }

    #[inline(always)]
    fn block(&self) -> BlockHandle {
        BlockHandle { addr: self.addr, tag: self.tag.load(Ordering::Relaxed) }
    }

    #[cold]
    #[inline(never)]
    fn drop_empty(&self) {
        // SAFETY: made by `Parts::empty`, which counted this reference; it is given back once.
        drop(unsafe { Arc::from_raw(self.pool.as_ptr().cast_const()) });
    }

    #[inline(always)]
    pub(crate) fn pool(&self) -> &StreamPool {
        // SAFETY: the pool lives as long as its live blocks, of which this is one, or is counted as above.
        unsafe { self.pool.as_ref() }
    }

    /// The device address; null for zero bytes.
    #[must_use]
    #[inline]
    pub fn ptr(&self) -> DevicePtr {
        DevicePtr(self.addr)
    }

    /// The bytes that were asked for.
    #[must_use]
    #[inline]
    pub fn bytes(&self) -> u64 {
        self.requested
    }

    /// The bytes of the block: those asked for, rounded.
    #[must_use]
    #[inline]
    pub fn block_bytes(&self) -> u64 {
        self.block().block_bytes(self.requested)
    }

    /// The stream that it was allocated on.
    #[must_use]
    pub fn stream(&self) -> Stream {
        Stream { pool: self.pool().shared() }
    }

    /// Announces that work on `stream` uses this memory: once freed, it is not reused before what is queued on
    /// `stream` by then has passed. Its own stream needs no announcement. Calling it again costs little.
    ///
    /// # Errors
    /// [`Error::WrongDevice`] for a stream of another allocator.
    pub fn record_stream(&self, stream: &Stream) -> Result<()> {
        let pool = self.pool();
        let device = &pool.device;
        if !Arc::ptr_eq(device, &stream.pool.device) {
            let ours = device.driver.device();
            return Err(Error::WrongDevice { what: "stream", theirs: stream.device(), ours });
        }
        if pool.clock.key.id != stream.pool.clock.key.id {
            self.record_clock(&stream.pool.clock);
        }
        Ok(())
    }

    /// What all memory of the device shares.
    pub(crate) fn device(&self) -> &Arc<Device> {
        &self.pool().device
    }

    /// Its stream's clock.
    #[cfg(feature = "cuda")]
    pub(crate) fn clock(&self) -> &Arc<StreamClock> {
        &self.pool().clock
    }

    /// Announces a use that only `clock` can tell the end of.
    pub(crate) fn record_clock(&self, clock: &Arc<StreamClock>) {
        let id = self.block().id();
        if id != NONE && !self.device().is_forked() {
            self.tag.fetch_or(RECORDED, Ordering::Relaxed);
            self.pool().lock().record_use(id, clock);
        }
    }
}

impl Drop for Allocation {
    #[inline]
    fn drop(&mut self) {
        let parts = self.parts();
        if parts.block.id() == NONE {
            return self.drop_empty();
        }
        // SAFETY: its own parts, at its end.
        unsafe { parts.free() };
    }
}

#[cold]
#[inline(never)]
fn drop_last(last: LastReference) {
    drop(last);
}

impl std::fmt::Debug for Allocation {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Allocation")
            .field("ptr", &self.ptr())
            .field("bytes", &self.requested)
            .field("block_bytes", &self.block_bytes())
            .field("stream", &self.pool().clock.key)
            .finish()
    }
}
