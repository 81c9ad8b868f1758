//! A CUDA device as a [`Driver`](super::Driver).
//!
//! The driver's library is looked for when the first device is opened, and never before: a program that has this
//! module in it builds and starts on machines without CUDA, and [`CudaDriver::open`] then says what is missing.
//! The functions are this module's own table. cudarc lends its types only; none of its functions is called.
//!
//! # Contexts
//! Every call makes the device's context current for its own length, and puts back what was current before.
//!
//! # Captures into graphs
//! Calls that a capture in some thread would forbid (allocation, mapping, asking events, and their like) run in
//! CUDA's relaxed mode: they neither fail for the capture nor spoil it. Waiting for the device is the exception.
//!
//! # Streams
//! The driver cannot tell a destroyed stream's handle from a live one's without touching it. Whoever hands in the
//! handle of a stream therefore answers for it that the handle is valid in every call that takes it, or a
//! [`StreamKey`](super::StreamKey) made of it: a stream must be retired from the allocator before it is destroyed.
//! On drivers before CUDA 12.0 (no `cuStreamGetId`) identities are made of handles, and a new stream may get a
//! destroyed one's.
//!
//! # Forks
//! A forked child must not use the parent's driver. Every call of this module notices and answers
//! [`Forked`](super::DriverErrorKind::Forked) without asking the driver; values dropped in a child do nothing.

mod api;
mod context;
mod device;
mod error;
mod kernel;
mod raw;
mod stream;
mod vmm;

pub use error::{CudaError, error_kind, error_name};
pub use kernel::{CudaKernel, CudaModule, KernelArg, LaunchShape};

use self::api::Api;
use self::context::{ContextHandle, Entered, Owner, Primary, Shared};
use self::error::{CONTEXT_IS_DESTROYED, Code, Failure, INVALID_CONTEXT, SUCCESS, opening, unavailable};
use super::{Call, CallMeter, Capabilities, DriverErrorKind, Result};
use cudarc::driver::CudaContext;
use cudarc::driver::sys::{CUcontext, CUdevice};
use std::ffi::CStr;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};
use std::time::Instant;

/// A CUDA device.
pub struct CudaDriver {
    api: &'static Api,
    context: ContextHandle,
    /// Keeps `context` alive; dropped with the driver.
    _owner: Owner,
    context_number: u64,
    device: CUdevice,
    ordinal: u32,
    name: String,
    capabilities: Capabilities,
    pid: u32,
    state: AtomicU8,
    meter: CallMeter,
}

/// Values of [`CudaDriver::state`]; a higher one replaces a lower one.
const USABLE: u8 = 0;
const LOST: u8 = 1;
const DEINITIALIZED: u8 = 2;

/// Whether a call has to be kept apart from captures into graphs.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Scope {
    Plain,
    Relaxed,
}

impl CudaDriver {
    /// Opens the device of that ordinal in its primary context, which is the one that CUDA's runtime and cudarc
    /// use; it is kept until the driver value is dropped.
    ///
    /// # Errors
    /// [`DriverErrorKind::Unavailable`] if there is no driver, no such device, or a driver that lacks a needed
    /// function; the text says what can be done. [`DriverErrorKind::OutOfMemory`] if the device has no memory
    /// left for a context.
    pub fn open(ordinal: u32) -> Result<Arc<Self>> {
        let api = Api::get()?;
        let count = count(api)?;
        if ordinal >= count {
            return Err(unavailable(format!(
                "there is no device {ordinal}: {count} visible, counted from 0; check CUDA_VISIBLE_DEVICES"
            )));
        }
        let number = CUdevice::try_from(ordinal).map_err(|_| unavailable("the ordinal is too large"))?;
        let mut device = 0;
        // SAFETY: the driver is initialized and the pointer is valid for the call.
        check("cuDeviceGet", unsafe { (api.device_get)(&raw mut device, number) })?;
        let owner = Owner::Primary(Primary::retain(api, device)?);
        Self::assemble(api, owner, stream::primary_context_number(ordinal), device, ordinal)
    }

    /// Opens the device of a context of cudarc, in that context; the context is kept until the driver value is
    /// dropped.
    ///
    /// # Errors
    /// As for [`open`](Self::open).
    pub fn from_context(context: &Arc<CudaContext>) -> Result<Arc<Self>> {
        let api = Api::get()?;
        count(api)?;
        let ordinal = u32::try_from(context.ordinal()).map_err(|_| unavailable("the ordinal is too large"))?;
        let context_number = if context.is_primary() {
            stream::primary_context_number(ordinal)
        } else {
            stream::other_context_number()
        };
        let owner = Owner::Shared(Shared::new(api, Arc::clone(context)));
        Self::assemble(api, owner, context_number, context.cu_device(), ordinal)
    }

    /// How many devices this process sees.
    ///
    /// # Errors
    /// [`DriverErrorKind::Unavailable`] if there is no driver, or no device at all.
    pub fn device_count() -> Result<u32> {
        count(Api::get()?)
    }

    /// The context that the driver's calls are made in.
    #[must_use]
    pub fn context_handle(&self) -> CUcontext {
        self.context.0
    }

    fn assemble(
        api: &'static Api,
        owner: Owner,
        context_number: u64,
        device: CUdevice,
        ordinal: u32,
    ) -> Result<Arc<Self>> {
        let mut total = 0_usize;
        // SAFETY: the pointer is valid for the call and `device` comes from the driver.
        check("cuDeviceTotalMem", unsafe { (api.device_total_mem)(&raw mut total, device) })?;
        let name = device_name(api, device)?;
        // An ordinal fits, as the device's number was made of it.
        let page_bytes = CUdevice::try_from(ordinal).ok().and_then(|number| vmm::page_bytes(api, device, number));
        let capabilities = Capabilities::new(total as u64);
        let capabilities = match page_bytes {
            Some(page_bytes) => capabilities.with_virtual_memory(page_bytes),
            None => capabilities,
        };
        Ok(Arc::new(Self {
            api,
            context: owner.handle(),
            _owner: owner,
            context_number,
            device,
            ordinal,
            name,
            capabilities,
            pid: std::process::id(),
            state: AtomicU8::new(USABLE),
            meter: CallMeter::new(),
        }))
    }

    /// Whether the driver can still be asked. A lost context can: the driver knows best what it refuses.
    fn usable(&self) -> std::result::Result<(), Failure> {
        if self.pid != std::process::id() {
            Err(Failure::Unusable(DriverErrorKind::Forked))
        } else if self.state.load(Ordering::Relaxed) == DEINITIALIZED {
            Err(Failure::Unusable(DriverErrorKind::Deinitialized))
        } else {
            Ok(())
        }
    }

    /// Runs `body` in the driver's context.
    fn run(
        &self,
        scope: Scope,
        body: impl FnOnce(&Api) -> std::result::Result<Code, Failure>,
    ) -> std::result::Result<(), Failure> {
        self.usable()?;
        let entered = Entered::new(self.api, self.context, scope == Scope::Relaxed).map_err(Failure::Entering)?;
        let code = body(self.api)?;
        drop(entered);
        if code == SUCCESS { Ok(()) } else { Err(Failure::Call(code)) }
    }

    /// Whether the driver must not be asked any more: the process is a fork, or the driver is shut down.
    pub(crate) fn is_over(&self) -> bool {
        self.usable().is_err()
    }

    /// Runs what binds this context to the thread, and puts back what was bound before.
    pub(crate) fn in_context<T>(&self, call: Call, body: impl FnOnce() -> T) -> Result<T> {
        self.usable().map_err(|failure| failure.of_call(call))?;
        let entered = Entered::new(self.api, self.context, false);
        let _entered = entered.map_err(|code| Failure::Entering(code).of_call(call))?;
        Ok(body())
    }

    /// Makes a call of the trait: in the driver's context, timed, and its failure remembered if it is for good.
    fn invoke(
        &self,
        call: Call,
        scope: Scope,
        body: impl FnOnce(&Api) -> std::result::Result<Code, Failure>,
    ) -> Result<()> {
        let start = Instant::now();
        let outcome = self.run(scope, body);
        if !matches!(outcome, Err(Failure::Unusable(_))) {
            self.meter.add(call, u64::try_from(start.elapsed().as_nanos()).unwrap_or(u64::MAX));
        }
        outcome.map_err(|failure| {
            let error = failure.of_call(call);
            self.remember(error.kind);
            error
        })
    }

    /// Makes a call beside the trait; as [`invoke`](Self::invoke), but not timed.
    fn invoke_raw(
        &self,
        function: &'static str,
        scope: Scope,
        body: impl FnOnce(&Api) -> std::result::Result<Code, Failure>,
    ) -> std::result::Result<(), CudaError> {
        self.run(scope, body).map_err(|failure| {
            let error = failure.of_function(function);
            // A stream handed in may be the one whose context is gone; ours was current by then.
            if !matches!(failure, Failure::Call(INVALID_CONTEXT | CONTEXT_IS_DESTROYED)) {
                self.remember(error.kind);
            }
            error
        })
    }

    fn remember(&self, kind: DriverErrorKind) {
        let state = match kind {
            DriverErrorKind::DeviceLost => LOST,
            DriverErrorKind::Deinitialized => DEINITIALIZED,
            _ => return,
        };
        self.state.fetch_max(state, Ordering::Relaxed);
    }
}

impl fmt::Debug for CudaDriver {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CudaDriver")
            .field("device", &self.ordinal)
            .field("name", &self.name)
            .field("capabilities", &self.capabilities)
            .finish_non_exhaustive()
    }
}

/// Initializes the driver and counts its devices; 0 of them is an error.
fn count(api: &Api) -> Result<u32> {
    // SAFETY: no conditions; a second time is harmless.
    check("cuInit", unsafe { (api.init)(0) })?;
    let mut count = 0;
    // SAFETY: the pointer is valid for the call.
    check("cuDeviceGetCount", unsafe { (api.device_count)(&raw mut count) })?;
    match u32::try_from(count) {
        Ok(count) if count > 0 => Ok(count),
        _ => Err(unavailable("no GPU is visible; check `nvidia-smi` and CUDA_VISIBLE_DEVICES")),
    }
}

fn device_name(api: &Api, device: CUdevice) -> Result<String> {
    let mut bytes = [0_u8; 256];
    // One byte less than there is, so that the text always ends in the array.
    let room = bytes.len() as i32 - 1;
    // SAFETY: the array is valid for the call and `device` comes from the driver.
    let code = unsafe { (api.device_name)(bytes.as_mut_ptr().cast(), room, device) };
    check("cuDeviceGetName", code)?;
    let text = CStr::from_bytes_until_nul(&bytes).unwrap_or_default();
    Ok(text.to_string_lossy().into_owned())
}

fn check(step: &'static str, code: Code) -> Result<()> {
    if code == SUCCESS { Ok(()) } else { Err(opening(step, code)) }
}

/// A handle of the driver that travels as a number, which nothing but the driver follows.
fn opaque<T>(handle: u64) -> *mut T {
    std::ptr::with_exposed_provenance_mut(handle as usize)
}

/// The number that a handle of the driver travels as.
fn number<T>(handle: *mut T) -> u64 {
    handle.expose_provenance() as u64
}
