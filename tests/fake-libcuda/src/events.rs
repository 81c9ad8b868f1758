//! Events.

use crate::contexts::current_device;
use crate::streams::{forbid, stream};
use crate::{INVALID_HANDLE, NOT_READY, answer, device_of_handle, functions, refused};
use std::ffi::c_uint;
use vramalloc::driver::{Driver, EventHandle};

functions! {
    fn cuEventCreate(place: *mut u64, _flags: c_uint) {
        let event = current_device()?.create_event().map_err(refused)?;
        // SAFETY: CUDA's contract.
        unsafe { answer(place, event.0) }
    }

    fn cuEventDestroy_v2(event: u64) {
        device_of_handle(event)?.destroy_event(EventHandle(event)).map_err(refused)
    }

    fn cuEventRecord(event: u64, handle: u64) {
        let (device, key) = stream(handle)?;
        if device_of_handle(event)?.device() != device.device() {
            return Err(INVALID_HANDLE);
        }
        device.record_event(EventHandle(event), key).map_err(refused)
    }

    fn cuEventQuery(event: u64) {
        forbid()?;
        if device_of_handle(event)?.query_event(EventHandle(event)).map_err(refused)? {
            Ok(())
        } else {
            Err(NOT_READY)
        }
    }

    fn cuEventSynchronize(event: u64) {
        forbid()?;
        device_of_handle(event)?.synchronize_event(EventHandle(event)).map_err(refused)
    }
}
