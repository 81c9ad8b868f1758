//! Views: parts of a buffer, borrowed.

use super::{ViewBinding, ViewMutBinding};
use crate::driver::DevicePtr;
use crate::error::Result;
use crate::{Allocation, Stream};
use bytemuck::{AnyBitPattern, NoUninit, PodCastError};
use std::fmt;
use std::marker::PhantomData;
use std::ops::{Bound, Range, RangeBounds};

/// A part of a [`DeviceBuffer`](super::DeviceBuffer), to be read: what `&[T]` is to a `Vec<T>`.
pub struct DeviceView<'a, T> {
    ptr: DevicePtr,
    len: usize,
    pub(crate) allocation: &'a Allocation,
    pub(crate) binding: ViewBinding<'a>,
    marker: PhantomData<&'a [T]>,
}

/// A part of a [`DeviceBuffer`](super::DeviceBuffer), to be read and written: what `&mut [T]` is to a `Vec<T>`.
pub struct DeviceViewMut<'a, T> {
    ptr: DevicePtr,
    len: usize,
    pub(crate) allocation: &'a Allocation,
    pub(crate) binding: ViewMutBinding<'a>,
    marker: PhantomData<&'a mut [T]>,
}

/// The range as numbers, if it is inside.
fn within(range: impl RangeBounds<usize>, len: usize) -> Option<Range<usize>> {
    let start = match range.start_bound() {
        Bound::Included(&start) => start,
        Bound::Excluded(&start) => start.checked_add(1)?,
        Bound::Unbounded => 0,
    };
    let end = match range.end_bound() {
        Bound::Included(&end) => end.checked_add(1)?,
        Bound::Excluded(&end) => end,
        Bound::Unbounded => len,
    };
    (start <= end && end <= len).then_some(start..end)
}

#[cold]
#[track_caller]
fn outside(len: usize) -> ! {
    panic!(
        "the range is not inside the {len} values that there are; `try_slice` and its like return `None` for one that is not"
    )
}

/// Where the `index`th value of `T` is, which is inside the memory at `ptr` or at its end.
fn at<T>(ptr: DevicePtr, index: usize) -> DevicePtr {
    // Inside one allocation, so that neither product nor sum can overflow.
    DevicePtr(ptr.0 + (index * size_of::<T>()) as u64)
}

/// How many values of `U` the `len` values of `T` at `ptr` are.
pub(super) fn cast_len<T, U>(ptr: DevicePtr, len: usize) -> std::result::Result<usize, PodCastError> {
    if !ptr.0.is_multiple_of(align_of::<U>() as u64) {
        return Err(PodCastError::TargetAlignmentGreaterAndInputNotAligned);
    }
    let (bytes, size) = (len * size_of::<T>(), size_of::<U>());
    if size == 0 {
        return if bytes == 0 { Ok(len) } else { Err(PodCastError::SizeMismatch) };
    }
    if bytes.is_multiple_of(size) { Ok(bytes / size) } else { Err(PodCastError::OutputSliceWouldHaveSlop) }
}

pub(super) fn debug<T>(
    f: &mut fmt::Formatter<'_>,
    name: &str,
    ptr: DevicePtr,
    len: usize,
    allocation: &Allocation,
) -> fmt::Result {
    f.debug_struct(name)
        .field("type", &std::any::type_name::<T>())
        .field("ptr", &ptr)
        .field("len", &len)
        .field("stream", &allocation.stream().key())
        .finish()
}

/// What both kinds of views tell.
macro_rules! accessors {
    ($view:ident) => {
        impl<T> $view<'_, T> {
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

            /// The device address of the first value.
            #[must_use]
            pub fn ptr(&self) -> DevicePtr {
                self.ptr
            }

            /// The buffer's stream.
            #[must_use]
            pub fn stream(&self) -> Stream {
                self.allocation.stream()
            }

            /// Announces a use on another stream; see [`Allocation::record_stream`].
            ///
            /// # Errors
            /// [`Error::WrongDevice`](crate::Error::WrongDevice) for a stream of another allocator.
            pub fn record_stream(&self, stream: &Stream) -> Result<()> {
                self.allocation.record_stream(stream)
            }
        }
    };
}

accessors!(DeviceView);
accessors!(DeviceViewMut);

impl<'a, T> DeviceView<'a, T> {
    pub(crate) fn new(ptr: DevicePtr, len: usize, allocation: &'a Allocation, binding: ViewBinding<'a>) -> Self {
        Self { ptr, len, allocation, binding, marker: PhantomData }
    }

    fn part(&self, range: Range<usize>) -> Self {
        let binding = self.binding.slice(range.start * size_of::<T>(), range.len() * size_of::<T>());
        Self::new(at::<T>(self.ptr, range.start), range.len(), self.allocation, binding)
    }

    /// A part of it.
    ///
    /// # Panics
    /// If the range is not inside.
    #[must_use]
    #[track_caller]
    pub fn slice(&self, range: impl RangeBounds<usize>) -> Self {
        match self.try_slice(range) {
            Some(view) => view,
            None => outside(self.len),
        }
    }

    /// [`slice`](Self::slice), or `None` if the range is not inside.
    #[must_use]
    pub fn try_slice(&self, range: impl RangeBounds<usize>) -> Option<Self> {
        within(range, self.len).map(|range| self.part(range))
    }

    /// The first `mid` values and the others.
    ///
    /// # Panics
    /// If there are fewer.
    #[must_use]
    #[track_caller]
    pub fn split_at(&self, mid: usize) -> (Self, Self) {
        (self.slice(..mid), self.slice(mid..))
    }

    /// The same memory as values of another type.
    ///
    /// # Errors
    /// The size is no multiple of `U`'s, or the address none of its alignment.
    pub fn cast<U: AnyBitPattern>(&self) -> std::result::Result<DeviceView<'a, U>, PodCastError>
    where
        T: NoUninit,
    {
        let len = cast_len::<T, U>(self.ptr, self.len)?;
        Ok(DeviceView::new(self.ptr, len, self.allocation, self.binding.clone()))
    }
}

impl<T> Clone for DeviceView<'_, T> {
    fn clone(&self) -> Self {
        Self::new(self.ptr, self.len, self.allocation, self.binding.clone())
    }
}

impl<'a, T> DeviceViewMut<'a, T> {
    pub(crate) fn new(
        ptr: DevicePtr,
        len: usize,
        allocation: &'a Allocation,
        binding: ViewMutBinding<'a>,
    ) -> Self {
        Self { ptr, len, allocation, binding, marker: PhantomData }
    }

    /// The same, to be read.
    #[must_use]
    pub fn as_view(&self) -> DeviceView<'_, T> {
        DeviceView::new(self.ptr, self.len, self.allocation, self.binding.as_view())
    }

    /// The same, to be read from now on.
    #[must_use]
    pub fn into_view(self) -> DeviceView<'a, T> {
        DeviceView::new(self.ptr, self.len, self.allocation, self.binding.into_view())
    }

    /// The same for a shorter time.
    #[must_use]
    pub fn reborrow(&mut self) -> DeviceViewMut<'_, T> {
        DeviceViewMut::new(self.ptr, self.len, self.allocation, self.binding.reborrow())
    }

    /// A part of it, to be read.
    ///
    /// # Panics
    /// If the range is not inside.
    #[must_use]
    #[track_caller]
    pub fn slice(&self, range: impl RangeBounds<usize>) -> DeviceView<'_, T> {
        match within(range, self.len) {
            Some(range) => self.as_view().part(range),
            None => outside(self.len),
        }
    }

    /// A part of it, to be written.
    ///
    /// # Panics
    /// If the range is not inside.
    #[must_use]
    #[track_caller]
    pub fn slice_mut(&mut self, range: impl RangeBounds<usize>) -> DeviceViewMut<'_, T> {
        self.reborrow().into_slice_mut(range)
    }

    /// [`slice_mut`](Self::slice_mut), or `None` if the range is not inside.
    #[must_use]
    pub fn try_slice_mut(&mut self, range: impl RangeBounds<usize>) -> Option<DeviceViewMut<'_, T>> {
        self.reborrow().try_into_slice_mut(range)
    }

    /// A part of it, for as long as the whole could be used.
    ///
    /// # Panics
    /// If the range is not inside.
    #[must_use]
    #[track_caller]
    pub fn into_slice_mut(self, range: impl RangeBounds<usize>) -> Self {
        let len = self.len;
        match self.try_into_slice_mut(range) {
            Some(view) => view,
            None => outside(len),
        }
    }

    /// [`into_slice_mut`](Self::into_slice_mut), or `None` if the range is not inside.
    #[must_use]
    pub fn try_into_slice_mut(self, range: impl RangeBounds<usize>) -> Option<Self> {
        let range = within(range, self.len)?;
        let (_, rest) = self.halves(range.start);
        Some(rest.halves(range.len()).0)
    }

    /// The first `mid` values and the others: two views that do not overlap.
    ///
    /// # Panics
    /// If there are fewer.
    #[must_use]
    #[track_caller]
    pub fn split_at_mut(&mut self, mid: usize) -> (DeviceViewMut<'_, T>, DeviceViewMut<'_, T>) {
        self.reborrow().into_split_at_mut(mid)
    }

    /// [`split_at_mut`](Self::split_at_mut), for as long as the whole could be used.
    ///
    /// # Panics
    /// If there are fewer.
    #[must_use]
    #[track_caller]
    pub fn into_split_at_mut(self, mid: usize) -> (Self, Self) {
        if mid > self.len {
            outside(self.len);
        }
        self.halves(mid)
    }

    /// `mid` is not beyond the end.
    fn halves(self, mid: usize) -> (Self, Self) {
        let (left, right) = self.binding.split(mid * size_of::<T>());
        (
            Self::new(self.ptr, mid, self.allocation, left),
            Self::new(at::<T>(self.ptr, mid), self.len - mid, self.allocation, right),
        )
    }

    /// The same memory as values of another type.
    ///
    /// # Errors
    /// The size is no multiple of `U`'s, or the address none of its alignment.
    pub fn cast<U: AnyBitPattern + NoUninit>(self) -> std::result::Result<DeviceViewMut<'a, U>, PodCastError>
    where
        T: AnyBitPattern + NoUninit,
    {
        let len = cast_len::<T, U>(self.ptr, self.len)?;
        Ok(DeviceViewMut::new(self.ptr, len, self.allocation, self.binding))
    }
}

impl<T> fmt::Debug for DeviceView<'_, T> {
    /// Says where it is and how long; device memory is not read.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        debug::<T>(f, "DeviceView", self.ptr, self.len, self.allocation)
    }
}

impl<T> fmt::Debug for DeviceViewMut<'_, T> {
    /// Says where it is and how long; device memory is not read.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        debug::<T>(f, "DeviceViewMut", self.ptr, self.len, self.allocation)
    }
}
