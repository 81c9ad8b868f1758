//! Whose errors are whose, and whose context is current.

use crate::bench::{Bench, bench};
use cudarc::driver::sys::cudaError_enum::CUDA_ERROR_UNKNOWN;
use cudarc::driver::{CudaContext, DriverError};
use std::sync::{Arc, Mutex};
use vramalloc::driver::Call;
use vramalloc::{DriverErrorKind, Error};

static CONTEXT: Mutex<Option<Arc<CudaContext>>> = Mutex::new(None);

/// Parks an error in cudarc's context, as another thread may at any moment.
extern "C" fn park() -> i32 {
    if let Some(context) = &*CONTEXT.lock().expect("no panic") {
        context.record_err::<()>(Err(DriverError(CUDA_ERROR_UNKNOWN)));
    }
    0
}

extern "C" fn refuse() -> i32 {
    2 // out of memory
}

/// Runs `body`, in which somebody else's error is parked at the first call of `function`; it must be there afterwards.
fn while_others_park(bench: &Bench, function: &str, body: impl FnOnce()) {
    *CONTEXT.lock().expect("no panic") = Some(Arc::clone(&bench.context));
    let before = bench.fake.calls(function);
    bench.fake.hook(function, park);
    body();
    assert!(bench.fake.calls(function) > before, "{function} was not called");
    *CONTEXT.lock().expect("no panic") = None;
    assert_eq!(bench.context.check_err(), Err(DriverError(CUDA_ERROR_UNKNOWN)), "theirs stays, {function}");
    assert_eq!(bench.memory.take_deferred_error(), None, "and is not ours, {function}");
}

#[test]
fn what_others_park_meanwhile_is_theirs() {
    let Some(bench) = bench("what_others_park_meanwhile_is_theirs") else { return };
    let (stream, other) = bench.streams();
    while_others_park(&bench, "cuEventCreate", || {
        drop(bench.memory.alloc_zeros::<u8>(100, &stream).expect("not our error"));
    });
    let x = bench.memory.alloc_zeros::<u8>(100, &stream).expect("zeros");
    let mut slice = None;
    while_others_park(&bench, "cuEventCreate", || slice = Some(x.into_cuda_slice().expect("not our error")));
    while_others_park(&bench, "cuStreamWaitEvent", || drop(slice.take()));
    let slice = bench.memory.alloc_zeros::<u8>(100, &stream).expect("zeros").into_cuda_slice().expect("slice");
    while_others_park(&bench, "cuEventDestroy_v2", || drop(slice));
    drop(bench.memory.alloc_zeros::<u8>(100, &other).expect("zeros"));
    while_others_park(&bench, "cuEventDestroy_v2", || bench.memory.retire_stream(&other).expect("retire"));
}

#[test]
fn a_driver_that_creates_no_event_is_our_error() {
    let Some(bench) = bench("a_driver_that_creates_no_event_is_our_error") else { return };
    let (stream, _other) = bench.streams();
    bench.context.record_err::<()>(Err(DriverError(CUDA_ERROR_UNKNOWN)));
    bench.fake.hook("cuEventCreate", refuse_twice);
    let Err(Error::Driver(error)) = bench.memory.alloc_zeros::<u8>(100, &stream) else { panic!("no event") };
    assert_eq!((error.call, error.kind), (Call::EventCreate, DriverErrorKind::OutOfMemory), "{error}");
    assert_eq!(bench.memory.memory_allocated(), 0, "the memory was freed");
    assert_eq!(bench.context.check_err(), Err(DriverError(CUDA_ERROR_UNKNOWN)), "what was there before");
    assert_eq!(bench.context.check_err(), Ok(()), "and nothing of ours");
}

/// Refuses, and refuses the next one, too.
extern "C" fn refuse_twice() -> i32 {
    if let Ok(fake) = crate::fake::load() {
        fake.hook("cuEventCreate", refuse);
    }
    refuse()
}

#[test]
fn what_cudarc_has_parked_stays_parked() {
    let Some(bench) = bench("what_cudarc_has_parked_stays_parked") else { return };
    let (stream, _) = bench.streams();
    bench.context.record_err::<()>(Err(DriverError(CUDA_ERROR_UNKNOWN)));
    let x = bench.memory.clone_htod(&[1_u8, 2], &stream).expect("an error of others is none of ours");
    assert_eq!(x.to_vec().expect("download"), [1, 2]);
    let slice = x.into_cuda_slice().expect("slice");
    drop(slice);
    bench.memory.empty_cache().expect("empty cache");
    assert_eq!(bench.context.check_err(), Err(DriverError(CUDA_ERROR_UNKNOWN)), "and is still there");
}

#[test]
fn the_current_context_stays() {
    let Some(bench) = bench("the_current_context_stays") else { return };
    let (stream, _) = bench.streams();
    let second = CudaContext::new(1).expect("the second device");
    second.bind_to_thread().expect("bind");
    let current = || cudarc::driver::result::ctx::get_current().expect("current");
    let x = bench.memory.clone_htod(&[1_u8, 2], &stream).expect("upload");
    assert_eq!(current(), Some(second.cu_ctx()));
    let y = x.try_clone().expect("clone");
    assert_eq!(y.to_vec().expect("download"), [1, 2]);
    drop(x);
    drop(y.into_cuda_slice().expect("slice"));
    bench.memory.empty_cache().expect("empty cache");
    assert_eq!(current(), Some(second.cu_ctx()));
}

#[test]
fn buffers_outlive_the_allocator() {
    let Some(bench) = bench("buffers_outlive_the_allocator") else { return };
    let (stream, other) = bench.streams();
    let memory =
        vramalloc::cuda::CudaAllocator::new(&bench.context, vramalloc::Config::default()).expect("allocator");
    let mut x = memory.clone_htod(&[4_u32; 100], &stream).expect("upload");
    drop(memory);
    other.memset_zeros(&mut x).expect("memset");
    assert_eq!(x.to_vec().expect("download"), [0; 100]);
    drop(x);
}

const CONTEXT_LOST: i32 = 700;

extern "C" fn nothing() -> i32 {
    0
}

/// Makes each of the functions fail from now on.
fn break_down(bench: &Bench, functions: &[(&str, extern "C" fn() -> i32)]) {
    functions.iter().for_each(|&(function, broken)| bench.fake.hook(function, broken));
}

fn again(function: &str, broken: extern "C" fn() -> i32) -> i32 {
    if let Ok(fake) = crate::fake::load() {
        fake.hook(function, broken);
    }
    CONTEXT_LOST
}

extern "C" fn no_wait() -> i32 {
    again("cuStreamWaitEvent", no_wait)
}

extern "C" fn no_destruction() -> i32 {
    again("cuEventDestroy_v2", no_destruction)
}

extern "C" fn no_answer() -> i32 {
    again("cuStreamIsCapturing", no_answer)
}

#[test]
fn an_event_that_is_created_after_all_leaves_no_error() {
    let Some(bench) = bench("an_event_that_is_created_after_all_leaves_no_error") else { return };
    let (stream, _other) = bench.streams();
    bench.fake.hook("cuEventCreate", refuse);
    let x = bench.memory.alloc_zeros::<u8>(100, &stream).expect("the next attempt works");
    assert_eq!(bench.context.check_err(), Ok(()), "it was nobody else's");
    assert_eq!(x.to_vec().expect("download"), [0; 100]);
}

#[test]
fn waits_that_fail_at_a_slices_end_are_ours_to_report() {
    let Some(bench) = bench("waits_that_fail_at_a_slices_end_are_ours_to_report") else { return };
    let (stream, _other) = bench.streams();
    let x = bench.memory.alloc_zeros::<u8>(100, &stream).expect("zeros").into_cuda_slice().expect("slice");
    break_down(&bench, &[("cuStreamWaitEvent", no_wait)]);
    drop(x);
    bench.fake.hook("cuStreamWaitEvent", nothing);
    let error = bench.memory.take_deferred_error().expect("what stood in the way");
    assert_eq!(error.call, Call::StreamWait, "{error}");
    assert_eq!(bench.context.check_err(), Ok(()), "and cudarc has heard nothing of it");
}

#[test]
fn a_driver_out_of_order_parks_nothing_where_cudarc_waits_for_nothing() {
    let Some(bench) = bench("a_driver_out_of_order_parks_nothing_where_cudarc_waits_for_nothing") else { return };
    let (stream, _other) = bench.streams();
    drop(bench.memory.alloc_zeros::<u8>(100, &stream).expect("its events are kept"));
    let bench = bench.without_tracking();
    break_down(&bench, &[("cuStreamIsCapturing", no_answer), ("cuEventDestroy_v2", no_destruction)]);
    bench.memory.retire_stream(&stream).expect_err("the driver is out of order");
    break_down(&bench, &[("cuStreamIsCapturing", nothing), ("cuEventDestroy_v2", nothing)]);
    drop(bench.memory.take_deferred_error());
    assert_eq!(bench.context.check_err(), Ok(()));
}

extern "C" fn lost() -> i32 {
    CONTEXT_LOST
}

#[test]
fn a_lost_device_parks_nothing_on_the_default_stream() {
    let Some(bench) = bench("a_lost_device_parks_nothing_on_the_default_stream") else { return };
    let stream = bench.context.default_stream();
    let x = bench.memory.alloc_zeros::<u8>(100, &stream).expect("zeros");
    bench.fake.hook("cuMemcpyDtoHAsync_v2", lost);
    x.to_vec().expect_err("the device is lost");
    drop(x);
    bench.fake.hook("cuEventDestroy_v2", no_destruction);
    let retired = bench.memory.retire_stream(&stream);
    bench.fake.hook("cuEventDestroy_v2", nothing);
    eprintln!("retired: {retired:?}, deferred: {:?}", bench.memory.take_deferred_error());
    assert_eq!(bench.context.check_err(), Ok(()));
}
