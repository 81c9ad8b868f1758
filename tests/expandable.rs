//! Expandable segments: pages that move between holes, pools and streams, and what happens when that fails.

use std::sync::Arc;
use vramalloc::driver::sim::{Fault, SimDriver, SimMachine, Work};
use vramalloc::driver::{Call, DriverErrorKind};
use vramalloc::{Allocation, CachingAllocator, Cause, Config, Error, OnPending, Segments, Stream};

const MIB: u64 = 1 << 20;

struct Bench {
    sim: Arc<SimDriver>,
    allocator: CachingAllocator,
}

impl Bench {
    fn new(mebibytes: u64, config: &str) -> Self {
        Self::on(SimDriver::builder().capacity(mebibytes * MIB).build(), config)
    }

    fn on(sim: Arc<SimDriver>, config: &str) -> Self {
        let config: Config = config.parse().expect("a configuration");
        let allocator =
            CachingAllocator::new(sim.clone(), config.segments(Segments::Expandable)).expect("an allocator");
        Self { sim, allocator }
    }

    fn stream(&self) -> Stream {
        self.allocator.stream(self.sim.create_stream()).expect("a stream")
    }

    fn alloc(&self, mebibytes: u64, stream: &Stream) -> Allocation {
        let allocation = self.allocator.alloc(mebibytes * MIB, stream);
        self.check();
        allocation.unwrap_or_else(|error| panic!("{mebibytes} MiB: {error}"))
    }

    fn check(&self) {
        self.allocator.validate().expect("valid");
        self.sim.assert_clean();
    }

    fn calls(&self, call: Call) -> u64 {
        self.sim.log().iter().filter(|entry| entry.call == call && entry.ok()).count() as u64
    }

    fn reserved(&self) -> u64 {
        self.allocator.memory_reserved() / MIB
    }

    /// Unfinished work that writes the whole allocation.
    fn launch(&self, stream: &Stream, allocation: &Allocation) {
        let work = Work::writing(allocation.ptr(), allocation.bytes());
        self.sim.launch(stream.key(), work).expect("nothing else uses the memory");
    }
}

#[test]
fn a_hole_is_filled_with_pages_of_other_holes() {
    let bench = Bench::new(64, "slack:1.0");
    let stream = bench.allocator.default_stream().unwrap();
    // Live and free memory alternate: 32 MiB are free, in pieces of 8.
    let mut blocks: Vec<_> = (0..8).map(|_| Some(bench.alloc(8, &stream))).collect();
    for block in blocks.iter_mut().step_by(2) {
        *block = None;
    }
    bench.check();
    assert_eq!((bench.reserved(), bench.allocator.memory_allocated()), (64, 32 * MIB));
    bench.sim.clear_log();
    let large = bench.alloc(32, &stream);
    assert_eq!(bench.reserved(), 64, "nothing was taken from the device, which has nothing left");
    assert!(bench.calls(Call::Map) > 0, "pages were mapped");
    assert_eq!(bench.calls(Call::Synchronize) + bench.calls(Call::EventSynchronize), 0, "nothing was waited for");
    drop(large);
}

/// Two free blocks, the smaller one first, and live memory between and behind them; the next request is 8 MiB.
fn with_two_holes(config: &str, holes: [u64; 2]) -> (Bench, Stream, Vec<Allocation>, [u64; 2]) {
    let bench = Bench::new(512, config);
    let stream = bench.allocator.default_stream().unwrap();
    drop(bench.alloc(16, &stream)); // from here on not all that is allocated stays
    let blocks = holes.map(|mebibytes| (bench.alloc(mebibytes, &stream), bench.alloc(2, &stream)));
    let starts = blocks.each_ref().map(|(hole, _)| hole.ptr().0);
    let kept = blocks.map(|(_, kept)| kept).into();
    bench.check();
    bench.sim.clear_log();
    (bench, stream, kept, starts)
}

#[test]
fn with_little_slack_large_free_blocks_are_kept_for_large_requests() {
    // Best fit would take the 40 MiB. Of kept blocks the lower one comes first where nothing else decides.
    for (config, holes, taken) in
        [("slack:1.0", [64, 40], 0), ("slack:1.014", [64, 40], 1), ("slack:1.0", [64, 24], 1)]
    {
        let (bench, stream, _kept, starts) = with_two_holes(config, holes);
        let small = bench.alloc(8, &stream);
        let hole = starts[taken]..starts[taken] + (holes[taken] << 20);
        assert!(hole.contains(&small.ptr().0), "{config} {holes:?}: {:#x} is not in {hole:#x?}", small.ptr().0);
        let large = bench.alloc(if taken == 0 { 40 } else { 64 }, &stream);
        assert_eq!(bench.calls(Call::Map), 0, "{config} {holes:?}: both are hits");
        drop((small, large));
    }
}

/// The device is full, `waiting` blocks wait for one stream and 2 MiB more for another; then `wanted` MiB are asked for.
/// Returns how much work is unfinished after that.
fn waits_for_one_of_two(config: &str, waiting: &[u64], wanted: u64) -> usize {
    let bench = Bench::new(128, config);
    let (own, soon, late) = (bench.stream(), bench.stream(), bench.stream());
    let mut blocks = Vec::new();
    let mut kept = Vec::new();
    for &mebibytes in waiting {
        blocks.push(bench.alloc(mebibytes, &own));
        kept.push(bench.alloc(2, &own));
    }
    let small = bench.alloc(2, &own);
    while let Ok(block) = bench.allocator.alloc(2 * MIB, &own) {
        kept.push(block);
    }
    for block in &blocks {
        block.record_stream(&soon).expect("a stream of this allocator");
        bench.launch(&soon, block);
    }
    small.record_stream(&late).expect("a stream of this allocator");
    bench.launch(&late, &small);
    drop(blocks);
    drop(small);
    drop(bench.alloc(wanted, &own));
    bench.sim.unfinished()
}

#[test]
fn a_wait_ends_as_soon_as_pages_can_move_or_a_kept_block_is_free() {
    for config in ["slack:1.014", "slack:1.0"] {
        assert_eq!(waits_for_one_of_two(config, &[12, 12], 24), 1, "{config}: pages of two blocks");
        assert_eq!(waits_for_one_of_two(config, &[64], 8), 1, "{config}: a large block for a small request");
    }
}

#[test]
fn a_kept_block_serves_a_small_request_rather_than_none() {
    let bench = Bench::new(64, "slack:1.0");
    let stream = bench.allocator.default_stream().unwrap();
    let whole = bench.alloc(62, &stream);
    drop(whole);
    // Every free block is kept, and the device has nothing left.
    let pieces: Vec<_> = (0..31).map(|_| bench.alloc(2, &stream)).collect();
    assert_eq!(bench.reserved(), 62);
    // Another stream's comes from there, too, since all work has passed.
    drop(pieces);
    let other = bench.stream();
    let small = bench.alloc(8, &other);
    let aligned = bench.allocator.alloc_aligned(4 * MIB, 2 * MIB, &other).expect("room");
    bench.check();
    assert_eq!(bench.reserved(), 62);
    drop((small, aligned));
}

#[test]
fn bytes_of_live_blocks_survive_every_move() {
    let bench = Bench::new(96, "slack:1.0");
    let streams = [bench.allocator.default_stream().unwrap(), bench.stream()];
    let mut live: Vec<(Allocation, u8)> = Vec::new();
    for round in 0..60u64 {
        let stream = &streams[(round % 2) as usize];
        let mebibytes = [3, 9, 1, 14, 6, 21][(round % 6) as usize];
        while live.iter().map(|(block, _)| block.bytes()).sum::<u64>() + mebibytes * MIB > 70 * MIB {
            live.swap_remove((round % 3) as usize % live.len());
        }
        let block = bench.alloc(mebibytes, stream);
        bench.sim.fill(block.ptr(), block.bytes(), round as u8).expect("mapped memory");
        live.push((block, round as u8));
        for (block, pattern) in &live {
            for at in [0, block.bytes() / 2, block.bytes() - 1] {
                let mut byte = [0];
                bench.sim.read(vramalloc::DevicePtr(block.ptr().0 + at), &mut byte).expect("mapped memory");
                assert_eq!(byte[0], *pattern, "round {round}: byte {at} of {block:?}");
            }
        }
    }
}

#[test]
fn idle_pages_serve_other_streams_without_a_call() {
    let bench = Bench::new(64, "");
    let (a, b) = (bench.stream(), bench.stream());
    drop(bench.alloc(40, &a));
    bench.sim.clear_log();
    let block = bench.alloc(40, &b);
    assert_eq!(bench.reserved(), 40);
    let moved = bench.calls(Call::Map) + bench.calls(Call::Unmap) + bench.calls(Call::CreatePages);
    assert_eq!(moved, 0, "the pages stay where they are and change hands");
    drop(block);
}

#[test]
fn pages_under_queued_work_do_not_move() {
    let bench = Bench::new(64, "");
    let (a, b) = (bench.stream(), bench.stream());
    let block = bench.alloc(40, &a);
    bench.launch(&a, &block);
    drop(block);
    // 24 MiB are free on the device, 40 under work: this fits without them.
    let other = bench.alloc(20, &b);
    bench.launch(&b, &other);
    // This one does not: the host waits for the oldest work, and for no more than that.
    let large = bench.alloc(30, &b);
    assert_eq!(bench.calls(Call::EventSynchronize), 1);
    assert_eq!(bench.sim.unfinished(), 1, "the other stream's work goes on");
    bench.launch(&b, &large);
    bench.check();
    bench.sim.complete_all();
}

#[test]
fn the_policy_on_pending_memory_is_obeyed() {
    for (policy, reserved, waits, ok) in
        [(OnPending::Grow, 60, 0, true), (OnPending::Wait, 30, 1, true), (OnPending::Fail, 60, 0, true)]
    {
        let sim = SimDriver::builder().capacity(4 << 30).build();
        let config = Config::default().segments(Segments::Expandable).slack(1.0).on_pending(policy);
        let allocator = CachingAllocator::new(sim.clone(), config).unwrap();
        let stream = |()| allocator.stream(sim.create_stream()).unwrap();
        let (a, b) = (stream(()), stream(()));
        // A peak beside which the slack that small programs are given is nothing.
        drop(allocator.alloc(3 << 30, &a).unwrap());
        allocator.empty_cache().unwrap();
        allocator.reset_peak_memory_stats();
        let block = allocator.alloc(30 * MIB, &a).unwrap();
        sim.launch(a.key(), Work::writing(block.ptr(), block.bytes())).unwrap();
        drop(block);
        sim.clear_log();
        assert_eq!(allocator.alloc(30 * MIB, &b).is_ok(), ok, "{policy:?}");
        let waited = sim.log().iter().filter(|entry| entry.call == Call::EventSynchronize).count();
        assert_eq!((allocator.memory_reserved() / MIB, waited), (reserved, waits), "{policy:?}");
        allocator.validate().unwrap();
        sim.assert_clean();
        sim.complete_all();
    }
}

/// What is reserved once small memory is wanted and 100 MiB of large memory are free, used by work that is under way if
/// `queued`, on the same stream or another; and how often that was waited for.
fn small_beside_free_large_memory(config: &str, queued: bool, same: bool) -> (u64, u64) {
    let bench = Bench::new(512, config);
    let (a, b) = (bench.stream(), bench.stream());
    let large = bench.alloc(100, &a);
    if queued {
        bench.launch(&a, &large);
    }
    drop(large);
    bench.sim.clear_log();
    let small = bench.alloc(1, if same { &a } else { &b });
    let outcome = (bench.reserved(), bench.calls(Call::EventSynchronize));
    drop(small);
    bench.sim.complete_all();
    outcome
}

#[test]
fn who_waits_pays_for_small_memory_with_the_end_of_large_memory() {
    let wait = "on_pending:wait";
    for same in [true, false] {
        assert_eq!(small_beside_free_large_memory("", false, same), (102, 0), "by default there is slack for it");
        assert_eq!(small_beside_free_large_memory(wait, false, same), (98, 0), "a handle of 4 MiB for one of 2");
    }
    assert_eq!(small_beside_free_large_memory(wait, true, true), (98, 1), "its own stream is waited for");
    assert_eq!(small_beside_free_large_memory(wait, true, false), (102, 0), "another is not, for one page");
}

#[test]
fn who_waits_pays_for_small_memory_only_while_little_is_allocated() {
    for (kept, reserved) in [(48, 98), (49, 102)] {
        let bench = Bench::new(512, "on_pending:wait");
        let stream = bench.allocator.default_stream().unwrap();
        let (kept, freed) = (bench.alloc(kept, &stream), bench.alloc(100 - kept, &stream));
        drop(freed);
        let small = bench.alloc(1, &stream);
        assert_eq!(bench.reserved(), reserved, "{} of 100 MiB and one more", kept.bytes() / MIB);
        drop((kept, small));
    }
}

#[test]
fn who_waits_does_not_touch_the_end_of_large_memory_while_it_is_in_use() {
    let bench = Bench::new(512, "on_pending:wait");
    let stream = bench.allocator.default_stream().unwrap();
    let (front, end) = (bench.alloc(96, &stream), bench.alloc(4, &stream));
    drop(front);
    let small = bench.alloc(1, &stream);
    assert_eq!(bench.reserved(), 102, "a hole elsewhere would cost more than it saves");
    drop((end, small));
}

#[test]
fn who_waits_leaves_the_end_of_large_memory_to_a_private_pool_and_during_a_capture() {
    let bench = Bench::new(512, "on_pending:wait");
    let stream = bench.allocator.default_stream().unwrap();
    let pool = bench.allocator.private_pool();
    drop(bench.alloc(100, &pool.stream(&stream).unwrap()));
    let small = bench.alloc(1, &stream);
    assert_eq!(
        (bench.reserved(), bench.calls(Call::EventSynchronize)),
        (102, 0),
        "a graph uses its addresses again"
    );
    drop((pool, small));

    let bench = Bench::new(512, "on_pending:wait");
    let stream = bench.allocator.default_stream().unwrap();
    drop(bench.alloc(100, &stream));
    let pool = bench.allocator.private_pool();
    let capturing = pool.capture();
    let small = bench.alloc(1, &stream);
    assert_eq!(bench.reserved(), 102, "nothing is given back");
    drop((capturing, small));
}

#[test]
fn who_waits_puts_an_idle_page_of_small_memory_into_large_memory_before_more_is_reserved() {
    for (config, reserved) in [("", 26), ("on_pending:wait", 24)] {
        let bench = Bench::new(512, config);
        let stream = bench.allocator.default_stream().unwrap();
        drop((0..6).map(|_| bench.alloc(1, &stream)).collect::<Vec<_>>());
        assert_eq!(bench.reserved(), 6);
        let large = bench.alloc(20, &stream);
        assert_eq!(bench.reserved(), reserved, "{config}: of three pages that are idle one is moved");
        drop(large);
    }
}

#[test]
fn failing_for_pending_memory_says_so() {
    let bench = Bench::new(64, "on_pending:fail");
    let (a, b) = (bench.stream(), bench.stream());
    let block = bench.alloc(60, &a);
    block.record_stream(&b).unwrap();
    bench.launch(&b, &block);
    drop(block);
    let error = bench.allocator.alloc(30 * MIB, &a).unwrap_err();
    let report = error.out_of_memory().expect("out of memory");
    assert_eq!((report.cause, report.pending), (Cause::PendingWork, 60 * MIB));
    bench.sim.complete_all();
    bench.alloc(30, &a);
}

#[test]
fn emptying_the_cache_does_not_wait_for_a_running_kernel() {
    let bench = Bench::new(256, "");
    let (a, b) = (bench.stream(), bench.stream());
    let running = bench.alloc(20, &a);
    bench.launch(&a, &running);
    drop(running); // its work is not done: it must stay
    drop(bench.alloc(60, &b));
    bench.sim.clear_log();
    let freed = bench.allocator.empty_cache().unwrap();
    assert_eq!((freed / MIB, bench.reserved()), (60, 20));
    assert!(!bench.sim.log().iter().any(|entry| entry.is_host_wait()), "it waited");
    assert_eq!(bench.sim.unfinished(), 1, "the kernel is still running");
    bench.check();
    bench.sim.complete_all();
    assert_eq!(bench.allocator.empty_cache().unwrap(), 20 * MIB);
    assert_eq!(bench.reserved(), 0);
}

#[test]
fn a_failed_growth_leaves_nothing_half_mapped() {
    for call in [Call::ReserveAddresses, Call::CreatePages, Call::Map, Call::SetAccess] {
        for n in 1..=4 {
            let bench = Bench::new(512, "");
            let stream = bench.allocator.default_stream().unwrap();
            bench.sim.fail(Fault::nth(call, n, DriverErrorKind::Other(999)));
            // Large enough for several handles.
            let result = bench.allocator.alloc(50 * MIB, &stream);
            bench.allocator.validate().unwrap_or_else(|broken| panic!("{call:?} {n}: {broken}"));
            if bench.sim.pending_faults() > 0 {
                continue; // the call was not made that often
            }
            assert!(
                matches!(&result, Err(Error::Driver(error)) if error.call == call),
                "{call:?} {n}: {result:?}"
            );
            assert_eq!((bench.reserved(), bench.sim.used_bytes()), (0, 0), "{call:?} {n}");
            let block = bench.alloc(50, &stream);
            drop(block);
            let sim = bench.sim.clone();
            drop((bench, stream));
            assert!(sim.leaks().is_empty(), "{call:?} {n}: {:?}", sim.leaks());
            sim.assert_clean();
        }
    }
}

#[test]
fn with_little_slack_streams_share_pages_of_small_memory() {
    for (slack, pages) in [("slack:1.0", 1), ("slack:1.014", 2)] {
        let bench = Bench::new(64, slack);
        let (a, b) = (bench.stream(), bench.stream());
        let halves = |stream: &Stream| bench.allocator.alloc(MIB / 2, stream).expect("memory");
        let (first, second) = (halves(&a), halves(&a));
        bench.sim.fill(first.ptr(), first.bytes(), 7).expect("mapped memory");
        drop(second);
        let other = halves(&b);
        bench.check();
        assert_eq!(bench.reserved(), 2 * pages, "{slack}");
        bench.sim.fill(other.ptr(), other.bytes(), 9).expect("mapped memory");
        let mut byte = [0];
        bench.sim.read(first.ptr(), &mut byte).expect("mapped memory");
        assert_eq!(byte[0], 7);
        drop((first, other));
        bench.check();
        bench.allocator.empty_cache().expect("the page goes when both have left it");
        assert_eq!(bench.reserved(), 0, "{slack}");
    }
}

#[test]
fn small_memory_under_queued_work_is_not_shared() {
    let bench = Bench::new(64, "slack:1.0");
    let (a, b) = (bench.stream(), bench.stream());
    let halves = |stream: &Stream| bench.allocator.alloc(MIB / 2, stream).expect("memory");
    let (first, second) = (halves(&a), halves(&a));
    bench.launch(&a, &second);
    drop(second);
    let other = halves(&b);
    bench.launch(&b, &other);
    assert_eq!(bench.reserved(), 4, "a page of its own");
    bench.check();
    bench.sim.complete_all();
    drop((first, other));
}

#[test]
fn a_failed_growth_beside_a_shared_page_is_undone() {
    for call in [Call::CreatePages, Call::Map, Call::SetAccess] {
        let bench = Bench::new(64, "slack:1.0");
        let (a, b) = (bench.stream(), bench.stream());
        let alloc = |kibibytes: u64, stream: &Stream| bench.allocator.alloc(kibibytes << 10, stream);
        let live: Vec<_> = (0..3).map(|_| alloc(512, &a).expect("memory")).collect();
        // Its first half fits in what is left of that page, the second needs a page behind it.
        bench.sim.fail(Fault::nth(call, 1, DriverErrorKind::Other(999)));
        let failed = alloc(1024, &b);
        assert!(matches!(&failed, Err(Error::Driver(error)) if error.call == call), "{failed:?}");
        assert_eq!((bench.reserved(), bench.sim.used_bytes()), (2, 2 * MIB), "{call:?}: the new page is back");
        bench.check();
        bench.sim.clear_faults();
        let half = alloc(512, &b).expect("memory");
        assert_eq!(half.ptr().0, live[2].ptr().0 + MIB / 2, "{call:?}: beside the other stream's memory");
        assert_eq!(bench.reserved(), 2, "{call:?}");
        let block = alloc(1024, &b).expect("memory");
        assert_eq!(bench.reserved(), 4, "{call:?}");
        bench.check();
        let sim = bench.sim.clone();
        drop((half, block, live, bench, a, b));
        assert!(sim.leaks().is_empty(), "{call:?}: {:?}", sim.leaks());
    }
}

#[test]
fn a_failed_move_loses_no_page() {
    for call in [Call::Unmap, Call::Map, Call::SetAccess, Call::CreatePages, Call::ReleasePages] {
        for n in 1..=6 {
            let bench = Bench::new(64, "slack:1.0");
            let stream = bench.allocator.default_stream().unwrap();
            let mut blocks: Vec<_> = (0..8).map(|_| Some(bench.alloc(8, &stream))).collect();
            for block in blocks.iter_mut().step_by(2) {
                *block = None;
            }
            bench.sim.fail(Fault::nth(call, n, DriverErrorKind::Other(999)));
            let result = bench.allocator.alloc(32 * MIB, &stream);
            bench.allocator.validate().unwrap_or_else(|broken| panic!("{call:?} {n}: {broken}"));
            drop(result);
            bench.sim.clear_faults();
            let again = bench.allocator.alloc(32 * MIB, &stream);
            assert!(again.is_ok(), "{call:?} {n}: {again:?}");
            bench.check();
            let sim = bench.sim.clone();
            drop((again, blocks, bench, stream));
            assert!(sim.leaks().is_empty(), "{call:?} {n}: {:?}", sim.leaks());
        }
    }
}

#[test]
fn an_unmap_that_fails_at_the_end_panics_nowhere() {
    let bench = Bench::new(64, "");
    let stream = bench.allocator.default_stream().unwrap();
    let block = bench.alloc(12, &stream);
    let sim = bench.sim.clone();
    sim.fail(Fault::always(Call::Unmap, DriverErrorKind::Other(999)));
    drop((block, bench, stream));
    assert!(!sim.leaks().is_empty(), "the driver kept the pages");
}

#[test]
fn addresses_may_be_scarce() {
    let sim = SimDriver::builder().capacity(256 * MIB).address_budget(1 << 30).build();
    let bench = Bench::on(sim, "");
    let blocks: Vec<_> = (0..8).map(|_| bench.alloc(4, &bench.stream())).collect();
    let small = bench.allocator.alloc(512, &bench.stream());
    assert!(small.is_ok(), "{small:?}");
    drop((blocks, small));
}

#[test]
fn running_out_of_addresses_is_not_running_out_of_memory() {
    let bench = Bench::new(256, "");
    let stream = bench.allocator.default_stream().unwrap();
    bench.sim.fail(Fault::always(Call::ReserveAddresses, DriverErrorKind::AddressSpace));
    let error = bench.allocator.alloc(4 * MIB, &stream).unwrap_err();
    assert_eq!(error.out_of_memory().map(|report| report.cause), Some(Cause::AddressSpace), "{error}");
    assert!(error.to_string().contains("address space"), "{error}");
    bench.sim.clear_faults();
    bench.alloc(4, &stream);
}

#[test]
fn peers_see_every_page_also_those_that_move() {
    let machine = SimMachine::new(4, &SimDriver::builder().capacity(64 * MIB));
    let bench = Bench::on(machine.device(0), "slack:1.0");
    let stream = bench.allocator.default_stream().unwrap();
    let mut blocks: Vec<_> = (0..8).map(|_| Some(bench.alloc(8, &stream))).collect();
    bench.allocator.grant_access(3).unwrap();
    for block in blocks.iter_mut().step_by(2) {
        *block = None;
    }
    bench.sim.clear_log();
    let large = bench.alloc(32, &stream);
    assert!(bench.calls(Call::SetAccess) > 0, "pages were moved");
    for block in blocks.iter().flatten().chain([&large]) {
        for page in 0..block.bytes() / (2 * MIB) {
            let at = vramalloc::DevicePtr(block.ptr().0 + page * 2 * MIB);
            assert_eq!(bench.sim.accessible_from(at), [0, 3], "page {page} of {block:?}");
        }
    }
    drop(large);
}

#[test]
fn a_device_without_virtual_memory_says_so() {
    let sim = || SimDriver::builder().capacity(64 * MIB).virtual_memory(false).build();
    let error = CachingAllocator::new(sim(), Config::default().segments(Segments::Expandable)).unwrap_err();
    assert!(error.to_string().contains("no virtual memory management"), "{error}");
    let allocator = CachingAllocator::new(sim(), Config::default().segments(Segments::Auto)).unwrap();
    assert!(!allocator.is_expandable());
    assert!(allocator.alloc(4 * MIB, &allocator.default_stream().unwrap()).is_ok());
}

#[test]
fn a_training_loop_settles_without_driver_calls() {
    let bench = Bench::new(2048, "");
    let stream = bench.allocator.default_stream().unwrap();
    let weights: Vec<_> = (0..10).map(|layer| bench.alloc(8 + layer, &stream)).collect();
    // A handful of shapes alternate.
    let step = |shape: u64| {
        let activations: Vec<_> = (1..=10).map(|layer| bench.alloc(layer * 3 + shape * 2, &stream)).collect();
        for activation in activations.into_iter().rev() {
            drop((bench.alloc(2 + shape, &stream), activation));
        }
    };
    for round in 0..8 {
        step(round % 4);
    }
    bench.sim.clear_log();
    for round in 0..8 {
        step(round % 4);
    }
    assert_eq!(bench.sim.log().len(), 0, "{:?}", bench.sim.log().first());
    drop(weights);
}

#[test]
fn teardown_waits_for_work_and_returns_everything() {
    let bench = Bench::new(64, "");
    let (a, b) = (bench.stream(), bench.stream());
    let (first, second) = (bench.alloc(20, &a), bench.alloc(20, &b));
    bench.launch(&a, &first);
    bench.launch(&b, &second);
    drop(first);
    let sim = bench.sim.clone();
    drop((bench, a, b));
    sim.assert_clean();
    drop(second); // outlives the allocator
    sim.assert_clean();
    assert!(sim.leaks().is_empty(), "{:?}", sim.leaks());
}
