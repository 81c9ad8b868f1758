//! Buffers as `CudaSlice`s, for what insists on one.

use super::binding::{Access, is_of_the_stream};
use super::errors::apart;
use super::shell::events_of;
use crate::buffer::{DeviceBuffer, Memory};
use crate::driver::Call;
use crate::error::{Error, Result};
use cudarc::driver::{CudaSlice, CudaStream, DevicePtr as _, DevicePtrMut as _};
use std::fmt;
use std::mem::ManuallyDrop;
use std::ops::Deref;

/// A buffer as a `CudaSlice`, to which it dereferences. Dropping it returns the memory to the cache.
///
/// There is no `DerefMut`: the slice must not get out, since its own drop would free memory that is not its own. Uses
/// through the slice are tracked by cudarc alone; those on other streams without its tracking must be announced by
/// [`record_stream`](Self::record_stream).
pub struct CudaSliceGuard<T> {
    slice: ManuallyDrop<CudaSlice<T>>,
    buffer: ManuallyDrop<DeviceBuffer<T>>,
}

/// The right to memory whose `CudaSlice` was given away; see [`CudaSliceGuard::release`].
///
/// Dropping it leaves the memory allocated for good, as nobody can tell whether the slice is still in use.
#[must_use = "without it the memory cannot be returned to the cache"]
pub struct CudaSliceLease<T> {
    buffer: ManuallyDrop<DeviceBuffer<T>>,
}

impl<T> DeviceBuffer<T> {
    /// The buffer as a `CudaSlice`.
    ///
    /// # Errors
    /// [`Error::Driver`] if cudarc's events cannot be created; the memory is then freed.
    ///
    /// # Panics
    /// As cudarc's traits do on a buffer that was not allocated on a stream of cudarc.
    pub fn into_cuda_slice(self) -> Result<CudaSliceGuard<T>> {
        let Memory { binding, allocation } = self.memory();
        let uses = binding.bound().uses();
        let stream = &uses.known.cuda;
        // What cudarc tracked so far becomes the stream's past, and the slice's first event stands for that.
        uses.before(allocation, allocation.clock().key, Access::Write)?;
        let slice = uses.known.driver.in_context(Call::EventCreate, || {
            apart(stream.context(), Call::EventCreate, || {
                // SAFETY: memory of ours for so many values, which is never freed through the slice.
                let mut slice =
                    ManuallyDrop::new(unsafe { stream.upgrade_device_ptr::<T>(self.ptr().0, self.len()) });
                drop(slice.device_ptr_mut(stream).1);
                slice
            })
        });
        let slice = allocation.device().checked(slice.and_then(|slice| slice))?;
        Ok(CudaSliceGuard { slice, buffer: ManuallyDrop::new(self) })
    }
}

/// Gives up a slice of a buffer, with its uses made the stream's past. Errors are kept for the allocator's user.
fn give_up<T>(slice: CudaSlice<T>, buffer: &DeviceBuffer<T>) {
    let Memory { binding, allocation } = buffer.memory();
    let uses = binding.bound().uses();
    let (context, key) = (uses.known.cuda.context(), allocation.clock().key);
    let mut slice = Some(slice);
    let left = uses.known.driver.in_context(Call::StreamWait, || {
        apart(context, Call::StreamWait, || {
            let mut slice = slice.take()?;
            let events = events_of(&mut slice);
            // Waited for here, as cudarc itself does not when no stream of its own is left.
            let joined = uses.wait_for(key, events);
            slice.leak();
            Some(joined)
        })
    });
    std::mem::forget(slice); // still there if the driver must not be asked any more
    let joined = left.and_then(|left| left).and_then(|joined| joined.unwrap_or(Ok(())));
    let noted = uses.after(allocation, key, Access::Write);
    if let Err(error) = joined {
        uses.note_unreachable();
        if !is_of_the_stream(&error) {
            allocation.device().defer(error);
        }
    } else if let Err(Error::Driver(error)) = noted {
        uses.note_unreachable();
        allocation.device().defer(error);
    }
}

impl<T> CudaSliceGuard<T> {
    /// The buffer again.
    #[must_use]
    pub fn into_buffer(self) -> DeviceBuffer<T> {
        let mut this = ManuallyDrop::new(self);
        // SAFETY: neither is used again, as the guard itself is not dropped.
        let (slice, buffer) =
            unsafe { (ManuallyDrop::take(&mut this.slice), ManuallyDrop::take(&mut this.buffer)) };
        give_up(slice, &buffer);
        buffer
    }

    /// The slice, to be written.
    ///
    /// # Safety
    /// The slice is not moved out of the reference (`mem::replace`, `mem::swap`): dropped, it would free memory that is
    /// not its own.
    #[must_use]
    pub unsafe fn as_mut(&mut self) -> &mut CudaSlice<T> {
        &mut self.slice
    }

    /// Announces a use on another stream.
    ///
    /// # Panics
    /// Never for a buffer that became this guard.
    pub fn record_stream(&self, stream: &CudaStream) {
        let memory = self.buffer.memory();
        memory.binding.bound().uses().notice_raw(&memory.allocation, stream, Access::Write);
    }

    /// The slice itself, for functions that take one by value, and the right to its memory.
    ///
    /// # Safety
    /// The slice is never dropped: it comes back to [`CudaSliceLease::adopt`], or is forgotten, or given up by
    /// `CudaSlice::leak`. Dropped, it frees an address that CUDA never gave it: at best CUDA refuses, and cudarc reports
    /// that from an unrelated call; at worst it frees a whole segment.
    pub unsafe fn release(self) -> (CudaSlice<T>, CudaSliceLease<T>) {
        let mut this = ManuallyDrop::new(self);
        // SAFETY: neither is used again, as the guard itself is not dropped.
        let (slice, buffer) =
            unsafe { (ManuallyDrop::take(&mut this.slice), ManuallyDrop::take(&mut this.buffer)) };
        (slice, CudaSliceLease { buffer: ManuallyDrop::new(buffer) })
    }
}

impl<T> Deref for CudaSliceGuard<T> {
    type Target = CudaSlice<T>;

    fn deref(&self) -> &CudaSlice<T> {
        &self.slice
    }
}

impl<T> Drop for CudaSliceGuard<T> {
    fn drop(&mut self) {
        // SAFETY: neither is used again.
        let (slice, buffer) =
            unsafe { (ManuallyDrop::take(&mut self.slice), ManuallyDrop::take(&mut self.buffer)) };
        give_up(slice, &buffer);
    }
}

impl<T> CudaSliceLease<T> {
    /// Takes the slice back.
    ///
    /// # Errors
    /// Both, as they were, if it is another slice.
    pub fn adopt(self, slice: CudaSlice<T>) -> std::result::Result<CudaSliceGuard<T>, Box<(Self, CudaSlice<T>)>> {
        let here = self.buffer.memory().binding.bound().uses().known.cuda.context();
        let (ptr, guard) = slice.device_ptr(slice.stream());
        std::mem::forget(guard); // it would record a use that is none
        if ptr != self.buffer.ptr().0 || slice.len() != self.buffer.len() || slice.stream().context() != here {
            return Err(Box::new((self, slice)));
        }
        Ok(CudaSliceGuard { slice: ManuallyDrop::new(slice), buffer: self.buffer })
    }
}

impl<T> fmt::Debug for CudaSliceGuard<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("CudaSliceGuard").field(&*self.buffer).finish()
    }
}

impl<T> fmt::Debug for CudaSliceLease<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("CudaSliceLease").field(&*self.buffer).finish()
    }
}
