//! Copies between host and device, and on the device.

use super::{DeviceBuffer, DeviceView, DeviceViewMut};
use crate::Stream;
use crate::driver::{Call, Driver, DriverError, DriverErrorKind, StreamKey};
use crate::error::Result;
use bytemuck::{AnyBitPattern, NoUninit, Zeroable};
use std::sync::Arc;

#[track_caller]
pub(crate) fn assert_same_len(source: usize, target: usize) {
    assert!(
        source == target,
        "a copy of {source} values to a place for {target}: take parts of one length by `slice`"
    );
}

/// The identity of a stream that is about to be used from this thread.
pub(crate) fn key_for_use(stream: &Stream, call: Call) -> Result<StreamKey> {
    let pool = &stream.pool;
    let why = if pool.clock.is_retired() {
        "the stream was retired by `retire_stream`; name one that was not, to a function whose name ends in `_on`"
    } else if pool.thread.is_some_and(|thread| thread != std::thread::current().id()) {
        "it is the default stream of another thread; name a stream that this thread can use, to a function whose name ends \
         in `_on`"
    } else {
        return Ok(stream.key());
    };
    Err(DriverError::with_detail(call, DriverErrorKind::StreamGone, why).into())
}

/// Refuses a copy between the device and memory that may be gone when a graph is launched.
fn check_not_captured(driver: &Arc<dyn Driver>, stream: StreamKey, call: Call) -> crate::driver::Result<()> {
    if driver.is_capturing(stream)? {
        let why = "a graph would use the slice whenever it is launched; copy before the capture, or from and to a \
                   `PinnedBuffer`, which you keep for as long as the graph is launched";
        return Err(DriverError::with_detail(call, DriverErrorKind::Capturing, why));
    }
    Ok(())
}

/// Whether a copy goes on after the call that queued it. The ends tell: host memory is page-locked in whole pages.
fn is_page_locked<T>(driver: &Arc<dyn Driver>, values: &[T]) -> bool {
    let bytes = values.as_ptr_range();
    let last = bytes.end.cast::<u8>().wrapping_sub(1);
    driver.is_page_locked(bytes.start.cast()) || driver.is_page_locked(last)
}

impl<T> DeviceView<'_, T> {
    /// Copies to the host, and waits for it.
    ///
    /// # Errors
    /// [`Error::Driver`](crate::Error::Driver), also about work that was queued before.
    ///
    /// # Panics
    /// If the lengths differ.
    #[track_caller]
    pub fn copy_to_slice(&self, target: &mut [T]) -> Result<()>
    where
        T: AnyBitPattern,
    {
        self.copy_to_slice_on(target, &self.stream())
    }

    /// [`copy_to_slice`](Self::copy_to_slice) on another stream, whose use is recorded. What was queued elsewhere must
    /// be ordered before by the caller.
    ///
    /// # Errors
    /// [`Error::WrongDevice`](crate::Error::WrongDevice), and as there.
    ///
    /// # Panics
    /// If the lengths differ.
    #[track_caller]
    pub fn copy_to_slice_on(&self, target: &mut [T], stream: &Stream) -> Result<()>
    where
        T: AnyBitPattern,
    {
        assert_same_len(self.len(), target.len());
        self.record_stream(stream)?; // before the driver is asked, which may be another's
        if target.is_empty() {
            return Ok(()); // a wait would spoil a capture
        }
        let key = key_for_use(stream, Call::CopyToHost)?;
        let device = self.allocation.device();
        device.checked(check_not_captured(&device.driver, key, Call::CopyToHost))?;
        // SAFETY: the slice is ours until the stream has been waited for, and any bits make valid values.
        let queued = unsafe { self.queue_to_host(target.as_mut_ptr(), stream) };
        // Waited for after a failure, too: the copy may have been queued.
        let waited = device.checked(device.driver.synchronize_stream(key));
        queued.and(waited)
    }

    /// Queues a copy of all values to `target`.
    ///
    /// # Safety
    /// `target` is host memory for as many values that nothing else uses until the copy has ended.
    pub(crate) unsafe fn queue_to_host(&self, target: *mut T, stream: &Stream) -> Result<()> {
        self.record_stream(stream)?;
        if self.num_bytes() == 0 {
            return Ok(());
        }
        let (device, key) = (self.allocation.device(), key_for_use(stream, Call::CopyToHost)?);
        self.binding.before_read(self.allocation, key)?;
        // SAFETY: the view borrows the memory; the rest is the caller's promise.
        let copied =
            unsafe { device.driver.copy_to_host(target.cast(), self.ptr(), self.num_bytes() as u64, key) };
        device.checked(copied)?;
        self.binding.after_read(self.allocation, key)
    }

    /// The values, on the host. Waits for them.
    ///
    /// # Errors
    /// As [`copy_to_slice`](Self::copy_to_slice).
    pub fn to_vec(&self) -> Result<Vec<T>>
    where
        T: AnyBitPattern,
    {
        let mut values = vec![T::zeroed(); self.len()];
        self.copy_to_slice(&mut values)?;
        Ok(values)
    }
}

impl<T> DeviceViewMut<'_, T> {
    /// Copies from the host. `source` can be reused when this returns; work queued later on the stream sees the values.
    /// Pageable memory is staged by the driver; page-locked memory is waited for (to go on meanwhile, use a
    /// [`PinnedBuffer`](crate::PinnedBuffer)).
    ///
    /// # Errors
    /// [`Error::Driver`](crate::Error::Driver).
    ///
    /// # Panics
    /// If the lengths differ.
    #[track_caller]
    pub fn copy_from_slice(&mut self, source: &[T]) -> Result<()>
    where
        T: NoUninit,
    {
        let stream = self.stream();
        self.copy_from_slice_on(source, &stream)
    }

    /// [`copy_from_slice`](Self::copy_from_slice) on another stream, whose use is recorded. What was queued elsewhere
    /// must be ordered before by the caller.
    ///
    /// # Errors
    /// [`Error::WrongDevice`](crate::Error::WrongDevice), and as there.
    ///
    /// # Panics
    /// If the lengths differ.
    #[track_caller]
    pub fn copy_from_slice_on(&mut self, source: &[T], stream: &Stream) -> Result<()>
    where
        T: NoUninit,
    {
        assert_same_len(source.len(), self.len());
        let key = key_for_use(stream, Call::CopyToDevice)?;
        if !source.is_empty() {
            self.record_stream(stream)?;
            let device = self.allocation.device();
            device.checked(check_not_captured(&device.driver, key, Call::CopyToDevice))?;
        }
        // SAFETY: the slice stays as it is until the stream has been waited for, unless the driver has staged it; and
        // its values have no uninitialized bytes.
        let queued = unsafe { self.queue_from_host(source.as_ptr(), stream) };
        let device = self.allocation.device();
        if !source.is_empty() && is_page_locked(&device.driver, source) {
            let waited = device.checked(device.driver.synchronize_stream(key));
            return queued.and(waited);
        }
        queued
    }

    /// Queues a copy of all values from `source`.
    ///
    /// # Safety
    /// `source` is host memory with as many initialized values, which stay unchanged until the copy has ended.
    pub(crate) unsafe fn queue_from_host(&mut self, source: *const T, stream: &Stream) -> Result<()> {
        let bytes = self.num_bytes() as u64;
        // SAFETY: the view borrows the memory alone; the rest is the caller's promise.
        self.queue_write(Call::CopyToDevice, stream, |driver, ptr| unsafe {
            driver.copy_to_device(ptr, source.cast(), bytes, stream.key())
        })
    }

    /// Queues a copy from other device memory, on this view's stream.
    ///
    /// # Errors
    /// [`Error::WrongDevice`](crate::Error::WrongDevice) for memory of another allocator,
    /// [`Error::Driver`](crate::Error::Driver).
    ///
    /// # Panics
    /// If the lengths differ.
    #[track_caller]
    pub fn copy_from(&mut self, source: &DeviceView<'_, T>) -> Result<()>
    where
        T: Copy,
    {
        let stream = self.stream();
        self.copy_from_on(source, &stream)
    }

    /// [`copy_from`](Self::copy_from) on another stream, whose use is recorded. What was queued elsewhere must be
    /// ordered before by the caller.
    ///
    /// # Errors
    /// As there.
    ///
    /// # Panics
    /// If the lengths differ.
    #[track_caller]
    pub fn copy_from_on(&mut self, source: &DeviceView<'_, T>, stream: &Stream) -> Result<()>
    where
        T: Copy,
    {
        assert_same_len(source.len(), self.len());
        let key = key_for_use(stream, Call::CopyOnDevice)?;
        source.record_stream(stream)?;
        source.binding.before_read(source.allocation, key)?;
        let (from, bytes) = (source.ptr(), self.num_bytes() as u64);
        // SAFETY: both views are borrowed, this one alone, so that they do not overlap.
        self.queue_write(Call::CopyOnDevice, stream, |driver, to| unsafe {
            driver.copy_on_device(to, from, bytes, key)
        })?;
        source.binding.after_read(source.allocation, key)
    }

    /// Queues setting all values to zero.
    ///
    /// # Errors
    /// [`Error::Driver`](crate::Error::Driver).
    pub fn set_zero(&mut self) -> Result<()>
    where
        T: Zeroable,
    {
        let stream = self.stream();
        self.set_zero_on(&stream)
    }

    /// [`set_zero`](Self::set_zero) on another stream, whose use is recorded. What was queued elsewhere must be ordered
    /// before by the caller.
    ///
    /// # Errors
    /// [`Error::WrongDevice`](crate::Error::WrongDevice), and as there.
    pub fn set_zero_on(&mut self, stream: &Stream) -> Result<()>
    where
        T: Zeroable,
    {
        let bytes = self.num_bytes() as u64;
        // SAFETY: the view borrows the memory alone.
        self.queue_write(Call::Fill, stream, |driver, ptr| unsafe { driver.fill(ptr, 0, bytes, stream.key()) })
    }

    /// Queues what writes to the memory, between what orders it with other streams; nothing if there are no bytes.
    fn queue_write(
        &mut self,
        call: Call,
        stream: &Stream,
        queue: impl FnOnce(&Arc<dyn Driver>, crate::DevicePtr) -> crate::driver::Result<()>,
    ) -> Result<()> {
        self.record_stream(stream)?;
        if self.num_bytes() == 0 {
            return Ok(());
        }
        let (device, key) = (self.allocation.device(), key_for_use(stream, call)?);
        self.binding.before_write(self.allocation, key)?;
        device.checked(queue(&device.driver, self.ptr()))?;
        self.binding.after_write(self.allocation, key)
    }
}

/// Copies of all of it; see the views' methods.
impl<T> DeviceBuffer<T> {
    /// [`DeviceView::copy_to_slice`] of all of it.
    ///
    /// # Errors
    /// As there.
    ///
    /// # Panics
    /// If the lengths differ.
    #[track_caller]
    pub fn copy_to_slice(&self, target: &mut [T]) -> Result<()>
    where
        T: AnyBitPattern,
    {
        self.as_view().copy_to_slice(target)
    }

    /// The values, on the host. Waits for them.
    ///
    /// # Errors
    /// As [`DeviceView::copy_to_slice`].
    pub fn to_vec(&self) -> Result<Vec<T>>
    where
        T: AnyBitPattern,
    {
        self.as_view().to_vec()
    }

    /// [`DeviceViewMut::copy_from_slice`] to all of it.
    ///
    /// # Errors
    /// As there.
    ///
    /// # Panics
    /// If the lengths differ.
    #[track_caller]
    pub fn copy_from_slice(&mut self, source: &[T]) -> Result<()>
    where
        T: NoUninit,
    {
        self.as_view_mut().copy_from_slice(source)
    }

    /// [`DeviceViewMut::copy_from`] to all of it.
    ///
    /// # Errors
    /// As there.
    ///
    /// # Panics
    /// If the lengths differ.
    #[track_caller]
    pub fn copy_from(&mut self, source: &DeviceView<'_, T>) -> Result<()>
    where
        T: Copy,
    {
        self.as_view_mut().copy_from(source)
    }

    /// Queues setting all values to zero.
    ///
    /// # Errors
    /// [`Error::Driver`](crate::Error::Driver).
    pub fn set_zero(&mut self) -> Result<()>
    where
        T: Zeroable,
    {
        self.as_view_mut().set_zero()
    }
}
