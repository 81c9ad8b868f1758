//! What CuPy loads: `cupy.cuda.CFunctionAllocator(stream, malloc, free, owner)`.

use crate::allocator::{number, pointer};
use crate::devices::Device;
use crate::registry;
use crate::status::{Result, Status, caught, remember, say};
use std::ffi::{c_int, c_void};
use std::ptr::null_mut;
use vramalloc::DevicePtr;

fn device(ordinal: c_int) -> Result<&'static Device> {
    registry::own()?.0.get(ordinal)
}

/// Allocates for CuPy, from the process's own allocator. CuPy passes no stream: `param` is the one (a number in Python,
/// 0 for the default stream) that all arrays of this CuPy allocator are used on.
///
/// If that fails it returns null, which CuPy does not check; the report goes to standard error first.
///
/// # Safety
/// `param` is null or a stream of the device that exists.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vram_cupy_malloc(param: *mut c_void, size: usize, ordinal: c_int) -> *mut c_void {
    match caught(|| device(ordinal)?.alloc(size as u64, number(param))) {
        Ok(ptr) => {
            log::trace!("cupy: alloc {size} on device {ordinal}, stream {param:?}: {ptr}");
            pointer(ptr)
        }
        Err(failure) => {
            remember(&failure);
            say(&format!(
                "vramalloc: CuPy asked for {size} bytes on device {ordinal}, and cannot have them:\n{failure}\n\
                 vramalloc: THE ARRAY HAS NO MEMORY: CuPy does not check for null here."
            ));
            null_mut()
        }
    }
}

/// Frees for CuPy.
#[unsafe(no_mangle)]
pub extern "C" fn vram_cupy_free(param: *mut c_void, ptr: *mut c_void, ordinal: c_int) {
    let _ = param;
    let freed = caught(|| {
        let device = device(ordinal)?;
        device.check_not_forked()?;
        log::trace!("cupy: free {ptr:?} on device {ordinal}");
        Ok(device.allocator.free_raw(DevicePtr(number(ptr)))?)
    });
    if let Err(failure) = freed {
        remember(&failure);
        if failure.status() != Status::Forked {
            say(&format!("vramalloc: CuPy's free failed: {failure}"));
        }
    }
}
