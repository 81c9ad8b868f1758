//! Buffers as `CudaSlice`s, for what insists on one.

use super::binding::{Access, is_of_the_stream};
use super::errors::{address_of, events_of, slice_around};
use crate::buffer::{DeviceBuffer, Memory, key_for_use};
use crate::driver::{Call, Driver as _};
use crate::error::{Error, Result};
use cudarc::driver::{CudaSlice, CudaStream};
use std::fmt;
use std::mem::ManuallyDrop;
use std::ops::Deref;

/// A buffer as a `CudaSlice`, to which it dereferences. Dropping it returns the memory to the cache.
///
/// There is no `DerefMut`: the slice must not get out, since its own drop would free memory that is not its own. Uses
/// through the slice are tracked by cudarc alone, whose event for reads stands for the last of them, on whatever stream. So a
/// read on another stream that is not the last read must be announced by [`record_stream`](Self::record_stream), unless a
/// tracked write comes between; and so must every use on another stream without cudarc's tracking.
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
    /// [`Error::Driver`] if cudarc's events cannot be created, or the stream was retired or is another thread's own; the
    /// memory is then freed.
    ///
    /// # Panics
    /// As cudarc's traits do on a buffer that was not allocated on a stream of cudarc.
    pub fn into_cuda_slice(self) -> Result<CudaSliceGuard<T>> {
        let Memory { binding, allocation } = self.memory();
        let uses = binding.bound().uses();
        let (stream, driver) = (&uses.known.cuda, &uses.known.driver);
        let own = key_for_use(&allocation.stream(), Call::StreamWait)?;
        // What cudarc tracked so far becomes the stream's past, and the slice's first event stands for that.
        uses.before(allocation, own, Access::Write)?;
        let made = driver.in_context(Call::EventCreate, || {
            // SAFETY: memory of ours for so many values, which is never freed through the slice.
            let (slice, events) = unsafe { slice_around::<T>(driver, stream, self.ptr().0, self.len()) }?;
            let tracked = uses.tracked(stream.context()).and(events);
            let recorded = tracked.map_or(Ok(()), |events| driver.record_event(events.write, own));
            // If it could not be recorded, cudarc could not wait for it, and would keep that error: the slice is forgotten,
            // with two events.
            recorded.map(|()| slice)
        });
        let slice = allocation.device().checked(made.and_then(|slice| slice))?;
        Ok(CudaSliceGuard { slice, buffer: ManuallyDrop::new(self) })
    }
}

/// Gives up a slice of a buffer, with its uses made the stream's past. Errors are kept for the allocator's user.
fn give_up<T>(slice: CudaSlice<T>, buffer: &DeviceBuffer<T>) {
    let Memory { binding, allocation } = buffer.memory();
    let uses = binding.bound().uses();
    let mut slice = Some(slice);
    let joined = uses.known.driver.in_context(Call::StreamWait, || {
        let Some(mut slice) = slice.take() else { return Ok(()) };
        // Waited for here, as cudarc itself does not when no stream of its own is left.
        let events = events_of(uses.known.cuda.context(), &mut slice);
        let joined = events.and_then(|events| uses.join_slice(allocation, events));
        if joined.is_ok() {
            uses.known.give_up(slice);
        } else {
            std::mem::forget(slice); // cudarc would fail as well, and keep the error in its context
        }
        joined
    });
    std::mem::forget(slice); // still there if the driver must not be asked any more
    let noted = match joined.and_then(|joined| joined) {
        Ok(()) => uses.after(allocation, allocation.clock().key, Access::Write),
        Err(error) => Err(Error::Driver(error)),
    };
    if let Err(error) = noted {
        uses.note_unreachable();
        match error {
            Error::Driver(error) if !is_of_the_stream(&error) => allocation.device().defer(error),
            _ => {}
        }
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

    /// Announces a use on another stream: the memory is not reused before what is queued there when the guard is dropped has
    /// passed. On a stream that the allocator does not know, that is when the device has been waited for.
    ///
    /// # Panics
    /// Never for a buffer that became this guard.
    pub fn record_stream(&self, stream: &CudaStream) {
        let memory = self.buffer.memory();
        memory.binding.bound().uses().notice_untracked(&memory.allocation, stream);
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
    /// Both, as they were, if it is another slice, or the process is a fork.
    pub fn adopt(self, slice: CudaSlice<T>) -> std::result::Result<CudaSliceGuard<T>, Box<(Self, CudaSlice<T>)>> {
        let known = &self.buffer.memory().binding.bound().uses().known;
        let here = known.cuda.context();
        // In a fork, whoever held the lock that the address is asked for under is not there any more.
        if known.driver.is_over()
            || address_of(&slice) != Ok(self.buffer.ptr().0)
            || slice.len() != self.buffer.len()
            || slice.stream().context() != here
        {
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
