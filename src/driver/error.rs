//! What a driver call can answer instead of a result.

use super::Call;
use std::borrow::Cow;

/// A driver call that failed: which call, what kind of failure, and the driver's own words.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{call} failed: {kind}{}{detail}", if detail.is_empty() { "" } else { ": " })]
pub struct DriverError {
    /// The call that failed.
    pub call: Call,
    /// The kind of failure, which decides what the allocator does about it.
    pub kind: DriverErrorKind,
    /// More, for people; may be empty.
    pub detail: Cow<'static, str>,
}

/// The kinds of failure that the allocator treats differently.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, thiserror::Error)]
#[non_exhaustive]
pub enum DriverErrorKind {
    /// The device (or the host) has no such memory left. Nothing else is reported as this.
    #[error("out of memory")]
    OutOfMemory,
    /// No range of addresses is left; memory may be.
    #[error("out of address space")]
    AddressSpace,
    /// The device cannot do it.
    #[error("not supported by this device or driver")]
    NotSupported,
    /// The stream is destroyed, or cannot be reached from the calling thread.
    #[error("no such stream (destroyed, or another thread's default stream)")]
    StreamGone,
    /// A capture into a graph forbids the call.
    #[error("not allowed while a stream is captured")]
    Capturing,
    /// The context is lost: a kernel crashed or the device fell off. Every later call fails, too.
    #[error("the device's context is lost (a kernel crashed, or the device failed)")]
    DeviceLost,
    /// The driver is shut down; the process is about to end.
    #[error("the driver is shut down")]
    Deinitialized,
    /// The process is a fork of the one that opened the device; only that one may use it.
    #[error("the process was forked after the device was opened")]
    Forked,
    /// No driver, no device, or a driver that lacks a needed function.
    #[error("the driver is not available")]
    Unavailable,
    /// The arguments were refused.
    #[error("invalid argument")]
    InvalidValue,
    /// The simulated device saw a use that a real one would answer with corruption.
    #[error("illegal use, seen by the simulated device")]
    Violation,
    /// Any other answer, by its number.
    #[error("driver error {0}")]
    Other(i32),
}

impl DriverErrorKind {
    /// Whether every later call to the driver will fail as well.
    #[must_use]
    pub const fn is_sticky(self) -> bool {
        matches!(self, Self::DeviceLost | Self::Deinitialized | Self::Forked)
    }
}

impl DriverError {
    /// A failure of `call` with nothing more to say.
    #[must_use]
    pub const fn new(call: Call, kind: DriverErrorKind) -> Self {
        Self { call, kind, detail: Cow::Borrowed("") }
    }

    /// A failure of `call` and why.
    pub fn with_detail(call: Call, kind: DriverErrorKind, detail: impl Into<Cow<'static, str>>) -> Self {
        Self { call, kind, detail: detail.into() }
    }

    /// The device cannot do `call`.
    #[must_use]
    pub const fn not_supported(call: Call) -> Self {
        Self::new(call, DriverErrorKind::NotSupported)
    }
}
