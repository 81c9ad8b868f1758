//! Streams and captures.

use crate::contexts::current_device;
use crate::{
    CAPTURE_UNSUPPORTED, INVALID_HANDLE, INVALID_VALUE, Result, answer, device_of_handle, functions, note_stale,
    refused,
};
use std::cell::Cell;
use std::ffi::{c_int, c_uint, c_ulonglong};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::ThreadId;
use vramalloc::driver::sim::{CaptureMode, Graph, SimDriver};
use vramalloc::driver::{Driver, DriverErrorKind, EventHandle, StreamHandle, StreamKey};

/// `CUstreamCaptureMode`.
const GLOBAL: c_uint = 0;
const THREAD_LOCAL: c_uint = 1;
const RELAXED: c_uint = 2;

struct Capture {
    stream: u64,
    mode: c_uint,
    thread: ThreadId,
}

/// The captures underway. The simulated device is told that they are relaxed; what the calling thread's mode forbids is
/// seen to here, as the device knows no such mode.
static CAPTURES: Mutex<Vec<Capture>> = Mutex::new(Vec::new());

thread_local! {
    static MODE: Cell<c_uint> = const { Cell::new(GLOBAL) };
}

/// The device and identity of a stream; handles up to 2 are default streams of the current context.
pub(crate) fn stream(handle: u64) -> Result<(Arc<SimDriver>, StreamKey)> {
    let device = if handle <= StreamHandle::PER_THREAD_DEFAULT.0 {
        current_device()?
    } else {
        device_of_handle(handle).inspect_err(|_| note_stale(handle))?
    };
    let key = device.stream_key(StreamHandle(handle)).map_err(|error| {
        if error.kind == DriverErrorKind::StreamGone {
            note_stale(handle);
        }
        refused(error)
    })?;
    Ok((device, key))
}

/// Breaks the captures that the calling thread's call may not be made during.
pub(crate) fn forbid() -> Result {
    let (mode, thread) = (MODE.get(), std::thread::current().id());
    if mode == RELAXED {
        return Ok(());
    }
    break_where(|capture| match capture.mode {
        GLOBAL => mode == GLOBAL || capture.thread == thread,
        THREAD_LOCAL => capture.thread == thread,
        _ => false,
    })
}

/// The same for waiting for a whole device, which no mode allows.
pub(crate) fn forbid_waiting() -> Result {
    break_where(|_| true)
}

fn break_where(is_broken: impl Fn(&Capture) -> bool) -> Result {
    let captures = CAPTURES.lock().unwrap_or_else(PoisonError::into_inner);
    let mut broken = Ok(());
    for capture in captures.iter().filter(|capture| is_broken(capture)) {
        device_of_handle(capture.stream)?.invalidate_capture(StreamHandle(capture.stream));
        broken = Err(CAPTURE_UNSUPPORTED);
    }
    broken
}

functions! {
    fn cuStreamCreate(place: *mut u64, _flags: c_uint) {
        let handle = current_device()?.create_stream();
        // SAFETY: CUDA's contract.
        unsafe { answer(place, handle.0) }
    }

    fn cuStreamCreateWithPriority(place: *mut u64, _flags: c_uint, _priority: c_int) {
        let handle = current_device()?.create_stream();
        // SAFETY: CUDA's contract.
        unsafe { answer(place, handle.0) }
    }

    fn cuStreamDestroy_v2(handle: u64) {
        let device = device_of_handle(handle).inspect_err(|_| note_stale(handle))?;
        device.destroy_stream(StreamHandle(handle)).map_err(|_| INVALID_HANDLE)
    }

    fn cuStreamSynchronize(handle: u64) {
        let (device, key) = stream(handle)?;
        device.synchronize_stream(key).map_err(refused)
    }

    fn cuStreamWaitEvent(handle: u64, event: u64, flags: c_uint) {
        let (device, key) = stream(handle)?;
        if flags != 0 {
            return Err(INVALID_VALUE);
        }
        // A stream may wait for another device's event; the simulated device cannot, and the host waits instead.
        let owner = device_of_handle(event)?;
        if owner.device() != device.device() {
            return owner.synchronize_event(EventHandle(event)).map_err(refused);
        }
        device.stream_wait_event(key, EventHandle(event)).map_err(refused)
    }

    fn cuStreamGetId(handle: u64, place: *mut c_ulonglong) {
        let key = stream(handle)?.1;
        // SAFETY: CUDA's contract.
        unsafe { answer(place, key.id) }
    }

    fn cuStreamIsCapturing(handle: u64, place: *mut c_uint) {
        let (device, key) = stream(handle)?;
        let capturing = device.is_capturing(key).map_err(refused)?;
        // SAFETY: CUDA's contract.
        unsafe { answer(place, c_uint::from(capturing)) }
    }

    fn cuStreamBeginCapture_v2(handle: u64, mode: c_uint) {
        if handle <= StreamHandle::LEGACY.0 || mode > RELAXED {
            return Err(CAPTURE_UNSUPPORTED);
        }
        let (device, key) = stream(handle)?;
        device.begin_capture(key, CaptureMode::Relaxed).map_err(refused)?;
        let capture = Capture { stream: handle, mode, thread: std::thread::current().id() };
        CAPTURES.lock().unwrap_or_else(PoisonError::into_inner).push(capture);
        Ok(())
    }

    fn cuStreamEndCapture(handle: u64, place: *mut *mut Graph) {
        let (device, key) = stream(handle)?;
        CAPTURES.lock().unwrap_or_else(PoisonError::into_inner).retain(|capture| capture.stream != handle);
        let graph = device.end_capture(key).map_err(refused)?;
        // SAFETY: CUDA's contract.
        unsafe { answer(place, Box::into_raw(Box::new(graph))) }
    }

    fn cuGraphDestroy(graph: *mut Graph) {
        if graph.is_null() {
            return Err(INVALID_VALUE);
        }
        // SAFETY: CUDA's contract: it comes from the end of a capture and is destroyed once.
        drop(unsafe { Box::from_raw(graph) });
        Ok(())
    }

    fn cuThreadExchangeStreamCaptureMode(mode: *mut c_uint) {
        // SAFETY: CUDA's contract.
        let mode = unsafe { mode.as_mut() }.ok_or(INVALID_VALUE)?;
        if *mode > RELAXED {
            return Err(INVALID_VALUE);
        }
        *mode = MODE.replace(*mode);
        Ok(())
    }
}
