//! Typed device memory: [`DeviceBuffer`] and views of it.
//!
//! The same on every device, the simulated one included. With feature `cuda`, a buffer that was allocated on a stream of
//! cudarc (by a [`CudaAllocator`](crate::cuda::CudaAllocator)) also goes wherever a `CudaSlice` goes.
//!
//! What a type must be for an operation is said by [`bytemuck`]'s marker traits: [`Zeroable`] to be zeroed,
//! [`NoUninit`] to be copied from the host, [`AnyBitPattern`] to be copied to the host, whatever the device wrote.

#[cfg(not(feature = "cuda"))]
mod binding;
mod transfer;
mod views;

pub(crate) use transfer::{assert_same_len, key_for_use};
pub use views::{DeviceView, DeviceViewMut};

#[cfg(not(feature = "cuda"))]
pub(crate) use binding::{Binding, ViewBinding, ViewMutBinding};

#[cfg(feature = "cuda")]
pub(crate) use crate::cuda::binding::Binding;
#[cfg(feature = "cuda")]
pub(crate) use crate::cuda::view::{ViewBinding, ViewMutBinding};

use crate::driver::{Call, DevicePtr};
use crate::error::{Error, Result};
use crate::{Allocation, CachingAllocator, Stream};
use bytemuck::{AnyBitPattern, NoUninit, PodCastError, Zeroable};
use std::fmt;
use std::marker::PhantomData;
use std::ops::RangeBounds;

/// The memory of a buffer, and what ties it to cudarc.
pub(crate) struct Memory {
    pub(crate) binding: Binding,
    pub(crate) allocation: Allocation,
}

impl Drop for Memory {
    fn drop(&mut self) {
        self.binding.release(&self.allocation);
    }
}

/// `len` values of type `T` in device memory; freed into the cache when dropped.
///
/// Its operations run on the stream that it was allocated on, in the order in which they are called; those named
/// `..._on` run on another stream, whose use is then recorded. What other code queues on other streams must be announced
/// by [`record_stream`](Self::record_stream), except for what cudarc's functions do, which is noticed.
///
/// ```
/// use vramalloc::{CachingAllocator, Config, driver::sim::SimDriver};
///
/// let device = SimDriver::builder().capacity(1 << 30).build();
/// let allocator = CachingAllocator::new(device, Config::default())?;
/// let stream = allocator.default_stream()?;
///
/// let mut x = allocator.clone_htod(&[1.0_f32, 2.0, 3.0, 4.0], &stream)?;
/// x.slice_mut(1..3).copy_from_slice(&[20.0, 30.0])?;
/// assert_eq!(x.to_vec()?, [1.0, 20.0, 30.0, 4.0]);
///
/// let bits = x.as_view().cast::<u32>()?;
/// assert_eq!(bits.slice(..1).to_vec()?, [1.0_f32.to_bits()]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Threads
/// A buffer may be sent, and shared, where a `Vec<T>` may. Shared access only reads; whoever writes on the device through
/// shared access (a kernel that is given an address) answers for it.
pub struct DeviceBuffer<T> {
    memory: Memory,
    len: usize,
    marker: PhantomData<T>,
}

/// The bytes of `len` values.
pub(crate) fn bytes_of<T>(len: usize) -> Result<u64> {
    let bytes = len.checked_mul(size_of::<T>()).ok_or(Error::SizeOverflow { requested: u64::MAX })?;
    Ok(bytes as u64)
}

/// Memory for `len` values of `T`, aligned to them.
pub(crate) fn allocate<T>(allocator: &CachingAllocator, len: usize, stream: &Stream) -> Result<Allocation> {
    let (bytes, alignment) = (bytes_of::<T>(len)?, align_of::<T>() as u64);
    if alignment <= crate::size::MIN_BLOCK_BYTES {
        allocator.alloc(bytes, stream)
    } else {
        allocator.alloc_aligned(bytes, alignment, stream)
    }
}

/// Typed memory.
impl CachingAllocator {
    /// Allocates `len` values whose contents are whatever was there.
    ///
    /// # Errors
    /// As [`alloc`](Self::alloc).
    pub fn alloc_uninit<T: AnyBitPattern>(&self, len: usize, stream: &Stream) -> Result<DeviceBuffer<T>> {
        // SAFETY: whatever is there is a valid value.
        unsafe { self.alloc_unset(len, stream) }
    }

    /// [`alloc_uninit`](Self::alloc_uninit) for types of which not every pattern of bits is a value.
    ///
    /// # Safety
    /// Nothing reads a value before it is written.
    ///
    /// # Errors
    /// As [`alloc`](Self::alloc).
    pub unsafe fn alloc_unset<T>(&self, len: usize, stream: &Stream) -> Result<DeviceBuffer<T>> {
        let allocation = allocate::<T>(self, len, stream)?;
        Ok(DeviceBuffer::new(Memory { binding: Binding::none(), allocation }, len))
    }

    /// Allocates `len` values and queues setting them to zero.
    ///
    /// # Errors
    /// As [`alloc`](Self::alloc).
    pub fn alloc_zeros<T: Zeroable>(&self, len: usize, stream: &Stream) -> Result<DeviceBuffer<T>> {
        // SAFETY: all is set before anything that comes after it on the stream.
        let mut buffer = unsafe { self.alloc_unset(len, stream) }?;
        buffer.set_zero()?;
        Ok(buffer)
    }

    /// Allocates and copies `values` from the host.
    ///
    /// # Errors
    /// As [`alloc`](Self::alloc).
    pub fn clone_htod<T: NoUninit>(&self, values: &[T], stream: &Stream) -> Result<DeviceBuffer<T>> {
        // SAFETY: all is written before anything that comes after it on the stream.
        let mut buffer = unsafe { self.alloc_unset(values.len(), stream) }?;
        buffer.copy_from_slice(values)?;
        Ok(buffer)
    }
}

impl<T> DeviceBuffer<T> {
    pub(crate) fn new(memory: Memory, len: usize) -> Self {
        Self { memory, len, marker: PhantomData }
    }

    #[cfg(feature = "cuda")]
    pub(crate) fn memory(&self) -> &Memory {
        &self.memory
    }

    #[cfg(feature = "cuda")]
    pub(crate) fn memory_mut(&mut self) -> &mut Memory {
        &mut self.memory
    }

    /// The number of values.
    #[must_use]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there are none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The bytes of all values together.
    #[must_use]
    pub fn num_bytes(&self) -> usize {
        self.len * size_of::<T>()
    }

    /// The device address; null if there are no bytes.
    #[must_use]
    pub fn ptr(&self) -> DevicePtr {
        self.memory.allocation.ptr()
    }

    /// The stream that it was allocated on, and that its operations run on.
    #[must_use]
    pub fn stream(&self) -> Stream {
        self.memory.allocation.stream()
    }

    /// The memory behind it.
    #[must_use]
    pub fn allocation(&self) -> &Allocation {
        &self.memory.allocation
    }

    /// Announces a use on another stream; see [`Allocation::record_stream`].
    ///
    /// # Errors
    /// [`Error::WrongDevice`] for a stream of another allocator.
    pub fn record_stream(&self, stream: &Stream) -> Result<()> {
        self.memory.allocation.record_stream(stream)
    }

    /// All of it.
    #[must_use]
    pub fn as_view(&self) -> DeviceView<'_, T> {
        let Memory { binding, allocation } = &self.memory;
        DeviceView::new(self.ptr(), self.len, allocation, binding.view(self.num_bytes()))
    }

    /// All of it, to be written.
    #[must_use]
    pub fn as_view_mut(&mut self) -> DeviceViewMut<'_, T> {
        let bytes = self.num_bytes();
        let Memory { binding, allocation } = &mut self.memory;
        DeviceViewMut::new(allocation.ptr(), self.len, allocation, binding.view_mut(bytes))
    }

    /// A part of it.
    ///
    /// # Panics
    /// If the range is not inside.
    #[must_use]
    #[track_caller]
    pub fn slice(&self, range: impl RangeBounds<usize>) -> DeviceView<'_, T> {
        self.as_view().slice(range)
    }

    /// A part of it, to be written.
    ///
    /// # Panics
    /// If the range is not inside.
    #[must_use]
    #[track_caller]
    pub fn slice_mut(&mut self, range: impl RangeBounds<usize>) -> DeviceViewMut<'_, T> {
        self.as_view_mut().into_slice_mut(range)
    }

    /// [`slice`](Self::slice), or `None` if the range is not inside.
    #[must_use]
    pub fn try_slice(&self, range: impl RangeBounds<usize>) -> Option<DeviceView<'_, T>> {
        self.as_view().try_slice(range)
    }

    /// [`slice_mut`](Self::slice_mut), or `None` if the range is not inside.
    #[must_use]
    pub fn try_slice_mut(&mut self, range: impl RangeBounds<usize>) -> Option<DeviceViewMut<'_, T>> {
        self.as_view_mut().try_into_slice_mut(range)
    }

    /// The first `mid` values and the others.
    ///
    /// # Panics
    /// If there are fewer.
    #[must_use]
    #[track_caller]
    pub fn split_at(&self, mid: usize) -> (DeviceView<'_, T>, DeviceView<'_, T>) {
        self.as_view().split_at(mid)
    }

    /// The first `mid` values and the others, to be written: two views that do not overlap.
    ///
    /// # Panics
    /// If there are fewer.
    #[must_use]
    #[track_caller]
    pub fn split_at_mut(&mut self, mid: usize) -> (DeviceViewMut<'_, T>, DeviceViewMut<'_, T>) {
        self.as_view_mut().into_split_at_mut(mid)
    }

    /// The same memory as values of another type. Nothing is copied.
    ///
    /// # Errors
    /// The buffer, unchanged, with the reason: the size is no multiple of `U`'s, or the address none of its alignment.
    pub fn cast<U: AnyBitPattern>(self) -> std::result::Result<DeviceBuffer<U>, (PodCastError, Self)>
    where
        T: NoUninit,
    {
        match views::cast_len::<T, U>(self.ptr(), self.len) {
            Ok(len) => Ok(DeviceBuffer::new(self.memory, len)),
            Err(error) => Err((error, self)),
        }
    }

    /// Allocates as much on the same stream and queues a copy there.
    ///
    /// # Errors
    /// As [`CachingAllocator::alloc`], and [`Error::AllocatorGone`].
    pub fn try_clone(&self) -> Result<Self>
    where
        T: Copy,
    {
        let allocator = self.memory.allocation.allocator()?;
        key_for_use(&self.stream(), Call::CopyOnDevice)?;
        let allocation = allocate::<T>(&allocator, self.len, &self.stream())?;
        let binding = self.memory.binding.sibling(&allocation)?;
        let mut copy = Self::new(Memory { binding, allocation }, self.len);
        copy.copy_from(&self.as_view())?;
        Ok(copy)
    }
}

impl<T> fmt::Debug for DeviceBuffer<T> {
    /// Says where it is and how long; device memory is not read.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        views::debug::<T>(f, "DeviceBuffer", self.ptr(), self.len, &self.memory.allocation)
    }
}
