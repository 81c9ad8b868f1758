//! What a call answers: a status, and a text by thread.

use crate::forks;
use std::cell::RefCell;
use std::ffi::{CString, c_char};
use std::panic::{AssertUnwindSafe, catch_unwind};
use vramalloc::{ConfigError, DriverError, DriverErrorKind, Error, InvariantViolation};

/// What a call answers. `vram_last_error` has the text.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Status {
    /// It is done.
    Ok = 0,
    /// A pointer is null that must not be, a text is not UTF-8, or a number makes no sense.
    InvalidArgument = 1,
    /// The handle is null, destroyed, or none at all.
    InvalidHandle = 2,
    /// The configuration string is not understood, or the device cannot do what it says.
    InvalidConfig = 3,
    /// There is no such device, or it cannot be opened.
    NoDevice = 4,
    /// Everything has been tried; the text is the report.
    OutOfMemory = 5,
    /// The size is beyond any device.
    SizeOverflow = 6,
    /// The address was freed before.
    NotLive = 7,
    /// The address is not the start of an allocation of this allocator.
    UnknownPointer = 8,
    /// The stream is another device's.
    WrongDevice = 9,
    /// The driver failed, and not for want of memory.
    Driver = 10,
    /// The buffer is too small for the text; nothing was written to it.
    BufferTooSmall = 11,
    /// A file could not be written.
    Io = 12,
    /// The process was forked; only the parent may use the device.
    Forked = 13,
    /// A bug in this library, caught.
    Internal = 14,
}

/// Why a call failed.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Failure {
    #[error("the argument '{0}' is null")]
    Null(&'static str),
    #[error("the argument '{0}' is not UTF-8")]
    NotText(&'static str),
    #[error("{0}")]
    Argument(String),
    #[error("{0:#x} is no allocator: it was destroyed, or never made by vram_create")]
    Handle(u64),
    #[error("{0}")]
    Device(String),
    #[error("the text needs {needed} bytes, the buffer has {capacity}")]
    Buffer { needed: usize, capacity: usize },
    #[error("'{path}' could not be written: {error}")]
    Io { path: String, error: std::io::Error },
    #[error(transparent)]
    Invariant(#[from] InvariantViolation),
    #[error(transparent)]
    Core(#[from] Error),
    #[error(
        "this process was forked from one that used vramalloc, where the device and its memory stay; start workers before the \
         first use, or by exec (Python: multiprocessing's 'spawn' or 'forkserver')"
    )]
    Forked,
    #[error("a bug in vramalloc: {0}; please report it")]
    Panic(String),
}

impl From<ConfigError> for Failure {
    fn from(error: ConfigError) -> Self {
        Self::Core(error.into())
    }
}

impl From<DriverError> for Failure {
    fn from(error: DriverError) -> Self {
        Self::Core(error.into())
    }
}

impl Failure {
    /// Whether the driver is shut down, as happens at the end of the process.
    pub(crate) fn is_the_end(&self) -> bool {
        matches!(self, Self::Core(Error::Driver(error)) if error.kind == DriverErrorKind::Deinitialized)
    }

    pub(crate) fn status(&self) -> Status {
        match self {
            Self::Null(_) | Self::NotText(_) | Self::Argument(_) => Status::InvalidArgument,
            Self::Handle(_) => Status::InvalidHandle,
            Self::Device(_) => Status::NoDevice,
            Self::Buffer { .. } => Status::BufferTooSmall,
            Self::Io { .. } => Status::Io,
            Self::Forked => Status::Forked,
            Self::Invariant(_) | Self::Panic(_) => Status::Internal,
            Self::Core(error) => match error {
                Error::OutOfMemory(_) => Status::OutOfMemory,
                Error::SizeOverflow { .. } => Status::SizeOverflow,
                Error::NotLive { .. } => Status::NotLive,
                Error::UnknownPointer { .. } => Status::UnknownPointer,
                Error::WrongDevice { .. } => Status::WrongDevice,
                Error::UnknownDevice { .. } => Status::NoDevice,
                Error::InvalidConfig(_) | Error::NoVirtualMemory { .. } => Status::InvalidConfig,
                Error::Driver(error) => match error.kind {
                    DriverErrorKind::Unavailable => Status::NoDevice,
                    DriverErrorKind::Forked => Status::Forked,
                    _ => Status::Driver,
                },
                _ => Status::Driver,
            },
        }
    }
}

pub(crate) type Result<T> = std::result::Result<T, Failure>;

thread_local! {
    static LAST: RefCell<CString> = RefCell::default();
}

/// The text of this thread's last failure; empty if it had none. Valid until the thread's next failure; it is not to be
/// freed.
#[unsafe(no_mangle)]
pub extern "C" fn vram_last_error() -> *const c_char {
    // A thread that is about to end has no text any more.
    LAST.try_with(|last| last.borrow().as_ptr()).unwrap_or(c"".as_ptr())
}

pub(crate) fn remember(failure: &Failure) {
    let text = failure.to_string().replace('\0', " ");
    // As above; then nobody is left to ask for it.
    let _ = LAST.try_with(|last| *last.borrow_mut() = CString::new(text).unwrap_or_default());
}

/// The frame of every exported function that does anything: fails in a forked child, and else runs `body`; a panic
/// becomes a failure.
#[inline]
pub(crate) fn guarded<T>(body: impl FnOnce() -> Result<T>) -> Result<T> {
    forks::check()?;
    catch_unwind(AssertUnwindSafe(body)).unwrap_or_else(|panic| {
        let text = panic.downcast_ref::<&str>().map(|text| (*text).to_owned());
        let text = text.or_else(|| panic.downcast_ref::<String>().cloned());
        Err(Failure::Panic(text.unwrap_or_else(|| "it panicked".to_owned())))
    })
}

/// The frame of every function that answers a status.
pub(crate) fn answer(body: impl FnOnce() -> Result<()>) -> Status {
    match guarded(body) {
        Ok(()) => Status::Ok,
        Err(failure) => {
            remember(&failure);
            failure.status()
        }
    }
}

/// Says something on standard error. Takes no lock, since a forked child says things, too, and no descriptor, of which there may
/// be none left. Standard error may be closed; then there is nobody to tell.
pub(crate) fn say(text: &str) {
    use std::io::Write;
    let text = format!("{text}\n");
    #[cfg(unix)]
    {
        use std::os::fd::{AsRawFd, FromRawFd};
        // SAFETY: the descriptor stays its owner's: it is only written to, and `ManuallyDrop` never closes it.
        let stderr = unsafe { std::fs::File::from_raw_fd(std::io::stderr().as_raw_fd()) };
        let _ = std::mem::ManuallyDrop::new(stderr).write_all(text.as_bytes());
    }
    #[cfg(not(unix))]
    let _ = std::io::stderr().write_all(text.as_bytes());
}
