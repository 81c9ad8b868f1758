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
