//! The allocator on cudarc's streams.

use super::binding::Binding;
use super::streams::{Known, Shared};
use crate::buffer::{self, DeviceBuffer, Memory};
use crate::driver::Driver;
use crate::driver::cuda::CudaDriver;
use crate::error::Result;
use crate::{CachingAllocator, Config, Stream};
use bytemuck::{AnyBitPattern, NoUninit, Zeroable};
use cudarc::driver::{CudaContext, CudaStream};
use std::fmt;
use std::ops::Deref;
use std::sync::Arc;

/// A [`CachingAllocator`] on cudarc's streams. Cheap to clone; `Send` and `Sync`.
///
/// Dereferences to the allocator, for statistics and all else that does not allocate on a stream of cudarc.
///
/// ```no_run
/// use cudarc::driver::CudaContext;
/// use vramalloc::{Config, cuda::CudaAllocator};
///
/// let context = CudaContext::new(0)?;
/// let stream = context.default_stream();
/// let memory = CudaAllocator::new(&context, Config::default())?;
///
/// let x = memory.clone_htod(&[1.0_f32; 1024], &stream)?; // was: stream.clone_htod(&[1.0_f32; 1024])?
/// let mut y = memory.alloc_zeros::<f32>(1024, &stream)?; // was: stream.alloc_zeros::<f32>(1024)?
/// stream.memcpy_dtod(&x, &mut y)?; // as before
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone)]
pub struct CudaAllocator {
    shared: Arc<Shared>,
}

impl CudaAllocator {
    /// An allocator for the device of a context, in that context.
    ///
    /// # Errors
    /// As [`CudaDriver::from_context`] and [`CachingAllocator::new`].
    pub fn new(context: &Arc<CudaContext>, config: Config) -> Result<Self> {
        let driver = CudaDriver::from_context(context)?;
        let allocator = CachingAllocator::new(Arc::clone(&driver) as Arc<dyn Driver>, config)?;
        let shared = Shared::new(allocator, driver, Arc::clone(context));
        shared.allocator.host_pool().cuda.get_or_init(|| Arc::downgrade(&shared));
        Ok(Self { shared })
    }

    /// The allocator below, for streams that are not cudarc's.
    #[must_use]
    pub fn allocator(&self) -> &CachingAllocator {
        &self.shared.allocator
    }

    /// The context.
    #[must_use]
    pub fn context(&self) -> &Arc<CudaContext> {
        &self.shared.context
    }

    /// A stream of cudarc as this crate knows it, from then on known: uses of buffers on it cost no driver call and no
    /// wait. It is kept alive until it is [retired](Self::retire_stream).
    ///
    /// Streams that buffers are allocated on are known anyway; those are retired by themselves when nobody else has them
    /// any more.
    ///
    /// # Errors
    /// [`Error::WrongDevice`](crate::Error::WrongDevice) for a stream of another context,
    /// [`Error::Driver`](crate::Error::Driver).
    pub fn stream(&self, stream: &Arc<CudaStream>) -> Result<Stream> {
        Ok(self.shared.know(stream)?.hand_out())
    }

    /// Lets go of a stream: one of cudarc's own is destroyed when nobody else has it; one of another library
    /// (`wrap_borrowed_stream`) may be destroyed from now on. What is cached for it stays usable by other streams. A stream
    /// that is not known is none of its business.
    ///
    /// Buffers of it that live may be used on other streams (by functions whose names end in `_on`, or cudarc's), and
    /// dropped; their memory is then reused when the device has been waited for. What would use the stream itself is an
    /// error. If another library destroys the stream, each such buffer costs two events of cudarc's, which keep the context alive,
    /// for good, where its event tracking is in force.
    ///
    /// No other thread may use, drop or return (as a [`CudaSliceGuard`](super::CudaSliceGuard)) buffers of such a stream while
    /// this runs: one that has just found the stream alive would name it to CUDA after it was destroyed.
    ///
    /// # Errors
    /// As [`CachingAllocator::retire_stream`].
    pub fn retire_stream(&self, stream: &CudaStream) -> Result<()> {
        self.shared.retire(stream)
    }

    /// [`CachingAllocator::empty_cache`]; streams that nobody else has any more are retired before.
    ///
    /// # Errors
    /// As there.
    pub fn empty_cache(&self) -> Result<u64> {
        self.shared.retire_left();
        self.shared.allocator.empty_cache()
    }

    /// Allocates `len` values whose contents are whatever was there.
    ///
    /// # Errors
    /// As [`stream`](Self::stream) and [`CachingAllocator::alloc`].
    pub fn alloc_uninit<T: AnyBitPattern>(&self, len: usize, stream: &Arc<CudaStream>) -> Result<DeviceBuffer<T>> {
        // SAFETY: whatever is there is a valid value.
        unsafe { self.alloc_unset(len, stream) }
    }

    /// [`alloc_uninit`](Self::alloc_uninit) for types of which not every pattern of bits is a value.
    ///
    /// # Safety
    /// Nothing reads a value before it is written.
    ///
    /// # Errors
    /// As [`alloc_uninit`](Self::alloc_uninit).
    pub unsafe fn alloc_unset<T>(&self, len: usize, stream: &Arc<CudaStream>) -> Result<DeviceBuffer<T>> {
        self.alloc_known(len, &self.shared.know(stream)?)
    }

    fn alloc_known<T>(&self, len: usize, known: &Arc<Known>) -> Result<DeviceBuffer<T>> {
        let allocation = buffer::allocate::<T>(&self.shared.allocator, len, &known.stream)?;
        let binding = allocation.device().checked(Binding::new(known, &allocation))?;
        Ok(DeviceBuffer::new(Memory { binding, allocation }, len))
    }

    /// Allocates `len` values and queues setting them to zero.
    ///
    /// # Errors
    /// As [`alloc_uninit`](Self::alloc_uninit).
    pub fn alloc_zeros<T: Zeroable>(&self, len: usize, stream: &Arc<CudaStream>) -> Result<DeviceBuffer<T>> {
        // SAFETY: all is set before anything that comes after it on the stream.
        let mut buffer = unsafe { self.alloc_unset(len, stream) }?;
        buffer.set_zero()?;
        Ok(buffer)
    }

    /// Allocates and copies `values` from the host.
    ///
    /// # Errors
    /// As [`alloc_uninit`](Self::alloc_uninit).
    pub fn clone_htod<T: NoUninit>(&self, values: &[T], stream: &Arc<CudaStream>) -> Result<DeviceBuffer<T>> {
        // SAFETY: all is written before anything that comes after it on the stream.
        let mut buffer = unsafe { self.alloc_unset(values.len(), stream) }?;
        buffer.copy_from_slice(values)?;
        Ok(buffer)
    }
}

impl Deref for CudaAllocator {
    type Target = CachingAllocator;

    fn deref(&self) -> &CachingAllocator {
        &self.shared.allocator
    }
}

impl fmt::Debug for CudaAllocator {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CudaAllocator").field("allocator", &self.shared.allocator).finish_non_exhaustive()
    }
}
