//! What PyTorch loads: `torch.cuda.memory.CUDAPluggableAllocator` and what its object can be given beyond that.
//!
//! They use the process's own allocator (`vram_process_allocator`). Devices are PyTorch's ordinals, in their primary
//! contexts, which are those that PyTorch uses.

use crate::allocator::{number, pointer};
use crate::devices::Device;
use crate::guest::{Guest, told};
use crate::registry;
use crate::status::{Result, guarded, remember};
use std::ffi::{c_int, c_void};
use std::ptr::null_mut;
use vramalloc::DevicePtr;

/// The number of a pool (C++: `std::pair<unsigned long long, unsigned long long>`, passed by value).
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct PoolId {
    /// Counts pools that captures made.
    pub first: u64,
    /// Counts pools that users made.
    pub second: u64,
}

/// Devices come as 8 bits in some calls, with whatever above.
fn device(ordinal: c_int) -> Result<&'static Device> {
    registry::own()?.0.get(i32::from(ordinal as i8))
}

const TORCH: Guest = Guest {
    name: "PyTorch",
    log: "torch",
    device,
    null: "THE TENSOR HAS NO MEMORY: PyTorch does not check for null. A kernel that uses it will fail with an illegal \
           memory access, and nothing works after that. Behind torch.cuda.MemPool PyTorch raises OutOfMemoryError \
           instead (vramalloc.use_as_mempool).",
};

/// Allocates for PyTorch as its current allocator (`alloc_fn_name`).
///
/// If that fails it returns null, **which PyTorch does not check**: the tensor then has no memory, and the next kernel
/// that uses it ends the process's CUDA context. So the report goes to standard error first.
///
/// # Safety
/// `stream` is a stream of the device that exists.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vram_torch_alloc(size: usize, ordinal: c_int, stream: *mut c_void) -> *mut c_void {
    TORCH.alloc(size, ordinal, stream)
}

/// Frees for PyTorch (`free_fn_name`). Size, device and stream are those of the allocation; the stream may be gone.
#[unsafe(no_mangle)]
pub extern "C" fn vram_torch_free(ptr: *mut c_void, _size: usize, ordinal: c_int, _stream: *mut c_void) {
    told("freeing", || TORCH.free(ptr, ordinal));
}

/// Allocates a segment for a `torch.cuda.MemPool`: null means out of memory there, which PyTorch handles.
///
/// # Safety
/// `stream` is a stream of the device that exists.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vram_torch_segment_alloc(
    size: usize,
    ordinal: c_int,
    stream: *mut c_void,
) -> *mut c_void {
    let allocated = guarded(|| {
        let allocated = device(ordinal)?.alloc(size as u64, number(stream));
        match &allocated {
            Ok(ptr) => log::debug!("torch: segment of {size} on device {ordinal}: {ptr}"),
            Err(failure) => log::warn!("torch: no segment of {size} bytes on device {ordinal}: {failure}"),
        }
        allocated
    });
    allocated.map_or_else(
        |failure| {
            remember(&failure);
            null_mut()
        },
        pointer,
    )
}

/// Takes a segment of a `torch.cuda.MemPool` back, and gives what it can to the driver: PyTorch is what caches here.
#[unsafe(no_mangle)]
pub extern "C" fn vram_torch_segment_free(ptr: *mut c_void, _size: usize, ordinal: c_int, _stream: *mut c_void) {
    told("giving a segment back", || {
        TORCH.free(ptr, ordinal)?;
        device(ordinal)?.empty_cache_for_good().map(drop)
    });
}

/// For `set_record_stream_fn`: `Tensor.record_stream`. Without it PyTorch ignores that call, and memory is reused while
/// another stream uses it.
///
/// # Safety
/// `stream` is a stream of the allocation's device that exists.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vram_torch_record_stream(ptr: *mut c_void, stream: *mut c_void) {
    told("record_stream", || {
        let ptr = DevicePtr(number(ptr));
        if ptr.is_null() {
            return Ok(());
        }
        registry::own()?.0.of_ptr(ptr)?.record_stream(ptr, number(stream))
    });
}

/// For `set_reset_fn`: `torch.cuda.empty_cache()`.
#[unsafe(no_mangle)]
pub extern "C" fn vram_torch_empty_cache() {
    told("empty_cache", || {
        let results: Vec<_> = registry::own()?.0.used().map(Device::empty_cache_for_good).collect();
        results.into_iter().try_for_each(|result| result.map(drop))
    });
}

/// For `set_memory_fraction_fn`: `torch.cuda.set_per_process_memory_fraction`.
#[unsafe(no_mangle)]
pub extern "C" fn vram_torch_set_memory_fraction(fraction: f64, ordinal: c_int) {
    told("setting the memory fraction", || {
        Ok(device(ordinal)?.allocator.set_limit(vramalloc::Limit::Fraction(fraction))?)
    });
}

/// For `set_begin_allocate_to_pool`: a capture into the pool is about to begin. (0, 0) means no pool, and is refused. `filter`,
/// a C++ object of the caller's, is not looked at.
#[unsafe(no_mangle)]
pub extern "C" fn vram_torch_begin_allocate_to_pool(ordinal: c_int, pool: PoolId, filter: *mut c_void) {
    let _ = filter;
    told("beginning a capture", || {
        let device = device(ordinal)?;
        device.routes.begin(&device.allocator, &device.streams, (pool.first, pool.second))
    });
}

/// For `set_end_allocate_to_pool_fn`: the capture is over.
#[unsafe(no_mangle)]
pub extern "C" fn vram_torch_end_allocate_to_pool(ordinal: c_int, pool: PoolId) {
    told("ending a capture", || device(ordinal)?.routes.end((pool.first, pool.second)));
}

/// For `set_release_pool`: a graph that used the pool is gone.
#[unsafe(no_mangle)]
pub extern "C" fn vram_torch_release_pool(ordinal: c_int, pool: PoolId) {
    told("releasing a pool", || device(ordinal)?.routes.release((pool.first, pool.second)));
}
