//! Allocation, host memory, copies.

use crate::contexts::{current_device, device_of_context};
use crate::streams::{forbid, stream};
use crate::{INVALID_VALUE, Result, answer, device_of_address, functions, refused};
use std::ffi::{c_uchar, c_uint, c_void};
use vramalloc::driver::{DevicePtr, Driver, HostPtr, StreamKey};

/// `CU_POINTER_ATTRIBUTE_MEMORY_TYPE` and two of its values.
const POINTER_MEMORY_TYPE: c_uint = 2;
const MEMORY_HOST: c_uint = 1;
const MEMORY_DEVICE: c_uint = 2;

/// What functions without a stream run on.
const DEFAULT: u64 = 0;

fn host(pointer: *const c_void) -> HostPtr {
    HostPtr(pointer.expose_provenance() as u64)
}

/// Runs a copy on a stream, unless it is one of no bytes.
fn copy(
    handle: u64,
    bytes: usize,
    queue: impl FnOnce(&dyn Driver, StreamKey) -> vramalloc::driver::Result<()>,
) -> Result {
    let (device, key) = stream(handle)?;
    if bytes == 0 {
        return Ok(());
    }
    queue(&*device, key).map_err(refused)
}

/// Waits for the default stream, as functions without one do.
fn finish() -> Result {
    let (device, key) = stream(DEFAULT)?;
    device.synchronize_stream(key).map_err(refused)
}

functions! {
    fn cuMemGetInfo_v2(free: *mut usize, total: *mut usize) {
        let info = current_device()?.memory_info().map_err(refused)?;
        // SAFETY: CUDA's contract.
        unsafe { answer(free, info.free_bytes as usize)?; answer(total, info.total_bytes as usize) }
    }

    fn cuMemAlloc_v2(place: *mut u64, bytes: usize) {
        forbid()?;
        let ptr = current_device()?.alloc(bytes as u64).map_err(refused)?;
        // SAFETY: CUDA's contract.
        unsafe { answer(place, ptr.0) }
    }

    fn cuMemFree_v2(address: u64) {
        forbid()?;
        device_of_address(address)?.free(DevicePtr(address)).map_err(refused)
    }

    fn cuMemAllocAsync(place: *mut u64, bytes: usize, handle: u64) {
        // CUDA has an address for no bytes, too.
        let ptr = stream(handle)?.0.alloc(bytes.max(1) as u64).map_err(refused)?;
        // SAFETY: CUDA's contract.
        unsafe { answer(place, ptr.0) }
    }

    fn cuMemFreeAsync(address: u64, handle: u64) {
        stream(handle)?; // the memory goes at once, after all work: the caller cannot tell
        device_of_address(address)?.free(DevicePtr(address)).map_err(refused)
    }

    fn cuDeviceGetDefaultMemPool(place: *mut u64, number: i32) {
        let ordinal = u32::try_from(number).map_err(|_| crate::INVALID_DEVICE)?;
        crate::device(ordinal)?;
        // SAFETY: CUDA's contract.
        unsafe { answer(place, 0xe000_0000 + u64::from(ordinal)) }
    }

    fn cuMemPoolSetAttribute(_pool: u64, attribute: c_uint, value: *mut c_void) {
        // The release threshold: nothing is kept here, so that any will do.
        if attribute == 4 && !value.is_null() { Ok(()) } else { Err(INVALID_VALUE) }
    }

    fn cuMemPoolTrimTo(_pool: u64, _bytes: usize) {
        Ok(())
    }

    fn cuMemHostAlloc(place: *mut *mut c_void, bytes: usize, _flags: c_uint) {
        forbid()?;
        let ptr = current_device()?.alloc_host(bytes as u64).map_err(refused)?;
        // SAFETY: CUDA's contract.
        unsafe { answer(place, std::ptr::with_exposed_provenance_mut(ptr.0 as usize)) }
    }

    fn cuMemFreeHost(pointer: *mut c_void) {
        forbid()?;
        // Any context may free it; the device that made it knows it.
        for ordinal in 0..crate::devices() {
            let device = crate::device(ordinal)?;
            if device.is_page_locked(pointer.cast()) {
                return device.free_host(host(pointer)).map_err(refused);
            }
        }
        Err(INVALID_VALUE)
    }

    fn cuPointerGetAttribute(value: *mut c_void, attribute: c_uint, address: u64) {
        if attribute != POINTER_MEMORY_TYPE {
            return Err(INVALID_VALUE);
        }
        let pointer = std::ptr::with_exposed_provenance::<u8>(address as usize);
        let is_host = (0..crate::devices()).any(|ordinal| {
            crate::device(ordinal).is_ok_and(|device| device.is_page_locked(pointer))
        });
        let is_device = device_of_address(address)
            .is_ok_and(|device| !device.accessible_from(DevicePtr(address)).is_empty());
        let kind = match (is_host, is_device) {
            (true, _) => MEMORY_HOST,
            (_, true) => MEMORY_DEVICE,
            _ => return Err(INVALID_VALUE),
        };
        // SAFETY: CUDA's contract: the attribute is a 32-bit number.
        unsafe { answer(value.cast::<c_uint>(), kind) }
    }

    fn cuMemcpyHtoDAsync_v2(target: u64, source: *const c_void, bytes: usize, handle: u64) {
        copy(handle, bytes, |device, key| {
            // SAFETY: CUDA's contract is the same.
            unsafe { device.copy_to_device(DevicePtr(target), source.cast(), bytes as u64, key) }
        })
    }

    fn cuMemcpyDtoHAsync_v2(target: *mut c_void, source: u64, bytes: usize, handle: u64) {
        copy(handle, bytes, |device, key| {
            // SAFETY: CUDA's contract is the same.
            unsafe { device.copy_to_host(target.cast(), DevicePtr(source), bytes as u64, key) }
        })
    }

    fn cuMemcpyDtoDAsync_v2(target: u64, source: u64, bytes: usize, handle: u64) {
        copy(handle, bytes, |device, key| {
            // SAFETY: CUDA's contract is the same.
            unsafe { device.copy_on_device(DevicePtr(target), DevicePtr(source), bytes as u64, key) }
        })
    }

    fn cuMemcpyPeerAsync(target: u64, to: u64, source: u64, from: u64, bytes: usize, handle: u64) {
        let (device, key) = stream(handle)?;
        let (to, from) = (device_of_context(to)?, device_of_context(from)?);
        // Over the host, and at once: the streams are waited for.
        device.synchronize_stream(key).map_err(refused)?;
        let mut held = vec![0; bytes];
        from.read(DevicePtr(source), &mut held).map_err(|_| crate::ILLEGAL_ADDRESS)?;
        to.write(DevicePtr(target), &held).map_err(|_| crate::ILLEGAL_ADDRESS)
    }

    fn cuMemcpyHtoD_v2(target: u64, source: *const c_void, bytes: usize) {
        copy(DEFAULT, bytes, |device, key| {
            // SAFETY: CUDA's contract is the same.
            unsafe { device.copy_to_device(DevicePtr(target), source.cast(), bytes as u64, key) }
        })?;
        finish()
    }

    fn cuMemcpyDtoH_v2(target: *mut c_void, source: u64, bytes: usize) {
        copy(DEFAULT, bytes, |device, key| {
            // SAFETY: CUDA's contract is the same.
            unsafe { device.copy_to_host(target.cast(), DevicePtr(source), bytes as u64, key) }
        })?;
        finish()
    }

    fn cuMemcpyDtoD_v2(target: u64, source: u64, bytes: usize) {
        copy(DEFAULT, bytes, |device, key| {
            // SAFETY: CUDA's contract is the same.
            unsafe { device.copy_on_device(DevicePtr(target), DevicePtr(source), bytes as u64, key) }
        })
    }

    fn cuMemsetD8Async(target: u64, value: c_uchar, bytes: usize, handle: u64) {
        copy(handle, bytes, |device, key| {
            // SAFETY: CUDA's contract is the same.
            unsafe { device.fill(DevicePtr(target), value, bytes as u64, key) }
        })
    }

    fn cuMemsetD32Async(target: u64, value: c_uint, words: usize, handle: u64) {
        if !target.is_multiple_of(4) {
            return Err(INVALID_VALUE);
        }
        let bytes = value.to_ne_bytes().repeat(words);
        copy(handle, bytes.len(), |device, key| {
            // SAFETY: the bytes are staged before the call returns; the rest is CUDA's contract.
            unsafe { device.copy_to_device(DevicePtr(target), bytes.as_ptr(), bytes.len() as u64, key) }
        })
    }
}
