//! The CUDA driver's functions on vramalloc's simulated device: a `libcuda.so.1` for tests where no GPU is.
//!
//! A function that is not here is not pretended to be: whoever asks for its symbol finds none. Two devices of 1 GiB
//! (`FAKE_CUDA_DEVICES`, `FAKE_CUDA_BYTES` change that). Time is the simulated device's: it passes with calls, and when
//! the host waits. There is no legacy default stream that others wait for. A kernel is known by name and does what
//! `kernels.rs` says.
//!
//! Three functions are this library's own: [`fake_cuda_calls`], [`fake_cuda_hook`] and [`fake_cuda_violations`].

// CUDA's names. What a function's arguments must be is said by CUDA's manual, for all of them.
#![allow(non_snake_case, clippy::missing_safety_doc)]

mod contexts;
mod events;
mod kernels;
mod memory;
mod pages;
mod streams;

use std::cell::Cell;
use std::collections::HashMap;
use std::ffi::{CStr, c_char};
use std::sync::{Arc, LazyLock, Mutex, PoisonError};
use vramalloc::driver::sim::{SimDriver, SimMachine};
use vramalloc::driver::{DriverError, DriverErrorKind};

/// `CUresult`.
pub type Code = i32;

pub(crate) const INVALID_VALUE: Code = 1;
pub(crate) const NOT_INITIALIZED: Code = 3;
pub(crate) const INVALID_DEVICE: Code = 101;
pub(crate) const INVALID_CONTEXT: Code = 201;
pub(crate) const INVALID_HANDLE: Code = 400;
pub(crate) const NOT_FOUND: Code = 500;
pub(crate) const NOT_READY: Code = 600;
pub(crate) const ILLEGAL_ADDRESS: Code = 700;
pub(crate) const NOT_SUPPORTED: Code = 801;
pub(crate) const CAPTURE_UNSUPPORTED: Code = 900;

pub(crate) type Result<T = ()> = std::result::Result<T, Code>;

/// Where the simulated devices' addresses begin, and how large the part of each is.
const ADDRESS_BASE: u64 = 0x7_0000_0000_0000;
const ADDRESS_WINDOW_SHIFT: u32 = 46;
/// Where a handle of the simulated device says which device it is of.
const DEVICE_SHIFT: u32 = 40;

static MACHINE: LazyLock<SimMachine> = LazyLock::new(|| {
    let builder = SimDriver::builder().capacity(setting("FAKE_CUDA_BYTES", 1 << 30)).log(false);
    SimMachine::new(devices(), &builder)
});
static CALLS: LazyLock<Mutex<HashMap<&'static str, u64>>> = LazyLock::new(Mutex::default);

/// Calls that named a stream that is not there, in words; what else the devices see, they note themselves.
static STALE: Mutex<Vec<String>> = Mutex::new(Vec::new());

thread_local! {
    /// The function that this thread is in.
    static FUNCTION: Cell<&'static str> = const { Cell::new("") };
}

fn setting(name: &str, default: u64) -> u64 {
    std::env::var(name).ok().and_then(|text| text.parse().ok()).unwrap_or(default)
}

pub(crate) fn devices() -> u32 {
    static DEVICES: LazyLock<u32> =
        LazyLock::new(|| u32::try_from(setting("FAKE_CUDA_DEVICES", 2)).unwrap_or(2).clamp(1, 8));
    *DEVICES
}

/// A device by its ordinal.
pub(crate) fn device(ordinal: u32) -> Result<Arc<SimDriver>> {
    if ordinal < devices() { Ok(MACHINE.device(ordinal)) } else { Err(INVALID_DEVICE) }
}

/// The device that made a handle of an event, a stream or physical memory.
pub(crate) fn device_of_handle(handle: u64) -> Result<Arc<SimDriver>> {
    device(u32::try_from(handle >> DEVICE_SHIFT).unwrap_or(u32::MAX)).map_err(|_| INVALID_HANDLE)
}

/// The device that an address belongs to.
pub(crate) fn device_of_address(address: u64) -> Result<Arc<SimDriver>> {
    let offset = address.checked_sub(ADDRESS_BASE).ok_or(INVALID_VALUE)?;
    device(u32::try_from(offset >> ADDRESS_WINDOW_SHIFT).unwrap_or(u32::MAX)).map_err(|_| INVALID_VALUE)
}

/// The code for what the simulated device answers.
pub(crate) fn refused(error: DriverError) -> Code {
    match error.kind {
        DriverErrorKind::OutOfMemory | DriverErrorKind::AddressSpace => 2,
        DriverErrorKind::NotSupported => NOT_SUPPORTED,
        DriverErrorKind::StreamGone => INVALID_HANDLE,
        DriverErrorKind::Capturing => CAPTURE_UNSUPPORTED,
        DriverErrorKind::Deinitialized => 4,
        DriverErrorKind::Forked => NOT_INITIALIZED,
        DriverErrorKind::InvalidValue => INVALID_VALUE,
        // A lost device, and what a real one would answer with corruption.
        _ => ILLEGAL_ADDRESS,
    }
}

/// Writes an answer through a pointer that the caller of a driver's function gave.
///
/// # Safety
/// `place` is null, or valid for a write.
pub(crate) unsafe fn answer<T>(place: *mut T, value: T) -> Result {
    if place.is_null() {
        return Err(INVALID_VALUE);
    }
    // SAFETY: the caller's promise.
    unsafe { place.write(value) };
    Ok(())
}

/// Notes that the function under way was given a stream that is not there: a real driver may crash on it.
pub(crate) fn note_stale(stream: u64) {
    let what = format!("{} was given {stream:#x}, which is no stream, or a destroyed one", FUNCTION.get());
    STALE.lock().unwrap_or_else(PoisonError::into_inner).push(what);
}

/// Counts a call of a function, which this thread is in from now on.
pub(crate) fn count(name: &'static str) {
    FUNCTION.set(name);
    *CALLS.lock().unwrap_or_else(PoisonError::into_inner).entry(name).or_default() += 1;
}

/// Defines functions of the driver: counted, refused before `cuInit`, and with the body's error as the code.
macro_rules! functions {
    ($(fn $name:ident($($arg:ident: $ty:ty),* $(,)?) $body:block)*) => {
        $(
            #[allow(missing_docs, clippy::too_many_arguments)]
            #[unsafe(no_mangle)]
            pub unsafe extern "C" fn $name($($arg: $ty),*) -> $crate::Code {
                $crate::count(stringify!($name));
                let call = || -> $crate::Result {
                    $crate::contexts::initialized(stringify!($name))?;
                    $crate::hooked(stringify!($name))?;
                    $body
                };
                call().err().unwrap_or(0)
            }
        )*
    };
}
pub(crate) use functions;

/// What to run when a function is called next, by the function's name.
static HOOKS: LazyLock<Mutex<HashMap<String, extern "C" fn() -> Code>>> = LazyLock::new(Mutex::default);

/// The answer that a hook gives in the place of a function, if it does.
pub(crate) fn hooked(name: &str) -> Result {
    let hook = HOOKS.lock().unwrap_or_else(PoisonError::into_inner).remove(name);
    hook.map_or(Ok(()), |hook| match hook() {
        0 => Ok(()),
        code => Err(code),
    })
}

/// Runs `hook` when the function is called next, before it: what it answers, unless 0, is the call's answer; not a function
/// of CUDA's.
///
/// # Safety
/// `name` is a text that ends in a zero byte.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fake_cuda_hook(name: *const c_char, hook: extern "C" fn() -> Code) {
    // SAFETY: the caller's promise.
    let name = unsafe { CStr::from_ptr(name) }.to_string_lossy().into_owned();
    HOOKS.lock().unwrap_or_else(PoisonError::into_inner).insert(name, hook);
}

/// How often a function was called; not a function of CUDA's.
///
/// # Safety
/// `name` is a text that ends in a zero byte.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fake_cuda_calls(name: *const c_char) -> u64 {
    // SAFETY: the caller's promise.
    let name = unsafe { CStr::from_ptr(name) }.to_string_lossy();
    CALLS.lock().unwrap_or_else(PoisonError::into_inner).get(&*name).copied().unwrap_or(0)
}

/// Prints every misuse seen since the last call to stderr, calls on destroyed streams and events included, and returns how
/// many there were; not a function of CUDA's.
#[unsafe(no_mangle)]
pub extern "C" fn fake_cuda_violations() -> u64 {
    let mut seen = std::mem::take(&mut *STALE.lock().unwrap_or_else(PoisonError::into_inner));
    for ordinal in 0..devices() {
        let device = MACHINE.device(ordinal);
        seen.extend(device.violations().into_iter().map(|violation| format!("device {ordinal}: {violation}")));
        device.clear_violations();
    }
    seen.iter().for_each(|violation| eprintln!("{violation}"));
    seen.len() as u64
}
