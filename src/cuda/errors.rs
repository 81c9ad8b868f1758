//! cudarc's errors, and those that it keeps in its contexts.
//!
//! A `CudaContext` has room for one error that nobody could be given, and the next of its functions that looks takes it,
//! whoever runs that. So nothing of ours may get there, and what others put there, at any moment, must stay.

use crate::driver::cuda::{CudaDriver, error_kind, error_name};
use crate::driver::{Call, Driver, DriverError, DriverErrorKind, EventHandle};
use cudarc::driver::sys::cudaError_enum;
use cudarc::driver::{CudaContext, CudaSlice, CudaStream, DevicePtr as _, DevicePtrMut as _, SyncOnDrop};
use std::any::Any;
use std::mem::{self, ManuallyDrop};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

/// How often an error of somebody else's may get in the way of creating events.
const TRIES: u32 = 8;

/// The events of a tracked `CudaSlice`.
#[derive(Clone, Copy, Debug)]
pub(super) struct Events {
    pub(super) read: EventHandle,
    pub(super) write: EventHandle,
}

/// A `CudaSlice` around memory, with its events if the stream's context tracks by events. To be called in the driver's
/// context.
///
/// # Safety
/// The memory has so many values. The slice must not be dropped.
pub(super) unsafe fn slice_around<T>(
    driver: &CudaDriver,
    stream: &Arc<CudaStream>,
    ptr: u64,
    len: usize,
) -> Result<(ManuallyDrop<CudaSlice<T>>, Option<Events>), DriverError> {
    let context = stream.context();
    for _ in 0..TRIES {
        let before = context.check_err(); // cudarc would return it here
        // SAFETY: the caller's promise.
        let make = || ManuallyDrop::new(unsafe { stream.upgrade_device_ptr::<T>(ptr, len) });
        let made = catch_unwind(AssertUnwindSafe(make));
        put_back(context, before);
        let panic = match made {
            Ok(mut slice) => {
                let events = events_of(context, &mut slice)?;
                return Ok((slice, events));
            }
            Err(panic) => panic,
        };
        // cudarc unwraps: either the driver creates no events, and says so to us, too, or an error that was left for
        // somebody else got in the way.
        let event = driver.create_event()?;
        driver.destroy_event(event)?;
        let parked = parked(&*panic);
        // The one kind of error that the driver has for events now and not in a moment; then it was nobody else's.
        if !parked.is_err_and(|error| error_kind(error.0 as i32) == DriverErrorKind::OutOfMemory) {
            put_back(context, parked);
        }
    }
    let why = "cudarc could not create the events that it tracks a slice by, as its context kept having errors left over \
               from other code; take them by `CudaContext::check_err`";
    Err(DriverError::with_detail(Call::EventCreate, DriverErrorKind::Other(0), why))
}

/// An error of cudarc as one of the driver's.
fn converted(call: Call, error: cudarc::driver::DriverError) -> DriverError {
    let code = error.0 as i32;
    DriverError::with_detail(call, error_kind(code), error_name(code).unwrap_or_default())
}

/// Leaves an error where it was found. One that came meanwhile stays, as it would have replaced this one.
fn put_back(context: &CudaContext, found: Result<(), cudarc::driver::DriverError>) {
    if found.is_err() {
        let newer = context.check_err();
        context.record_err(if newer.is_err() { newer } else { found });
    }
}

/// The error that cudarc panicked with.
fn parked(panic: &(dyn Any + Send)) -> Result<(), cudarc::driver::DriverError> {
    match panic.downcast_ref::<String>().and_then(|text| code_in(text)) {
        // SAFETY: cudarc has just printed the variant of that name, so that it exists; CUDA gives each name its number.
        Some(code) => Err(cudarc::driver::DriverError(unsafe { mem::transmute::<u32, cudaError_enum>(code) })),
        None => Ok(()),
    }
}

/// The number of the error that a text like `...: DriverError(CUDA_ERROR_UNKNOWN, "...")` names.
fn code_in(text: &str) -> Option<u32> {
    let name = text.split_once("DriverError(")?.1.split([',', ')']).next()?;
    (1..1000).find(|&code| error_name(code) == Some(name)).map(i32::cast_unsigned)
}

/// The events of a slice. No call is made, but for the first slice of all.
pub(super) fn events_of<T>(
    context: &CudaContext,
    slice: &mut CudaSlice<T>,
) -> Result<Option<Events>, DriverError> {
    let nobody = Nobody::get(context)?.lock().unwrap_or_else(PoisonError::into_inner);
    let stream = nobody.stream();
    let read = event(slice.device_ptr(stream).1);
    let write = event(slice.device_ptr_mut(stream).1);
    Ok(read.zip(write).map(|(read, write)| Events { read, write }))
}

/// The address of a slice's memory. No call is made, but for the first slice of all.
pub(super) fn address_of<T>(slice: &CudaSlice<T>) -> Result<u64, DriverError> {
    let nobody = Nobody::get(slice.context())?.lock().unwrap_or_else(PoisonError::into_inner);
    let (ptr, guard) = slice.device_ptr(nobody.stream());
    mem::forget(guard); // it would record a use that is none
    Ok(ptr)
}

/// The event that a guard would record, without recording it.
fn event(guard: SyncOnDrop<'_>) -> Option<EventHandle> {
    let handle = match &guard {
        SyncOnDrop::Record(Some((event, _))) => Some(EventHandle(event.cu_event().expose_provenance() as u64)),
        _ => None,
    };
    mem::forget(guard);
    handle
}

/// A stream that a slice can be asked for its events with. cudarc makes the stream that it is asked with wait; this one's
/// context always has an error left over, so that nothing comes of that. It is a context of its own value.
struct Nobody(Arc<CudaStream>);

impl Nobody {
    fn get(context: &CudaContext) -> Result<&'static Mutex<Self>, DriverError> {
        static NOBODY: OnceLock<Mutex<Nobody>> = OnceLock::new();
        if let Some(nobody) = NOBODY.get() {
            return Ok(nobody);
        }
        // SAFETY: the context is alive, and current. It is not given up: the new value is never dropped, being static (what
        // comes too late to be it is forgotten), and makes no call after this one. cudarc itself would drop it only if the
        // driver could not even say what is current, and then it can destroy nothing either.
        let twin =
            unsafe { CudaContext::from_raw_context(context.ordinal(), context.cu_device(), context.cu_ctx()) };
        let stream = twin.map_err(|error| converted(Call::EventCreate, error))?.default_stream();
        let mut made = Some(Mutex::new(Self(stream)));
        let nobody = NOBODY.get_or_init(|| made.take().unwrap_or_else(|| unreachable!("it is taken once")));
        mem::forget(made);
        Ok(nobody)
    }

    fn stream(&self) -> &CudaStream {
        self.0.context().record_err::<()>(Err(cudarc::driver::DriverError(cudaError_enum::CUDA_ERROR_NOT_READY)));
        &self.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_is_known_by_its_name() {
        let text =
            "called `Result::unwrap()` on an `Err` value: DriverError(CUDA_ERROR_UNKNOWN, \"unknown error\")";
        assert_eq!(code_in(text), Some(999));
        assert_eq!(code_in("DriverError(CUDA_ERROR_OUT_OF_MEMORY)"), Some(2));
        assert_eq!(code_in("DriverError(CUDA_ERROR_OF_TOMORROW, \"\")"), None);
        assert_eq!(code_in("something else"), None);
    }
}
