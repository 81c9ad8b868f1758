//! What the functions for PyTorch and CuPy have in common: they use the process's own allocator, and their callers cannot
//! be answered, or do not look at the answer.

use crate::allocator::{number, pointer};
use crate::devices::Device;
use crate::status::{Result, Status, guarded, remember, say};
use std::ffi::{c_int, c_void};
use std::ptr::null_mut;
use vramalloc::DevicePtr;

/// Who calls.
pub(crate) struct Guest {
    pub(crate) name: &'static str,
    /// Before what is logged.
    pub(crate) log: &'static str,
    /// The device of an ordinal as it comes from there.
    pub(crate) device: fn(c_int) -> Result<&'static Device>,
    /// What null means there, which is not checked for.
    pub(crate) null: &'static str,
}

impl Guest {
    /// Allocates; if that fails it returns null, after a report on standard error.
    pub(crate) fn alloc(&self, size: usize, ordinal: c_int, stream: *mut c_void) -> *mut c_void {
        let Self { name, log, device, null } = self;
        let allocated = guarded(|| {
            let ptr = device(ordinal)?.alloc(size as u64, number(stream))?;
            log::trace!("{log}: alloc {size} on device {ordinal}, stream {stream:?}: {ptr}");
            Ok(ptr)
        });
        match allocated {
            Ok(ptr) => pointer(ptr),
            Err(failure) => {
                remember(&failure);
                say(&format!(
                    "vramalloc: {name} asked for {size} bytes on device {ordinal}, and cannot have them:\n{failure}\n\
                     vramalloc: {null}"
                ));
                null_mut()
            }
        }
    }

    /// Frees; null is nothing.
    pub(crate) fn free(&self, ptr: *mut c_void, ordinal: c_int) -> Result<()> {
        if ptr.is_null() {
            return Ok(());
        }
        let device = (self.device)(ordinal)?;
        log::trace!("{}: free {ptr:?} on device {ordinal}", self.log);
        Ok(device.allocator.free_raw(DevicePtr(number(ptr)))?)
    }
}

/// Runs what has no way to answer: a failure is told on standard error, but for what is no more to be told: that a forked
/// child frees what it has of the parent's, or that the driver was shut down before us, at the end of the process.
pub(crate) fn told(what: &str, body: impl FnOnce() -> Result<()>) {
    if let Err(failure) = guarded(body) {
        remember(&failure);
        if failure.status() != Status::Forked && !failure.is_the_end() {
            say(&format!("vramalloc: {what} failed: {failure}"));
        }
    }
}
