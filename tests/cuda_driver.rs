//! The CUDA driver: what it says on machines without a GPU, and what it does on those with one.
//!
//! Where there is no driver, they run on the fake one of `tests/fake-libcuda`, whose time is virtual. Tests that need a
//! device skip with a line on stderr where there is neither; with `VRAMALLOC_REQUIRE_GPU` set, they fail instead. They take turns: one that waits for the device, or captures a stream, would disturb another.
#![cfg(feature = "cuda")]

#[path = "support/fake.rs"]
mod fake;

use libloading::Library;
use std::ffi::c_void;
use std::ops::Deref;
use std::ptr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};
use vramalloc::driver::cuda::{CudaDriver, KernelArg, LaunchShape, error_kind, error_name};
use vramalloc::driver::{Call, DevicePtr, Driver, DriverErrorKind, StreamHandle};

/// Waits for `nanos` nanoseconds of the device's clock, then writes `value` to `target`.
const PTX: &std::ffi::CStr = c"
.version 6.4
.target sm_75
.address_size 64

.visible .entry wait_and_store(.param .u64 target, .param .u32 value, .param .u64 nanos)
{
    .reg .pred  %early;
    .reg .b32   %v;
    .reg .b64   %t, %n, %begin, %now, %passed;

    ld.param.u64    %t, [target];
    ld.param.u32    %v, [value];
    ld.param.u64    %n, [nanos];
    cvta.to.global.u64 %t, %t;
    mov.u64         %begin, %globaltimer;
again:
    mov.u64         %now, %globaltimer;
    sub.u64         %passed, %now, %begin;
    setp.lt.u64     %early, %passed, %n;
    @%early bra     again;
    st.global.u32   [%t], %v;
    ret;
}
";

/// The first device, for one test at a time.
#[derive(Debug)]
struct Device {
    driver: Arc<CudaDriver>,
    _turn: MutexGuard<'static, ()>,
}

impl Deref for Device {
    type Target = Arc<CudaDriver>;

    fn deref(&self) -> &Arc<CudaDriver> {
        &self.driver
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        if let (Ok(fake), false) = (fake::load(), thread::panicking()) {
            assert_eq!(fake.violations(), 0, "misuse that the simulated device saw");
        }
    }
}

/// The first device, or `None` with the reason on stderr.
fn device(test: &str) -> Option<Device> {
    static TURN: Mutex<()> = Mutex::new(());
    let turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    if let Err(why_not_fake) = fake::load() {
        eprintln!("{test}: {why_not_fake}");
    }
    match CudaDriver::open(0) {
        Ok(driver) => Some(Device { driver, _turn: turn }),
        Err(error) if std::env::var_os("VRAMALLOC_REQUIRE_GPU").is_some() => panic!("{test}: {error}"),
        Err(error) => {
            eprintln!("SKIPPED: {test}: {error}");
            None
        }
    }
}

/// The driver's library, for the few functions that only these tests need.
fn library() -> Library {
    // SAFETY: a device is open, so this library is loaded already.
    unsafe { Library::new("libcuda.so.1").or_else(|_| Library::new("libcuda.so")) }.expect("libcuda is loaded")
}

/// Calls a function of the driver's library and expects it to succeed.
macro_rules! raw {
    ($library:expr, $symbol:literal ($($arg:expr => $ty:ty),*)) => {{
        // SAFETY: the signature is that of CUDA's header, and the arguments are valid for the call.
        let code = unsafe {
            let function = $library.get::<unsafe extern "system" fn($($ty),*) -> i32>($symbol).expect($symbol);
            function($($arg),*)
        };
        assert_eq!(code, 0, "{}", $symbol);
    }};
}

fn current_context(library: &Library) -> *mut c_void {
    let mut context = ptr::null_mut();
    raw!(library, "cuCtxGetCurrent"(&raw mut context => *mut *mut c_void));
    context
}

fn pattern(bytes: usize, seed: u8) -> Vec<u8> {
    (0..bytes).map(|i| (i % 251) as u8 ^ seed).collect()
}

fn write(driver: &CudaDriver, target: DevicePtr, bytes: &[u8]) {
    // SAFETY: the tests' own memory, which nothing else uses now.
    unsafe { driver.memcpy_htod(target, bytes) }.expect("copy to the device");
}

fn read(driver: &CudaDriver, source: DevicePtr, bytes: usize) -> Vec<u8> {
    let mut copy = vec![0; bytes];
    // SAFETY: the tests' own memory, written before.
    unsafe { driver.memcpy_dtoh(&mut copy, source) }.expect("copy from the device");
    copy
}

#[test]
fn opening_works_or_says_why_not() {
    let _ = fake::load(); // another test may load it in the middle of this one
    match CudaDriver::open(0) {
        Ok(driver) => {
            assert_eq!(driver.label(), "cuda:0");
            assert!(driver.check_usable().is_ok());
        }
        Err(error) => {
            assert_eq!((error.call, error.kind), (Call::Open, DriverErrorKind::Unavailable), "{error}");
            assert!(error.detail.len() > 20, "{error}");
            assert_eq!(CudaDriver::device_count().expect_err("no device").kind, DriverErrorKind::Unavailable);
        }
    }
}

#[test]
fn a_device_that_is_not_there_is_unavailable() {
    let _ = fake::load(); // another test may load it in the middle of this one
    for ordinal in [4096, u32::MAX] {
        let error = CudaDriver::open(ordinal).expect_err("no machine has so many devices");
        assert_eq!((error.call, error.kind), (Call::Open, DriverErrorKind::Unavailable), "{error}");
        if CudaDriver::device_count().is_ok() {
            assert!(error.detail.contains(&ordinal.to_string()), "{error}");
        }
    }
}

#[test]
fn codes_have_kinds_and_names() {
    for (code, kind) in [
        (1, DriverErrorKind::InvalidValue),
        (2, DriverErrorKind::OutOfMemory),
        (4, DriverErrorKind::Deinitialized),
        (34, DriverErrorKind::Unavailable),
        (100, DriverErrorKind::Unavailable),
        (700, DriverErrorKind::DeviceLost),
        (719, DriverErrorKind::DeviceLost),
        (801, DriverErrorKind::NotSupported),
        (900, DriverErrorKind::Capturing),
        (907, DriverErrorKind::Capturing),
        (701, DriverErrorKind::Other(701)),
        (999, DriverErrorKind::Other(999)),
        (31337, DriverErrorKind::Other(31337)),
        (-5, DriverErrorKind::Other(-5)),
    ] {
        assert_eq!(error_kind(code), kind, "{code}");
    }
    let out_of_memory: Vec<i32> =
        (-1000..2000).filter(|&code| error_kind(code) == DriverErrorKind::OutOfMemory).collect();
    assert_eq!(out_of_memory, [2], "nothing else is out of memory");
    assert_eq!(error_name(700), Some("CUDA_ERROR_ILLEGAL_ADDRESS"));
    assert_eq!(error_name(31337), None);
}

#[test]
fn facts_of_the_device() {
    let Some(driver) = device("facts_of_the_device") else { return };
    assert!(driver.driver_version().expect("version") >= 11_040);
    assert!(!driver.name().is_empty());
    let capabilities = driver.capabilities();
    let memory = driver.memory_info().expect("memory info");
    assert!(memory.free_bytes > 0 && memory.free_bytes <= memory.total_bytes, "{memory:?}");
    assert!(memory.total_bytes <= capabilities.total_bytes, "{memory:?} {capabilities:?}");
    if capabilities.virtual_memory {
        assert!(capabilities.page_bytes.is_power_of_two() && capabilities.page_bytes >= 4096, "{capabilities:?}");
    }
    eprintln!("{:?}, CUDA {}, {memory:?}", driver.driver, driver.driver_version().expect("version"));
}

#[test]
fn memory_keeps_bytes() {
    let Some(driver) = device("memory_keeps_bytes") else { return };
    let bytes = pattern(1 << 20, 7);
    let (first, second) = (driver.alloc(1 << 20).expect("alloc"), driver.alloc(1 << 20).expect("alloc"));
    assert!(first.0 % 512 == 0 && second.0 % 512 == 0 && first != second);
    write(&driver, first, &bytes);
    // SAFETY: both are this test's memory.
    unsafe { driver.memcpy_dtod(second, first, 1 << 20) }.expect("copy on the device");
    assert!(read(&driver, second, 1 << 20) == bytes);

    let stream = driver.create_stream().expect("stream");
    let mut copy = vec![0_u8; 1 << 20];
    // SAFETY: this test's memory; the stream is waited for before any of it is touched again.
    unsafe {
        driver.memset_d8_async(first, 0x5a, 1 << 20, stream).expect("memset");
        driver.memset_d32_async(first, 0x0403_0201, 16, stream).expect("memset");
        driver.memcpy_dtod_async(second, first, 1 << 19, stream).expect("copy");
        driver.memcpy_htod_async(second, bytes.as_ptr(), 8, stream).expect("copy");
        driver.memcpy_dtoh_async(copy.as_mut_ptr(), second, 1 << 20, stream).expect("copy");
    }
    driver.synchronize_stream(stream).expect("synchronize");
    assert_eq!(copy[..8], bytes[..8]);
    assert_eq!(copy[8..64], [1, 2, 3, 4].repeat(14));
    assert!(copy[64..1 << 19].iter().all(|&byte| byte == 0x5a));
    assert!(copy[1 << 19..] == bytes[1 << 19..]);
    // SAFETY: nothing uses the stream any more.
    unsafe { driver.destroy_stream(stream) }.expect("destroy");

    driver.free(first).expect("free");
    driver.free(second).expect("free");
    let refused = driver.free(first).expect_err("it is free");
    assert_eq!(refused.kind, DriverErrorKind::InvalidValue, "{refused}");
    driver.check_usable().expect("a refused argument harms nothing");
    let calls = driver.calls();
    assert_eq!((calls.get(Call::Alloc).calls, calls.get(Call::Free).calls), (2, 3));
    assert!(calls.get(Call::Alloc).nanos > 0);
    if let Ok(fake) = fake::load() {
        assert_eq!(fake.violations(), 1, "the second free");
    }
}

#[test]
fn too_much_is_out_of_memory() {
    let Some(driver) = device("too_much_is_out_of_memory") else { return };
    let error = driver.alloc(1 << 46).expect_err("no device has 64 TiB");
    assert_eq!((error.call, error.kind), (Call::Alloc, DriverErrorKind::OutOfMemory), "{error}");
    if driver.capabilities().virtual_memory {
        let error = driver.create_pages(1 << 46).expect_err("no device has 64 TiB");
        assert_eq!((error.call, error.kind), (Call::CreatePages, DriverErrorKind::OutOfMemory), "{error}");
        let error = driver.reserve_addresses(1 << 60).expect_err("no address space has 2^60 bytes");
        eprintln!("2^60 bytes of addresses: {error}");
        assert_ne!(error.kind, DriverErrorKind::OutOfMemory, "{error}");
    }
    let small = driver.alloc(512).expect("a refusal leaves nothing behind");
    driver.free(small).expect("free");
}

#[test]
fn pages_keep_bytes_when_they_move() {
    let Some(driver) = device("pages_keep_bytes_when_they_move") else { return };
    let page = driver.capabilities().page_bytes;
    if page == 0 {
        eprintln!("SKIPPED: pages_keep_bytes_when_they_move: no virtual memory management");
        return;
    }
    let at = |base: DevicePtr, pages: u64| DevicePtr(base.0 + pages * page);
    let base = driver.reserve_addresses(4 * page).expect("reserve");
    assert_eq!(base.0 % page, 0);
    let (one, two) = (driver.create_pages(page).expect("create"), driver.create_pages(page).expect("create"));
    driver.map(base, page, one).expect("map");
    driver.map(at(base, 1), page, two).expect("map");
    driver.set_access(base, 2 * page, &[0]).expect("access");
    let refused = driver.set_access(base, 2 * page, &[4096]).expect_err("no such device");
    assert!(!refused.kind.is_sticky(), "{refused}");

    let bytes = pattern(2 * page as usize, 3);
    write(&driver, base, &bytes);
    driver.synchronize().expect("synchronize");
    driver.unmap(base, 2 * page).expect("unmap two mappings at once");
    // The other way round, two pages further on.
    driver.map(at(base, 2), page, two).expect("map");
    driver.map(at(base, 3), page, one).expect("map");
    driver.set_access(at(base, 2), 2 * page, &[0]).expect("access");
    let (front, back) = bytes.split_at(page as usize);
    assert!(read(&driver, at(base, 2), page as usize) == back);
    assert!(read(&driver, at(base, 3), page as usize) == front);

    driver.synchronize().expect("synchronize");
    driver.unmap(at(base, 2), 2 * page).expect("unmap");
    driver.release_pages(one).expect("release");
    driver.release_pages(two).expect("release");
    driver.free_addresses(base, 4 * page).expect("free addresses");
}

#[test]
fn events_follow_their_stream() {
    let Some(driver) = device("events_follow_their_stream") else { return };
    let module = driver.load_ptx(PTX).expect("PTX");
    let kernel = module.kernel(c"wait_and_store").expect("kernel");
    assert!(module.kernel(c"no_such_kernel").is_err());
    let word = driver.alloc(512).expect("alloc");
    write(&driver, word, &[0; 512]);
    let (slow, other) = (driver.create_stream().expect("stream"), driver.create_stream().expect("stream"));
    let (slow_key, other_key) = (driver.stream_key(slow).expect("key"), driver.stream_key(other).expect("key"));
    let (done, after) = (driver.create_event().expect("event"), driver.create_event().expect("event"));
    assert!(driver.query_event(done).expect("query"), "an event that was never recorded is complete");

    let args = [KernelArg::Ptr(word), KernelArg::U32(0xcafe), KernelArg::U64(300_000_000)];
    let begin = Instant::now();
    // SAFETY: the kernel writes 4 bytes of this test's memory.
    unsafe { kernel.launch(slow, LaunchShape::row(1, 1), &args) }.expect("launch");
    driver.record_event(done, slow_key).expect("record");
    driver.stream_wait_event(other_key, done).expect("wait");
    driver.record_event(after, other_key).expect("record");
    let queued = begin.elapsed();
    if queued < Duration::from_millis(200) {
        assert!(!driver.query_event(done).expect("query"), "the kernel runs for longer than that");
        assert!(!driver.query_event(after).expect("query"), "the other stream waits");
    } else {
        eprintln!("SKIPPED: events_follow_their_stream: half of it, as queueing took {queued:?}");
    }
    driver.synchronize_event(after).expect("synchronize");
    assert!(driver.query_event(done).expect("query") && driver.query_event(after).expect("query"));
    let is_fake = fake::load().is_ok(); // then 300 ms are no time at all
    assert!(is_fake || begin.elapsed() >= Duration::from_millis(250), "waited for the kernel");
    assert_eq!(read(&driver, word, 4), 0xcafe_u32.to_le_bytes());

    for event in [done, after] {
        driver.destroy_event(event).expect("destroy");
    }
    // SAFETY: nothing uses the streams any more.
    unsafe {
        driver.destroy_stream(slow).expect("destroy");
        driver.destroy_stream(other).expect("destroy");
    }
    driver.free(word).expect("free");
}

#[test]
fn streams_have_identities() {
    let Some(driver) = device("streams_have_identities") else { return };
    let default = driver.stream_key(StreamHandle::DEFAULT).expect("key");
    assert_eq!(driver.stream_key(StreamHandle::LEGACY).expect("key"), default);
    let mine = driver.stream_key(StreamHandle::PER_THREAD_DEFAULT).expect("key");
    assert_eq!(driver.stream_key(StreamHandle::PER_THREAD_DEFAULT).expect("key"), mine);
    assert_ne!(mine.id, default.id);

    let event = driver.create_event().expect("event");
    driver.record_event(event, mine).expect("record on the own default stream");
    driver.record_event(event, default).expect("record on the legacy default stream");
    let theirs = thread::scope(|scope| {
        let other = scope.spawn(|| {
            let refused = driver.record_event(event, mine).expect_err("another thread's stream");
            assert_eq!((refused.call, refused.kind), (Call::EventRecord, DriverErrorKind::StreamGone));
            let refused = driver.stream_wait_event(mine, event).expect_err("another thread's stream");
            assert_eq!(refused.kind, DriverErrorKind::StreamGone);
            driver.stream_key(StreamHandle::PER_THREAD_DEFAULT).expect("key")
        });
        other.join().expect("the thread's checks")
    });
    assert_ne!(theirs.id, mine.id);
    assert_eq!(
        driver.record_event(event, theirs).expect_err("its thread ended").kind,
        DriverErrorKind::StreamGone
    );

    // Before CUDA 12.0 identities are made of handles, which come back.
    let lasting = driver.driver_version().expect("version") >= 12_000;
    let mut ids = vec![default.id, mine.id, theirs.id];
    for _ in 0..20 {
        let stream = driver.create_stream().expect("stream");
        let key = driver.stream_key(stream).expect("key");
        assert_eq!(driver.stream_key(stream).expect("key"), key);
        assert!(!lasting || !ids.contains(&key.id), "an identity came back: {key:?}");
        ids.push(key.id);
        // SAFETY: nothing uses the stream any more.
        unsafe { driver.destroy_stream(stream) }.expect("destroy");
    }
    driver.destroy_event(event).expect("destroy");
    driver.check_usable().expect("refused streams harm nothing");
}

#[test]
fn the_current_context_stays() {
    let Some(driver) = device("the_current_context_stays") else { return };
    let use_it = || {
        let block = driver.alloc(4096).expect("alloc");
        let event = driver.create_event().expect("event");
        let key = driver.stream_key(StreamHandle::DEFAULT).expect("key");
        driver.record_event(event, key).expect("record");
        driver.synchronize_event(event).expect("synchronize");
        driver.destroy_event(event).expect("destroy");
        driver.free(block).expect("free");
        driver.alloc(1 << 46).expect_err("no device has 64 TiB");
        drop(CudaDriver::open(0).expect("open"));
    };
    let library = library();
    // A new thread has no context.
    thread::scope(|scope| {
        scope.spawn(|| {
            assert!(current_context(&library).is_null());
            use_it();
            assert!(current_context(&library).is_null(), "the thread still has no context");

            let mut foreign: *mut c_void = ptr::null_mut();
            raw!(library, "cuCtxCreate_v2"(&raw mut foreign => *mut *mut c_void, 0 => u32, 0 => i32));
            use_it();
            assert_eq!(current_context(&library), foreign, "the thread still has the other context");
            raw!(library, "cuCtxDestroy_v2"(foreign => *mut c_void));

            let ours: *mut c_void = driver.context_handle().cast();
            raw!(library, "cuCtxSetCurrent"(ours => *mut c_void));
            use_it();
            assert_eq!(current_context(&library), ours);
        });
    });
}

#[test]
fn a_context_of_cudarc_is_shared() {
    let Some(_turn) = device("a_context_of_cudarc_is_shared") else { return };
    let library = library();
    // A new thread has no context.
    let on_a_thread = thread::spawn(move || {
        let context = cudarc::driver::CudaContext::new(0).expect("cudarc's context");
        let driver = CudaDriver::from_context(&context).expect("from_context");
        assert_eq!(driver.context_handle(), context.cu_ctx());
        let stream = context.new_stream().expect("cudarc's stream");
        let key = driver.stream_key(StreamHandle(stream.cu_stream() as u64)).expect("key");
        assert!(!driver.is_capturing(key).expect("capture status"));
        let own = CudaDriver::open(0).expect("open");
        assert_eq!(
            driver.stream_key(StreamHandle::PER_THREAD_DEFAULT).expect("key"),
            own.stream_key(StreamHandle::PER_THREAD_DEFAULT).expect("key"),
            "one context, one stream",
        );
        drop((stream, context));
        raw!(library, "cuCtxSetCurrent"(ptr::null_mut() => *mut c_void));
        let block = driver.alloc(1 << 20).expect("the driver keeps the context");
        driver.free(block).expect("free");
        drop(driver);
        assert!(current_context(&library).is_null(), "dropping the context binds nothing");
    });
    on_a_thread.join().expect("the thread's checks");
}

#[test]
fn captures_are_seen_and_not_broken() {
    let Some(driver) = device("captures_are_seen_and_not_broken") else { return };
    let library = library();
    let stream = driver.create_stream().expect("stream");
    let key = driver.stream_key(stream).expect("key");
    let event = driver.create_event().expect("event");
    let handle = stream.0 as usize as *mut c_void;
    assert!(!driver.is_capturing(key).expect("capture status"));
    // A global capture, the strictest mode.
    raw!(library, "cuStreamBeginCapture_v2"(handle => *mut c_void, 0 => u32));
    assert!(driver.is_capturing(key).expect("capture status"));
    let default = driver.stream_key(StreamHandle::DEFAULT).expect("key");
    assert!(!driver.is_capturing(default).expect("the default stream is never captured"));

    let block = driver.alloc(4 << 20).expect("alloc during a capture");
    assert!(driver.query_event(event).expect("query during a capture"));
    let page = driver.capabilities().page_bytes;
    if page > 0 {
        let base = driver.reserve_addresses(page).expect("reserve during a capture");
        let pages = driver.create_pages(page).expect("create during a capture");
        driver.map(base, page, pages).expect("map during a capture");
        driver.set_access(base, page, &[0]).expect("access during a capture");
        driver.unmap(base, page).expect("unmap during a capture");
        driver.release_pages(pages).expect("release during a capture");
        driver.free_addresses(base, page).expect("free addresses during a capture");
    }
    let host = driver.alloc_host(4096).expect("host memory during a capture");

    let mut graph: *mut c_void = ptr::null_mut();
    raw!(library, "cuStreamEndCapture"(handle => *mut c_void, &raw mut graph => *mut *mut c_void));
    assert!(!graph.is_null(), "the capture was not spoilt");
    raw!(library, "cuGraphDestroy"(graph => *mut c_void));
    driver.free_host(host).expect("free");
    driver.free(block).expect("free");
    driver.destroy_event(event).expect("destroy");
    // SAFETY: nothing uses the stream any more.
    unsafe { driver.destroy_stream(stream) }.expect("destroy");
}

#[test]
fn host_memory_and_cudas_own_pool() {
    let Some(driver) = device("host_memory_and_cudas_own_pool") else { return };
    let host = driver.alloc_host(1 << 16).expect("host memory");
    let address = host.0 as usize as *mut u8;
    // SAFETY: 64 KiB of page-locked memory, this test's own.
    unsafe { address.write_bytes(0x3c, 1 << 16) };
    let stream = driver.create_stream().expect("stream");
    driver.set_default_pool_release_threshold(1 << 30).expect("threshold");
    let block = driver.alloc_async(1 << 16, stream).expect("alloc_async");
    // SAFETY: both are this test's memory, and the stream is waited for.
    unsafe { driver.memcpy_htod_async(block, address, 1 << 16, stream) }.expect("copy");
    driver.synchronize_stream(stream).expect("synchronize");
    assert!(read(&driver, block, 1 << 16).iter().all(|&byte| byte == 0x3c));
    driver.free_async(block, stream).expect("free_async");
    driver.synchronize_stream(stream).expect("synchronize");
    driver.trim_default_pool(0).expect("trim");
    driver.set_default_pool_release_threshold(0).expect("threshold");
    // SAFETY: nothing uses the stream any more.
    unsafe { driver.destroy_stream(stream) }.expect("destroy");
    driver.free_host(host).expect("free");
}

#[cfg(unix)]
#[test]
fn a_fork_keeps_its_hands_off() {
    let Some(driver) = device("a_fork_keeps_its_hands_off") else { return };
    let forked = DriverErrorKind::Forked;
    // SAFETY: the child takes no lock that another thread may hold: it compares numbers and ends.
    let child = unsafe { libc::fork() };
    if child == 0 {
        let unusable = driver.check_usable().is_err_and(|error| error.kind == forked);
        let info = driver.memory_info().is_err_and(|error| error.kind == forked);
        let key = driver.stream_key(StreamHandle::PER_THREAD_DEFAULT).is_err_and(|error| error.kind == forked);
        let version = driver.driver_version().is_err_and(|error| error.kind == forked);
        let code = i32::from(!(unusable && info && key && version));
        // SAFETY: ends the child at once, without the parent's exit handlers.
        unsafe { libc::_exit(code) };
    }
    assert!(child > 0, "fork");
    let mut status = -1;
    // SAFETY: the pointer is valid for the call.
    assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
    assert!(libc::WIFEXITED(status) && libc::WEXITSTATUS(status) == 0, "status {status:#x}");
    driver.memory_info().expect("the parent goes on");
}
