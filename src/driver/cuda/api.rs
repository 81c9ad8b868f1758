//! The driver's functions, found in its library at run time.
//!
//! Return codes stay plain numbers: a newer driver may answer with one that no enumeration knows.

use super::error::{Code, unavailable};
use crate::driver::Result;
use cudarc::driver::sys::{
    CUcontext, CUdevice, CUdeviceptr, CUevent, CUfunction, CUmemAccessDesc, CUmemAllocationProp,
    CUmemGenericAllocationHandle, CUmemoryPool, CUmodule, CUstream,
};
use libloading::Library;
use std::error::Error as _;
use std::ffi::{c_char, c_int, c_uchar, c_uint, c_ulonglong, c_void};
use std::sync::OnceLock;

/// The names of the driver's library, the reliable one first: plain `libcuda.so` may be a toolkit's stub.
#[cfg(not(windows))]
const LIBRARIES: &[&str] = &["libcuda.so.1", "libcuda.so"];
#[cfg(windows)]
const LIBRARIES: &[&str] = &["nvcuda.dll"];

macro_rules! table {
    (
        required { $($need:ident = $need_symbol:literal ($($need_arg:ty),*);)* }
        optional { $($may:ident = $may_symbol:literal ($($may_arg:ty),*);)* }
    ) => {
        /// The functions in use: the required ones, and those that not every driver has.
        pub(super) struct Api {
            $(pub(super) $need: unsafe extern "system" fn($($need_arg),*) -> Code,)*
            $(pub(super) $may: Option<unsafe extern "system" fn($($may_arg),*) -> Code>,)*
            /// Keeps the functions loaded.
            _library: Library,
        }

        impl Api {
            fn resolve(library: Library) -> Result<Self> {
                Ok(Self {
                    $(
                        // SAFETY: the type is the one that CUDA's header declares for this symbol.
                        $need: unsafe { required(&library, $need_symbol)? },
                    )*
                    $(
                        // SAFETY: as above.
                        $may: unsafe { optional(&library, $may_symbol) },
                    )*
                    _library: library,
                })
            }
        }
    };
}

table! {
    required {
        init = "cuInit" (c_uint);
        driver_version = "cuDriverGetVersion" (*mut c_int);
        device_count = "cuDeviceGetCount" (*mut c_int);
        device_get = "cuDeviceGet" (*mut CUdevice, c_int);
        device_name = "cuDeviceGetName" (*mut c_char, c_int, CUdevice);
        device_attribute = "cuDeviceGetAttribute" (*mut c_int, c_uint, CUdevice);
        device_total_mem = "cuDeviceTotalMem_v2" (*mut usize, CUdevice);
        primary_retain = "cuDevicePrimaryCtxRetain" (*mut CUcontext, CUdevice);
        primary_release = "cuDevicePrimaryCtxRelease_v2" (CUdevice);
        ctx_push = "cuCtxPushCurrent_v2" (CUcontext);
        ctx_pop = "cuCtxPopCurrent_v2" (*mut CUcontext);
        ctx_get = "cuCtxGetCurrent" (*mut CUcontext);
        ctx_set = "cuCtxSetCurrent" (CUcontext);
        ctx_synchronize = "cuCtxSynchronize" ();
        mem_info = "cuMemGetInfo_v2" (*mut usize, *mut usize);
        mem_alloc = "cuMemAlloc_v2" (*mut CUdeviceptr, usize);
        mem_free = "cuMemFree_v2" (CUdeviceptr);
        host_alloc = "cuMemHostAlloc" (*mut *mut c_void, usize, c_uint);
        host_free = "cuMemFreeHost" (*mut c_void);
        event_create = "cuEventCreate" (*mut CUevent, c_uint);
        event_destroy = "cuEventDestroy_v2" (CUevent);
        event_record = "cuEventRecord" (CUevent, CUstream);
        event_query = "cuEventQuery" (CUevent);
        event_synchronize = "cuEventSynchronize" (CUevent);
        stream_create = "cuStreamCreate" (*mut CUstream, c_uint);
        stream_destroy = "cuStreamDestroy_v2" (CUstream);
        stream_synchronize = "cuStreamSynchronize" (CUstream);
        stream_wait = "cuStreamWaitEvent" (CUstream, CUevent, c_uint);
        stream_is_capturing = "cuStreamIsCapturing" (CUstream, *mut c_uint);
        copy_to_device = "cuMemcpyHtoD_v2" (CUdeviceptr, *const c_void, usize);
        copy_to_host = "cuMemcpyDtoH_v2" (*mut c_void, CUdeviceptr, usize);
        copy_on_device = "cuMemcpyDtoD_v2" (CUdeviceptr, CUdeviceptr, usize);
        copy_to_device_async = "cuMemcpyHtoDAsync_v2" (CUdeviceptr, *const c_void, usize, CUstream);
        copy_to_host_async = "cuMemcpyDtoHAsync_v2" (*mut c_void, CUdeviceptr, usize, CUstream);
        copy_on_device_async = "cuMemcpyDtoDAsync_v2" (CUdeviceptr, CUdeviceptr, usize, CUstream);
        set_bytes_async = "cuMemsetD8Async" (CUdeviceptr, c_uchar, usize, CUstream);
        set_words_async = "cuMemsetD32Async" (CUdeviceptr, c_uint, usize, CUstream);
        module_load = "cuModuleLoadData" (*mut CUmodule, *const c_void);
        module_unload = "cuModuleUnload" (CUmodule);
        module_function = "cuModuleGetFunction" (*mut CUfunction, CUmodule, *const c_char);
        launch_kernel = "cuLaunchKernel" (
            CUfunction, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, CUstream,
            *mut *mut c_void, *mut *mut c_void
        );
    }
    optional {
        pointer_attribute = "cuPointerGetAttribute" (*mut c_void, c_uint, CUdeviceptr);
        address_reserve = "cuMemAddressReserve" (*mut CUdeviceptr, usize, usize, CUdeviceptr, c_ulonglong);
        address_free = "cuMemAddressFree" (CUdeviceptr, usize);
        mem_create = "cuMemCreate" (
            *mut CUmemGenericAllocationHandle, usize, *const CUmemAllocationProp, c_ulonglong
        );
        mem_release = "cuMemRelease" (CUmemGenericAllocationHandle);
        mem_map = "cuMemMap" (CUdeviceptr, usize, usize, CUmemGenericAllocationHandle, c_ulonglong);
        mem_unmap = "cuMemUnmap" (CUdeviceptr, usize);
        mem_set_access = "cuMemSetAccess" (CUdeviceptr, usize, *const CUmemAccessDesc, usize);
        mem_granularity = "cuMemGetAllocationGranularity" (*mut usize, *const CUmemAllocationProp, c_uint);
        device_uuid = "cuDeviceGetUuid_v2" (*mut [u8; 16], CUdevice);
        stream_id = "cuStreamGetId" (CUstream, *mut c_ulonglong);
        stream_capture_info = "cuStreamGetCaptureInfo_v2" (
            CUstream, *mut c_uint, *mut c_ulonglong, *mut c_void, *mut c_void, *mut c_void
        );
        exchange_capture_mode = "cuThreadExchangeStreamCaptureMode" (*mut c_uint);
        alloc_async = "cuMemAllocAsync" (*mut CUdeviceptr, usize, CUstream);
        free_async = "cuMemFreeAsync" (CUdeviceptr, CUstream);
        default_pool = "cuDeviceGetDefaultMemPool" (*mut CUmemoryPool, CUdevice);
        pool_set = "cuMemPoolSetAttribute" (CUmemoryPool, c_uint, *mut c_void);
        pool_trim = "cuMemPoolTrimTo" (CUmemoryPool, usize);
    }
}

impl Api {
    /// The functions of this machine's driver. A failure is not remembered: a later call looks again.
    pub(super) fn get() -> Result<&'static Self> {
        static API: OnceLock<Api> = OnceLock::new();
        if let Some(api) = API.get() {
            return Ok(api);
        }
        let api = Self::load(LIBRARIES)?;
        Ok(API.get_or_init(|| api))
    }

    /// Whether physical memory can be mapped by hand.
    pub(super) fn has_virtual_memory(&self) -> bool {
        self.address_reserve.is_some()
            && self.address_free.is_some()
            && self.mem_create.is_some()
            && self.mem_release.is_some()
            && self.mem_map.is_some()
            && self.mem_unmap.is_some()
            && self.mem_set_access.is_some()
            && self.mem_granularity.is_some()
    }

    /// Loads the first of the `names` that there is.
    fn load(names: &[&str]) -> Result<Self> {
        let mut reasons = Vec::with_capacity(names.len());
        for &name in names {
            // SAFETY: the driver's library is made to be loaded this way; its initializers ask nothing of us.
            match unsafe { Library::new(name) } {
                Ok(library) => return Self::resolve(library),
                Err(error) => {
                    // The loader's own words are behind the error, and mostly name the library.
                    let words = error.source().map_or_else(|| error.to_string(), ToString::to_string);
                    reasons.push(if words.contains(name) { words } else { format!("{name}: {words}") });
                }
            }
        }
        Err(unavailable(format!(
            "the CUDA driver's library is not there ({}); install NVIDIA's driver, or name the folder of \
             {} in LD_LIBRARY_PATH; a container must be started with access to GPUs",
            reasons.join("; "),
            names.first().unwrap_or(&"libcuda"),
        )))
    }
}

/// A function that every driver in use has.
///
/// # Safety
/// `F` is the type of a C function pointer, and right for `symbol`.
unsafe fn required<F: Copy>(library: &Library, symbol: &'static str) -> Result<F> {
    // SAFETY: the caller's promise.
    unsafe { optional(library, symbol) }.ok_or_else(|| {
        unavailable(format!(
            "the CUDA driver's library lacks the function `{symbol}`; update NVIDIA's driver (CUDA 11.4 or later)"
        ))
    })
}

/// A function that a driver may have.
///
/// # Safety
/// As for [`required`].
unsafe fn optional<F: Copy>(library: &Library, symbol: &'static str) -> Option<F> {
    // SAFETY: the caller's promise; the library outlives the copy, as both end up in the same `Api`.
    unsafe { library.get::<F>(symbol) }.ok().map(|function| *function)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::driver::{Call, DriverError, DriverErrorKind};

    fn refusal(names: &[&str]) -> DriverError {
        match Api::load(names) {
            Ok(_) => panic!("{names:?} is a driver"),
            Err(error) => error,
        }
    }

    #[test]
    fn a_missing_library_is_an_error_with_a_remedy() {
        let error = refusal(&["libvramalloc-no-such-thing.so.1", "libvramalloc-nor-this.so"]);
        assert_eq!((error.call, error.kind), (Call::Open, DriverErrorKind::Unavailable));
        for part in ["libvramalloc-no-such-thing.so.1", "libvramalloc-nor-this.so", "install", "LD_LIBRARY_PATH"] {
            assert!(error.detail.contains(part), "{part} is not in: {error}");
        }
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn a_missing_symbol_is_named() {
        let error = refusal(&["libc.so.6"]);
        assert_eq!((error.call, error.kind), (Call::Open, DriverErrorKind::Unavailable));
        assert!(error.detail.contains("`cuInit`"), "{error}");
    }
}
