//! Contexts: keeping one alive, and making it current for the length of a call.

use super::api::Api;
use super::error::{Code, SUCCESS, opening};
use crate::driver::Result;
use cudarc::driver::CudaContext;
use cudarc::driver::sys::{CUcontext, CUdevice};
use std::mem::ManuallyDrop;
use std::ptr;
use std::sync::Arc;

/// A thread's capture mode under which a capture elsewhere forbids nothing (`CU_STREAM_CAPTURE_MODE_RELAXED`).
const RELAXED: u32 = 2;

/// The handle of a context, which any thread may use.
#[derive(Clone, Copy)]
pub(super) struct ContextHandle(pub(super) CUcontext);

// SAFETY: the driver's functions take a context from any thread; the address is never followed here.
unsafe impl Send for ContextHandle {}
// SAFETY: as above.
unsafe impl Sync for ContextHandle {}

/// What keeps the context alive. Dropped in a forked process, it keeps its hands off the driver.
pub(super) enum Owner {
    /// A share in the device's primary context.
    Primary(Primary),
    /// A context of cudarc.
    Shared(Shared),
}

/// A share in a device's primary context.
pub(super) struct Primary {
    api: &'static Api,
    device: CUdevice,
    handle: ContextHandle,
    pid: u32,
}

impl Primary {
    pub(super) fn retain(api: &'static Api, device: CUdevice) -> Result<Self> {
        let mut handle: CUcontext = ptr::null_mut();
        // SAFETY: the driver is initialized and `device` comes from it.
        let code = unsafe { (api.primary_retain)(&raw mut handle, device) };
        if code != SUCCESS {
            return Err(opening("cuDevicePrimaryCtxRetain", code));
        }
        Ok(Self { api, device, handle: ContextHandle(handle), pid: std::process::id() })
    }
}

impl Drop for Primary {
    fn drop(&mut self) {
        if self.pid == std::process::id() {
            // SAFETY: retained once by `retain`. A refusal means that the driver is gone, and the share with it.
            unsafe { (self.api.primary_release)(self.device) };
        }
    }
}

/// A share in a context of cudarc.
pub(super) struct Shared {
    api: &'static Api,
    context: ManuallyDrop<Arc<CudaContext>>,
    pid: u32,
}

impl Shared {
    pub(super) fn new(api: &'static Api, context: Arc<CudaContext>) -> Self {
        Self { api, context: ManuallyDrop::new(context), pid: std::process::id() }
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        if self.pid != std::process::id() {
            return;
        }
        let dropped = self.context.cu_ctx();
        let before = current(self.api);
        // SAFETY: nothing uses the field after this.
        drop(unsafe { ManuallyDrop::take(&mut self.context) });
        // The last share binds its context to the thread before it goes.
        if let Ok(before) = before
            && before != dropped
        {
            // SAFETY: it was current a moment ago, and is another one than the context that may be gone.
            unsafe { (self.api.ctx_set)(before) };
        }
    }
}

impl Owner {
    pub(super) fn handle(&self) -> ContextHandle {
        match self {
            Self::Primary(primary) => primary.handle,
            Self::Shared(shared) => ContextHandle(shared.context.cu_ctx()),
        }
    }
}

/// The calling thread's context.
fn current(api: &Api) -> std::result::Result<CUcontext, Code> {
    let mut context: CUcontext = ptr::null_mut();
    // SAFETY: the driver is initialized.
    match unsafe { (api.ctx_get)(&raw mut context) } {
        SUCCESS => Ok(context),
        code => Err(code),
    }
}

/// A context made current for this thread, until this is dropped.
pub(super) struct Entered<'a> {
    api: &'a Api,
    pushed: bool,
    capture_mode: Option<u32>,
}

impl<'a> Entered<'a> {
    /// Makes `context` current; with `relaxed`, the thread's calls also cannot break a capture meanwhile.
    pub(super) fn new(api: &'a Api, context: ContextHandle, relaxed: bool) -> std::result::Result<Self, Code> {
        let mut entered = Self { api, pushed: false, capture_mode: None };
        if current(api)? != context.0 {
            // SAFETY: the context is alive as long as its driver value is.
            let code = unsafe { (api.ctx_push)(context.0) };
            if code != SUCCESS {
                return Err(code);
            }
            entered.pushed = true;
        }
        if relaxed {
            entered.capture_mode = exchange_capture_mode(api, RELAXED);
        }
        Ok(entered)
    }
}

impl Drop for Entered<'_> {
    fn drop(&mut self) {
        if let Some(mode) = self.capture_mode {
            exchange_capture_mode(self.api, mode);
        }
        if self.pushed {
            let mut popped: CUcontext = ptr::null_mut();
            // SAFETY: takes off what `new` pushed on this very thread: the guard does not leave it.
            unsafe { (self.api.ctx_pop)(&raw mut popped) };
        }
    }
}

/// Sets the thread's capture mode and returns what it was, if the driver can.
fn exchange_capture_mode(api: &Api, mode: u32) -> Option<u32> {
    let mut mode = mode;
    // SAFETY: the pointer is valid for the call; the modes are small numbers.
    (unsafe { api.exchange_capture_mode?(&raw mut mode) } == SUCCESS).then_some(mode)
}
