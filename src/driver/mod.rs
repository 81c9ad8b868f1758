//! The contract between the allocator and a device: [`Driver`].
//!
//! One driver value is one device. Everything above this line is free of CUDA: the allocator calls this trait
//! on its slow paths only, so it is used as `Arc<dyn Driver>` and no type parameter reaches a user's code.
//! Two implementations come with the crate and know nothing of each other: [`cuda`] and [`sim`].
//!
//! # For implementers
//! * A call binds its own context; the caller's current device is never changed.
//! * No call but [`Driver::free`], [`Driver::synchronize`], [`Driver::synchronize_event`],
//!   [`Driver::synchronize_stream`], [`Driver::free_host`], and copies from and to pageable host memory may wait for
//!   work on the device.
//! * A refusal for want of memory is [`DriverErrorKind::OutOfMemory`] and leaves no error behind; nothing else
//!   may be reported as that.
//! * Methods with a default body answer [`DriverErrorKind::NotSupported`]; new capabilities will come as such
//!   methods, so that an implementation keeps compiling.

mod call;
#[cfg(feature = "cuda")]
pub mod cuda;
mod error;
pub mod sim;

pub use call::{Call, CallCount, CallCounts, CallMeter};
pub use error::{DriverError, DriverErrorKind};

use std::fmt;

/// An address in device memory: a number that only the device follows.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct DevicePtr(pub u64);

impl DevicePtr {
    /// The null address, which is what an allocation of zero bytes has.
    pub const NULL: Self = Self(0);

    /// Whether this is the null address.
    #[must_use]
    pub const fn is_null(self) -> bool {
        self.0 == 0
    }

    /// The address `bytes` further on, or `None` past the end of the address space.
    #[must_use]
    pub const fn checked_add(self, bytes: u64) -> Option<Self> {
        match self.0.checked_add(bytes) {
            Some(address) => Some(Self(address)),
            None => None,
        }
    }
}

impl fmt::Debug for DevicePtr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "DevicePtr({:#x})", self.0)
    }
}

impl fmt::Display for DevicePtr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:#x}", self.0)
    }
}

/// A stream's handle as the driver knows it (`CUstream` as a number).
///
/// Not an identity: the driver reuses the handle of a destroyed stream, and
/// [`PER_THREAD_DEFAULT`](Self::PER_THREAD_DEFAULT) is another stream in each thread. [`StreamKey`] is one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct StreamHandle(pub u64);

impl StreamHandle {
    /// The legacy default stream (the null handle).
    pub const DEFAULT: Self = Self(0);
    /// `CU_STREAM_LEGACY`: the legacy default stream by its explicit handle.
    pub const LEGACY: Self = Self(1);
    /// `CU_STREAM_PER_THREAD`: the calling thread's own default stream.
    pub const PER_THREAD_DEFAULT: Self = Self(2);
}

/// A stream's identity: the handle together with a number that no two streams of a process share.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct StreamKey {
    /// What driver calls take.
    pub handle: StreamHandle,
    /// Unique in the process, also after the stream is destroyed (CUDA: `cuStreamGetId`).
    pub id: u64,
}

/// An event of the driver.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct EventHandle(pub u64);

/// Physical memory of the driver without an address (`CUmemGenericAllocationHandle`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct PageHandle(pub u64);

/// Page-locked host memory of the driver.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct HostPtr(pub u64);

/// What a device can do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Capabilities {
    /// Whether physical pages can be mapped by hand (virtual memory management).
    pub virtual_memory: bool,
    /// Size and alignment, in bytes, of what can be mapped; 0 without virtual memory management.
    pub page_bytes: u64,
    /// The device's memory in bytes.
    pub total_bytes: u64,
}

impl Capabilities {
    /// A device with `total_bytes` of memory and plain allocations only.
    #[must_use]
    pub const fn new(total_bytes: u64) -> Self {
        Self { virtual_memory: false, page_bytes: 0, total_bytes }
    }

    /// The same device with virtual memory management in pages of `page_bytes`.
    #[must_use]
    pub const fn with_virtual_memory(self, page_bytes: u64) -> Self {
        Self { virtual_memory: true, page_bytes, ..self }
    }
}

/// Free and total memory of a device, in bytes, as the driver reports it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemoryInfo {
    /// Bytes that nobody holds.
    pub free_bytes: u64,
    /// Bytes of the device.
    pub total_bytes: u64,
}

/// The result of a driver call.
pub type Result<T> = std::result::Result<T, DriverError>;

/// One device: raw memory, virtual memory management, events.
///
/// See the [module documentation](self) for what every implementation promises.
pub trait Driver: fmt::Debug + Send + Sync {
    /// The device's ordinal.
    fn device(&self) -> u32;

    /// The device as a person knows it, for reports: "NVIDIA H200", "simulated device".
    fn name(&self) -> String;

    /// The device as a command line option spells it: `cuda:0`, `sim`.
    fn label(&self) -> String;

    /// What the device can do. Constant over the driver's life.
    fn capabilities(&self) -> Capabilities;

    /// Fails if the process must not use the driver any more: it was forked ([`DriverErrorKind::Forked`]), the
    /// driver is shut down ([`DriverErrorKind::Deinitialized`]) or the context is lost. Makes no driver call.
    ///
    /// # Errors
    /// As above.
    fn check_usable(&self) -> Result<()>;

    /// Free and total bytes (`cuMemGetInfo`).
    ///
    /// # Errors
    /// Whatever the driver says.
    fn memory_info(&self) -> Result<MemoryInfo>;

    /// Allocates `bytes` of device memory (`cuMemAlloc`); `bytes` is not 0. Aligned to 512 at least.
    ///
    /// # Errors
    /// [`DriverErrorKind::OutOfMemory`] if the device refuses.
    fn alloc(&self, bytes: u64) -> Result<DevicePtr>;

    /// Frees what [`alloc`](Self::alloc) gave (`cuMemFree`). Waits for all work of the device.
    ///
    /// # Errors
    /// Whatever the driver says; the memory is then still allocated.
    fn free(&self, ptr: DevicePtr) -> Result<()>;

    /// Reserves `bytes` of addresses with nothing behind them (`cuMemAddressReserve`); a multiple of the page
    /// size, and aligned to it.
    ///
    /// # Errors
    /// [`DriverErrorKind::AddressSpace`] if no such range is left.
    fn reserve_addresses(&self, bytes: u64) -> Result<DevicePtr> {
        let _ = bytes;
        Err(DriverError::not_supported(Call::ReserveAddresses))
    }

    /// Gives back a range of [`reserve_addresses`](Self::reserve_addresses), whole; nothing is mapped in it.
    ///
    /// # Errors
    /// Whatever the driver says.
    fn free_addresses(&self, base: DevicePtr, bytes: u64) -> Result<()> {
        let _ = (base, bytes);
        Err(DriverError::not_supported(Call::FreeAddresses))
    }

    /// Creates `bytes` of physical memory, a multiple of the page size (`cuMemCreate`).
    ///
    /// # Errors
    /// [`DriverErrorKind::OutOfMemory`] if the device refuses.
    fn create_pages(&self, bytes: u64) -> Result<PageHandle> {
        let _ = bytes;
        Err(DriverError::not_supported(Call::CreatePages))
    }

    /// Gives physical memory back (`cuMemRelease`); it is not mapped anywhere.
    ///
    /// # Errors
    /// Whatever the driver says.
    fn release_pages(&self, pages: PageHandle) -> Result<()> {
        let _ = pages;
        Err(DriverError::not_supported(Call::ReleasePages))
    }

    /// Maps all `bytes` of `pages` at `ptr` in a reserved range (`cuMemMap`). No one can read it before
    /// [`set_access`](Self::set_access).
    ///
    /// # Errors
    /// Whatever the driver says; nothing is then mapped.
    fn map(&self, ptr: DevicePtr, bytes: u64, pages: PageHandle) -> Result<()> {
        let _ = (ptr, bytes, pages);
        Err(DriverError::not_supported(Call::Map))
    }

    /// Unmaps `bytes` at `ptr`: whole mappings, one or several (`cuMemUnmap`). **Does not wait**: the caller
    /// answers for it that no queued work still touches them.
    ///
    /// # Errors
    /// Whatever the driver says; everything is then still mapped.
    fn unmap(&self, ptr: DevicePtr, bytes: u64) -> Result<()> {
        let _ = (ptr, bytes);
        Err(DriverError::not_supported(Call::Unmap))
    }

    /// Lets `devices` (by ordinal) read and write the mappings in the range (`cuMemSetAccess`).
    ///
    /// # Errors
    /// Whatever the driver says; access is then as before.
    fn set_access(&self, ptr: DevicePtr, bytes: u64, devices: &[u32]) -> Result<()> {
        let _ = (ptr, bytes, devices);
        Err(DriverError::not_supported(Call::SetAccess))
    }

    /// Identifies the stream behind a handle, as seen by the calling thread.
    ///
    /// # Errors
    /// [`DriverErrorKind::StreamGone`] for a handle that is no stream of this device.
    fn stream_key(&self, handle: StreamHandle) -> Result<StreamKey>;

    /// Creates an event without timing (`cuEventCreate`).
    ///
    /// # Errors
    /// Whatever the driver says.
    fn create_event(&self) -> Result<EventHandle>;

    /// Destroys an event (`cuEventDestroy`); also one that is not complete.
    ///
    /// # Errors
    /// Whatever the driver says.
    fn destroy_event(&self, event: EventHandle) -> Result<()>;

    /// Makes `event` stand for all that was queued on `stream` so far (`cuEventRecord`).
    ///
    /// # Errors
    /// [`DriverErrorKind::StreamGone`] if that stream (by its identity) is destroyed, or is another thread's
    /// per-thread default stream.
    fn record_event(&self, event: EventHandle, stream: StreamKey) -> Result<()>;

    /// Whether all that `event` stands for has ended (`cuEventQuery`).
    ///
    /// # Errors
    /// Whatever the driver says.
    fn query_event(&self, event: EventHandle) -> Result<bool>;

    /// Waits on the host until all that `event` stands for has ended (`cuEventSynchronize`).
    ///
    /// # Errors
    /// Whatever the driver says.
    fn synchronize_event(&self, event: EventHandle) -> Result<()>;

    /// Makes what is queued on `stream` from now on wait for `event` (`cuStreamWaitEvent`). Does not wait itself.
    ///
    /// # Errors
    /// Whatever the driver says.
    fn stream_wait_event(&self, stream: StreamKey, event: EventHandle) -> Result<()>;

    /// Waits on the host for all work of the device (`cuCtxSynchronize`).
    ///
    /// # Errors
    /// Whatever the driver says.
    fn synchronize(&self) -> Result<()>;

    /// Whether `stream` is being captured into a graph (`cuStreamIsCapturing`).
    ///
    /// # Errors
    /// Whatever the driver says.
    fn is_capturing(&self, stream: StreamKey) -> Result<bool> {
        let _ = stream;
        Ok(false)
    }

    /// The capture into a graph that `stream` is part of, by a number that no two captures of a process share; `None` if
    /// it is not being captured (`cuStreamGetCaptureInfo`).
    ///
    /// # Errors
    /// Whatever the driver says.
    fn capture_id(&self, stream: StreamKey) -> Result<Option<u64>> {
        Ok(self.is_capturing(stream)?.then_some(0))
    }

    /// Allocates `bytes` of page-locked host memory (`cuMemHostAlloc`).
    ///
    /// # Errors
    /// [`DriverErrorKind::OutOfMemory`] if the host refuses.
    fn alloc_host(&self, bytes: u64) -> Result<HostPtr> {
        let _ = bytes;
        Err(DriverError::not_supported(Call::HostAlloc))
    }

    /// Frees page-locked host memory (`cuMemFreeHost`). Waits for work of the device.
    ///
    /// # Errors
    /// Whatever the driver says.
    fn free_host(&self, ptr: HostPtr) -> Result<()> {
        let _ = ptr;
        Err(DriverError::not_supported(Call::HostFree))
    }

    /// Whether an address is in page-locked host memory, so that a copy from or to it goes on after the call that
    /// queued it. Not knowing counts as yes.
    fn is_page_locked(&self, address: *const u8) -> bool {
        let _ = address;
        true
    }

    /// Queues a copy of `bytes` from the host on `stream` (`cuMemcpyHtoDAsync`). Pageable memory can be reused when
    /// the call returns, page-locked memory when the copy has ended.
    ///
    /// # Safety
    /// `target` is that much memory of the device that the caller owns, and nothing else uses it until the copy has
    /// ended; `source` is that much initialized host memory that stays allocated and unchanged for as long as the copy
    /// may read it.
    ///
    /// # Errors
    /// Whatever the driver says; nothing is then queued.
    unsafe fn copy_to_device(
        &self,
        target: DevicePtr,
        source: *const u8,
        bytes: u64,
        stream: StreamKey,
    ) -> Result<()> {
        let _ = (target, source, bytes, stream);
        Err(DriverError::not_supported(Call::CopyToDevice))
    }

    /// Queues a copy of `bytes` to the host on `stream` (`cuMemcpyDtoHAsync`). With pageable memory it waits for the
    /// copy.
    ///
    /// # Safety
    /// `source` is that much memory of the device that the caller owns, and nothing writes it until the copy has ended;
    /// `target` is that much host memory that stays allocated and that nothing else uses until then.
    ///
    /// # Errors
    /// Whatever the driver says; nothing is then queued.
    unsafe fn copy_to_host(
        &self,
        target: *mut u8,
        source: DevicePtr,
        bytes: u64,
        stream: StreamKey,
    ) -> Result<()> {
        let _ = (target, source, bytes, stream);
        Err(DriverError::not_supported(Call::CopyToHost))
    }

    /// Queues a copy of `bytes` on the device on `stream` (`cuMemcpyDtoDAsync`).
    ///
    /// # Safety
    /// Both are that much memory that the caller owns; until the copy has ended nothing else writes either or reads
    /// `target`.
    ///
    /// # Errors
    /// Whatever the driver says; nothing is then queued.
    unsafe fn copy_on_device(
        &self,
        target: DevicePtr,
        source: DevicePtr,
        bytes: u64,
        stream: StreamKey,
    ) -> Result<()> {
        let _ = (target, source, bytes, stream);
        Err(DriverError::not_supported(Call::CopyOnDevice))
    }

    /// Queues the setting of `bytes` bytes to `value` on `stream` (`cuMemsetD8Async`).
    ///
    /// # Safety
    /// `target` is that much memory that the caller owns, and nothing else uses it until the work has ended.
    ///
    /// # Errors
    /// Whatever the driver says; nothing is then queued.
    unsafe fn fill(&self, target: DevicePtr, value: u8, bytes: u64, stream: StreamKey) -> Result<()> {
        let _ = (target, value, bytes, stream);
        Err(DriverError::not_supported(Call::Fill))
    }

    /// Waits on the host for all that is queued on `stream` (`cuStreamSynchronize`).
    ///
    /// # Errors
    /// [`DriverErrorKind::StreamGone`] if the stream is destroyed, or is another thread's default stream; else whatever
    /// the driver says, about the work on the stream as well.
    fn synchronize_stream(&self, stream: StreamKey) -> Result<()> {
        let _ = stream;
        Err(DriverError::not_supported(Call::StreamSynchronize))
    }

    /// What the calls to this driver have cost so far: modelled on the simulated device, measured on CUDA.
    fn calls(&self) -> CallCounts;
}
