//! Allocators: made, used, destroyed.

use crate::devices::Devices;
use crate::logging;
use crate::registry;
use crate::status::{Failure, Result, Status, answer};
use crate::streams::{forget_last, named};
use std::ffi::{CStr, c_char, c_int, c_void};
use std::sync::Arc;
use vramalloc::{Config, DevicePtr, StreamHandle};

/// An allocator. 0 is none.
pub type Allocator = u64;

/// A text of the caller; null is none.
///
/// # Safety
/// `text` is null or a string that ends in a zero byte.
pub(crate) unsafe fn text<'a>(text: *const c_char, name: &'static str) -> Result<Option<&'a str>> {
    if text.is_null() {
        return Ok(None);
    }
    // SAFETY: the caller answers for it.
    let text = unsafe { CStr::from_ptr(text) };
    text.to_str().map(Some).map_err(|_| Failure::NotText(name))
}

/// Writes a result of the caller's.
///
/// # Safety
/// `out` is null or can be written.
pub(crate) unsafe fn put<T>(out: *mut T, name: &'static str, value: T) -> Result<()> {
    if out.is_null() {
        return Err(Failure::Null(name));
    }
    // SAFETY: not null, and the caller answers for the rest.
    unsafe { out.write(value) };
    Ok(())
}

/// The device address or stream that a pointer is. Nobody here follows it.
pub(crate) fn number(pointer: *mut c_void) -> u64 {
    pointer.addr() as u64
}

/// The pointer that an address is, for a caller who hands it to the device.
pub(crate) fn pointer(ptr: DevicePtr) -> *mut c_void {
    std::ptr::without_provenance_mut(ptr.0 as usize)
}

/// Makes an allocator.
///
/// `device`: `cuda` for all GPUs of the process, each opened when it is first used; `cuda:N` for that one; `sim` or
/// `sim:4GiB` for a simulated device, which has the number 0; `auto` for the GPUs if there are any, else `sim`. Null is
/// `auto`. `config`: a configuration string as in VRAMALLOC_CONF; null takes that variable.
///
/// # Safety
/// `device` and `config` are null or strings that end in a zero byte; `out` can be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vram_create(device: *const c_char, config: *const c_char, out: *mut Allocator) -> Status {
    answer(|| {
        logging::start();
        if out.is_null() {
            return Err(Failure::Null("out"));
        }
        // SAFETY: the caller answers for both.
        let (device, config) = unsafe { (text(device, "device")?, text(config, "config")?) };
        let config: Config = match config {
            Some(config) => config.parse()?,
            None => Config::from_env()?,
        };
        let devices = Devices::new(device.unwrap_or("auto").parse()?, config)?;
        // SAFETY: the caller answers for it.
        unsafe { put(out, "out", registry::insert(Arc::new(devices))) }
    })
}

/// The allocator of the process, which the functions for PyTorch and CuPy use: configured by VRAMALLOC_CONF, on the
/// devices of VRAMALLOC_DEVICE (as `device` of `vram_create`; `cuda` if it is not set). It cannot be destroyed.
///
/// # Safety
/// `out` can be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vram_process_allocator(out: *mut Allocator) -> Status {
    answer(|| {
        if out.is_null() {
            return Err(Failure::Null("out"));
        }
        // SAFETY: the caller answers for it.
        unsafe { put(out, "out", registry::own()?.1) }
    })
}

/// Destroys an allocator: its cached memory goes back. What is still allocated stays valid for the life of the process,
/// and can no more be freed; VRAMALLOC_LOG=warn lists it.
#[unsafe(no_mangle)]
pub extern "C" fn vram_destroy(allocator: Allocator) -> Status {
    answer(|| {
        if registry::is_own(allocator) {
            return Err(Failure::Argument("the process's own allocator cannot be destroyed".to_owned()));
        }
        let devices = registry::remove(allocator)?;
        forget_last();
        drop(devices);
        Ok(())
    })
}

/// Allocates `bytes` on `device` (by number) for use on `stream` (a `cudaStream_t`; null is the default stream), and
/// writes the device address to `out`. Zero bytes are legal: null.
///
/// A stream that is destroyed while the allocator lives is to be announced before: `vram_retire_stream`.
///
/// # Safety
/// `stream` is a stream of the device that exists; `out` can be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vram_alloc(
    allocator: Allocator,
    bytes: u64,
    device: c_int,
    stream: *mut c_void,
    out: *mut *mut c_void,
) -> Status {
    answer(|| {
        if out.is_null() {
            return Err(Failure::Null("out"));
        }
        let devices = registry::get(allocator)?;
        let ptr = devices.get(device)?.alloc(bytes, number(stream))?;
        log::trace!("alloc {bytes} on device {device}, stream {stream:?}: {ptr}");
        // SAFETY: the caller answers for it.
        unsafe { put(out, "out", pointer(ptr)) }
    })
}

/// Frees what `vram_alloc` gave. Null is nothing.
///
/// `bytes` is what was asked for, or 0 for "not known". `stream` is the one that used the memory last; if it is not the
/// one that it was allocated on, the memory is not reused before what is queued on it by now has passed.
///
/// # Safety
/// `stream` is the stream of the allocation, or one of the device that exists.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vram_free(
    allocator: Allocator,
    ptr: *mut c_void,
    bytes: u64,
    device: c_int,
    stream: *mut c_void,
) -> Status {
    answer(|| {
        let devices = registry::get(allocator)?;
        let device = devices.get(device)?;
        if ptr.is_null() {
            return Ok(());
        }
        let ptr = DevicePtr(number(ptr));
        let allocation = device.allocator.from_raw(ptr)?;
        let mut failed = None;
        if bytes != 0 && bytes != allocation.bytes() {
            let (asked, block) = (allocation.bytes(), allocation.block_bytes());
            failed = Some(Failure::Argument(format!(
                "{ptr} has {asked} bytes (a block of {block}), not {bytes}; nothing was freed"
            )));
        } else if named(number(stream)) != allocation.stream().key().handle
            || named(number(stream)) == StreamHandle::PER_THREAD_DEFAULT
        {
            // That handle is another stream in each thread; whether it is this block's is told by its identity.
            let record = |stream: &_| Ok(allocation.record_stream(stream)?);
            failed = device.streams.with(&device.allocator, number(stream), record).err();
        }
        if let Some(failure) = failed {
            let _ = device.allocator.into_raw(allocation);
            return Err(failure);
        }
        log::trace!("free {ptr}");
        drop(allocation);
        Ok(())
    })
}

/// Announces that work on `stream` uses the allocation at `ptr`: once freed, it is not reused before what is queued on
/// `stream` by then has passed.
///
/// # Safety
/// `stream` is a stream of the allocation's device that exists.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vram_record_stream(
    allocator: Allocator,
    ptr: *mut c_void,
    device: c_int,
    stream: *mut c_void,
) -> Status {
    answer(|| {
        let devices = registry::get(allocator)?;
        devices.get(device)?.record_stream(DevicePtr(number(ptr)), number(stream))
    })
}

/// Makes a stream, for programs that have no CUDA runtime or use a simulated device. It lives as long as the allocator.
///
/// # Safety
/// `out` can be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vram_create_stream(allocator: Allocator, device: c_int, out: *mut *mut c_void) -> Status {
    answer(|| {
        if out.is_null() {
            return Err(Failure::Null("out"));
        }
        let devices = registry::get(allocator)?;
        let handle = devices.get(device)?.open.create_stream()?;
        // SAFETY: the caller answers for it.
        unsafe { put(out, "out", pointer(DevicePtr(handle.0))) }
    })
}

/// To be called before a stream is destroyed that was used with the allocator: the driver gives its handle to another
/// stream, and nothing else tells the two apart.
///
/// # Safety
/// `stream` is a stream of the device that exists.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vram_retire_stream(allocator: Allocator, device: c_int, stream: *mut c_void) -> Status {
    answer(|| {
        let devices = registry::get(allocator)?;
        let device = devices.get(device)?;
        device.streams.retire(&device.allocator, number(stream))
    })
}

/// Gives all cached memory back to the driver, of `device` or, if that is negative, of every device used so far. Writes
/// the bytes to `freed`, if that is not null. Waits for no work: what is still used by then, as far as the driver has
/// noticed, stays cached.
///
/// # Safety
/// `freed` is null or can be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vram_empty_cache(allocator: Allocator, device: c_int, freed: *mut u64) -> Status {
    answer(|| {
        let devices = registry::get(allocator)?;
        let bytes = empty_cache(&devices, device)?;
        // SAFETY: the caller answers for it.
        if freed.is_null() { Ok(()) } else { unsafe { put(freed, "freed", bytes) } }
    })
}

pub(crate) fn empty_cache(devices: &Devices, device: c_int) -> Result<u64> {
    let mut bytes = 0;
    if device >= 0 {
        bytes += devices.get(device)?.allocator.empty_cache()?;
    } else {
        for device in devices.used() {
            bytes += device.allocator.empty_cache()?;
        }
    }
    log::debug!("{bytes} bytes given back");
    Ok(bytes)
}

/// Lets another device (by number) use all memory of expandable segments of `device`, now and later. For fixed segments
/// that is what `cudaDeviceEnablePeerAccess` does.
#[unsafe(no_mangle)]
pub extern "C" fn vram_grant_access(allocator: Allocator, device: c_int, peer: c_int) -> Status {
    answer(|| {
        let peer = u32::try_from(peer).map_err(|_| Failure::Argument(format!("{peer} is no device")))?;
        let devices = registry::get(allocator)?;
        Ok(devices.get(device)?.allocator.grant_access(peer)?)
    })
}

/// Caps reserved memory at a part of the device's, 0 to 1; 1 is no cap.
#[unsafe(no_mangle)]
pub extern "C" fn vram_set_memory_fraction(allocator: Allocator, device: c_int, fraction: f64) -> Status {
    answer(|| {
        let devices = registry::get(allocator)?;
        Ok(devices.get(device)?.allocator.set_limit(vramalloc::Limit::Fraction(fraction))?)
    })
}
