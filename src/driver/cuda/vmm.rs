//! The structures of virtual memory management, filled in a way that fits every version of cudarc's bindings.

use super::api::Api;
use super::error::SUCCESS;
use cudarc::driver::sys::{
    CUdevice, CUmemAccess_flags, CUmemAccessDesc, CUmemAllocationProp, CUmemAllocationType, CUmemLocation,
    CUmemLocationType,
};
use std::mem::{align_of, size_of, zeroed};
use std::ptr::addr_of_mut;

/// `CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED`.
const ATTRIBUTE_VIRTUAL_MEMORY: u32 = 102;
/// `CU_MEM_ALLOC_GRANULARITY_MINIMUM`.
const GRANULARITY_MINIMUM: u32 = 0;

// The layout of CUDA's header on 64-bit machines. `location` relies on the first.
#[cfg(target_pointer_width = "64")]
const _: () = {
    assert!(size_of::<CUmemLocation>() == 8 && align_of::<CUmemLocation>() == 4);
    assert!(size_of::<CUmemAccessDesc>() == 12);
    assert!(size_of::<CUmemAllocationProp>() == 32);
};

/// The device of that ordinal as a place for memory.
fn location(ordinal: CUdevice) -> CUmemLocation {
    // SAFETY: zero is a value of each field (a C enumeration's 0 and a number).
    let mut location: CUmemLocation = unsafe { zeroed() };
    location.type_ = CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE;
    // SAFETY: the structure is two 32-bit numbers (asserted above), the second being the ordinal. Newer bindings
    // have a union in its place, so the field has no name that all of them share.
    unsafe { addr_of_mut!(location).cast::<i32>().add(1).write(ordinal) };
    location
}

/// Physical memory of the device of that ordinal.
pub(super) fn properties(ordinal: CUdevice) -> CUmemAllocationProp {
    // SAFETY: zero is a value of each field; the null pointer and the zero flags mean "nothing special".
    let mut properties: CUmemAllocationProp = unsafe { zeroed() };
    properties.type_ = CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED;
    properties.location = location(ordinal);
    properties
}

/// Leave to read and write for the device of that ordinal.
pub(super) fn read_write(ordinal: CUdevice) -> CUmemAccessDesc {
    CUmemAccessDesc { location: location(ordinal), flags: CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE }
}

/// The smallest piece that the device can map; `None` if it cannot.
pub(super) fn page_bytes(api: &Api, device: CUdevice, ordinal: CUdevice) -> Option<u64> {
    if !api.has_virtual_memory() {
        return None;
    }
    let mut supported = 0;
    // SAFETY: the pointer is valid for the call and `device` comes from the driver.
    let code = unsafe { (api.device_attribute)(&raw mut supported, ATTRIBUTE_VIRTUAL_MEMORY, device) };
    if code != SUCCESS || supported == 0 {
        return None;
    }
    let (properties, mut bytes) = (properties(ordinal), 0_usize);
    // SAFETY: both pointers are valid for the call.
    let code = unsafe { api.mem_granularity?(&raw mut bytes, &raw const properties, GRANULARITY_MINIMUM) };
    (code == SUCCESS && bytes > 0).then_some(bytes as u64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_ordinal_lands_behind_the_type() {
        let location = location(0x0102_0304);
        // SAFETY: the structure is eight bytes of plain numbers.
        let words: [u32; 2] = unsafe { std::mem::transmute(location) };
        assert_eq!(words, [1, 0x0102_0304]);
    }

    #[test]
    fn access_is_read_and_write() {
        // SAFETY: the structure is twelve bytes of plain numbers.
        let words: [u32; 3] = unsafe { std::mem::transmute(read_write(5)) };
        assert_eq!(words, [1, 5, 3]);
    }
}
