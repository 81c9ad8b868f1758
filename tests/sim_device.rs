//! The simulated device by its public face: bytes, time, misuse, failures, costs.

use vramalloc::driver::sim::{CaptureMode, CostModel, Fault, SimDriver, SimMachine, Work};
use vramalloc::driver::{Call, DevicePtr, Driver, DriverErrorKind as Kind, StreamHandle};

const MIB: u64 = 1 << 20;
const PAGE: u64 = 2 * MIB;

type Device = std::sync::Arc<SimDriver>;

fn device(mib: u64) -> Device {
    SimDriver::builder().capacity(mib * MIB).build()
}

/// Fresh pages mapped and usable at an address.
fn mapped(device: &Device, at: DevicePtr, bytes: u64) -> vramalloc::driver::PageHandle {
    let pages = device.create_pages(bytes).unwrap();
    device.map(at, bytes, pages).unwrap();
    device.set_access(at, bytes, &[0]).unwrap();
    pages
}

fn after(ptr: DevicePtr, bytes: u64) -> DevicePtr {
    ptr.checked_add(bytes).unwrap()
}

/// Asserts that exactly one violation was seen and that it says `words`, and forgets it.
#[track_caller]
fn caught(device: &SimDriver, words: &str) {
    let violations = device.violations();
    assert_eq!(violations.len(), 1, "{violations:?}");
    assert!(violations[0].contains(words), "{violations:?} does not say {words:?}");
    device.clear_violations();
}

#[track_caller]
fn kind<T: std::fmt::Debug>(answer: vramalloc::driver::Result<T>) -> Kind {
    answer.expect_err("the call must fail").kind
}

// ---- bytes ----

#[test]
fn bytes_survive_a_remap() {
    let device = device(64);
    let range = device.reserve_addresses(8 * PAGE).unwrap();
    let pages = mapped(&device, range, PAGE);
    device.write(after(range, PAGE - 3), b"end").unwrap();
    device.unmap(range, PAGE).unwrap();
    assert!(device.read(range, &mut [0]).is_err());
    caught(&device, "not mapped");

    let elsewhere = after(range, 5 * PAGE);
    device.map(elsewhere, PAGE, pages).unwrap();
    device.set_access(elsewhere, PAGE, &[0]).unwrap();
    let mut bytes = [0; 3];
    device.read(after(elsewhere, PAGE - 3), &mut bytes).unwrap();
    assert_eq!(&bytes, b"end");
    device.assert_clean();
}

#[test]
fn a_page_mapped_twice_is_seen_twice() {
    let device = device(64);
    let range = device.reserve_addresses(2 * PAGE).unwrap();
    let pages = mapped(&device, range, PAGE);
    let alias = after(range, PAGE);
    device.map(alias, PAGE, pages).unwrap();
    device.set_access(alias, PAGE, &[0]).unwrap();
    device.write(after(range, 10), b"one page").unwrap();
    let found = device.with_bytes(after(alias, 10), 8, <[u8]>::to_vec).unwrap();
    assert_eq!(found, b"one page");

    // Over the seam, where the second half is the first half again.
    device.fill(after(range, PAGE - 1), 1, 0xaa).unwrap();
    let seam = device.with_bytes(after(range, PAGE - 1), 11, <[u8]>::to_vec).unwrap();
    assert_eq!((seam[0], seam[1]), (0xaa, 0));

    // A handle given back while mapped lives until the last mapping goes.
    device.release_pages(pages).unwrap();
    device.unmap(range, PAGE).unwrap();
    assert_eq!(device.used_bytes(), PAGE);
    device.unmap(alias, PAGE).unwrap();
    assert_eq!(device.used_bytes(), 0);
    device.assert_clean();
}

#[test]
fn a_race_through_an_alias_is_seen() {
    let device = device(64);
    let [s1, s2] = [device.create_stream(), device.create_stream()];
    let range = device.reserve_addresses(2 * PAGE).unwrap();
    let pages = mapped(&device, range, PAGE);
    device.map(after(range, PAGE), PAGE, pages).unwrap();
    device.set_access(range, 2 * PAGE, &[0]).unwrap();
    device.launch(s1, Work::writing(range, 512)).unwrap();
    assert!(device.launch(s2, Work::reading(after(range, PAGE + 511), 1)).is_err());
    caught(&device, "race");
    device.launch(s2, Work::reading(after(range, PAGE + 512), 1)).unwrap();
}

#[test]
fn memory_given_back_is_wiped() {
    let device = device(4);
    let ptr = device.alloc(4 * MIB).unwrap();
    device.fill(ptr, 4 * MIB, 0xee).unwrap();
    device.free(ptr).unwrap();
    let again = device.alloc(4 * MIB).unwrap();
    assert_eq!(again, ptr, "the lowest free address is used first");
    assert!(device.with_bytes(again, 4 * MIB, |bytes| bytes.iter().all(|&byte| byte == 0)).unwrap());
}

#[test]
fn copies_and_kernels_work_on_bytes() {
    let device = device(16);
    let ptr = device.alloc(3 * MIB).unwrap();
    device.write(ptr, b"0123456789").unwrap();
    device.copy(after(ptr, 2), ptr, 8).unwrap();
    let sum = device.with_bytes_mut(ptr, 10, |bytes| {
        bytes.reverse();
        bytes.len()
    });
    assert_eq!(sum.unwrap(), 10);
    assert_eq!(device.with_bytes(ptr, 10, <[u8]>::to_vec).unwrap(), b"7654321010");
}

#[test]
fn an_allocation_ends_where_it_was_asked_to() {
    let device = device(16);
    let ptr = device.alloc(1000).unwrap();
    device.fill(ptr, 1024, 1).unwrap();
    assert!(device.fill(ptr, 1025, 1).is_err());
    caught(&device, "past the end of its allocation");
    assert!(device.read(after(ptr, 2 * MIB), &mut [0]).is_err());
    caught(&device, "not mapped");
    assert!(device.read(DevicePtr(u64::MAX), &mut [0; 2]).is_err());
    caught(&device, "address space");
}

#[test]
fn without_backing_all_but_the_bytes_works() {
    let device = SimDriver::builder().capacity(1 << 40).backing(false).build();
    let ptr = device.alloc(1 << 40).unwrap();
    assert!(device.read(ptr, &mut [0]).is_err());
    device.launch(StreamHandle::DEFAULT, Work::writing(ptr, 1 << 40).filling(1)).unwrap();
    device.free(ptr).unwrap();
    device.assert_clean();
}

#[test]
fn host_memory_is_real_and_limited() {
    let device = SimDriver::builder().host_limit(MIB).build();
    let host = device.alloc_host(MIB).unwrap();
    assert!(host.0.is_multiple_of(4096));
    let at = std::ptr::with_exposed_provenance_mut::<u8>(usize::try_from(host.0).unwrap());
    // SAFETY: the device keeps these bytes for us until `free_host`.
    let last = unsafe {
        at.add(usize::try_from(MIB).unwrap() - 1).write(9);
        at.add(usize::try_from(MIB).unwrap() - 1).read()
    };
    assert_eq!(last, 9);
    assert_eq!(kind(device.alloc_host(1)), Kind::OutOfMemory);
    assert_eq!(kind(device.alloc_host(u64::MAX)), Kind::OutOfMemory);
    device.free_host(host).unwrap();
    device.assert_clean();
    assert_eq!(kind(device.free_host(host)), Kind::InvalidValue);
    caught(&device, "not page-locked");
}

// ---- limits ----

#[test]
fn a_foreign_tenant_takes_room() {
    let device = SimDriver::builder().capacity(100 * MIB).foreign_bytes(40 * MIB).build();
    let free = |device: &Device| device.memory_info().unwrap().free_bytes / MIB;
    assert_eq!((free(&device), device.memory_info().unwrap().total_bytes), (60, 100 * MIB));
    assert_eq!(kind(device.alloc(62 * MIB)), Kind::OutOfMemory);
    let ptr = device.alloc(60 * MIB).unwrap();
    device.set_foreign_bytes(50 * MIB);
    assert_eq!(free(&device), 0);
    device.set_foreign_bytes(0);
    assert_eq!(free(&device), 40);
    device.free(ptr).unwrap();
    assert_eq!(free(&device), 100);
    device.assert_clean();
}

#[test]
fn addresses_run_out_apart_from_memory() {
    let device = SimDriver::builder().capacity(256 * MIB).address_budget(64 * MIB).build();
    let range = device.reserve_addresses(60 * MIB).unwrap();
    assert_eq!(kind(device.reserve_addresses(6 * MIB)), Kind::AddressSpace);
    let ptr = device.alloc(4 * MIB).unwrap();
    assert_eq!(kind(device.alloc(MIB)), Kind::AddressSpace);
    assert_eq!(device.used_bytes(), 4 * MIB, "the refused call gives its memory back");
    device.free_addresses(range, 60 * MIB).unwrap();
    device.free(ptr).unwrap();
    assert_eq!(device.reserve_addresses(64 * MIB).unwrap(), range);
    assert_eq!(kind(device.alloc(u64::MAX)), Kind::OutOfMemory);
    device.assert_clean();
}

#[test]
fn an_allocation_may_be_scattered_over_physical_holes() {
    let device = device(16);
    let all: Vec<_> = (0..8).map(|_| device.alloc(PAGE).unwrap()).collect();
    all.iter().step_by(2).for_each(|&ptr| device.free(ptr).unwrap());
    let ptr = device.alloc(4 * PAGE).unwrap();
    device.fill(ptr, 4 * PAGE, 5).unwrap();
    assert!(device.with_bytes(all[1], PAGE, |bytes| bytes.iter().all(|&byte| byte == 0)).unwrap());
    assert!(device.with_bytes(ptr, 4 * PAGE, |bytes| bytes.iter().all(|&byte| byte == 5)).unwrap());
}

#[test]
fn a_device_without_virtual_memory_says_so() {
    let device = SimDriver::builder().virtual_memory(false).build();
    assert!(!device.capabilities().virtual_memory);
    assert_eq!(kind(device.reserve_addresses(PAGE)), Kind::NotSupported);
    assert_eq!(kind(device.create_pages(PAGE)), Kind::NotSupported);
    device.assert_clean();
}

// ---- misuse ----

#[test]
fn bad_frees_are_caught() {
    let device = device(64);
    let ptr = device.alloc(4 * MIB).unwrap();
    let range = device.reserve_addresses(PAGE).unwrap();
    for (bad, words) in [
        (after(ptr, 512), "inside the allocation"),
        (DevicePtr(0xdead_0000), "no allocation"),
        (DevicePtr::NULL, "no allocation"),
        (range, "reserved range"),
    ] {
        assert_eq!(kind(device.free(bad)), Kind::InvalidValue);
        caught(&device, words);
    }
    device.free(ptr).unwrap();
    device.assert_clean();
    assert_eq!(kind(device.free(ptr)), Kind::InvalidValue);
    caught(&device, "no longer");
}

#[test]
fn bad_page_calls_are_caught() {
    let device = device(64);
    let range = device.reserve_addresses(4 * PAGE).unwrap();
    let pages = mapped(&device, range, 2 * PAGE);
    let single = device.create_pages(PAGE).unwrap();
    let refused = |answer, words: &str| {
        assert_eq!(kind(answer), Kind::InvalidValue);
        caught(&device, words);
    };
    refused(device.map(after(range, PAGE), PAGE, single), "mapped already");
    refused(device.map(after(range, 3 * PAGE), 2 * PAGE, pages), "not inside one reserved range");
    refused(device.map(after(range, 2 * PAGE), PAGE, pages), "not all of the handle");
    refused(device.map(after(range, 2 * PAGE + 512), PAGE, single), "no multiple of the page");
    refused(device.unmap(range, PAGE), "cuts a mapping");
    refused(device.unmap(after(range, PAGE), PAGE), "cuts a mapping");
    refused(device.unmap(range, 3 * PAGE), "nothing is mapped");
    refused(device.set_access(after(range, 2 * PAGE), PAGE, &[0]), "nothing is mapped");
    refused(device.set_access(range, 2 * PAGE, &[0, 1]), "there is no device 1");
    refused(device.free_addresses(range, 4 * PAGE), "still mapped");
    refused(device.free_addresses(range, 2 * PAGE), "whole");
    device.release_pages(single).unwrap();
    refused(device.release_pages(single), "released already");
    refused(device.map(after(range, 2 * PAGE), PAGE, single), "released");
    device.unmap(range, 2 * PAGE).unwrap();
    device.release_pages(pages).unwrap();
    device.free_addresses(range, 4 * PAGE).unwrap();
    refused(device.free_addresses(range, 4 * PAGE), "not a reserved range");
    assert!(device.leaks().is_empty());
}

#[test]
fn work_needs_access() {
    let device = device(64);
    let range = device.reserve_addresses(PAGE).unwrap();
    let pages = device.create_pages(PAGE).unwrap();
    device.map(range, PAGE, pages).unwrap();
    assert!(device.launch(StreamHandle::DEFAULT, Work::reading(range, 1)).is_err());
    caught(&device, "without access");
    device.set_access(range, PAGE, &[0]).unwrap();
    device.launch(StreamHandle::DEFAULT, Work::reading(range, PAGE)).unwrap();
    assert!(device.launch(StreamHandle::DEFAULT, Work::reading(range, PAGE + 1)).is_err());
    caught(&device, "not mapped");
}

#[test]
fn unmapping_under_work_is_caught_and_does_not_wait() {
    let device = device(64);
    let stream = device.create_stream();
    let range = device.reserve_addresses(2 * PAGE).unwrap();
    mapped(&device, range, PAGE);
    mapped(&device, after(range, PAGE), PAGE);
    device.launch(stream, Work::reading(after(range, PAGE - 1), 1)).unwrap();
    device.unmap(after(range, PAGE), PAGE).unwrap();
    assert_eq!(kind(device.unmap(range, PAGE)), Kind::Violation);
    caught(&device, "unfinished work");
    assert_eq!(device.unfinished(), 1);
    device.complete(stream);
    device.unmap(range, PAGE).unwrap();
    device.assert_clean();
}

#[test]
fn a_plain_free_waits_for_the_whole_device() {
    let device = device(64);
    let [a, b] = [device.alloc(MIB).unwrap(), device.alloc(MIB).unwrap()];
    let stream = device.create_stream();
    device.launch(stream, Work::writing(a, MIB).lasting(7_000_000)).unwrap();
    device.launch(StreamHandle::DEFAULT, Work::reading(b, MIB)).unwrap();
    let before = device.now_nanos();
    device.free(b).unwrap();
    assert_eq!(device.unfinished(), 0);
    assert_eq!(device.now_nanos() - before, 7_000_000 + 44_000);
    assert_eq!(device.calls().get(Call::Free).nanos, 7_000_000 + 44_000);
    device.assert_clean();
}

#[test]
fn leaks_are_listed() {
    let device = device(64);
    assert!(device.leaks().is_empty());
    let ptr = device.alloc(1000).unwrap();
    let range = device.reserve_addresses(PAGE).unwrap();
    let pages = device.create_pages(PAGE).unwrap();
    device.create_event().unwrap();
    device.alloc_host(10).unwrap();
    let leaks = device.leaks();
    assert_eq!(leaks.allocations, [(ptr, PAGE)]);
    assert_eq!(leaks.ranges, [(range, PAGE)]);
    assert_eq!(leaks.pages, [(pages, PAGE)]);
    assert_eq!((leaks.events, leaks.host_allocations), (1, 1));
}

// ---- streams and time ----

#[test]
fn races_are_caught_unless_ordered() {
    let device = device(64);
    let ptr = device.alloc(MIB).unwrap();
    let [s1, s2, s3] = std::array::from_fn(|_| device.create_stream());
    let key = |handle| device.stream_key(handle).unwrap();
    device.launch(s1, Work::reading(ptr, 100)).unwrap();
    device.launch(s2, Work::reading(ptr, 100)).unwrap();
    assert!(device.launch(s2, Work::writing(after(ptr, 99), 1)).is_err());
    caught(&device, "race");
    device.launch(s2, Work::writing(after(ptr, 100), 1)).unwrap();

    // Order passes on from stream to stream.
    let [e1, e2] = [device.create_event().unwrap(), device.create_event().unwrap()];
    device.record_event(e1, key(s1)).unwrap();
    device.stream_wait_event(key(s2), e1).unwrap();
    device.record_event(e2, key(s2)).unwrap();
    device.stream_wait_event(key(s3), e2).unwrap();
    device.launch(s3, Work::writing(ptr, 200)).unwrap();

    // What comes to s1 later is not covered.
    assert!(device.launch(s1, Work::reading(ptr, 1)).is_err());
    caught(&device, "race");

    // The host's wait orders, too, and it ends what the stream waits for.
    device.complete(s3);
    assert_eq!(device.unfinished(), 0);
    device.launch(s1, Work::reading(ptr, 1)).unwrap();
    device.assert_clean();
}

#[test]
fn events_stand_for_what_was_queued_before() {
    let device = device(64);
    let stream = device.create_stream();
    let key = device.stream_key(stream).unwrap();
    let event = device.create_event().unwrap();
    assert!(device.query_event(event).unwrap(), "never recorded");
    device.launch(stream, Work::new()).unwrap();
    device.record_event(event, key).unwrap();
    device.launch(stream, Work::new()).unwrap();
    assert!(!device.query_event(event).unwrap());
    assert!(device.complete_one(stream));
    assert!(device.query_event(event).unwrap());
    assert_eq!(device.unfinished(), 1);

    device.record_event(event, key).unwrap();
    device.launch(stream, Work::new()).unwrap();
    device.synchronize_event(event).unwrap();
    assert_eq!(device.unfinished(), 1, "not more than the event asks for");
    device.synchronize().unwrap();
    assert!(!device.complete_one(stream));

    device.destroy_event(event).unwrap();
    device.assert_clean();
    assert_eq!(kind(device.query_event(event)), Kind::InvalidValue);
    assert_eq!(kind(device.destroy_event(event)), Kind::InvalidValue);
    assert_eq!(device.violations().len(), 2);
}

#[test]
fn timed_work_ends_on_the_virtual_clock() {
    let device = SimDriver::builder().cost_model(CostModel::free_of_charge()).build();
    let [s1, s2] = [device.create_stream(), device.create_stream()];
    let event = device.create_event().unwrap();
    device.launch(s1, Work::new().lasting(100)).unwrap();
    device.record_event(event, device.stream_key(s1).unwrap()).unwrap();
    device.stream_wait_event(device.stream_key(s2).unwrap(), event).unwrap();
    device.launch(s2, Work::new().lasting(50)).unwrap();
    device.launch(s1, Work::new().lasting(20)).unwrap();
    let counts: Vec<_> = [99, 1, 19, 1, 29, 1]
        .into_iter()
        .map(|nanos| {
            device.advance(nanos);
            device.unfinished()
        })
        .collect();
    assert_eq!(counts, [3, 2, 2, 1, 1, 0]);
    assert_eq!(device.now_nanos(), 150);
    // A wait takes as long as what it waits for.
    device.launch(s2, Work::new().lasting(30)).unwrap();
    device.advance(10);
    device.synchronize().unwrap();
    assert_eq!(device.now_nanos(), 180);
}

#[test]
fn filling_work_writes_when_it_ends() {
    let device = device(64);
    let ptr = device.alloc(MIB).unwrap();
    let first = || device.with_bytes(ptr, 1, |bytes| bytes[0]).unwrap();
    device.launch(StreamHandle::DEFAULT, Work::writing(ptr, MIB).filling(3)).unwrap();
    assert_eq!(first(), 0);
    device.synchronize().unwrap();
    assert_eq!(first(), 3);
}

#[test]
fn handles_are_recycled_and_identities_are_not() {
    let device = device(64);
    let old = device.create_stream();
    let old_key = device.stream_key(old).unwrap();
    let event = device.create_event().unwrap();
    let ptr = device.alloc(MIB).unwrap();
    device.launch(old, Work::writing(ptr, MIB)).unwrap();
    device.record_event(event, old_key).unwrap();
    device.destroy_stream(old).unwrap();
    let new = device.create_stream();
    let new_key = device.stream_key(new).unwrap();
    assert_eq!(new, old);
    assert_ne!(new_key, old_key);

    assert_eq!(kind(device.record_event(event, old_key)), Kind::StreamGone);
    assert!(!device.query_event(event).unwrap(), "its work goes on");
    assert!(device.launch(new, Work::reading(ptr, 1)).is_err());
    caught(&device, "race");
    device.complete(old_key);
    assert!(device.query_event(event).unwrap());
    device.launch(new, Work::reading(ptr, 1)).unwrap();
    device.assert_clean();

    assert_eq!(kind(device.stream_key(StreamHandle(0xdead))), Kind::StreamGone);
    device.destroy_stream(new).unwrap();
    assert!(device.destroy_stream(new).is_err());
    caught(&device, "no stream");
    assert!(device.destroy_stream(StreamHandle::DEFAULT).is_err());
}

#[test]
fn default_streams() {
    let device = device(64);
    let key = |handle| device.stream_key(handle).unwrap();
    assert_eq!(key(StreamHandle::DEFAULT), key(StreamHandle::LEGACY));
    let mine = key(StreamHandle::PER_THREAD_DEFAULT);
    assert_eq!(mine, key(StreamHandle::PER_THREAD_DEFAULT));
    assert_ne!(mine.id, key(StreamHandle::DEFAULT).id);
    let event = device.create_event().unwrap();
    let ptr = device.alloc(MIB).unwrap();
    device.launch(StreamHandle::PER_THREAD_DEFAULT, Work::writing(ptr, 1)).unwrap();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let theirs = key(StreamHandle::PER_THREAD_DEFAULT);
            assert_ne!(theirs.id, mine.id);
            assert_eq!(kind(device.record_event(event, mine)), Kind::StreamGone);
            device.record_event(event, theirs).unwrap();
            assert!(device.query_event(event).unwrap());
            assert!(device.launch(StreamHandle::PER_THREAD_DEFAULT, Work::reading(ptr, 1)).is_err());
            caught(&device, "race");
        });
    });
    device.record_event(event, mine).unwrap();
    assert!(!device.query_event(event).unwrap());
    device.assert_clean();
}

// ---- captures ----

#[test]
fn a_capture_collects_work_and_forbids_waiting() {
    let device = device(64);
    let ptr = device.alloc(MIB).unwrap();
    let stream = device.create_stream();
    let key = device.stream_key(stream).unwrap();
    device.begin_capture(stream, CaptureMode::ThreadLocal).unwrap();
    assert!(device.is_capturing(key).unwrap());
    device.launch(stream, Work::writing(ptr, 1).filling(8)).unwrap();
    assert_eq!(device.unfinished(), 0);
    let graph = device.end_capture(stream).unwrap();
    assert!(!device.is_capturing(key).unwrap());
    device.launch_graph(stream, &graph).unwrap();
    device.synchronize().unwrap();
    assert_eq!(device.with_bytes(ptr, 1, |bytes| bytes[0]).unwrap(), 8);
    device.assert_clean();

    let event = device.create_event().unwrap();
    let calls: [&dyn Fn() -> vramalloc::driver::Result<()>; 6] = [
        &|| device.free(ptr),
        &|| device.synchronize(),
        &|| device.synchronize_stream(key),
        &|| device.query_event(event).map(drop),
        &|| device.synchronize_event(event),
        &|| {
            device.record_event(event, key).unwrap();
            device.query_event(event).map(drop)
        },
    ];
    for call in calls {
        device.begin_capture(stream, CaptureMode::ThreadLocal).unwrap();
        assert_eq!(kind(call()), Kind::Capturing);
        assert_eq!(device.violations().len(), 1);
        device.clear_violations();
        assert_eq!(kind(device.end_capture(stream)), Kind::Capturing);
    }
    assert_eq!(device.used_bytes(), PAGE, "the refused free freed nothing");
}

#[test]
fn a_capture_spreads_over_streams_and_minds_its_mode() {
    let device = device(64);
    let [origin, side] = [device.create_stream(), device.create_stream()];
    let key = |handle| device.stream_key(handle).unwrap();
    let [fork, outside] = [device.create_event().unwrap(), device.create_event().unwrap()];
    device.begin_capture(origin, CaptureMode::Relaxed).unwrap();
    device.record_event(fork, key(origin)).unwrap();
    device.stream_wait_event(key(side), fork).unwrap();
    assert!(device.is_capturing(key(side)).unwrap());
    assert!(device.query_event(outside).unwrap(), "relaxed");
    device.end_capture(origin).unwrap();
    assert!(!device.is_capturing(key(side)).unwrap());

    device.begin_capture(origin, CaptureMode::ThreadLocal).unwrap();
    std::thread::scope(|scope| {
        scope.spawn(|| assert!(device.query_event(outside).unwrap(), "another thread may"));
    });
    device.end_capture(origin).unwrap();
    device.assert_clean();

    device.begin_capture(origin, CaptureMode::Global).unwrap();
    std::thread::scope(|scope| {
        scope.spawn(|| assert_eq!(kind(device.query_event(outside)), Kind::Capturing));
    });
    assert!(device.end_capture(origin).is_err());
    device.clear_violations();

    device.begin_capture(origin, CaptureMode::Relaxed).unwrap();
    assert_eq!(kind(device.stream_wait_event(key(origin), outside)), Kind::Capturing);
    device.invalidate_capture(origin);
    assert!(device.end_capture(origin).is_err());
}

// ---- failures ----

#[test]
fn planned_failures_strike_once_and_change_nothing() {
    let device = device(64);
    device.fail(Fault::nth(Call::CreatePages, 2, Kind::OutOfMemory));
    let pages = device.create_pages(PAGE).unwrap();
    assert_eq!(kind(device.create_pages(PAGE)), Kind::OutOfMemory);
    device.create_pages(PAGE).unwrap();
    assert_eq!(device.used_bytes(), 2 * PAGE);

    device.fail(Fault::nth_any(1, Kind::Other(700)));
    assert_eq!(kind(device.release_pages(pages)), Kind::Other(700));
    device.release_pages(pages).unwrap();

    device.fail(Fault::always(Call::Alloc, Kind::OutOfMemory));
    (0..3).for_each(|_| assert_eq!(kind(device.alloc(512)), Kind::OutOfMemory));
    device.clear_faults();
    device.alloc(512).unwrap();
    assert_eq!(device.pending_faults(), 0);
    device.assert_clean();
}

#[test]
fn a_lost_device_stays_lost() {
    for (doom, loses) in [
        (Kind::DeviceLost, &(|device: &SimDriver| device.lose_device()) as &dyn Fn(&SimDriver)),
        (Kind::Deinitialized, &|device: &SimDriver| device.deinitialize()),
        (Kind::DeviceLost, &|device: &SimDriver| {
            device.fail(Fault::nth(Call::EventCreate, 1, Kind::DeviceLost));
            assert!(device.create_event().is_err());
        }),
    ] {
        let device = device(64);
        let ptr = device.alloc(512).unwrap();
        device.check_usable().unwrap();
        loses(&device);
        assert_eq!(kind(device.check_usable()), doom);
        assert_eq!(kind(device.free(ptr)), doom);
        assert_eq!(kind(device.alloc(512)), doom);
        assert!(device.launch(StreamHandle::DEFAULT, Work::new()).is_err());
        device.assert_clean();
    }
}

#[cfg(unix)]
#[test]
fn a_forked_child_cannot_use_the_device() {
    let device = device(64);
    let ptr = device.alloc(MIB).unwrap();
    device.write(ptr, b"parent").unwrap();
    // SAFETY: the child only makes calls that allocate nothing, and leaves by `_exit`.
    let child = unsafe { libc::fork() };
    assert!(child >= 0);
    if child == 0 {
        let is_forked = |answer: vramalloc::driver::Result<()>| answer.is_err_and(|why| why.kind == Kind::Forked);
        let refused = is_forked(device.check_usable())
            && is_forked(device.free(ptr))
            && is_forked(device.alloc(512).map(drop))
            && is_forked(device.memory_info().map(drop));
        // SAFETY: ends this process at once; nothing of the parent's is flushed or dropped.
        unsafe { libc::_exit(if refused { 0 } else { 1 }) };
    }
    let mut status = -1;
    // SAFETY: `status` outlives the call.
    assert_eq!(unsafe { libc::waitpid(child, &mut status, 0) }, child);
    assert!(libc::WIFEXITED(status) && libc::WEXITSTATUS(status) == 0, "the child could use the device");
    assert_eq!(device.with_bytes(ptr, 6, <[u8]>::to_vec).unwrap(), b"parent");
    device.free(ptr).unwrap();
    assert!(device.leaks().is_empty());
}

// ---- costs ----

/// Microseconds, as measured on an H200.
const MEASURED: [(Call, [(u64, f64); 4]); 6] = [
    (Call::Alloc, [(2, 56.0), (20, 64.0), (64, 72.0), (512, 132.0)]),
    (Call::Free, [(2, 44.0), (20, 66.0), (64, 91.0), (512, 380.0)]),
    (Call::CreatePages, [(2, 12.7), (20, 13.2), (64, 16.0), (512, 27.0)]),
    (Call::SetAccess, [(2, 31.0), (20, 31.0), (64, 33.0), (512, 57.0)]),
    (Call::Unmap, [(2, 20.0), (20, 19.5), (64, 21.9), (512, 35.2)]),
    (Call::ReleasePages, [(2, 15.0), (20, 28.8), (64, 50.8), (512, 319.5)]),
];

#[test]
fn calls_cost_what_was_measured() {
    let device = SimDriver::builder().backing(false).build();
    for (which, mib) in [2, 20, 64, 512].into_iter().enumerate() {
        let (before, bytes) = (device.calls(), mib * MIB);
        let start = device.now_nanos();
        let ptr = device.alloc(bytes).unwrap();
        device.free(ptr).unwrap();
        let range = device.reserve_addresses(bytes).unwrap();
        let pages = mapped(&device, range, bytes);
        device.unmap(range, bytes).unwrap();
        device.release_pages(pages).unwrap();
        let costs = device.calls().since(&before);
        for (call, points) in MEASURED {
            assert_eq!(points[which].0, mib);
            let nanos = costs.get(call).nanos as f64;
            assert!((nanos - points[which].1 * 1000.0).abs() < 0.5, "{call} of {mib} MiB took {nanos} ns");
        }
        assert_eq!((costs.get(Call::Map).nanos, costs.get(Call::ReserveAddresses).nanos), (1_500, 17_400));
        assert_eq!(device.now_nanos() - start, costs.total().nanos);
    }
}

#[test]
fn calls_over_many_handles_cost_each() {
    let device = device(64);
    let range = device.reserve_addresses(4 * PAGE).unwrap();
    (0..4).for_each(|i| {
        mapped(&device, after(range, i * PAGE), PAGE);
    });
    let before = device.calls();
    device.set_access(range, 4 * PAGE, &[0]).unwrap();
    device.unmap(range, 4 * PAGE).unwrap();
    let costs = device.calls().since(&before);
    assert_eq!((costs.get(Call::SetAccess).nanos, costs.get(Call::Unmap).nanos), (4 * 31_000, 4 * 20_000));
}

#[test]
fn failed_calls_are_counted_charged_and_logged() {
    let device = device(2);
    assert!(device.alloc(64 * MIB).is_err());
    assert_eq!((device.calls().get(Call::Alloc).calls, device.now_nanos()), (1, 72_000));
    let log = device.log();
    assert_eq!((log.len(), log[0].call, log[0].bytes, log[0].ok()), (1, Call::Alloc, 64 * MIB, false));
    assert_eq!((log[0].error, log[0].nanos), (Some(Kind::OutOfMemory), 72_000));
    device.clear_log();
    device.memory_info().unwrap();
    assert_eq!(device.log()[0].seq, 1);
    let silent = SimDriver::builder().log(false).build();
    silent.memory_info().unwrap();
    assert!(silent.log().is_empty());
}

// ---- sameness, and several devices ----

#[test]
fn two_runs_are_the_same() {
    let run = || {
        let device = device(256);
        let mut live = Vec::new();
        let mut dice = 12_345_u64;
        for _ in 0..400 {
            dice = dice.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            if dice >> 63 == 0 || live.is_empty() {
                live.extend(device.alloc((dice >> 40) % (12 * MIB) + 1).ok());
            } else {
                device.free(live.swap_remove((dice >> 33) as usize % live.len())).unwrap();
            }
            let event = device.create_event().unwrap();
            device.record_event(event, device.stream_key(StreamHandle::DEFAULT).unwrap()).unwrap();
        }
        device.assert_clean();
        (device.log(), device.calls())
    };
    assert_eq!(run(), run());
}

#[test]
fn devices_of_a_machine() {
    let machine = SimMachine::new(2, &SimDriver::builder().capacity(64 * MIB));
    let [d0, d1] = [machine.device(0), machine.device(1)];
    assert_eq!((d0.label().as_str(), d1.label().as_str(), d1.device()), ("sim", "sim:1", 1));
    machine.set_current_device(1);
    let ptr = d1.alloc(MIB).unwrap();
    assert_eq!((machine.contexts_created(0), machine.contexts_created(1)), (0, 1));
    std::thread::scope(|scope| {
        scope.spawn(|| {
            assert_eq!(machine.current_device(), 0);
            d1.free(ptr).unwrap();
        });
    });
    assert_eq!((machine.contexts_created(0), machine.contexts_created(1), machine.current_device()), (0, 1, 1));
    assert_ne!(d0.alloc(MIB).unwrap(), d1.alloc(MIB).unwrap());

    // Access for another device alone does not let the own one in.
    let range = d0.reserve_addresses(PAGE).unwrap();
    let pages = d0.create_pages(PAGE).unwrap();
    d0.map(range, PAGE, pages).unwrap();
    d0.set_access(range, PAGE, &[1]).unwrap();
    assert!(d0.write(range, b"x").is_err());
    caught(&d0, "without access");
    d0.set_access(range, PAGE, &[0, 1]).unwrap();
    d0.write(range, b"x").unwrap();

    // Events of one device are no events of the other.
    let event = d0.create_event().unwrap();
    assert_eq!(kind(d1.destroy_event(event)), Kind::InvalidValue);
}

#[test]
fn threads_share_a_device() {
    let device = SimDriver::builder().capacity(1 << 30).log(false).build();
    std::thread::scope(|scope| {
        for mark in 0..4u8 {
            let device = &device;
            scope.spawn(move || {
                for _ in 0..200 {
                    let ptr = device.alloc(PAGE).unwrap();
                    device.fill(ptr, 10_000, mark).unwrap();
                    assert!(
                        device.with_bytes(ptr, 10_000, |bytes| bytes.iter().all(|&byte| byte == mark)).unwrap()
                    );
                    device.free(ptr).unwrap();
                }
            });
        }
    });
    device.assert_clean();
    assert!(device.leaks().is_empty());
}
