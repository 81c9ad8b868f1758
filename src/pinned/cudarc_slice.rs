//! Page-locked buffers as cudarc's `HostSlice`.

use super::PinnedBuffer;
use crate::driver::DriverErrorKind;
use crate::error::Error;
use cudarc::driver::{CudaStream, HostSlice, SyncOnDrop};

impl<T> PinnedBuffer<T> {
    /// Waits for what stands in the way of a copy, and notes the stream that it will run on; the guard waits for it if
    /// nothing else could.
    fn lend<'a>(&self, stream: &'a CudaStream, writes: bool) -> SyncOnDrop<'a> {
        let known = self.pool().cuda.get().and_then(|shared| shared.upgrade()?.find_in(stream));
        let settled = match &known {
            Some(known) => self.settle_for(writes, &known.pool.clock),
            None => self.settle(writes),
        };
        if let Err(Error::Driver(error)) = settled
            && error.kind != DriverErrorKind::Capturing
        {
            self.pool().defer(error);
        }
        match known {
            Some(known) => {
                self.record(&known.pool.clock, None, writes);
                SyncOnDrop::Sync(None)
            }
            None => SyncOnDrop::sync_stream(stream),
        }
    }
}

/// Copies by cudarc's functions run while the host goes on if the allocator knows the stream
/// ([`CudaAllocator::stream`](crate::cuda::CudaAllocator::stream)); else they are waited for.
impl<T> HostSlice<T> for PinnedBuffer<T> {
    fn len(&self) -> usize {
        Self::len(self)
    }

    unsafe fn stream_synced_slice<'a>(&'a self, stream: &'a CudaStream) -> (&'a [T], SyncOnDrop<'a>) {
        let guard = self.lend(stream, false);
        // SAFETY: the block has so many valid values. What the device writes has been waited for, or comes before the copy on
        // its stream; the caller's promise is that they are used there.
        (unsafe { std::slice::from_raw_parts(self.as_ptr(), self.len()) }, guard)
    }

    unsafe fn stream_synced_mut_slice<'a>(&'a mut self, stream: &'a CudaStream) -> (&'a mut [T], SyncOnDrop<'a>) {
        let guard = self.lend(stream, true);
        // SAFETY: as above, and what the device reads, too. The caller's promise is that only the device writes, all of whose
        // bytes are initialized.
        (unsafe { std::slice::from_raw_parts_mut(self.values_ptr(), self.len()) }, guard)
    }
}
