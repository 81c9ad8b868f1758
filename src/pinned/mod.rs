//! Page-locked ("pinned") host memory that is cached: [`PinnedBuffer`].
//!
//! `cuMemHostAlloc` takes tens of milliseconds for tens of megabytes, and `cuMemFreeHost` waits for the device. So what
//! is dropped is kept, and serves later requests once the copies that used it have passed, of which the streams' events
//! tell. Nothing is recorded per copy.

mod blocks;
mod buffer;
#[cfg(feature = "cuda")]
mod cudarc_slice;
mod pool;
mod size;

pub use blocks::HostMemoryStats;
pub use buffer::PinnedBuffer;

pub(crate) use pool::HostPool;

use crate::CachingAllocator;
use crate::error::Result;
use bytemuck::{AnyBitPattern, NoUninit};

/// Page-locked host memory.
impl CachingAllocator {
    /// Allocates page-locked host memory for `len` values, whose contents are whatever was there.
    ///
    /// O(1) when the cache has a block whose copies are known to have passed. Takes at most an eighth more than asked for
    /// (in steps of 64 bytes below 512), or a cached block up to a quarter larger than that.
    ///
    /// When copies under way use four blocks of that size, and 4 MiB or more, the oldest is waited for instead of taking
    /// another from the driver, unless the configuration says [`OnPending::Fail`](crate::OnPending::Fail). So are, for four
    /// blocks of any size, copies on streams that are gone, of which no event tells.
    ///
    /// # Errors
    /// [`Error::HostOutOfMemory`](crate::Error::HostOutOfMemory) when the limit
    /// ([`Config::host_limit_bytes`](crate::Config::host_limit_bytes)) or the host leaves no room, after everything unused
    /// has been given back and pending copies have been waited for; [`Error::SizeOverflow`](crate::Error::SizeOverflow);
    /// [`Error::InvalidAlignment`](crate::Error::InvalidAlignment) for types aligned to more than 64 bytes;
    /// [`Error::Driver`](crate::Error::Driver).
    pub fn alloc_pinned<T: AnyBitPattern>(&self, len: usize) -> Result<PinnedBuffer<T>> {
        PinnedBuffer::new(self.host_pool(), len)
    }

    /// Allocates page-locked host memory and copies `values` into it.
    ///
    /// # Errors
    /// As [`alloc_pinned`](Self::alloc_pinned).
    pub fn pin_slice<T: AnyBitPattern + NoUninit>(&self, values: &[T]) -> Result<PinnedBuffer<T>> {
        let mut buffer = self.alloc_pinned(values.len())?;
        buffer.as_mut_slice()?.copy_from_slice(values);
        Ok(buffer)
    }

    /// Gives all unused page-locked memory back and returns the bytes. Waits for the device's work if there is any.
    /// Does nothing while a capture is announced ([`PrivatePool::capture`](crate::PrivatePool::capture)).
    ///
    /// # Errors
    /// [`Error::Driver`](crate::Error::Driver); what was not given back is still cached.
    pub fn empty_host_cache(&self) -> Result<u64> {
        self.host_pool().empty()
    }

    /// What the page-locked memory is doing.
    #[must_use]
    pub fn host_memory_stats(&self) -> HostMemoryStats {
        self.host_pool().stats()
    }

    /// Starts the peaks of page-locked memory anew, from what is current.
    pub fn reset_peak_host_memory_stats(&self) {
        self.host_pool().reset_peaks();
    }

    /// Starts the running sums of page-locked memory anew.
    pub fn reset_accumulated_host_memory_stats(&self) {
        self.host_pool().reset_accumulated();
    }
}
