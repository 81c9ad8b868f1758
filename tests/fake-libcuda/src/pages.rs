//! Virtual memory management.

use crate::contexts::current_device;
use crate::streams::forbid;
use crate::{INVALID_VALUE, answer, device, device_of_address, device_of_handle, functions, refused};
use std::ffi::{c_int, c_uint, c_ulonglong};
use vramalloc::driver::{DevicePtr, Driver, PageHandle};

/// `CUmemLocation`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Location {
    kind: c_uint,
    id: c_int,
}

/// The beginning of `CUmemAllocationProp`.
#[repr(C)]
pub struct Properties {
    kind: c_uint,
    handle_types: c_uint,
    location: Location,
}

/// `CUmemAccessDesc`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Access {
    location: Location,
    flags: c_uint,
}

/// `CU_MEM_LOCATION_TYPE_DEVICE`, `CU_MEM_ALLOCATION_TYPE_PINNED`, `CU_MEM_ACCESS_FLAGS_PROT_READWRITE`.
const LOCATION_DEVICE: c_uint = 1;
const ALLOCATION_PINNED: c_uint = 1;
const READ_WRITE: c_uint = 3;

impl Location {
    fn ordinal(self) -> crate::Result<u32> {
        let ordinal = u32::try_from(self.id).map_err(|_| INVALID_VALUE)?;
        if self.kind == LOCATION_DEVICE { Ok(ordinal) } else { Err(INVALID_VALUE) }
    }
}

/// # Safety
/// CUDA's contract.
unsafe fn location(properties: *const Properties) -> crate::Result<u32> {
    // SAFETY: CUDA's contract.
    let properties = unsafe { properties.as_ref() }.ok_or(INVALID_VALUE)?;
    if properties.kind != ALLOCATION_PINNED || properties.handle_types != 0 {
        return Err(crate::NOT_SUPPORTED);
    }
    properties.location.ordinal()
}

functions! {
    fn cuMemGetAllocationGranularity(place: *mut usize, properties: *const Properties, _kind: c_uint) {
        // SAFETY: CUDA's contract.
        let bytes = device(unsafe { location(properties) }?)?.capabilities().page_bytes;
        // SAFETY: CUDA's contract.
        unsafe { answer(place, bytes as usize) }
    }

    fn cuMemAddressReserve(place: *mut u64, bytes: usize, _alignment: usize, _wish: u64, flags: c_ulonglong) {
        forbid()?;
        if flags != 0 {
            return Err(INVALID_VALUE);
        }
        let base = current_device()?.reserve_addresses(bytes as u64).map_err(refused)?;
        // SAFETY: CUDA's contract.
        unsafe { answer(place, base.0) }
    }

    fn cuMemAddressFree(address: u64, bytes: usize) {
        forbid()?;
        device_of_address(address)?.free_addresses(DevicePtr(address), bytes as u64).map_err(refused)
    }

    fn cuMemCreate(place: *mut u64, bytes: usize, properties: *const Properties, flags: c_ulonglong) {
        forbid()?;
        if flags != 0 {
            return Err(INVALID_VALUE);
        }
        // SAFETY: CUDA's contract.
        let pages = device(unsafe { location(properties) }?)?.create_pages(bytes as u64).map_err(refused)?;
        // SAFETY: CUDA's contract.
        unsafe { answer(place, pages.0) }
    }

    fn cuMemRelease(handle: u64) {
        forbid()?;
        device_of_handle(handle)?.release_pages(PageHandle(handle)).map_err(refused)
    }

    fn cuMemMap(address: u64, bytes: usize, offset: usize, handle: u64, flags: c_ulonglong) {
        forbid()?;
        if offset != 0 || flags != 0 {
            return Err(INVALID_VALUE);
        }
        device_of_address(address)?.map(DevicePtr(address), bytes as u64, PageHandle(handle)).map_err(refused)
    }

    fn cuMemUnmap(address: u64, bytes: usize) {
        forbid()?;
        device_of_address(address)?.unmap(DevicePtr(address), bytes as u64).map_err(refused)
    }

    fn cuMemSetAccess(address: u64, bytes: usize, list: *const Access, len: usize) {
        forbid()?;
        if list.is_null() || len == 0 {
            return Err(INVALID_VALUE);
        }
        // SAFETY: CUDA's contract: so many entries.
        let list = unsafe { std::slice::from_raw_parts(list, len) };
        if list.iter().any(|entry| entry.flags != READ_WRITE) {
            return Err(crate::NOT_SUPPORTED);
        }
        let devices = list.iter().map(|entry| entry.location.ordinal()).collect::<crate::Result<Vec<u32>>>()?;
        for &ordinal in &devices {
            device(ordinal)?;
        }
        device_of_address(address)?.set_access(DevicePtr(address), bytes as u64, &devices).map_err(refused)
    }
}
