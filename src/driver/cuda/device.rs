//! The trait's calls.

use super::error::{Code, Failure, INVALID_VALUE, NOT_READY, SUCCESS};
use super::{CudaDriver, LOST, Scope, number, opaque, vmm};
use crate::driver::{
    Call, CallCounts, Capabilities, DevicePtr, Driver, DriverError, DriverErrorKind, EventHandle, HostPtr,
    MemoryInfo, PageHandle, Result, StreamHandle, StreamKey,
};
use std::ptr;
use std::sync::atomic::Ordering;

/// `CU_EVENT_DISABLE_TIMING`.
const EVENT_DISABLE_TIMING: u32 = 2;
/// `CU_MEMHOSTALLOC_PORTABLE`: page-locked for every context.
const HOST_PORTABLE: u32 = 1;
/// `CU_POINTER_ATTRIBUTE_MEMORY_TYPE`.
const POINTER_MEMORY_TYPE: u32 = 2;

/// A count of bytes as the driver takes it.
pub(super) fn size(bytes: u64) -> std::result::Result<usize, Failure> {
    // `CUDA_ERROR_INVALID_VALUE`, which is what a 32-bit driver could answer at best.
    usize::try_from(bytes).map_err(|_| Failure::Call(1))
}

/// The function, or that this driver lacks it.
pub(super) fn need<F>(function: Option<F>) -> std::result::Result<F, Failure> {
    function.ok_or(Failure::Missing)
}

impl Driver for CudaDriver {
    fn device(&self) -> u32 {
        self.ordinal
    }

    fn name(&self) -> String {
        self.name.clone()
    }

    fn label(&self) -> String {
        format!("cuda:{}", self.ordinal)
    }

    fn capabilities(&self) -> Capabilities {
        self.capabilities
    }

    fn check_usable(&self) -> Result<()> {
        self.usable().map_err(|failure| failure.of_call(Call::Open))?;
        if self.state.load(Ordering::Relaxed) == LOST {
            return Err(DriverError::new(Call::Open, DriverErrorKind::DeviceLost));
        }
        Ok(())
    }

    fn memory_info(&self) -> Result<MemoryInfo> {
        let (mut free, mut total) = (0_usize, 0_usize);
        self.invoke(Call::MemoryInfo, Scope::Plain, |api| {
            // SAFETY: both pointers are valid for the call.
            Ok(unsafe { (api.mem_info)(&raw mut free, &raw mut total) })
        })?;
        Ok(MemoryInfo { free_bytes: free as u64, total_bytes: total as u64 })
    }

    fn alloc(&self, bytes: u64) -> Result<DevicePtr> {
        let mut address = 0;
        self.invoke(Call::Alloc, Scope::Relaxed, |api| {
            let bytes = size(bytes)?;
            // SAFETY: the pointer is valid for the call.
            Ok(unsafe { (api.mem_alloc)(&raw mut address, bytes) })
        })?;
        Ok(DevicePtr(address))
    }

    fn free(&self, ptr: DevicePtr) -> Result<()> {
        self.invoke(Call::Free, Scope::Relaxed, |api| {
            // SAFETY: takes a number; the driver checks it, and waits for the work that uses the memory.
            Ok(unsafe { (api.mem_free)(ptr.0) })
        })
    }

    fn reserve_addresses(&self, bytes: u64) -> Result<DevicePtr> {
        let mut address = 0;
        self.invoke(Call::ReserveAddresses, Scope::Relaxed, |api| {
            let (reserve, bytes) = (need(api.address_reserve)?, size(bytes)?);
            // SAFETY: the pointer is valid for the call; alignment 0 is the page size, address 0 any address.
            Ok(unsafe { reserve(&raw mut address, bytes, 0, 0, 0) })
        })?;
        Ok(DevicePtr(address))
    }

    fn free_addresses(&self, base: DevicePtr, bytes: u64) -> Result<()> {
        self.invoke(Call::FreeAddresses, Scope::Relaxed, |api| {
            let (free, bytes) = (need(api.address_free)?, size(bytes)?);
            // SAFETY: takes numbers, which the driver checks against its reservations.
            Ok(unsafe { free(base.0, bytes) })
        })
    }

    fn create_pages(&self, bytes: u64) -> Result<PageHandle> {
        let properties = vmm::properties(self.location());
        let mut handle = 0;
        self.invoke(Call::CreatePages, Scope::Relaxed, |api| {
            let (create, bytes) = (need(api.mem_create)?, size(bytes)?);
            // SAFETY: both pointers are valid for the call.
            Ok(unsafe { create(&raw mut handle, bytes, &raw const properties, 0) })
        })?;
        Ok(PageHandle(handle))
    }

    fn release_pages(&self, pages: PageHandle) -> Result<()> {
        self.invoke(Call::ReleasePages, Scope::Relaxed, |api| {
            let release = need(api.mem_release)?;
            // SAFETY: takes a number, which the driver checks; mapped memory stays until it is unmapped.
            Ok(unsafe { release(pages.0) })
        })
    }

    fn map(&self, ptr: DevicePtr, bytes: u64, pages: PageHandle) -> Result<()> {
        self.invoke(Call::Map, Scope::Relaxed, |api| {
            let (map, bytes) = (need(api.mem_map)?, size(bytes)?);
            // SAFETY: takes numbers, which the driver checks; a range that is mapped already is refused.
            Ok(unsafe { map(ptr.0, bytes, 0, pages.0, 0) })
        })
    }

    fn unmap(&self, ptr: DevicePtr, bytes: u64) -> Result<()> {
        self.invoke(Call::Unmap, Scope::Relaxed, |api| {
            let (unmap, bytes) = (need(api.mem_unmap)?, size(bytes)?);
            // SAFETY: takes numbers, which the driver checks; the caller answers for queued work on the range.
            Ok(unsafe { unmap(ptr.0, bytes) })
        })
    }

    fn set_access(&self, ptr: DevicePtr, bytes: u64, devices: &[u32]) -> Result<()> {
        if devices.is_empty() {
            return Ok(());
        }
        self.invoke(Call::SetAccess, Scope::Relaxed, |api| {
            let (set_access, bytes) = (need(api.mem_set_access)?, size(bytes)?);
            // An ordinal beyond the driver's numbers becomes one that it refuses.
            let ordinal = |&device: &u32| i32::try_from(device).unwrap_or(i32::MAX);
            let leave: Vec<_> = devices.iter().map(|device| vmm::read_write(ordinal(device))).collect();
            // SAFETY: the list is valid for the call, with its length beside it.
            Ok(unsafe { set_access(ptr.0, bytes, leave.as_ptr(), leave.len()) })
        })
    }

    fn stream_key(&self, handle: StreamHandle) -> Result<StreamKey> {
        self.identify(handle)
    }

    fn create_event(&self) -> Result<EventHandle> {
        let mut event = ptr::null_mut();
        self.invoke(Call::EventCreate, Scope::Plain, |api| {
            // SAFETY: the pointer is valid for the call.
            Ok(unsafe { (api.event_create)(&raw mut event, EVENT_DISABLE_TIMING) })
        })?;
        Ok(EventHandle(number(event)))
    }

    fn destroy_event(&self, event: EventHandle) -> Result<()> {
        self.invoke(Call::EventDestroy, Scope::Plain, |api| {
            // SAFETY: the caller has the event from `create_event` and gives it up here.
            Ok(unsafe { (api.event_destroy)(opaque(event.0)) })
        })
    }

    fn record_event(&self, event: EventHandle, stream: StreamKey) -> Result<()> {
        self.invoke_on(Call::EventRecord, stream, |api, stream| {
            // SAFETY: the event is alive, and so is the stream (see the module's documentation).
            unsafe { (api.event_record)(opaque(event.0), opaque(stream.0)) }
        })
    }

    fn query_event(&self, event: EventHandle) -> Result<bool> {
        let mut ended = true;
        self.invoke(Call::EventQuery, Scope::Relaxed, |api| {
            // SAFETY: the event is alive.
            Ok(match unsafe { (api.event_query)(opaque(event.0)) } {
                NOT_READY => {
                    ended = false;
                    SUCCESS
                }
                code => code,
            })
        })?;
        Ok(ended)
    }

    fn synchronize_event(&self, event: EventHandle) -> Result<()> {
        self.invoke(Call::EventSynchronize, Scope::Relaxed, |api| {
            // SAFETY: the event is alive.
            Ok(unsafe { (api.event_synchronize)(opaque(event.0)) })
        })
    }

    fn stream_wait_event(&self, stream: StreamKey, event: EventHandle) -> Result<()> {
        self.invoke_on(Call::StreamWait, stream, |api, stream| {
            // SAFETY: the event is alive, and so is the stream (see the module's documentation).
            unsafe { (api.stream_wait)(opaque(stream.0), opaque(event.0), 0) }
        })
    }

    fn synchronize(&self) -> Result<()> {
        self.invoke(Call::Synchronize, Scope::Plain, |api| {
            // SAFETY: no conditions; our context is current.
            Ok(unsafe { (api.ctx_synchronize)() })
        })
    }

    fn is_capturing(&self, stream: StreamKey) -> Result<bool> {
        if stream.handle == StreamHandle::DEFAULT || stream.handle == StreamHandle::LEGACY {
            // CUDA cannot capture it, and would answer with an error while another stream is captured.
            return self.usable().map(|()| false).map_err(|failure| failure.of_call(Call::IsCapturing));
        }
        let mut status = 0;
        self.invoke_on(Call::IsCapturing, stream, |api, stream| {
            // SAFETY: the pointer is valid for the call, and the stream is alive (see the module's documentation).
            unsafe { (api.stream_is_capturing)(opaque(stream.0), &raw mut status) }
        })?;
        // Also a capture that something has spoilt goes on until it is ended.
        Ok(status != 0)
    }

    fn capture_id(&self, stream: StreamKey) -> Result<Option<u64>> {
        let Some(info) = self.api.stream_capture_info else {
            return Ok(self.is_capturing(stream)?.then_some(0));
        };
        if stream.handle == StreamHandle::DEFAULT || stream.handle == StreamHandle::LEGACY {
            return Ok(None); // as above
        }
        let (mut status, mut id) = (0, 0);
        self.invoke_on(Call::IsCapturing, stream, |_, stream| {
            let none = ptr::null_mut();
            // SAFETY: both pointers are valid for the call, the others may be null, and the stream is alive (see the
            // module's documentation).
            unsafe { info(opaque(stream.0), &raw mut status, &raw mut id, none, none, none) }
        })?;
        Ok((status != 0).then_some(id))
    }

    fn alloc_host(&self, bytes: u64) -> Result<HostPtr> {
        let mut address = ptr::null_mut();
        self.invoke(Call::HostAlloc, Scope::Relaxed, |api| {
            let bytes = size(bytes)?;
            // SAFETY: the pointer is valid for the call.
            Ok(unsafe { (api.host_alloc)(&raw mut address, bytes, HOST_PORTABLE) })
        })?;
        Ok(HostPtr(number(address)))
    }

    fn free_host(&self, ptr: HostPtr) -> Result<()> {
        self.invoke(Call::HostFree, Scope::Relaxed, |api| {
            // SAFETY: the caller has the memory from `alloc_host` and gives it up here.
            Ok(unsafe { (api.host_free)(opaque(ptr.0)) })
        })
    }

    fn is_page_locked(&self, address: *const u8) -> bool {
        let Some(attribute) = self.api.pointer_attribute else { return true };
        let mut kind = 0_u32;
        let asked = self.run(Scope::Plain, |_| {
            // SAFETY: the attribute is a 32-bit number, and the pointer to one is valid for the call.
            Ok(unsafe {
                attribute((&raw mut kind).cast(), POINTER_MEMORY_TYPE, address.expose_provenance() as u64)
            })
        });
        match asked {
            Ok(()) => true,
            // What the driver does not know is pageable.
            Err(Failure::Call(INVALID_VALUE)) => false,
            Err(_) => true,
        }
    }

    unsafe fn copy_to_device(
        &self,
        target: DevicePtr,
        source: *const u8,
        bytes: u64,
        stream: StreamKey,
    ) -> Result<()> {
        let bytes = size(bytes).map_err(|failure| failure.of_call(Call::CopyToDevice))?;
        self.invoke_on(Call::CopyToDevice, stream, |api, stream| {
            // SAFETY: the caller's promise, and the stream is alive (see the module's documentation).
            unsafe { (api.copy_to_device_async)(target.0, source.cast(), bytes, opaque(stream.0)) }
        })
    }

    unsafe fn copy_to_host(
        &self,
        target: *mut u8,
        source: DevicePtr,
        bytes: u64,
        stream: StreamKey,
    ) -> Result<()> {
        let bytes = size(bytes).map_err(|failure| failure.of_call(Call::CopyToHost))?;
        self.invoke_on(Call::CopyToHost, stream, |api, stream| {
            // SAFETY: as for `copy_to_device`.
            unsafe { (api.copy_to_host_async)(target.cast(), source.0, bytes, opaque(stream.0)) }
        })
    }

    unsafe fn copy_on_device(
        &self,
        target: DevicePtr,
        source: DevicePtr,
        bytes: u64,
        stream: StreamKey,
    ) -> Result<()> {
        let bytes = size(bytes).map_err(|failure| failure.of_call(Call::CopyOnDevice))?;
        self.invoke_on(Call::CopyOnDevice, stream, |api, stream| {
            // SAFETY: as for `copy_to_device`.
            unsafe { (api.copy_on_device_async)(target.0, source.0, bytes, opaque(stream.0)) }
        })
    }

    unsafe fn fill(&self, target: DevicePtr, value: u8, bytes: u64, stream: StreamKey) -> Result<()> {
        let bytes = size(bytes).map_err(|failure| failure.of_call(Call::Fill))?;
        self.invoke_on(Call::Fill, stream, |api, stream| {
            // SAFETY: as for `copy_to_device`.
            unsafe { (api.set_bytes_async)(target.0, value, bytes, opaque(stream.0)) }
        })
    }

    fn synchronize_stream(&self, stream: StreamKey) -> Result<()> {
        self.invoke_on(Call::StreamSynchronize, stream, |api, stream| {
            // SAFETY: the stream is alive (see the module's documentation).
            unsafe { (api.stream_synchronize)(opaque(stream.0)) }
        })
    }

    fn calls(&self) -> CallCounts {
        self.meter.counts()
    }
}

impl CudaDriver {
    /// The ordinal as the driver's structures take it.
    fn location(&self) -> i32 {
        i32::try_from(self.ordinal).unwrap_or(i32::MAX)
    }

    /// Makes a call on `stream`, if that is the stream it names on this thread, too.
    fn invoke_on(
        &self,
        call: Call,
        stream: StreamKey,
        body: impl FnOnce(&super::Api, StreamHandle) -> Code,
    ) -> Result<()> {
        self.usable().map_err(|failure| failure.of_call(call))?;
        let handle = self.reach(call, stream)?;
        self.invoke(call, Scope::Plain, |api| Ok(body(api, handle)))
    }
}
