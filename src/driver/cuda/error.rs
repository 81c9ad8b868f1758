//! What the driver's return codes mean here.

use crate::driver::{Call, DriverError, DriverErrorKind};
use std::borrow::Cow;

/// A return code of the driver (`CUresult` as the number that it is).
pub(super) type Code = i32;

/// Everything went well.
pub(super) const SUCCESS: Code = 0;
/// The work that was asked after has not ended.
pub(super) const NOT_READY: Code = 600;

/// The context asked for, or that of a handle, is none.
pub(super) const INVALID_CONTEXT: Code = 201;
/// The context that is current, or that of a handle, is destroyed.
pub(super) const CONTEXT_IS_DESTROYED: Code = 709;

/// The arguments were refused.
pub(super) const INVALID_VALUE: Code = 1;
const OUT_OF_MEMORY: Code = 2;
const INVALID_DEVICE: Code = 101;
const INVALID_HANDLE: Code = 400;

/// A call outside the [`Driver`](crate::driver::Driver) trait that failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{function} failed: {kind}{}{detail}", if detail.is_empty() { "" } else { ": " })]
pub struct CudaError {
    /// The name of CUDA's function.
    pub function: &'static str,
    /// The kind of failure.
    pub kind: DriverErrorKind,
    /// The driver's name for it; may be empty.
    pub detail: Cow<'static, str>,
}

/// What stopped a call.
#[derive(Clone, Copy, Debug)]
pub(super) enum Failure {
    /// The driver must not be used any more; it was not asked.
    Unusable(DriverErrorKind),
    /// The context could not be made current.
    Entering(Code),
    /// The call itself was refused.
    Call(Code),
    /// This driver lacks the function.
    Missing,
}

impl Failure {
    /// The failure as one of a call of the trait.
    pub(super) fn of_call(self, call: Call) -> DriverError {
        let kind = match self {
            Self::Call(code) => kind_in(call, code),
            other => other.kind(),
        };
        DriverError { call, kind, detail: self.detail() }
    }

    /// The failure as one of another function.
    pub(super) fn of_function(self, function: &'static str) -> CudaError {
        CudaError { function, kind: self.kind(), detail: self.detail() }
    }

    fn kind(self) -> DriverErrorKind {
        match self {
            Self::Unusable(kind) => kind,
            Self::Entering(code) | Self::Call(code) => error_kind(code),
            Self::Missing => DriverErrorKind::NotSupported,
        }
    }

    fn detail(self) -> Cow<'static, str> {
        match self {
            Self::Unusable(_) => Cow::Borrowed(""),
            Self::Entering(code) => format!("{}, when its context was made current", code_text(code)).into(),
            Self::Call(code) => code_text(code),
            Self::Missing => Cow::Borrowed("this driver lacks the function"),
        }
    }
}

/// The kind of failure behind a return code of the CUDA driver; a code that is not known here (0 included) is
/// [`DriverErrorKind::Other`] with its number.
#[must_use]
pub const fn error_kind(code: i32) -> DriverErrorKind {
    match code {
        OUT_OF_MEMORY => DriverErrorKind::OutOfMemory,
        4 => DriverErrorKind::Deinitialized,
        INVALID_VALUE | INVALID_DEVICE | INVALID_HANDLE => DriverErrorKind::InvalidValue,
        3 | 34 | 46 | 100 | 102 | 802..=809 => DriverErrorKind::Unavailable,
        // Not 701 (too many resources asked for a launch): the context survives it.
        INVALID_CONTEXT | 214 | 220 | 226 | 700 | 702 | CONTEXT_IS_DESTROYED | 710 | 714..=719 | 721 => {
            DriverErrorKind::DeviceLost
        }
        801 => DriverErrorKind::NotSupported,
        900..=908 => DriverErrorKind::Capturing,
        other => DriverErrorKind::Other(other),
    }
}

/// The kind behind a return code, given which call it answers.
fn kind_in(call: Call, code: Code) -> DriverErrorKind {
    match (call, code) {
        // These take a stream; our own context is current by then.
        (
            Call::StreamId | Call::EventRecord | Call::StreamWait | Call::IsCapturing | Call::StreamSynchronize,
            INVALID_HANDLE | INVALID_CONTEXT | CONTEXT_IS_DESTROYED,
        ) => DriverErrorKind::StreamGone,
        (Call::ReserveAddresses, OUT_OF_MEMORY) => DriverErrorKind::AddressSpace,
        // Whatever keeps a device from being opened, there is none to work with; but memory may come back.
        (Call::Open, code) if !matches!(code, OUT_OF_MEMORY | 4) => DriverErrorKind::Unavailable,
        (_, code) => error_kind(code),
    }
}

/// A device that cannot be opened, and what can be done about it.
pub(super) fn unavailable(detail: impl Into<Cow<'static, str>>) -> DriverError {
    DriverError::with_detail(Call::Open, DriverErrorKind::Unavailable, detail)
}

/// A step of opening that the driver answered with `code`.
pub(super) fn opening(step: &'static str, code: Code) -> DriverError {
    let text = code_text(code);
    let detail = match remedy(code) {
        Some(remedy) => format!("{step} answered {text}: {remedy}"),
        None => format!("{step} answered {text}"),
    };
    DriverError::with_detail(Call::Open, kind_in(Call::Open, code), detail)
}

/// What to do about a code that keeps a device from being opened.
const fn remedy(code: Code) -> Option<&'static str> {
    Some(match code {
        2 => "other processes hold the device's memory (see `nvidia-smi`); end one of them",
        3 => "this process may be the fork of one that used CUDA, and must not; start a new one",
        34 => "the library found is the CUDA toolkit's stub; take its `stubs` folder out of LD_LIBRARY_PATH",
        46 => "another process has the device for itself (exclusive mode), or the device is in a bad state",
        100 => "no GPU is visible; check `nvidia-smi` and CUDA_VISIBLE_DEVICES",
        101 => "there is no such device; check CUDA_VISIBLE_DEVICES",
        802 => "the system is still starting; on machines with NVSwitch, check the nvidia-fabricmanager service",
        803 => "the driver's library and kernel module differ in version; reload the module or reboot",
        804 => "the CUDA compatibility package does not work with this GPU; remove it or update the driver",
        805..=809 => "the MPS server refused; check nvidia-cuda-mps-control",
        999 => "the driver failed to start; check that the nvidia_uvm module is loaded, and `dmesg`",
        _ => return None,
    })
}

fn code_text(code: Code) -> Cow<'static, str> {
    match error_name(code) {
        Some(name) => Cow::Borrowed(name),
        None => Cow::Owned(format!("code {code}, which is not known here")),
    }
}

macro_rules! names {
    ($($code:literal $name:literal,)*) => {
        /// CUDA's name for a return code, as far as it is known here.
        #[must_use]
        pub const fn error_name(code: i32) -> Option<&'static str> {
            Some(match code { $($code => concat!("CUDA_ERROR_", $name),)* _ => return None })
        }
    };
}

names! {
    1 "INVALID_VALUE", 2 "OUT_OF_MEMORY", 3 "NOT_INITIALIZED", 4 "DEINITIALIZED", 34 "STUB_LIBRARY",
    46 "DEVICE_UNAVAILABLE", 100 "NO_DEVICE", 101 "INVALID_DEVICE", 102 "DEVICE_NOT_LICENSED",
    200 "INVALID_IMAGE", 201 "INVALID_CONTEXT", 205 "MAP_FAILED", 206 "UNMAP_FAILED", 208 "ALREADY_MAPPED",
    209 "NO_BINARY_FOR_GPU", 210 "ALREADY_ACQUIRED", 211 "NOT_MAPPED", 214 "ECC_UNCORRECTABLE",
    215 "UNSUPPORTED_LIMIT", 217 "PEER_ACCESS_UNSUPPORTED", 218 "INVALID_PTX", 220 "NVLINK_UNCORRECTABLE",
    221 "JIT_COMPILER_NOT_FOUND", 222 "UNSUPPORTED_PTX_VERSION", 223 "JIT_COMPILATION_DISABLED",
    226 "CONTAINED", 300 "INVALID_SOURCE", 304 "OPERATING_SYSTEM", 400 "INVALID_HANDLE", 401 "ILLEGAL_STATE",
    500 "NOT_FOUND", 600 "NOT_READY", 700 "ILLEGAL_ADDRESS", 701 "LAUNCH_OUT_OF_RESOURCES",
    702 "LAUNCH_TIMEOUT", 704 "PEER_ACCESS_ALREADY_ENABLED", 705 "PEER_ACCESS_NOT_ENABLED",
    708 "PRIMARY_CONTEXT_ACTIVE", 709 "CONTEXT_IS_DESTROYED", 710 "ASSERT",
    712 "HOST_MEMORY_ALREADY_REGISTERED", 713 "HOST_MEMORY_NOT_REGISTERED", 714 "HARDWARE_STACK_ERROR",
    715 "ILLEGAL_INSTRUCTION", 716 "MISALIGNED_ADDRESS", 717 "INVALID_ADDRESS_SPACE", 718 "INVALID_PC",
    719 "LAUNCH_FAILED", 720 "COOPERATIVE_LAUNCH_TOO_LARGE", 721 "TENSOR_MEMORY_LEAK", 800 "NOT_PERMITTED",
    801 "NOT_SUPPORTED", 802 "SYSTEM_NOT_READY", 803 "SYSTEM_DRIVER_MISMATCH",
    804 "COMPAT_NOT_SUPPORTED_ON_DEVICE", 805 "MPS_CONNECTION_FAILED", 806 "MPS_RPC_FAILURE",
    807 "MPS_SERVER_NOT_READY", 808 "MPS_MAX_CLIENTS_REACHED", 809 "MPS_MAX_CONNECTIONS_REACHED",
    900 "STREAM_CAPTURE_UNSUPPORTED", 901 "STREAM_CAPTURE_INVALIDATED", 902 "STREAM_CAPTURE_MERGE",
    903 "STREAM_CAPTURE_UNMATCHED", 904 "STREAM_CAPTURE_UNJOINED", 905 "STREAM_CAPTURE_ISOLATION",
    906 "STREAM_CAPTURE_IMPLICIT", 907 "CAPTURED_EVENT", 908 "STREAM_CAPTURE_WRONG_THREAD", 909 "TIMEOUT",
    911 "EXTERNAL_DEVICE", 999 "UNKNOWN",
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_call_decides_about_ambiguous_codes() {
        assert_eq!(kind_in(Call::EventRecord, 400), DriverErrorKind::StreamGone);
        assert_eq!(kind_in(Call::EventQuery, 400), DriverErrorKind::InvalidValue);
        assert_eq!(kind_in(Call::StreamId, 709), DriverErrorKind::StreamGone);
        assert_eq!(kind_in(Call::Alloc, 709), DriverErrorKind::DeviceLost);
        assert_eq!(kind_in(Call::Alloc, 2), DriverErrorKind::OutOfMemory);
        assert_eq!(kind_in(Call::ReserveAddresses, 2), DriverErrorKind::AddressSpace);
        assert_eq!(kind_in(Call::Open, 999), DriverErrorKind::Unavailable);
        assert_eq!(kind_in(Call::Free, 999), DriverErrorKind::Other(999));
    }

    #[test]
    fn failing_to_open_names_the_remedy() {
        let error = opening("cuInit", 100);
        assert_eq!((error.call, error.kind), (Call::Open, DriverErrorKind::Unavailable));
        assert!(error.detail.contains("CUDA_ERROR_NO_DEVICE") && error.detail.contains("CUDA_VISIBLE_DEVICES"));
        assert!(opening("cuInit", 34).detail.contains("stubs"));
        assert!(opening("cuInit", 76543).detail.contains("76543"));
    }

    #[test]
    fn a_lost_context_is_that_even_for_a_stream_call() {
        let error = Failure::Entering(CONTEXT_IS_DESTROYED).of_call(Call::EventRecord);
        assert_eq!(error.kind, DriverErrorKind::DeviceLost);
    }
}
