//! The cache of page-locked host memory, on the simulated device: it copies real bytes when a copy ends, so that memory
//! which is reused too early shows.

use std::sync::Arc;
use vramalloc::driver::sim::{Fault, SimDriver, Work};
use vramalloc::driver::{Call, Driver};
use vramalloc::{CachingAllocator, Config, DriverErrorKind, Error, Stream};

const MIB: usize = 1 << 20;

struct Bench {
    sim: Arc<SimDriver>,
    allocator: CachingAllocator,
    stream: Stream,
}

fn with_config(config: Config) -> Bench {
    let sim = SimDriver::builder().capacity(1 << 30).host_limit(256 << 20).build();
    let allocator = CachingAllocator::new(Arc::clone(&sim) as Arc<dyn Driver>, config).expect("allocator");
    let stream = allocator.stream(sim.create_stream()).expect("stream");
    Bench { sim, allocator, stream }
}

fn bench() -> Bench {
    with_config(Config::default())
}

impl Bench {
    fn calls(&self, call: Call) -> u64 {
        self.sim.calls().get(call).calls
    }
}

#[test]
fn values_go_both_ways() {
    let Bench { sim, allocator, stream } = bench();
    let up = allocator.pin_slice(&[1.5_f64, 2.5, 3.5]).expect("pinned");
    let mut on_device = allocator.alloc_uninit::<f64>(3, &stream).expect("alloc");
    let mut down = allocator.alloc_pinned::<f64>(3).expect("pinned");
    sim.launch(stream.key(), Work::new()).expect("never ends by itself");
    on_device.copy_from_pinned(&up).expect("up");
    on_device.copy_to_pinned(&mut down).expect("down");
    assert!(sim.unfinished() > 0, "nobody has waited yet");
    assert_eq!(down.as_slice().expect("waits"), [1.5, 2.5, 3.5]);
    assert_eq!(down.as_slice().expect("no second wait"), up.as_slice().expect("nothing writes it"));
    let mut part = allocator.alloc_pinned::<f64>(1).expect("pinned");
    on_device.slice(1..2).copy_to_pinned(&mut part).expect("down");
    assert_eq!(part.as_slice().expect("waits"), [2.5]);
    sim.assert_clean();
}

#[test]
fn a_dropped_buffer_is_reused_only_after_its_copy() {
    let Bench { sim, allocator, stream } = bench();
    let mut on_device = allocator.alloc_uninit::<u8>(MIB, &stream).expect("alloc");
    // The stream is busy until somebody waits.
    sim.launch(stream.key(), Work::new()).expect("launch");
    let mut first = allocator.alloc_pinned::<u8>(MIB).expect("pinned");
    first.as_mut_slice().expect("slice").fill(1);
    let place = first.as_ptr();
    on_device.copy_from_pinned(&first).expect("copy");
    drop(first);
    let mut second = allocator.alloc_pinned::<u8>(MIB).expect("pinned");
    assert_ne!(second.as_ptr(), place, "the copy has not begun yet");
    second.as_mut_slice().expect("slice").fill(2);
    assert_eq!(allocator.host_memory_stats().active_bytes.current, 2 * MIB as u64);
    assert_eq!(on_device.slice(..1).to_vec().expect("download"), [1]);
    let third = allocator.alloc_pinned::<u8>(MIB).expect("pinned");
    assert_eq!(third.as_ptr(), place, "now it has passed");
    assert_eq!(allocator.host_memory_stats().num_host_alloc, 2);
    sim.assert_clean();
}

#[test]
fn writing_waits_for_the_copy_that_reads() {
    let Bench { sim, allocator, stream } = bench();
    let mut on_device = allocator.alloc_uninit::<u32>(4, &stream).expect("alloc");
    let mut host = allocator.pin_slice(&[1_u32, 2, 3, 4]).expect("pinned");
    sim.launch(stream.key(), Work::new()).expect("launch");
    on_device.copy_from_pinned(&host).expect("copy");
    assert_eq!(host.as_slice().expect("reading does not wait"), [1, 2, 3, 4]);
    assert_eq!(sim.unfinished(), 2);
    host.as_mut_slice().expect("writing does").fill(9);
    assert_eq!(sim.unfinished(), 0);
    assert_eq!(on_device.to_vec().expect("download"), [1, 2, 3, 4]);
}

#[test]
fn a_use_on_another_stream_counts() {
    let Bench { sim, allocator, stream } = bench();
    let other = allocator.stream(sim.create_stream()).expect("stream");
    let mut on_device = allocator.alloc_uninit::<u8>(MIB, &stream).expect("alloc");
    sim.launch(other.key(), Work::new()).expect("launch");
    let host = allocator.pin_slice(&vec![7_u8; MIB]).expect("pinned");
    on_device.as_view_mut().copy_from_pinned_on(&host, &other).expect("copy");
    let place = host.as_ptr();
    drop(host);
    assert_ne!(allocator.alloc_pinned::<u8>(MIB).expect("pinned").as_ptr(), place);
    sim.complete(other.key());
    let again: Vec<_> = (0..2).map(|_| allocator.alloc_pinned::<u8>(MIB).expect("pinned")).collect();
    assert!(again.iter().any(|buffer| buffer.as_ptr() == place));
    assert_eq!(on_device.slice(..1).to_vec().expect("download"), [7]);
    sim.assert_clean();
}

#[test]
fn a_use_by_other_code_is_announced() {
    let Bench { sim, allocator, stream } = bench();
    let host = allocator.pin_slice(&[1_u8; 100]).expect("pinned");
    sim.launch(stream.key(), Work::new()).expect("launch");
    host.record_stream(&stream);
    let place = host.as_ptr();
    drop(host);
    assert_ne!(allocator.alloc_pinned::<u8>(100).expect("pinned").as_ptr(), place);
    assert_eq!(sim.unfinished(), 1);
}

#[test]
fn sizes_are_not_doubled() {
    let bench = bench();
    let mut held = Vec::new();
    for bytes in [1, 64, 65, 511, 513, 5000, 70_000, 1_100_000, 9_000_000] {
        let buffer = bench.allocator.alloc_pinned::<u8>(bytes).expect("pinned");
        let block = buffer.block_bytes() as usize;
        assert!(block >= bytes && block - bytes <= (bytes / 8).max(63), "{bytes}: {block}");
        assert!(buffer.as_ptr().cast::<[u64; 8]>().is_aligned());
        held.push(buffer);
    }
    let stats = bench.allocator.host_memory_stats();
    assert_eq!(stats.allocation.current, 9);
    assert!(stats.reserved_bytes.current == stats.allocated_bytes.current);
    drop(held);
    // A slightly smaller request takes a cached block.
    let calls = bench.calls(Call::HostAlloc);
    drop(bench.allocator.alloc_pinned::<u8>(8_200_000).expect("pinned"));
    assert_eq!(bench.calls(Call::HostAlloc), calls);
    let none = bench.allocator.alloc_pinned::<u8>(4_400_000).expect("pinned");
    assert_eq!(bench.calls(Call::HostAlloc), calls + 1, "half the size does not");
    assert_eq!(none.block_bytes(), 4_718_592);
}

#[test]
fn the_limit_holds() {
    let bench = with_config(Config::default().host_limit(10 * MIB as u64));
    let allocator = &bench.allocator;
    let one = allocator.alloc_pinned::<u8>(4 * MIB).expect("pinned");
    let two = allocator.alloc_pinned::<u8>(4 * MIB).expect("pinned");
    let error = allocator.alloc_pinned::<u8>(3 * MIB).expect_err("beyond the limit");
    let Error::HostOutOfMemory { requested, allocated, reserved, limit, .. } = error else { panic!("{error}") };
    assert_eq!((requested, allocated, reserved), (3 << 20, 8 << 20, 8 << 20));
    assert_eq!(limit, Some(10 << 20));
    let text = error.to_string();
    assert!(text.contains("host_limit") && text.contains("3.00 MiB") && text.contains("8.00 MiB"), "{text}");
    drop(two);
    // What is unused goes, so that another size fits.
    let three = allocator.alloc_pinned::<u8>(6 * MIB).expect("pinned");
    assert_eq!((bench.calls(Call::HostFree), allocator.host_memory_stats().reserved_bytes.current), (1, 10 << 20));
    assert_eq!(allocator.host_memory_stats().reserved_bytes.peak, 10 << 20);
    drop((one, three));
}

#[test]
fn at_the_limit_copies_are_waited_for() {
    let bench = with_config(Config::default().host_limit(2 * MIB as u64));
    let mut on_device = bench.allocator.alloc_uninit::<u8>(MIB, &bench.stream).expect("alloc");
    for batch in 0..20_u8 {
        let mut host = bench.allocator.alloc_pinned::<u8>(MIB).expect("pinned");
        host.as_mut_slice().expect("slice").fill(batch);
        bench.sim.launch(bench.stream.key(), Work::new()).expect("never ends by itself");
        on_device.copy_from_pinned(&host).expect("copy");
    }
    assert_eq!(on_device.slice(..1).to_vec().expect("download"), [19]);
    let stats = bench.allocator.host_memory_stats();
    assert_eq!((stats.num_host_alloc, stats.reserved_bytes.peak), (2, 2 << 20));
    assert!(stats.num_waits >= 9, "{stats:?}");

    let never: Config = "on_pending:fail,host_limit:1MiB".parse().expect("config");
    let bench = with_config(never);
    let host = bench.allocator.pin_slice(&[1_u8; MIB]).expect("pinned");
    bench.sim.launch(bench.stream.key(), Work::new()).expect("launch");
    host.record_stream(&bench.stream);
    drop(host);
    let error = bench.allocator.alloc_pinned::<u8>(MIB).expect_err("it may not wait");
    assert!(matches!(error, Error::HostOutOfMemory { pending: 0x10_0000, .. }), "{error}");
    assert_eq!(bench.sim.unfinished(), 1);
}

#[test]
fn a_host_without_memory_is_an_error_with_numbers() {
    let bench = bench();
    let error = bench.allocator.alloc_pinned::<u8>(300 * MIB).expect_err("256 MiB can be page-locked");
    assert!(matches!(error, Error::HostOutOfMemory { limit: None, reserved: 0, .. }), "{error}");
    drop(bench.allocator.alloc_pinned::<u8>(200 * MIB).expect("pinned"));
    let other = bench.allocator.alloc_pinned::<u8>(130 * MIB).expect("what is cached gives way");
    assert_eq!(other.len(), 130 * MIB);
    let error = bench.allocator.alloc_pinned::<u64>(usize::MAX).expect_err("no host has that");
    assert!(matches!(error, Error::SizeOverflow { .. }), "{error}");
}

#[test]
fn failures_lose_nothing() {
    let bench = bench();
    bench.sim.fail(Fault::nth(Call::HostAlloc, 1, DriverErrorKind::InvalidValue));
    let error = bench.allocator.alloc_pinned::<u8>(100).expect_err("planned");
    assert!(matches!(&error, Error::Driver(error) if error.call == Call::HostAlloc), "{error}");
    drop(bench.allocator.alloc_pinned::<u8>(100).expect("pinned"));
    bench.sim.fail(Fault::nth(Call::HostFree, 1, DriverErrorKind::InvalidValue));
    bench.allocator.empty_host_cache().expect_err("planned");
    assert_eq!(bench.allocator.host_memory_stats().reserved_bytes.current, 128);
    assert_eq!(bench.allocator.empty_host_cache().expect("empty"), 128);
    assert_eq!(bench.sim.leaks().host_allocations, 0);
    // The event that would tell of a copy cannot be recorded.
    let host = bench.allocator.pin_slice(&[1_u8; 100]).expect("pinned");
    host.record_stream(&bench.stream);
    drop(host);
    bench.sim.fail(Fault::nth(Call::EventRecord, 1, DriverErrorKind::InvalidValue));
    bench.allocator.alloc_pinned::<u8>(100).expect_err("planned");
    let stats = bench.allocator.host_memory_stats();
    assert_eq!((stats.active_bytes.current, stats.reserved_bytes.current), (128, 128));
    assert_eq!(bench.allocator.alloc_pinned::<u8>(100).expect("pinned").len(), 100);
}

#[test]
fn nothing_is_left_when_all_is_gone() {
    let Bench { sim, allocator, stream } = bench();
    let used = allocator.pin_slice(&[1_u8; 1000]).expect("pinned");
    let mut on_device = allocator.alloc_uninit::<u8>(1000, &stream).expect("alloc");
    sim.launch(stream.key(), Work::new()).expect("launch");
    on_device.copy_from_pinned(&used).expect("copy");
    let outliving = allocator.pin_slice(&[2_u8; 5000]).expect("pinned");
    drop(used);
    drop((on_device, stream, allocator));
    assert_eq!(outliving.as_slice().expect("it outlives the allocator")[4999], 2);
    drop(outliving);
    let leaks = sim.leaks();
    assert_eq!((leaks.host_allocations, leaks.events), (0, 0), "{leaks:?}");
    sim.assert_clean();
}

#[test]
fn statistics_start_anew() {
    let bench = bench();
    drop(bench.allocator.alloc_pinned::<u8>(1000).expect("pinned"));
    let stats = bench.allocator.host_memory_stats();
    assert_eq!(
        (stats.allocated_bytes.peak, stats.requested_bytes.allocated, stats.num_host_alloc),
        (1024, 1000, 1)
    );
    bench.allocator.reset_peak_host_memory_stats();
    bench.allocator.reset_accumulated_host_memory_stats();
    let stats = bench.allocator.host_memory_stats();
    assert_eq!((stats.allocated_bytes.peak, stats.requested_bytes.allocated, stats.num_host_alloc), (0, 0, 0));
    assert_eq!((stats.reserved_bytes.current, stats.reserved_bytes.peak), (1024, 1024));
}

#[test]
fn no_values_need_no_memory() {
    let bench = bench();
    let mut nothing = bench.allocator.alloc_pinned::<u64>(0).expect("nothing");
    assert_eq!(nothing.as_mut_slice().expect("slice"), [0; 0]);
    let empty = bench.allocator.alloc_uninit::<u64>(0, &bench.stream).expect("nothing");
    empty.copy_to_pinned(&mut nothing).expect("nothing");
    assert_eq!(bench.calls(Call::HostAlloc), 0);
}

/// A buffer whose copy runs on a stream that is gone by the time it is dropped.
fn strand(bench: &Bench, bytes: usize) {
    let Bench { sim, allocator, .. } = bench;
    let handle = sim.create_stream();
    let stream = allocator.stream(handle).expect("stream");
    let host = allocator.pin_slice(&vec![1_u8; bytes]).expect("pinned");
    let mut on_device = allocator.alloc_uninit::<u8>(bytes, &stream).expect("alloc");
    on_device.copy_from_pinned(&host).expect("copy");
    allocator.retire_stream(&stream).expect("retire");
    sim.destroy_stream(handle).expect("destroy");
    host.record_stream(&stream); // no event can be recorded for this any more
}

#[test]
fn streams_that_are_gone_strand_no_block() {
    let bench = bench();
    strand(&bench, 1000);
    strand(&bench, MIB);
    assert_eq!(bench.allocator.empty_host_cache().expect("empty"), MIB as u64 + 1024);
    assert_eq!(bench.allocator.host_memory_stats().reserved_bytes.current, 0);
    // Nor does the pool grow without end where nobody empties it.
    for _ in 0..100 {
        strand(&bench, 1000);
    }
    let stats = bench.allocator.host_memory_stats();
    assert!(stats.reserved_bytes.peak <= 1024 * 6 + MIB as u64, "{stats:?}");
    bench.sim.assert_clean();
}

#[test]
fn small_blocks_under_way_are_no_reason_to_wait() {
    let bench = bench();
    let Bench { sim, allocator, stream } = &bench;
    sim.launch(stream.key(), Work::new()).expect("never ends by itself");
    for _ in 0..20 {
        allocator.pin_slice(&[1_u8; 1000]).expect("pinned").record_stream(stream);
    }
    assert_eq!((sim.unfinished(), allocator.host_memory_stats().num_waits), (1, 0));
    assert_eq!(allocator.host_memory_stats().num_host_alloc, 20);
    assert!(bench.calls(Call::EventRecord) <= 2, "later ones are not asked for before the first has passed");
}

#[test]
fn default_streams_of_threads_that_ended_strand_no_block() {
    let bench = bench();
    std::thread::scope(|scope| {
        let ended = scope.spawn(|| {
            let own = bench.allocator.stream(vramalloc::StreamHandle::PER_THREAD_DEFAULT).expect("stream");
            let host = bench.allocator.pin_slice(&[1_u8; 1000]).expect("pinned");
            bench.sim.launch(own.key(), Work::new().lasting(1000)).expect("launch");
            host.record_stream(&own);
        });
        ended.join().expect("thread");
    });
    assert_eq!(bench.allocator.empty_host_cache().expect("empty"), 1024);
}

#[test]
fn a_capture_is_no_reason_to_have_no_memory() {
    use vramalloc::driver::sim::CaptureMode;
    let bench = bench();
    let Bench { sim, allocator, stream } = &bench;
    let hosts: Vec<_> = (0..4).map(|_| allocator.pin_slice(&vec![1_u8; MIB]).expect("pinned")).collect();
    sim.begin_capture(stream.key(), CaptureMode::Relaxed).expect("begin");
    hosts.iter().for_each(|host| host.record_stream(stream));
    drop(hosts);
    // All four wait for the end of the capture, which the host cannot wait for.
    let fifth = allocator.alloc_pinned::<u8>(MIB).expect("more from the driver");
    sim.end_capture(stream.key()).expect("the capture is whole");
    drop(fifth);
    assert_eq!(allocator.host_memory_stats().num_host_alloc, 5);
}

#[test]
fn at_the_limit_a_capture_keeps_nobody_from_waiting_for_others() {
    use vramalloc::driver::sim::CaptureMode;
    let bench = with_config(Config::default().host_limit(2 * MIB as u64));
    let Bench { sim, allocator, stream } = &bench;
    let other = allocator.stream(sim.create_stream()).expect("stream");
    let [first, second] = [(); 2].map(|()| allocator.pin_slice(&vec![1_u8; MIB]).expect("pinned"));
    sim.begin_capture(stream.key(), CaptureMode::Relaxed).expect("begin");
    sim.launch(other.key(), Work::new()).expect("never ends by itself");
    first.record_stream(stream);
    second.record_stream(&other);
    let place = second.as_ptr();
    drop(first); // the oldest
    drop(second);
    let third = allocator.alloc_pinned::<u8>(MIB).expect("the other stream is waited for");
    assert_eq!(third.as_ptr(), place);
    assert_eq!((sim.unfinished(), allocator.host_memory_stats().num_waits), (0, 1));
    let error = allocator.alloc_pinned::<u8>(MIB).expect_err("the captured stream cannot be waited for");
    assert!(matches!(error, Error::HostOutOfMemory { .. }), "{error}");
    sim.end_capture(stream.key()).expect("the capture is whole");
    sim.assert_clean();
}

#[test]
fn a_captured_use_hides_none_that_runs() {
    use vramalloc::driver::sim::CaptureMode;
    let bench = bench();
    let Bench { sim, allocator, stream } = &bench;
    let other = allocator.stream(sim.create_stream()).expect("stream");
    let mut host = allocator.pin_slice(&[1_u8; 64]).expect("pinned");
    sim.begin_capture(stream.key(), CaptureMode::Relaxed).expect("begin");
    host.record_stream(stream);
    sim.launch(other.key(), Work::new()).expect("never ends by itself");
    host.record_stream(&other);
    let Err(Error::Driver(error)) = host.as_mut_slice() else { panic!("the graph may write it") };
    assert_eq!((error.kind, sim.unfinished()), (DriverErrorKind::Capturing, 0));
    sim.end_capture(stream.key()).expect("the capture is whole");
    host.as_mut_slice().expect("waits").fill(2);
}

#[test]
fn an_announced_capture_is_not_spoilt() {
    let bench = bench();
    let Bench { sim, allocator, stream } = &bench;
    let pool = allocator.private_pool();
    let mut on_device = allocator.alloc_uninit::<u8>(MIB, stream).expect("alloc");
    let capturing = pool.capture();
    let asking = [Call::EventRecord, Call::EventQuery, Call::EventSynchronize, Call::Synchronize, Call::HostFree];
    let before = asking.map(|call| bench.calls(call));
    for batch in 0..6 {
        let host = allocator.pin_slice(&vec![batch; MIB]).expect("pinned");
        on_device.copy_from_pinned(&host).expect("copy");
    }
    assert_eq!(allocator.empty_host_cache().expect("later"), 0);
    assert_eq!(asking.map(|call| bench.calls(call)), before);
    drop(capturing);
    assert_eq!(on_device.slice(..1).to_vec().expect("download"), [5]);
    assert_eq!(allocator.empty_host_cache().expect("empty"), 6 * MIB as u64);
    sim.assert_clean();
}

#[test]
fn two_threads_uses_are_both_waited_for() {
    let bench = bench();
    let Bench { sim, allocator, stream } = &bench;
    let mut host = allocator.pin_slice(&[1_u8; 64]).expect("pinned");
    host.record_stream(stream);
    host.as_mut_slice().expect("closes the epoch").fill(2);
    sim.launch(stream.key(), Work::new()).expect("launch");
    host.record_stream(stream);
    assert_eq!(sim.unfinished(), 1);
    host.as_mut_slice().expect("waits").fill(3);
    assert_eq!(sim.unfinished(), 0);
}

/// What it costs to load batches of 1 MiB, whose copies take 19 us, without anything else: calls about events, calls for
/// memory, and virtual time.
fn load(batches: u64, host_nanos: u64) -> (u64, u64, u64) {
    let Bench { sim, allocator, stream } = bench();
    let mut place = allocator.alloc_uninit::<u8>(MIB, &stream).expect("alloc");
    let (before, start) = (sim.calls(), sim.now_nanos());
    for _ in 0..batches {
        let host = allocator.alloc_pinned::<u8>(MIB).expect("pinned");
        sim.advance(host_nanos); // the host fills the batch
        place.copy_from_pinned(&host).expect("copy");
    }
    sim.complete_all();
    let calls = sim.calls().since(&before);
    let about_events = [Call::EventRecord, Call::EventQuery, Call::EventSynchronize, Call::EventCreate];
    let asked = about_events.iter().map(|&call| calls.get(call).calls).sum();
    (asked, calls.get(Call::HostAlloc).calls, sim.now_nanos() - start)
}

/// A host that is about as fast as the copies keeps them going: it waits for older batches while the newest is copied.
#[test]
fn waiting_for_old_batches_does_not_stop_the_copies() {
    const BATCHES: u64 = 600;
    for (host_nanos, calls_per_batch) in [(1_000, 0.7), (15_000, 0.7), (18_000, 0.7), (40_000, 2.1)] {
        let (asked, blocks, nanos) = load(BATCHES, host_nanos);
        let (asked, nanos) = (asked as f64 / BATCHES as f64, nanos / BATCHES);
        eprintln!("filled in {host_nanos} ns: {nanos} ns a batch, {asked:.2} calls about events, {blocks} blocks");
        let slower = host_nanos.max(19_000) + 2_500; // the calls themselves take some time
        assert!(nanos <= slower, "{nanos} ns a batch where {slower} are enough");
        assert!(asked <= calls_per_batch, "{asked} calls about events a batch");
        assert!(blocks <= 4, "{blocks} blocks");
    }
}

/// The bar: a loader that copies 1,000 batches through the pool, with compute that follows on another stream.
#[test]
fn a_loader_makes_a_handful_of_calls_for_its_memory() {
    let bench = bench();
    let Bench { sim, allocator, stream: compute } = &bench;
    let copies = allocator.stream(sim.create_stream()).expect("stream");
    let mut places: Vec<_> =
        (0..2).map(|_| allocator.alloc_uninit::<u32>(MIB / 4, &copies).expect("alloc")).collect();
    // Events by which the compute stream and the copies stream take turns.
    let events: Vec<_> = (0..4).map(|_| sim.create_event().expect("event")).collect();
    let before = sim.calls();
    for batch in 0..1000_u32 {
        let which = batch as usize % 2;
        let mut host = allocator.alloc_pinned::<u32>(MIB / 4).expect("pinned");
        host.as_mut_slice().expect("slice").fill(batch);
        sim.stream_wait_event(copies.key(), events[2 + which]).expect("the place is free again");
        places[which].copy_from_pinned(&host).expect("copy");
        drop(host);
        sim.record_event(events[which], copies.key()).expect("record");
        sim.stream_wait_event(compute.key(), events[which]).expect("the batch is there");
        let work = Work::reading(places[which].ptr(), MIB as u64).lasting(30_000);
        sim.launch(compute.key(), work).expect("compute");
        sim.record_event(events[2 + which], compute.key()).expect("record");
        sim.advance(20_000); // the host reads the next batch from somewhere
    }
    let calls = sim.calls().since(&before);
    let of = |call| calls.get(call).calls;
    let asked = of(Call::EventRecord) - 2000 + of(Call::EventQuery) + of(Call::EventCreate);
    let waited = of(Call::EventSynchronize);
    eprintln!(
        "1,000 batches of 1 MiB: {} cuMemHostAlloc, {} cuMemFreeHost, {asked} calls to ask for \
         copies and {waited} to wait for one, {:?}",
        of(Call::HostAlloc),
        of(Call::HostFree),
        allocator.host_memory_stats().reserved_bytes
    );
    assert!(of(Call::HostAlloc) <= 5, "{}", of(Call::HostAlloc));
    assert_eq!((of(Call::HostFree), of(Call::Synchronize)), (0, 0));
    assert!(asked + waited <= 700, "an event and a wait for three batches");
    assert_eq!(places[1].slice(..1).to_vec().expect("download"), [999]);
    for event in events {
        sim.destroy_event(event).expect("destroy");
    }
    sim.assert_clean();
}
