//! Loading and launching kernels, for examples, benchmarks and tests.

use super::{CudaDriver, CudaError, Scope, opaque};
use crate::driver::{DevicePtr, StreamHandle};
use cudarc::driver::sys::{CUfunction, CUmodule};
use std::ffi::{CStr, c_void};
use std::fmt;
use std::ptr;
use std::sync::Arc;

type Result<T> = std::result::Result<T, CudaError>;

/// Code on a device; unloaded when it and all its kernels are dropped.
#[derive(Clone)]
pub struct CudaModule(Arc<Loaded>);

/// A kernel of a [`CudaModule`].
#[derive(Clone)]
pub struct CudaKernel {
    module: Arc<Loaded>,
    function: CUfunction,
}

/// How many threads of a kernel run, and in what groups.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LaunchShape {
    /// Blocks of the grid, in x, y and z.
    pub grid: [u32; 3],
    /// Threads of a block, in x, y and z.
    pub block: [u32; 3],
    /// Bytes of dynamic shared memory for each block.
    pub shared_bytes: u32,
}

impl LaunchShape {
    /// A row of `blocks` blocks of `threads` threads each.
    #[must_use]
    pub const fn row(blocks: u32, threads: u32) -> Self {
        Self { grid: [blocks, 1, 1], block: [threads, 1, 1], shared_bytes: 0 }
    }
}

/// A value for a kernel's parameter.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub enum KernelArg {
    /// A 32-bit number.
    U32(u32),
    /// A 64-bit number.
    U64(u64),
    /// A 32-bit floating point number.
    F32(f32),
    /// An address in device memory.
    Ptr(DevicePtr),
}

impl KernelArg {
    /// Where the value lies; the driver only reads it.
    fn address(&self) -> *mut c_void {
        match self {
            Self::U32(value) => ptr::from_ref(value).cast_mut().cast(),
            Self::U64(value) => ptr::from_ref(value).cast_mut().cast(),
            Self::F32(value) => ptr::from_ref(value).cast_mut().cast(),
            Self::Ptr(value) => ptr::from_ref(&value.0).cast_mut().cast(),
        }
    }
}

struct Loaded {
    driver: Arc<CudaDriver>,
    module: CUmodule,
}

// SAFETY: the driver's functions take a module from any thread; its address is never followed here.
unsafe impl Send for Loaded {}
// SAFETY: as above.
unsafe impl Sync for Loaded {}
// SAFETY: as above, for the kernel's function; the module behind it is alive as long.
unsafe impl Send for CudaKernel {}
// SAFETY: as above.
unsafe impl Sync for CudaKernel {}

impl Drop for Loaded {
    fn drop(&mut self) {
        // A refusal leaves the module loaded; it goes with the context.
        let _ = self.driver.invoke_raw("cuModuleUnload", Scope::Relaxed, |api| {
            // SAFETY: loaded once, and no kernel of it is left, as each has a share in this value.
            Ok(unsafe { (api.module_unload)(self.module) })
        });
    }
}

impl CudaDriver {
    /// Loads PTX text; the driver translates it for the device.
    ///
    /// # Errors
    /// Whatever the driver says, as about text that it does not understand.
    pub fn load_ptx(self: &Arc<Self>, text: &CStr) -> Result<CudaModule> {
        let mut module = ptr::null_mut();
        self.invoke_raw("cuModuleLoadData", Scope::Relaxed, |api| {
            // SAFETY: the text ends in a zero byte and is valid for the call.
            Ok(unsafe { (api.module_load)(&raw mut module, text.as_ptr().cast()) })
        })?;
        Ok(CudaModule(Arc::new(Loaded { driver: Arc::clone(self), module })))
    }
}

impl CudaModule {
    /// The kernel of that name.
    ///
    /// # Errors
    /// Whatever the driver says, as about a name that is not in the module.
    pub fn kernel(&self, name: &CStr) -> Result<CudaKernel> {
        let mut function = ptr::null_mut();
        self.0.driver.invoke_raw("cuModuleGetFunction", Scope::Plain, |api| {
            // SAFETY: the pointers are valid for the call, and the module is loaded.
            Ok(unsafe { (api.module_function)(&raw mut function, self.0.module, name.as_ptr()) })
        })?;
        Ok(CudaKernel { module: Arc::clone(&self.0), function })
    }
}

impl CudaKernel {
    /// Queues the kernel on a stream.
    ///
    /// # Safety
    /// `args` are the kernel's parameters in number, order and type. Whatever the kernel does to memory (device
    /// memory, and host memory that it can reach) is sound with those values, until it has ended; it is still
    /// loaded then. The stream is alive.
    ///
    /// # Errors
    /// Whatever the driver says. What goes wrong in the kernel itself shows in later calls.
    pub unsafe fn launch(&self, stream: StreamHandle, shape: LaunchShape, args: &[KernelArg]) -> Result<()> {
        let mut addresses: Vec<*mut c_void> = args.iter().map(KernelArg::address).collect();
        let ([grid_x, grid_y, grid_z], [block_x, block_y, block_z]) = (shape.grid, shape.block);
        self.module.driver.invoke_raw("cuLaunchKernel", Scope::Plain, |api| {
            // SAFETY: the list and the values are valid for the call, which copies them; the rest is promised.
            Ok(unsafe {
                (api.launch_kernel)(
                    self.function,
                    grid_x,
                    grid_y,
                    grid_z,
                    block_x,
                    block_y,
                    block_z,
                    shape.shared_bytes,
                    opaque(stream.0),
                    addresses.as_mut_ptr(),
                    ptr::null_mut(),
                )
            })
        })
    }
}

impl fmt::Debug for CudaModule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CudaModule").field("driver", &self.0.driver).finish_non_exhaustive()
    }
}

impl fmt::Debug for CudaKernel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CudaKernel").field("driver", &self.module.driver).finish_non_exhaustive()
    }
}
