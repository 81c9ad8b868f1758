//! Modules and kernels. No code runs: a kernel of a known name does what is said here, any other is refused.
//!
//! | kernel | parameters | |
//! | --- | --- | --- |
//! | `wait_and_store` | u64 address, u32 value, u64 nanos | runs so long, then stores the value |
//! | `fill_bytes` | u64 address, u64 bytes, u32 value, u64 nanos | runs so long, then fills the range |
//! | `read_bytes` | u64 address, u64 bytes, u64 nanos | runs so long, reading the range |
//!
//! With 2^64 - 1 nanoseconds a kernel runs until somebody waits for it.

use crate::streams::stream;
use crate::{ILLEGAL_ADDRESS, INVALID_VALUE, NOT_FOUND, NOT_SUPPORTED, Result, answer, functions, refused};
use std::ffi::{CStr, c_char, c_uint, c_void};
use std::sync::{Arc, Mutex, PoisonError};
use vramalloc::driver::sim::Work;
use vramalloc::driver::{DevicePtr, Driver};

/// What a loaded module has.
pub struct Module {
    kernels: Vec<String>,
    functions: Mutex<Vec<Arc<Function>>>,
}

/// A kernel of a module.
pub struct Function {
    name: String,
}

/// The names of a PTX text's kernels.
fn entries(text: &str) -> Vec<String> {
    let names = text.split(".entry").skip(1);
    names.filter_map(|rest| rest.split('(').next()).map(|name| name.trim().to_owned()).collect()
}

/// # Safety
/// The `index`th parameter exists and is a `T`.
unsafe fn parameter<T: Copy>(parameters: *mut *mut c_void, index: usize) -> T {
    // SAFETY: the caller's promise.
    unsafe { parameters.add(index).read().cast::<T>().read() }
}

fn timed(work: Work, nanos: u64) -> Work {
    if nanos == u64::MAX { work } else { work.lasting(nanos) }
}

/// # Safety
/// The parameters are those of the kernel.
unsafe fn launch(name: &str, handle: u64, parameters: *mut *mut c_void) -> Result {
    let (device, key) = stream(handle)?;
    // SAFETY: the kernels' parameters, as listed above.
    let (number, word) =
        unsafe { (|index| parameter::<u64>(parameters, index), |index| parameter::<u32>(parameters, index)) };
    let queue = |work| device.launch(key, work).map_err(|_| ILLEGAL_ADDRESS);
    match name {
        "wait_and_store" => {
            let (target, value) = (DevicePtr(number(0)), word(1).to_ne_bytes());
            queue(timed(Work::writing(target, 4), number(2)))?;
            // SAFETY: staged before the call returns.
            unsafe { device.copy_to_device(target, value.as_ptr(), 4, key) }.map_err(refused)
        }
        "fill_bytes" => {
            queue(timed(Work::writing(DevicePtr(number(0)), number(1)), number(3)).filling(word(2) as u8))
        }
        "read_bytes" => queue(timed(Work::reading(DevicePtr(number(0)), number(1)), number(2))),
        _ => Err(NOT_SUPPORTED),
    }
}

functions! {
    fn cuModuleLoadData(place: *mut *mut Module, image: *const c_void) {
        if image.is_null() {
            return Err(INVALID_VALUE);
        }
        // SAFETY: CUDA's contract: PTX is a text that ends in a zero byte.
        let text = unsafe { CStr::from_ptr(image.cast()) }.to_string_lossy();
        let module = Module { kernels: entries(&text), functions: Mutex::default() };
        // SAFETY: CUDA's contract.
        unsafe { answer(place, Box::into_raw(Box::new(module))) }
    }

    fn cuModuleUnload(module: *mut Module) {
        if module.is_null() {
            return Err(INVALID_VALUE);
        }
        // SAFETY: CUDA's contract: it was loaded, and is unloaded once.
        drop(unsafe { Box::from_raw(module) });
        Ok(())
    }

    fn cuModuleGetFunction(place: *mut *const Function, module: *mut Module, name: *const c_char) {
        // SAFETY: CUDA's contract.
        let (module, name) = unsafe { (module.as_ref().ok_or(INVALID_VALUE)?, CStr::from_ptr(name)) };
        let name = name.to_string_lossy().into_owned();
        if !module.kernels.contains(&name) {
            return Err(NOT_FOUND);
        }
        let function = Arc::new(Function { name });
        // SAFETY: CUDA's contract.
        unsafe { answer(place, Arc::as_ptr(&function))? };
        module.functions.lock().unwrap_or_else(PoisonError::into_inner).push(function);
        Ok(())
    }

    fn cuLaunchKernel(
        function: *const Function,
        _grid_x: c_uint,
        _grid_y: c_uint,
        _grid_z: c_uint,
        _block_x: c_uint,
        _block_y: c_uint,
        _block_z: c_uint,
        _shared: c_uint,
        handle: u64,
        parameters: *mut *mut c_void,
        _extra: *mut *mut c_void,
    ) {
        // SAFETY: CUDA's contract.
        let function = unsafe { function.as_ref() }.ok_or(INVALID_VALUE)?;
        // SAFETY: CUDA's contract.
        unsafe { launch(&function.name, handle, parameters) }
    }
}
