//! cudarc's errors, and those that it keeps in its contexts.

use crate::driver::cuda::{error_kind, error_name};
use crate::driver::{Call, DriverError, DriverErrorKind};
use cudarc::driver::CudaContext;
use std::borrow::Cow;
use std::panic::{AssertUnwindSafe, catch_unwind};

/// An error of cudarc as one of the driver's.
pub(super) fn converted(call: Call, error: cudarc::driver::DriverError) -> DriverError {
    let code = error.0 as i32;
    DriverError::with_detail(call, error_kind(code), Cow::Borrowed(error_name(code).unwrap_or_default()))
}

/// Runs what uses cudarc such that errors which cudarc keeps in its context stay apart: what was there before is there
/// after and does not disturb `body`; what `body` adds is returned. A panic of cudarc (it unwraps) becomes an error.
pub(super) fn apart<T>(context: &CudaContext, call: Call, body: impl FnOnce() -> T) -> Result<T, DriverError> {
    let before = context.check_err();
    let result = catch_unwind(AssertUnwindSafe(body));
    let added = context.check_err();
    context.record_err(before);
    match (result, added) {
        (Ok(value), Ok(())) => Ok(value),
        (_, Err(error)) => Err(converted(call, error)),
        (Err(_), Ok(())) => {
            Err(DriverError::with_detail(call, DriverErrorKind::Other(0), "cudarc could not create an event"))
        }
    }
}
