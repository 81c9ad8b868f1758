//! Initialization, devices and contexts.

use crate::{INVALID_CONTEXT, INVALID_DEVICE, INVALID_VALUE, NOT_INITIALIZED, Result, answer, device, functions};
use std::cell::RefCell;
use std::collections::HashMap;
use std::ffi::{c_char, c_int, c_uint};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, LazyLock, Mutex, PoisonError};
use vramalloc::driver::Driver;
use vramalloc::driver::sim::SimDriver;

/// A context's address, which is only a number here.
type Context = u64;

const FIRST_PRIMARY: Context = 0xc000_0000;
const CONTEXT_STEP: u64 = 0x100;

static INITIALIZED: AtomicBool = AtomicBool::new(false);
static NEXT: AtomicU64 = AtomicU64::new(0xd000_0000);
/// The device of each context that there is, with how often it was retained.
static CONTEXTS: LazyLock<Mutex<HashMap<Context, (u32, u64)>>> = LazyLock::new(Mutex::default);

thread_local! {
    static STACK: RefCell<Vec<Context>> = const { RefCell::new(Vec::new()) };
}

fn contexts<T>(body: impl FnOnce(&mut HashMap<Context, (u32, u64)>) -> T) -> T {
    body(&mut CONTEXTS.lock().unwrap_or_else(PoisonError::into_inner))
}

/// Whether a function may be called.
pub(crate) fn initialized(name: &str) -> Result {
    let early = ["cuInit", "cuDriverGetVersion", "cuGetErrorName", "cuGetErrorString"];
    if early.contains(&name) || INITIALIZED.load(Ordering::Acquire) { Ok(()) } else { Err(NOT_INITIALIZED) }
}

fn ordinal(number: c_int) -> Result<u32> {
    let ordinal = u32::try_from(number).map_err(|_| INVALID_DEVICE)?;
    device(ordinal).map(|_| ordinal)
}

/// The calling thread's context.
fn current() -> Context {
    STACK.with_borrow(|stack| stack.last().copied().unwrap_or(0))
}

/// The device of a context.
pub(crate) fn device_of_context(context: Context) -> Result<Arc<SimDriver>> {
    device(contexts(|all| all.get(&context).map(|entry| entry.0)).ok_or(INVALID_CONTEXT)?)
}

/// The device of the calling thread's context.
pub(crate) fn current_device() -> Result<Arc<SimDriver>> {
    device_of_context(current())
}

functions! {
    fn cuInit(flags: c_uint) {
        if flags != 0 {
            return Err(INVALID_VALUE);
        }
        INITIALIZED.store(true, Ordering::Release);
        Ok(())
    }

    fn cuDriverGetVersion(version: *mut c_int) {
        // SAFETY: CUDA's contract.
        unsafe { answer(version, 13_000) }
    }

    fn cuDeviceGetCount(number: *mut c_int) {
        // SAFETY: CUDA's contract.
        unsafe { answer(number, crate::devices() as c_int) }
    }

    fn cuDeviceGet(place: *mut c_int, number: c_int) {
        let ordinal = ordinal(number)?;
        // SAFETY: CUDA's contract.
        unsafe { answer(place, ordinal as c_int) }
    }

    fn cuDeviceGetName(name: *mut c_char, room: c_int, number: c_int) {
        ordinal(number)?;
        let text = b"simulated device behind a fake libcuda\0";
        let room = usize::try_from(room).map_err(|_| INVALID_VALUE)?;
        if name.is_null() || room == 0 {
            return Err(INVALID_VALUE);
        }
        let len = text.len().min(room);
        // SAFETY: CUDA's contract: there is so much room.
        unsafe {
            std::ptr::copy_nonoverlapping(text.as_ptr().cast::<c_char>(), name, len);
            name.add(len - 1).write(0);
        }
        Ok(())
    }

    fn cuDeviceGetAttribute(value: *mut c_int, attribute: c_uint, number: c_int) {
        ordinal(number)?;
        let known = match attribute {
            75 => 9,        // compute capability 9.0
            76 => 0,
            102 | 115 => 1, // virtual memory management, memory pools
            _ => return Err(INVALID_VALUE),
        };
        // SAFETY: CUDA's contract.
        unsafe { answer(value, known) }
    }

    fn cuDeviceTotalMem_v2(bytes: *mut usize, number: c_int) {
        let total = device(ordinal(number)?)?.capabilities().total_bytes;
        // SAFETY: CUDA's contract.
        unsafe { answer(bytes, total as usize) }
    }

    fn cuDevicePrimaryCtxRetain(place: *mut Context, number: c_int) {
        let ordinal = ordinal(number)?;
        let context = FIRST_PRIMARY + u64::from(ordinal) * CONTEXT_STEP;
        contexts(|all| all.entry(context).or_insert((ordinal, 0)).1 += 1);
        // SAFETY: CUDA's contract.
        unsafe { answer(place, context) }
    }

    fn cuDevicePrimaryCtxRelease_v2(number: c_int) {
        let context = FIRST_PRIMARY + u64::from(ordinal(number)?) * CONTEXT_STEP;
        contexts(|all| {
            let (_, shares) = all.get_mut(&context).filter(|entry| entry.1 > 0).ok_or(INVALID_CONTEXT)?;
            *shares -= 1; // what is left of it stays: a later share finds it as it was
            Ok(())
        })
    }

    fn cuCtxCreate_v2(place: *mut Context, _flags: c_uint, number: c_int) {
        let ordinal = ordinal(number)?;
        let context = NEXT.fetch_add(CONTEXT_STEP, Ordering::Relaxed);
        contexts(|all| all.insert(context, (ordinal, 1)));
        STACK.with_borrow_mut(|stack| stack.push(context));
        // SAFETY: CUDA's contract.
        unsafe { answer(place, context) }
    }

    fn cuCtxDestroy_v2(context: Context) {
        contexts(|all| all.remove(&context)).ok_or(INVALID_CONTEXT)?;
        STACK.with_borrow_mut(|stack| {
            if stack.last() == Some(&context) {
                stack.pop();
            }
        });
        Ok(())
    }

    fn cuCtxPushCurrent_v2(context: Context) {
        device_of_context(context)?;
        STACK.with_borrow_mut(|stack| stack.push(context));
        Ok(())
    }

    fn cuCtxPopCurrent_v2(place: *mut Context) {
        let popped = STACK.with_borrow_mut(Vec::pop).ok_or(INVALID_CONTEXT)?;
        if place.is_null() {
            return Ok(());
        }
        // SAFETY: CUDA's contract.
        unsafe { answer(place, popped) }
    }

    fn cuCtxGetCurrent(place: *mut Context) {
        // SAFETY: CUDA's contract.
        unsafe { answer(place, current()) }
    }

    fn cuCtxSetCurrent(context: Context) {
        if context != 0 {
            device_of_context(context)?;
        }
        STACK.with_borrow_mut(|stack| {
            stack.pop();
            if context != 0 {
                stack.push(context);
            }
        });
        Ok(())
    }

    fn cuCtxSynchronize() {
        crate::streams::forbid_waiting()?;
        current_device()?.synchronize().map_err(crate::refused)
    }

    fn cuGetErrorName(code: c_int, place: *mut *const c_char) {
        let name = match code {
            0 => c"CUDA_SUCCESS",
            1 => c"CUDA_ERROR_INVALID_VALUE",
            2 => c"CUDA_ERROR_OUT_OF_MEMORY",
            201 => c"CUDA_ERROR_INVALID_CONTEXT",
            400 => c"CUDA_ERROR_INVALID_HANDLE",
            500 => c"CUDA_ERROR_NOT_FOUND",
            700 => c"CUDA_ERROR_ILLEGAL_ADDRESS",
            801 => c"CUDA_ERROR_NOT_SUPPORTED",
            999 => c"CUDA_ERROR_UNKNOWN",
            900 => c"CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED",
            _ => return Err(INVALID_VALUE),
        };
        // SAFETY: CUDA's contract.
        unsafe { answer(place, name.as_ptr()) }
    }

    fn cuGetErrorString(code: c_int, place: *mut *const c_char) {
        // SAFETY: the same contract.
        match unsafe { cuGetErrorName(code, place) } {
            0 => Ok(()),
            refused => Err(refused),
        }
    }
}
