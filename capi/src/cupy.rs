//! What CuPy loads: `cupy.cuda.CFunctionAllocator(stream, malloc, free, owner)`.

use crate::guest::{Guest, told};
use crate::registry;
use std::ffi::{c_int, c_void};

const CUPY: Guest = Guest {
    name: "CuPy",
    log: "cupy",
    device: |ordinal| registry::own()?.0.get(ordinal),
    null: "THE ARRAY HAS NO MEMORY: CuPy does not check for null here.",
};

/// Allocates for CuPy, from the process's own allocator. CuPy passes no stream: `param` is the one (a number in Python,
/// 0 for the default stream) that all arrays of this CuPy allocator are used on.
///
/// If that fails it returns null, which CuPy does not check; the report goes to standard error first.
///
/// # Safety
/// `param` is null or a stream of the device that exists.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vram_cupy_malloc(param: *mut c_void, size: usize, ordinal: c_int) -> *mut c_void {
    CUPY.alloc(size, ordinal, param)
}

/// Frees for CuPy.
#[unsafe(no_mangle)]
pub extern "C" fn vram_cupy_free(param: *mut c_void, ptr: *mut c_void, ordinal: c_int) {
    let _ = param;
    told("CuPy's free", || CUPY.free(ptr, ordinal));
}
