//! The functions for PyTorch and CuPy on a simulated device, which can see what they do: captures, queued work, bytes.

use crate::devices::Device;
use crate::registry;
use crate::status::{Status, guarded};
use crate::*;
use parking_lot::{Mutex, MutexGuard};
use std::ffi::{CStr, c_void};
use std::ptr::null_mut;
use std::sync::{Arc, Barrier, Once};
use vramalloc::driver::sim::{CaptureMode, SimDriver, Work};
use vramalloc::driver::{Call, Driver};
use vramalloc::{DevicePtr, MemoryStats, OpenDevice, StreamHandle};

const MIB: usize = 1 << 20;

/// The process's one allocator, for one test at a time.
struct Torch {
    device: &'static Device,
    sim: Arc<SimDriver>,
    _turn: MutexGuard<'static, ()>,
}

fn torch() -> Torch {
    static TURN: Mutex<()> = Mutex::new(());
    static CONFIGURED: Once = Once::new();
    let turn = TURN.lock();
    CONFIGURED.call_once(|| {
        // SAFETY: every test of this program goes through here before it starts a thread or reads a variable.
        unsafe {
            std::env::set_var("VRAMALLOC_DEVICE", "sim:256MiB");
            std::env::set_var("VRAMALLOC_CONF", "segments:expandable");
        }
    });
    let device = registry::own().unwrap().0.get(0).unwrap();
    let OpenDevice::Sim(sim) = &device.open else { panic!("the device is simulated") };
    let torch = Torch { device, sim: Arc::clone(sim), _turn: turn };
    vram_torch_empty_cache();
    assert_eq!(torch.stats().reserved_bytes.all.current, 0, "the test before left something");
    torch
}

impl Torch {
    fn stats(&self) -> MemoryStats {
        self.device.allocator.validate().unwrap();
        self.sim.assert_clean();
        self.device.allocator.memory_stats()
    }

    fn stream(&self) -> StreamHandle {
        self.sim.create_stream()
    }

    fn alloc(&self, bytes: usize, stream: StreamHandle) -> *mut c_void {
        // SAFETY: the stream is one of the device's.
        unsafe { vram_torch_alloc(bytes, 0, raw(stream)) }
    }

    fn free(&self, ptr: *mut c_void) {
        vram_torch_free(ptr, 1, 0, null_mut());
    }

    /// The pool of the segment that an address is in.
    fn pool_id(&self, ptr: *mut c_void) -> (u64, u64) {
        let address = ptr.addr() as u64;
        let segments = self.device.allocator.pytorch_snapshot().segments;
        let within = segments
            .iter()
            .find(|segment| (segment.address..segment.address + segment.total_size).contains(&address));
        within.expect("it is in a segment").segment_pool_id
    }

    fn launch(&self, stream: StreamHandle, ptr: *mut c_void, bytes: usize) {
        self.sim.launch(stream, Work::writing(DevicePtr(ptr.addr() as u64), bytes as u64)).unwrap();
    }
}

fn raw(stream: StreamHandle) -> *mut c_void {
    std::ptr::without_provenance_mut(stream.0 as usize)
}

fn last_error() -> String {
    // SAFETY: it is a string that ends in a zero byte, and no call comes in between.
    unsafe { CStr::from_ptr(vram_last_error()) }.to_string_lossy().into_owned()
}

fn pool(first: u64) -> PoolId {
    PoolId { first, second: 0 }
}

#[test]
fn a_known_stream_costs_no_driver_call() {
    let torch = torch();
    let stream = torch.stream();
    torch.free(torch.alloc(3 * MIB, stream));
    let before = torch.sim.calls().total().calls;
    for _ in 0..100 {
        let (x, y) = (torch.alloc(3 * MIB, stream), torch.alloc(0, stream));
        assert!(!x.is_null() && y.is_null());
        torch.free(x);
        torch.free(y);
    }
    assert_eq!(torch.sim.calls().total().calls, before);
    vram_torch_empty_cache();
}

#[test]
fn recorded_memory_waits_for_the_other_stream() {
    let torch = torch();
    let (a, b) = (torch.stream(), torch.stream());
    let x = torch.alloc(4 * MIB, a);
    torch.launch(b, x, 4 * MIB);
    // SAFETY: the stream is one of the device's.
    unsafe { vram_torch_record_stream(x, raw(b)) };
    torch.free(x);
    let y = torch.alloc(4 * MIB, a);
    assert_ne!(x, y, "the other stream still writes there");
    torch.sim.complete(b);
    torch.free(y);
    assert_eq!(torch.stats().active.all.current, 1, "x waits");
    vram_torch_empty_cache();
    assert_eq!(torch.stats().reserved_bytes.all.current, 0);
}

#[test]
fn a_threads_default_stream_is_not_anothers() {
    let torch = torch();
    let own = StreamHandle::PER_THREAD_DEFAULT;
    let x = torch.alloc(4 * MIB, own);
    let address = x.addr();
    let (recorded, freed) = (std::sync::Barrier::new(2), std::sync::Barrier::new(2));
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let x = std::ptr::without_provenance_mut(address);
            // SAFETY: every thread has that stream.
            unsafe { vram_torch_record_stream(x, raw(own)) };
            recorded.wait();
            freed.wait();
            vram_torch_empty_cache(); // only this thread can ask its stream
        });
        recorded.wait();
        torch.free(x);
        assert_eq!(torch.stats().active.all.current, 1, "it waits for the other thread's stream of that handle");
        freed.wait();
    });
    vram_torch_empty_cache();
    assert_eq!(torch.stats().reserved_bytes.all.current, 0);
}

#[test]
fn out_of_memory_is_null_and_a_report() {
    let torch = torch();
    let x = torch.alloc(512 * MIB, StreamHandle::DEFAULT);
    assert!(x.is_null() && last_error().contains("out of memory on device 0"), "{}", last_error());
    vram_torch_set_memory_fraction(0.125, 0);
    assert!(torch.alloc(64 * MIB, StreamHandle::DEFAULT).is_null() && last_error().contains("limit"));
    vram_torch_set_memory_fraction(1.0, 0);
    let y = torch.alloc(64 * MIB, StreamHandle::DEFAULT);
    assert!(!y.is_null());
    torch.free(y);
    assert!(torch.alloc(usize::MAX, StreamHandle::DEFAULT).is_null() && last_error().contains("2^60"));
    // SAFETY: the default stream.
    let nowhere = unsafe { vram_torch_alloc(1, 63, null_mut()) };
    assert!(nowhere.is_null() && last_error().contains("only for device 0"));
    vram_torch_set_memory_fraction(f64::NAN, 0);
    assert_eq!(torch.device.allocator.limit(), None);
}

#[test]
fn a_bad_free_is_told_and_nothing_more() {
    let torch = torch();
    let x = torch.alloc(4096, StreamHandle::DEFAULT);
    torch.free(x);
    torch.free(x);
    assert!(last_error().contains("it was freed before"), "{}", last_error());
    torch.free((&raw const torch).cast_mut().cast());
    assert!(last_error().contains("not the start of an allocation"), "{}", last_error());
    // SAFETY: the default stream.
    unsafe { vram_torch_record_stream(x, null_mut()) };
    assert!(last_error().contains("it was freed before"), "{}", last_error());
    vram_cupy_free(null_mut(), x, 0);
    assert!(last_error().contains("it was freed before"), "{}", last_error());
    assert_eq!(torch.stats().allocation.all.current, 0);
}

#[test]
fn segments_go_back_at_once() {
    let torch = torch();
    // SAFETY: the default stream.
    let segment = |bytes| unsafe { vram_torch_segment_alloc(bytes, 0, null_mut()) };
    let (x, y) = (segment(20 * MIB), segment(2 * MIB));
    assert!(segment(512 * MIB).is_null());
    vram_torch_segment_free(x, 20 * MIB, 0, null_mut());
    assert!(torch.stats().reserved_bytes.all.current < 20 * MIB as u64);
    vram_torch_segment_free(y, 2 * MIB, 0, null_mut());
    assert_eq!(torch.stats().reserved_bytes.all.current, 0);
}

#[test]
fn cupy_gets_memory_of_its_stream() {
    let torch = torch();
    let stream = torch.stream();
    // SAFETY: the stream is one of the device's.
    let x = unsafe { vram_cupy_malloc(raw(stream), 8 * MIB, 0) };
    assert_eq!(torch.device.allocator.snapshot().segments[0].stream.handle, stream);
    vram_cupy_free(raw(stream), x, 0);
    // SAFETY: as above.
    assert!(unsafe { vram_cupy_malloc(raw(stream), 512 * MIB, 0) }.is_null());
    assert_eq!(torch.stats().allocation.all.current, 0);
}

#[test]
fn a_capture_has_memory_of_its_own() {
    let torch = torch();
    let (captured, other) = (torch.stream(), torch.stream());
    torch.free(torch.alloc(4 * MIB, captured));
    vram_torch_begin_allocate_to_pool(0, pool(1), null_mut());
    let before = torch.alloc(4 * MIB, captured);
    torch.free(before); // not captured yet: from the stream's own memory
    torch.sim.begin_capture(captured, CaptureMode::Global).unwrap();
    torch.sim.clear_log();
    let x = torch.alloc(4 * MIB, captured);
    let outside = torch.alloc(4 * MIB, other);
    assert_ne!(x, before, "the graph has memory of its own");
    torch.launch(captured, x, 4 * MIB);
    torch.free(x);
    assert_eq!(torch.alloc(4 * MIB, captured), x, "and uses it again");
    torch.free(x);
    let graph = torch.sim.end_capture(captured).unwrap();
    vram_torch_end_allocate_to_pool(0, pool(1));

    vram_torch_empty_cache();
    let y = torch.alloc(4 * MIB, captured);
    let z = torch.alloc(4 * MIB, captured);
    assert!(y != x && z != x, "others do not get it");
    torch.sim.launch_graph(captured, &graph).unwrap();
    [y, z, outside].into_iter().for_each(|ptr| torch.free(ptr));
    vram_torch_empty_cache();
    assert!(torch.stats().reserved_bytes.all.current >= 4 * MIB as u64);
    vram_torch_release_pool(0, pool(1));
    vram_torch_empty_cache();
    assert_eq!(torch.stats().reserved_bytes.all.current, 0);

    vram_torch_release_pool(0, pool(1));
    assert!(last_error().contains("no pool (1, 0)"), "{}", last_error());
    vram_torch_end_allocate_to_pool(0, pool(1));
    assert!(last_error().contains("no capture into pool (1, 0)"), "{}", last_error());
}

#[test]
fn graphs_share_a_pool_until_the_last_is_gone() {
    let torch = torch();
    let stream = torch.stream();
    let capture = || {
        vram_torch_begin_allocate_to_pool(0, pool(5), null_mut());
        torch.sim.begin_capture(stream, CaptureMode::Global).unwrap();
        let x = torch.alloc(8 * MIB, stream);
        torch.free(x);
        torch.sim.end_capture(stream).unwrap();
        vram_torch_end_allocate_to_pool(0, pool(5));
        x
    };
    assert_eq!(capture(), capture());
    vram_torch_release_pool(0, pool(5));
    vram_torch_empty_cache();
    assert!(torch.stats().reserved_bytes.all.current >= 8 * MIB as u64, "one graph is left");
    vram_torch_release_pool(0, pool(5));
    // The same number again, while a tensor of the old pool lives.
    capture();
    let kept = torch.alloc(8 * MIB, stream);
    vram_torch_release_pool(0, pool(5));
    capture();
    vram_torch_release_pool(0, pool(5));
    torch.free(kept);
    vram_torch_empty_cache();
    assert_eq!(torch.stats().reserved_bytes.all.current, 0);
}

#[test]
fn a_pool_may_be_captured_into_twice_at_once() {
    let torch = torch();
    let (a, b) = (torch.stream(), torch.stream());
    let (x, y) = (torch.alloc(4 * MIB, a), torch.alloc(4 * MIB, b));
    [x, y].into_iter().for_each(|ptr| torch.free(ptr));
    for stream in [a, b] {
        vram_torch_begin_allocate_to_pool(0, pool(31), null_mut());
        torch.sim.begin_capture(stream, CaptureMode::Relaxed).unwrap();
        torch.free(torch.alloc(4 * MIB, stream));
    }
    torch.sim.end_capture(b).unwrap();
    vram_torch_end_allocate_to_pool(0, pool(31));
    // The first one goes on, with memory that nobody else gets.
    let captured = torch.alloc(8 * MIB, a);
    assert_eq!(torch.pool_id(captured), (31, 0), "the id is PyTorch's");
    torch.free(captured);
    torch.sim.end_capture(a).unwrap();
    vram_torch_end_allocate_to_pool(0, pool(31));
    assert!(!torch.device.routes.any());
    assert!(torch.device.routes.reserved((31, 0)) >= 16 * MIB as u64);
    vram_torch_release_pool(0, pool(31));
    vram_torch_empty_cache();
    assert!(torch.stats().reserved_bytes.all.current >= 16 * MIB as u64, "one graph is left");
    vram_torch_release_pool(0, pool(31));
    vram_torch_empty_cache();
    assert_eq!(torch.stats().reserved_bytes.all.current, 0);
}

#[test]
fn captures_of_several_threads_do_not_mix() {
    let torch = torch();
    let barrier = Barrier::new(2);
    let addresses: [_; 2] = std::thread::scope(|scope| {
        let threads = [11, 12].map(|number| {
            let (torch, barrier) = (&torch, &barrier);
            scope.spawn(move || {
                let stream = torch.stream();
                vram_torch_begin_allocate_to_pool(0, pool(number), null_mut());
                barrier.wait(); // both are announced
                torch.sim.begin_capture(stream, CaptureMode::Relaxed).unwrap();
                let x = torch.alloc(4 * MIB, stream);
                barrier.wait(); // both have said which capture is theirs
                // Another thread works for this capture, as PyTorch's backward pass does.
                let y = std::thread::scope(|scope| {
                    scope.spawn(|| torch.alloc(4 * MIB, stream).addr()).join().unwrap()
                });
                barrier.wait();
                torch.sim.end_capture(stream).unwrap();
                vram_torch_end_allocate_to_pool(0, pool(number));
                (x.addr(), y)
            })
        });
        threads.map(|thread| thread.join().unwrap())
    });
    for (number, (x, y)) in [11, 12].into_iter().zip(addresses) {
        let bytes = torch.device.routes.reserved((number, 0));
        assert!(bytes >= 8 * MIB as u64, "both blocks are in pool {number}: {bytes}");
        [x, y].into_iter().for_each(|address| torch.free(std::ptr::without_provenance_mut(address)));
        vram_torch_release_pool(0, pool(number));
    }
    vram_torch_empty_cache();
    assert_eq!(torch.stats().reserved_bytes.all.current, 0);
}

#[test]
fn nothing_waits_or_is_given_back_during_a_capture() {
    let torch = torch();
    let stream = torch.stream();
    let x = torch.alloc(100 * MIB, stream);
    torch.launch(stream, x, 100 * MIB);
    torch.free(x); // still used
    vram_torch_begin_allocate_to_pool(0, pool(21), null_mut());
    torch.sim.begin_capture(stream, CaptureMode::Global).unwrap();
    torch.sim.clear_log();
    assert!(torch.alloc(250 * MIB, stream).is_null());
    let bad = [Call::Free, Call::Synchronize, Call::EventSynchronize];
    assert!(torch.sim.log().iter().all(|entry| !bad.contains(&entry.call)));
    vram_torch_empty_cache(); // asked for, but not now
    torch.sim.end_capture(stream).unwrap();
    vram_torch_end_allocate_to_pool(0, pool(21));
    vram_torch_release_pool(0, pool(21));
    vram_torch_empty_cache();
    assert_eq!(torch.stats().reserved_bytes.all.current, 0);
}

#[test]
fn a_retired_streams_handle_may_come_again() {
    let torch = torch();
    let own = registry::own().unwrap().1;
    let first = torch.stream();
    let x = torch.alloc(4 * MIB, first);
    torch.launch(first, x, 4 * MIB);
    torch.free(x);
    // SAFETY: the stream is one of the device's.
    assert_eq!(unsafe { vram_retire_stream(own, 0, raw(first)) }, Status::Ok);
    torch.sim.destroy_stream(first).unwrap();
    let second = torch.stream();
    assert_eq!(first, second, "the driver uses handles again");
    let y = torch.alloc(4 * MIB, second);
    torch.launch(second, y, 4 * MIB); // would be refused if the first stream's work were still under way there
    torch.free(y);
    torch.sim.complete_all();
    vram_torch_empty_cache();
    assert_eq!(torch.stats().reserved_bytes.all.current, 0);
}

#[test]
fn a_panic_stays_inside() {
    let caught = guarded::<()>(|| panic!("on purpose"));
    let failure = caught.unwrap_err();
    assert_eq!(failure.status(), Status::Internal);
    assert!(failure.to_string().contains("on purpose"));
}

#[test]
fn the_processes_allocator_has_a_handle() {
    let torch = torch();
    let mut handle = 0;
    // SAFETY: the pointers can be written, the stream is the default one.
    unsafe {
        assert_eq!(vram_process_allocator(&raw mut handle), Status::Ok);
        let x = torch.alloc(1000, StreamHandle::DEFAULT);
        let mut stats = Stats::default();
        assert_eq!(vram_get_stats(handle, 0, &raw mut stats, size_of::<Stats>()), Status::Ok);
        assert_eq!(stats.requested_bytes.all.current, 1000);
        assert_eq!(vram_free(handle, x, 1000, 0, null_mut()), Status::Ok);
    }
    assert_eq!(vram_destroy(handle), Status::InvalidArgument);
}

#[test]
fn the_first_of_two_captures_into_a_pool_may_end_first() {
    let torch = torch();
    let (a, b) = (torch.stream(), torch.stream());
    // Known streams.
    [a, b].into_iter().for_each(|stream| torch.free(torch.alloc(4 * MIB, stream)));
    for stream in [a, b] {
        vram_torch_begin_allocate_to_pool(0, pool(41), null_mut());
        torch.sim.begin_capture(stream, CaptureMode::Relaxed).unwrap();
        torch.free(torch.alloc(4 * MIB, stream));
    }
    torch.sim.end_capture(a).unwrap();
    vram_torch_end_allocate_to_pool(0, pool(41));
    let captured = torch.alloc(8 * MIB, b);
    let id = torch.pool_id(captured);
    torch.free(captured);
    torch.sim.end_capture(b).unwrap();
    vram_torch_end_allocate_to_pool(0, pool(41));
    vram_torch_release_pool(0, pool(41));
    vram_torch_release_pool(0, pool(41));
    vram_torch_empty_cache();
    assert_eq!(id, (41, 0), "the second capture's memory must be the pool's");
}

#[test]
fn the_second_of_two_captures_may_allocate_after_the_first_has_ended() {
    let torch = torch();
    let (a, b) = (torch.stream(), torch.stream());
    [a, b].into_iter().for_each(|stream| torch.free(torch.alloc(4 * MIB, stream)));
    for stream in [a, b] {
        vram_torch_begin_allocate_to_pool(0, pool(42), null_mut());
        torch.sim.begin_capture(stream, CaptureMode::Relaxed).unwrap();
    }
    torch.free(torch.alloc(4 * MIB, a));
    torch.sim.end_capture(a).unwrap();
    vram_torch_end_allocate_to_pool(0, pool(42));
    let captured = torch.alloc(8 * MIB, b);
    let id = torch.pool_id(captured);
    torch.free(captured);
    torch.sim.end_capture(b).unwrap();
    vram_torch_end_allocate_to_pool(0, pool(42));
    [0, 1].into_iter().for_each(|_| vram_torch_release_pool(0, pool(42)));
    vram_torch_empty_cache();
    assert_eq!(id, (42, 0));
    assert_eq!(torch.stats().reserved_bytes.all.current, 0);
}

#[test]
fn captures_of_one_thread_do_not_mix() {
    let torch = torch();
    let streams = [torch.stream(), torch.stream()];
    streams.into_iter().for_each(|stream| torch.free(torch.alloc(4 * MIB, stream)));
    for (stream, number) in streams.into_iter().zip([51, 52]) {
        vram_torch_begin_allocate_to_pool(0, pool(number), null_mut());
        torch.sim.begin_capture(stream, CaptureMode::Relaxed).unwrap();
    }
    // Only now the first of them allocates.
    let captured = streams.map(|stream| torch.alloc(4 * MIB, stream));
    let ids = captured.map(|ptr| torch.pool_id(ptr));
    for (index, number) in [51, 52].into_iter().enumerate() {
        torch.free(captured[index]);
        torch.sim.end_capture(streams[index]).unwrap();
        vram_torch_end_allocate_to_pool(0, pool(number));
        vram_torch_release_pool(0, pool(number));
    }
    vram_torch_empty_cache();
    assert_eq!(ids, [(51, 0), (52, 0)]);
    assert_eq!(torch.stats().reserved_bytes.all.current, 0);
}

#[test]
fn no_pool_is_none_to_capture_into() {
    let torch = torch();
    vram_torch_begin_allocate_to_pool(0, pool(0), null_mut());
    assert!(last_error().contains("(0, 0) means no pool"), "{}", last_error());
    assert!(!torch.device.routes.any());
    vram_torch_end_allocate_to_pool(0, pool(0));
    assert!(last_error().contains("no capture into pool (0, 0)"), "{}", last_error());
}
