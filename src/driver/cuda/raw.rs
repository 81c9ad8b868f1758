//! Calls beside the [`Driver`](crate::driver::Driver) trait, for examples, benchmarks and tests: copies, streams,
//! and CUDA's own stream-ordered allocator. None of them is counted in [`calls`](crate::driver::Driver::calls).
//!
//! Where a stream is taken, its handle must be valid, as everywhere in [this module's parent](super).

use super::device::{need, size};
use super::{CudaDriver, CudaError, Scope, number, opaque};
use crate::driver::{DevicePtr, StreamHandle};
use std::ffi::c_void;
use std::ptr;

type Result<T> = std::result::Result<T, CudaError>;

/// `CU_STREAM_NON_BLOCKING`: no order between the stream and the legacy default stream.
const STREAM_NON_BLOCKING: u32 = 1;
/// `CU_MEMPOOL_ATTR_RELEASE_THRESHOLD`.
const POOL_RELEASE_THRESHOLD: u32 = 4;

impl CudaDriver {
    /// The newest CUDA version that the driver supports, as CUDA writes it: 12080 for 12.8.
    ///
    /// # Errors
    /// Whatever the driver says.
    pub fn driver_version(&self) -> Result<u32> {
        let mut version = 0;
        self.invoke_raw("cuDriverGetVersion", Scope::Plain, |api| {
            // SAFETY: the pointer is valid for the call.
            Ok(unsafe { (api.driver_version)(&raw mut version) })
        })?;
        Ok(u32::try_from(version).unwrap_or(0))
    }

    /// The device's identity as `nvidia-smi -L` prints it: `GPU-` and the UUID.
    ///
    /// # Errors
    /// Whatever the driver says.
    pub fn uuid(&self) -> Result<String> {
        let mut bytes = [0_u8; 16];
        self.invoke_raw("cuDeviceGetUuid", Scope::Plain, |api| {
            let device_uuid = need(api.device_uuid)?;
            // SAFETY: the array is valid for the call, and the device comes from the driver.
            Ok(unsafe { device_uuid(&raw mut bytes, self.device) })
        })?;
        let hex: String = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
        Ok(format!("GPU-{}-{}-{}-{}-{}", &hex[..8], &hex[8..12], &hex[12..16], &hex[16..20], &hex[20..]))
    }

    /// Creates a stream without order towards the legacy default stream.
    ///
    /// # Errors
    /// Whatever the driver says.
    pub fn create_stream(&self) -> Result<StreamHandle> {
        let mut stream = ptr::null_mut();
        self.invoke_raw("cuStreamCreate", Scope::Plain, |api| {
            // SAFETY: the pointer is valid for the call.
            Ok(unsafe { (api.stream_create)(&raw mut stream, STREAM_NON_BLOCKING) })
        })?;
        Ok(StreamHandle(number(stream)))
    }

    /// Destroys a stream; the work queued on it still ends.
    ///
    /// # Safety
    /// The handle comes from [`create_stream`](Self::create_stream), and nothing uses it any more: not an
    /// allocator that knows the stream either.
    ///
    /// # Errors
    /// Whatever the driver says.
    pub unsafe fn destroy_stream(&self, stream: StreamHandle) -> Result<()> {
        self.invoke_raw("cuStreamDestroy", Scope::Plain, |api| {
            // SAFETY: the caller's promise.
            Ok(unsafe { (api.stream_destroy)(opaque(stream.0)) })
        })
    }

    /// Waits on the host for all work of a stream.
    ///
    /// # Errors
    /// Whatever the driver says, including about a kernel that crashed.
    pub fn synchronize_stream(&self, stream: StreamHandle) -> Result<()> {
        self.invoke_raw("cuStreamSynchronize", Scope::Plain, |api| {
            // SAFETY: the stream is alive (see the module's documentation).
            Ok(unsafe { (api.stream_synchronize)(opaque(stream.0)) })
        })
    }

    /// Copies `source` to the device, in the order of the legacy default stream. `source` can be reused when this
    /// returns.
    ///
    /// # Safety
    /// `target` is the address of as many bytes of memory that the caller owns and that nothing else uses now. (An
    /// address can also be one of host memory, so a wrong one can destroy any of the program's data.)
    ///
    /// # Errors
    /// Whatever the driver says.
    pub unsafe fn memcpy_htod(&self, target: DevicePtr, source: &[u8]) -> Result<()> {
        self.invoke_raw("cuMemcpyHtoD", Scope::Plain, |api| {
            // SAFETY: the slice is valid for the call, which is done with it at its end; the rest is promised.
            Ok(unsafe { (api.copy_to_device)(target.0, source.as_ptr().cast(), source.len()) })
        })
    }

    /// Copies from the device into `target` and waits for it, in the order of the legacy default stream.
    ///
    /// # Safety
    /// `source` is the address of as many bytes of initialized memory that the caller owns and that nothing
    /// writes now.
    ///
    /// # Errors
    /// Whatever the driver says.
    pub unsafe fn memcpy_dtoh(&self, target: &mut [u8], source: DevicePtr) -> Result<()> {
        self.invoke_raw("cuMemcpyDtoH", Scope::Plain, |api| {
            // SAFETY: the slice is valid for the call, which ends with the copy; the rest is promised.
            Ok(unsafe { (api.copy_to_host)(target.as_mut_ptr().cast(), source.0, target.len()) })
        })
    }

    /// Copies `bytes` on the device, in the order of the legacy default stream.
    ///
    /// # Safety
    /// Both addresses are of that many bytes of memory that the caller owns; nothing else writes either, or reads
    /// `target`, until the copy has ended.
    ///
    /// # Errors
    /// Whatever the driver says.
    pub unsafe fn memcpy_dtod(&self, target: DevicePtr, source: DevicePtr, bytes: u64) -> Result<()> {
        self.invoke_raw("cuMemcpyDtoD", Scope::Plain, |api| {
            let bytes = size(bytes)?;
            // SAFETY: the caller's promise.
            Ok(unsafe { (api.copy_on_device)(target.0, source.0, bytes) })
        })
    }

    /// Queues a copy of `bytes` from the host to the device on a stream.
    ///
    /// # Safety
    /// As for [`memcpy_htod`](Self::memcpy_htod), and until the copy has ended on the stream: `source` is the
    /// address of `bytes` of initialized host memory that stays allocated and unchanged.
    ///
    /// # Errors
    /// Whatever the driver says.
    pub unsafe fn memcpy_htod_async(
        &self,
        target: DevicePtr,
        source: *const u8,
        bytes: u64,
        stream: StreamHandle,
    ) -> Result<()> {
        self.invoke_raw("cuMemcpyHtoDAsync", Scope::Plain, |api| {
            let bytes = size(bytes)?;
            // SAFETY: the caller's promise.
            Ok(unsafe { (api.copy_to_device_async)(target.0, source.cast::<c_void>(), bytes, opaque(stream.0)) })
        })
    }

    /// Queues a copy of `bytes` from the device to the host on a stream.
    ///
    /// # Safety
    /// As for [`memcpy_dtoh`](Self::memcpy_dtoh), and until the copy has ended on the stream: `target` is the
    /// address of `bytes` of host memory that stays allocated and that nothing else uses.
    ///
    /// # Errors
    /// Whatever the driver says.
    pub unsafe fn memcpy_dtoh_async(
        &self,
        target: *mut u8,
        source: DevicePtr,
        bytes: u64,
        stream: StreamHandle,
    ) -> Result<()> {
        self.invoke_raw("cuMemcpyDtoHAsync", Scope::Plain, |api| {
            let bytes = size(bytes)?;
            // SAFETY: the caller's promise.
            Ok(unsafe { (api.copy_to_host_async)(target.cast::<c_void>(), source.0, bytes, opaque(stream.0)) })
        })
    }

    /// Queues a copy of `bytes` on the device on a stream.
    ///
    /// # Safety
    /// As for [`memcpy_dtod`](Self::memcpy_dtod), until the copy has ended on the stream.
    ///
    /// # Errors
    /// Whatever the driver says.
    pub unsafe fn memcpy_dtod_async(
        &self,
        target: DevicePtr,
        source: DevicePtr,
        bytes: u64,
        stream: StreamHandle,
    ) -> Result<()> {
        self.invoke_raw("cuMemcpyDtoDAsync", Scope::Plain, |api| {
            let bytes = size(bytes)?;
            // SAFETY: the caller's promise.
            Ok(unsafe { (api.copy_on_device_async)(target.0, source.0, bytes, opaque(stream.0)) })
        })
    }

    /// Queues filling `bytes` bytes with `value` on a stream.
    ///
    /// # Safety
    /// `target` is the address of that much memory that the caller owns, and nothing else uses it until the work
    /// has ended on the stream.
    ///
    /// # Errors
    /// Whatever the driver says.
    pub unsafe fn memset_d8_async(
        &self,
        target: DevicePtr,
        value: u8,
        bytes: u64,
        stream: StreamHandle,
    ) -> Result<()> {
        self.invoke_raw("cuMemsetD8Async", Scope::Plain, |api| {
            let bytes = size(bytes)?;
            // SAFETY: the caller's promise.
            Ok(unsafe { (api.set_bytes_async)(target.0, value, bytes, opaque(stream.0)) })
        })
    }

    /// Queues filling `words` 32-bit words with `value` on a stream; `target` is a multiple of 4.
    ///
    /// # Safety
    /// As for [`memset_d8_async`](Self::memset_d8_async), with four times as many bytes.
    ///
    /// # Errors
    /// Whatever the driver says.
    pub unsafe fn memset_d32_async(
        &self,
        target: DevicePtr,
        value: u32,
        words: u64,
        stream: StreamHandle,
    ) -> Result<()> {
        self.invoke_raw("cuMemsetD32Async", Scope::Plain, |api| {
            let words = size(words)?;
            // SAFETY: the caller's promise.
            Ok(unsafe { (api.set_words_async)(target.0, value, words, opaque(stream.0)) })
        })
    }

    /// Allocates in the order of a stream from the device's current pool: the peer in benchmarks. Give it back
    /// with [`free_async`](Self::free_async).
    ///
    /// # Errors
    /// [`NotSupported`](crate::driver::DriverErrorKind::NotSupported) on drivers without pools; whatever else
    /// the driver says.
    pub fn alloc_async(&self, bytes: u64, stream: StreamHandle) -> Result<DevicePtr> {
        let mut address = 0;
        self.invoke_raw("cuMemAllocAsync", Scope::Plain, |api| {
            let (alloc, bytes) = (need(api.alloc_async)?, size(bytes)?);
            // SAFETY: the pointer is valid for the call, and the stream alive (see the module's documentation).
            Ok(unsafe { alloc(&raw mut address, bytes, opaque(stream.0)) })
        })?;
        Ok(DevicePtr(address))
    }

    /// Frees what [`alloc_async`](Self::alloc_async) gave, in the order of a stream.
    ///
    /// # Errors
    /// As for [`alloc_async`](Self::alloc_async).
    pub fn free_async(&self, ptr: DevicePtr, stream: StreamHandle) -> Result<()> {
        self.invoke_raw("cuMemFreeAsync", Scope::Plain, |api| {
            let free = need(api.free_async)?;
            // SAFETY: takes an address, which the driver checks; the stream is alive (see the documentation).
            Ok(unsafe { free(ptr.0, opaque(stream.0)) })
        })
    }

    /// How many unused bytes the device's default pool keeps when it could give them back (it starts with 0).
    ///
    /// # Errors
    /// As for [`alloc_async`](Self::alloc_async).
    pub fn set_default_pool_release_threshold(&self, bytes: u64) -> Result<()> {
        let mut bytes = bytes;
        self.with_default_pool("cuMemPoolSetAttribute", |api, pool| {
            let set = need(api.pool_set)?;
            // SAFETY: the attribute is a 64-bit number, and the pointer to one is valid for the call.
            Ok(unsafe { set(pool, POOL_RELEASE_THRESHOLD, (&raw mut bytes).cast::<c_void>()) })
        })
    }

    /// Lets the device's default pool give back all unused memory but `keep_bytes`.
    ///
    /// # Errors
    /// As for [`alloc_async`](Self::alloc_async).
    pub fn trim_default_pool(&self, keep_bytes: u64) -> Result<()> {
        self.with_default_pool("cuMemPoolTrimTo", |api, pool| {
            let (trim, keep_bytes) = (need(api.pool_trim)?, size(keep_bytes)?);
            // SAFETY: the pool is the device's own and alive.
            Ok(unsafe { trim(pool, keep_bytes) })
        })
    }

    fn with_default_pool(
        &self,
        function: &'static str,
        body: impl FnOnce(
            &super::Api,
            cudarc::driver::sys::CUmemoryPool,
        ) -> std::result::Result<super::Code, super::Failure>,
    ) -> Result<()> {
        let mut pool = ptr::null_mut();
        self.invoke_raw("cuDeviceGetDefaultMemPool", Scope::Plain, |api| {
            let default_pool = need(api.default_pool)?;
            // SAFETY: the pointer is valid for the call, and the device comes from the driver.
            Ok(unsafe { default_pool(&raw mut pool, self.device) })
        })?;
        self.invoke_raw(function, Scope::Plain, |api| body(api, pool))
    }
}
