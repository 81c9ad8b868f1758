//! Typed buffers on the simulated device.

use bytemuck::PodCastError;
use std::sync::Arc;
use vramalloc::driver::sim::{SimDriver, Work};
use vramalloc::driver::{Call, Driver, StreamHandle};
use vramalloc::{CachingAllocator, Config, DeviceBuffer, DriverErrorKind, Error, Stream};

struct Bench {
    sim: Arc<SimDriver>,
    allocator: CachingAllocator,
    stream: Stream,
}

fn bench() -> Bench {
    let sim = SimDriver::builder().capacity(1 << 30).build();
    let allocator =
        CachingAllocator::new(Arc::clone(&sim) as Arc<dyn Driver>, Config::default()).expect("allocator");
    let stream = allocator.stream(sim.create_stream()).expect("stream");
    Bench { sim, allocator, stream }
}

#[test]
fn values_go_to_the_device_and_back() {
    let Bench { sim, allocator, stream } = bench();
    let values: Vec<u64> = (0..1000).map(|i| i * i).collect();
    let buffer = allocator.clone_htod(&values, &stream).expect("upload");
    assert_eq!((buffer.len(), buffer.num_bytes(), buffer.is_empty()), (1000, 8000, false));
    assert_eq!(buffer.to_vec().expect("download"), values);
    let copy = buffer.try_clone().expect("clone");
    assert_ne!(copy.ptr(), buffer.ptr());
    drop(buffer);
    assert_eq!(copy.to_vec().expect("download"), values);
    let zeros: DeviceBuffer<u64> = allocator.alloc_zeros(1000, &stream).expect("zeros");
    assert_eq!(zeros.to_vec().expect("download"), vec![0; 1000]);
    assert_eq!(sim.unfinished(), 0, "what was read was waited for");
    sim.assert_clean();
}

#[test]
fn zeros_are_zeros_in_reused_memory() {
    let Bench { allocator, stream, .. } = bench();
    let used = allocator.clone_htod(&[7_u8; 4096], &stream).expect("upload");
    let place = used.ptr();
    drop(used);
    let zeros = allocator.alloc_zeros::<u8>(4096, &stream).expect("zeros");
    assert_eq!(zeros.ptr(), place, "the cache was used");
    assert_eq!(zeros.to_vec().expect("download"), [0; 4096]);
}

#[test]
fn views_are_parts() {
    let Bench { sim, allocator, stream } = bench();
    let mut buffer = allocator.clone_htod(&[0_i32, 1, 2, 3, 4, 5, 6, 7, 8, 9], &stream).expect("upload");
    assert_eq!(buffer.slice(2..5).to_vec().expect("part"), [2, 3, 4]);
    assert_eq!(buffer.slice(2..=5).slice(1..).to_vec().expect("part of a part"), [3, 4, 5]);
    assert_eq!(buffer.slice(3..).ptr().0, buffer.ptr().0 + 12);
    let (left, right) = buffer.split_at(4);
    assert_eq!((left.len(), right.to_vec().expect("right")), (4, vec![4, 5, 6, 7, 8, 9]));
    let (mut left, mut right) = buffer.split_at_mut(5);
    left.copy_from(&right.as_view()).expect("copy on the device");
    right.set_zero().expect("zero");
    right.slice_mut(1..2).copy_from_slice(&[77]).expect("one");
    assert_eq!(left.slice(..2).to_vec().expect("left"), [5, 6]);
    assert_eq!(buffer.to_vec().expect("all"), [5, 6, 7, 8, 9, 0, 77, 0, 0, 0]);
    assert!(buffer.try_slice(5..11).is_none());
    assert!(buffer.try_slice_mut(..=usize::MAX).is_none());
    let empty = buffer.slice(10..);
    assert!(empty.is_empty());
    assert!(empty.to_vec().expect("nothing").is_empty());
    sim.assert_clean();
}

#[test]
#[should_panic(expected = "not inside the 4 values")]
fn a_range_that_is_not_inside_panics() {
    let Bench { allocator, stream, .. } = bench();
    let buffer = allocator.alloc_zeros::<u8>(4, &stream).expect("zeros");
    let _ = buffer.slice(3..5);
}

#[test]
#[should_panic(expected = "a copy of 3 values to a place for 4")]
fn a_copy_of_another_length_panics() {
    let Bench { allocator, stream, .. } = bench();
    let mut buffer = allocator.alloc_zeros::<u8>(4, &stream).expect("zeros");
    let _ = buffer.copy_from_slice(&[1, 2, 3]);
}

#[test]
fn the_same_bytes_as_another_type() {
    let Bench { allocator, stream, .. } = bench();
    let buffer = allocator.clone_htod(&[1.0_f32, -2.0, 0.5], &stream).expect("upload");
    let bits = buffer.as_view().cast::<u32>().expect("as bits");
    assert_eq!(bits.to_vec().expect("bits"), [1.0_f32, -2.0, 0.5].map(f32::to_bits));
    assert_eq!(buffer.as_view().cast::<u64>().unwrap_err(), PodCastError::OutputSliceWouldHaveSlop);
    let odd = buffer.slice(1..);
    assert_eq!(odd.cast::<u64>().unwrap_err(), PodCastError::TargetAlignmentGreaterAndInputNotAligned);
    let (error, buffer) = buffer.cast::<[u32; 2]>().expect_err("twelve bytes are one and a half");
    assert_eq!(error, PodCastError::OutputSliceWouldHaveSlop);
    let bytes = buffer.cast::<u8>().map_err(|(error, _)| error).expect("bytes");
    assert_eq!((bytes.len(), bytes.slice(..4).to_vec().expect("one")), (12, 1.0_f32.to_le_bytes().to_vec()));
}

#[test]
fn no_values_cost_no_call() {
    let Bench { sim, allocator, stream } = bench();
    let before = sim.calls().total().calls;
    let mut empty = allocator.alloc_zeros::<f64>(0, &stream).expect("nothing");
    empty.copy_from_slice(&[]).expect("nothing");
    assert!(empty.ptr().is_null() && empty.is_empty());
    assert_eq!(sim.calls().total().calls, before);
    let units = allocator.clone_htod(&[(); 5], &stream).expect("values without bytes");
    assert_eq!((units.len(), units.num_bytes()), (5, 0));
}

#[test]
fn a_type_of_large_alignment_gets_it() {
    #[repr(C, align(4096))]
    #[derive(Clone, Copy, bytemuck::AnyBitPattern)]
    struct Page([u8; 4096]);
    let Bench { allocator, stream, .. } = bench();
    let _odd = allocator.alloc(512, &stream).expect("alloc");
    let pages = allocator.alloc_zeros::<Page>(3, &stream).expect("pages");
    assert_eq!(pages.ptr().0 % 4096, 0);
    assert_eq!(pages.slice(1..2).to_vec().expect("page")[0].0[17], 0);
}

#[test]
fn too_many_values_are_an_error() {
    let Bench { allocator, stream, .. } = bench();
    for len in [usize::MAX, usize::MAX / 8, usize::MAX / 16] {
        let error = allocator.alloc_uninit::<u64>(len, &stream).expect_err("no device has that");
        assert!(matches!(error, Error::SizeOverflow { .. }), "{error}");
    }
}

#[test]
fn debug_reads_no_device_memory() {
    let Bench { sim, allocator, stream } = bench();
    let mut buffer = allocator.clone_htod(&[1_u16, 2, 3], &stream).expect("upload");
    let calls = sim.calls();
    let text = format!("{buffer:?} {:?} {:?}", buffer.slice(1..), buffer.stream());
    assert!(text.contains("DeviceBuffer") && text.contains("u16") && text.contains("len: 3"), "{text}");
    let text = format!("{:?}", buffer.slice_mut(..1));
    assert!(text.contains("DeviceViewMut") && text.contains("len: 1"), "{text}");
    assert_eq!(sim.calls(), calls);
}

#[test]
fn a_use_on_another_stream_is_recorded() {
    let Bench { sim, allocator, stream } = bench();
    let other = allocator.stream(sim.create_stream()).expect("stream");
    let mut buffer = allocator.alloc_uninit::<u8>(1 << 20, &stream).expect("alloc");
    buffer.slice_mut(..4).copy_from_slice_on(&[1, 2, 3, 4], &other).expect("copy on the other stream");
    let place = buffer.ptr();
    // A kernel on the other stream, which never ends by itself.
    sim.launch(other.key(), Work::reading(place, 1 << 20)).expect("launch");
    drop(buffer);
    let next = allocator.alloc_uninit::<u8>(1 << 20, &stream).expect("alloc");
    assert_ne!(next.ptr(), place, "the memory is still used");
    sim.complete_all();
    assert_eq!(allocator.poll(), 1);
    let again = allocator.alloc_uninit::<u8>(1 << 20, &stream).expect("alloc");
    assert_eq!(again.ptr(), place);
    sim.assert_clean();
}

#[test]
fn a_stream_of_another_allocator_is_refused() {
    let ours = bench();
    let theirs = bench();
    let buffer = ours.allocator.alloc_zeros::<u8>(8, &ours.stream).expect("zeros");
    let mut place = [0; 8];
    let error = buffer.as_view().copy_to_slice_on(&mut place, &theirs.stream).expect_err("another device's");
    assert!(matches!(error, Error::WrongDevice { .. }), "{error}");
    let mut target = theirs.allocator.alloc_zeros::<u8>(8, &theirs.stream).expect("zeros");
    let error = target.copy_from(&buffer.as_view()).expect_err("another device's");
    assert!(matches!(error, Error::WrongDevice { .. }), "{error}");
}

#[test]
fn failures_come_back_as_errors() {
    use vramalloc::driver::sim::Fault;
    let Bench { sim, allocator, stream } = bench();
    let mut buffer = allocator.alloc_zeros::<u8>(8, &stream).expect("zeros");
    for call in [Call::CopyToDevice, Call::CopyToHost, Call::Fill, Call::CopyOnDevice] {
        sim.fail(Fault::nth(call, 1, DriverErrorKind::InvalidValue));
        let error = match call {
            Call::CopyToDevice => buffer.copy_from_slice(&[1; 8]).map(drop),
            Call::CopyToHost => buffer.to_vec().map(drop),
            Call::Fill => allocator.alloc_zeros::<u8>(8, &stream).map(drop),
            _ => buffer.try_clone().map(drop),
        };
        assert!(matches!(&error, Err(Error::Driver(error)) if error.call == call), "{error:?}");
    }
    assert_eq!(allocator.memory_allocated(), 512, "what failed was freed");
    drop(allocator);
    let error = buffer.try_clone().expect_err("nothing to allocate from");
    assert!(matches!(error, Error::AllocatorGone { device: 0 }), "{error}");
    assert_eq!(buffer.to_vec().expect("still there"), [0; 8]);
}

#[test]
fn buffers_cross_threads() {
    let Bench { allocator, stream, .. } = bench();
    let buffer = allocator.clone_htod(&[1_u32, 2, 3], &stream).expect("upload");
    std::thread::scope(|scope| {
        let shared = &buffer;
        let one = scope.spawn(move || shared.to_vec().expect("download"));
        let two = scope.spawn(move || shared.slice(1..).to_vec().expect("download"));
        assert_eq!((one.join().expect("thread"), two.join().expect("thread")), (vec![1, 2, 3], vec![2, 3]));
    });
    std::thread::spawn(move || drop(buffer)).join().expect("dropped elsewhere");
    assert_eq!(allocator.memory_allocated(), 0);
}

#[test]
fn copies_take_virtual_time_and_cost_calls() {
    let Bench { sim, allocator, stream } = bench();
    let host = sim.alloc_host(55_000_000).expect("host memory");
    let buffer = allocator.alloc_uninit::<u8>(55_000_000, &stream).expect("alloc");
    let start = sim.now_nanos();
    let source = std::ptr::with_exposed_provenance(host.0 as usize);
    // SAFETY: the test's own memory, waited for below.
    unsafe { sim.copy_to_device(buffer.ptr(), source, 55_000_000, stream.key()) }.expect("copy");
    assert_eq!(sim.unfinished(), 1, "page-locked memory is copied while the host goes on");
    sim.synchronize_stream(stream.key()).expect("synchronize");
    let millis = (sim.now_nanos() - start) / 1_000_000;
    assert_eq!((millis, sim.unfinished()), (1, 0), "55 MB at 55 GB/s");
    let calls = sim.calls();
    assert_eq!((calls.get(Call::CopyToDevice).calls, calls.get(Call::StreamSynchronize).calls), (1, 1));
    sim.free_host(host).expect("free");
    assert_eq!(sim.stream_key(StreamHandle::DEFAULT).expect("key").handle, StreamHandle::DEFAULT);
}

#[test]
fn uses_on_default_streams_of_threads_that_ended_strand_nothing() {
    let Bench { sim, allocator, stream } = bench();
    let buffer = allocator.alloc_zeros::<u8>(1 << 20, &stream).expect("zeros");
    std::thread::scope(|scope| {
        let ended = scope.spawn(|| {
            let own = allocator.stream(StreamHandle::PER_THREAD_DEFAULT).expect("stream");
            sim.launch(own.key(), Work::new().lasting(1000)).expect("launch");
            buffer.record_stream(&own).expect("record");
            drop(allocator.alloc_zeros::<u8>(1 << 20, &own).expect("zeros"));
        });
        ended.join().expect("thread");
    });
    drop(buffer);
    allocator.empty_cache().expect("empty");
    assert_eq!(allocator.memory_reserved(), 0);
}

#[test]
fn a_retired_stream_is_an_error_that_says_what_to_do() {
    let Bench { sim, allocator, stream } = bench();
    let other = allocator.stream(sim.create_stream()).expect("stream");
    let mut buffer = allocator.clone_htod(&[1_u8, 2, 3], &stream).expect("upload");
    sim.synchronize_stream(stream.key()).expect("synchronize");
    allocator.retire_stream(&stream).expect("retire");
    sim.destroy_stream(stream.key().handle).expect("destroy");
    let calls = sim.calls();
    for refused in [buffer.to_vec().map(drop), buffer.set_zero(), buffer.copy_from_slice(&[4, 5, 6])] {
        let Err(Error::Driver(error)) = refused else { panic!("the stream may be gone") };
        assert_eq!(error.kind, DriverErrorKind::StreamGone);
        assert!(error.to_string().contains("retired") && error.to_string().contains("_on"), "{error}");
    }
    assert_eq!(sim.calls(), calls, "nobody was asked");
    let mut values = [0; 3];
    buffer.as_view().copy_to_slice_on(&mut values, &other).expect("on another stream");
    assert_eq!(values, [1, 2, 3]);
    sim.assert_clean();
}
