//! A lock held while the driver works or while a user's callback runs: the callback allocates or frees and waits
//! for itself for ever; a slow driver call stops every other thread. And a lock that is let go around a driver
//! call, with a pool that is not searched again afterwards. Reported as pytorch/pytorch #97833, mlx #2099, CuPy
//! PR 105, PaddlePaddle PR 73463.

use crate::dsl::{Gpu, KIB, Kind as _, MIB, each_config, no_deadlock};
use crate::hooked::Hooked;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use vramalloc::driver::sim::{Fault, SimDriver};
use vramalloc::driver::{Call, DriverErrorKind as Kind};
use vramalloc::{Allocation, CachingAllocator, Config, Stream};

fn hooked(mib: u64, config: Config) -> (Arc<Hooked>, Gpu) {
    let sim = SimDriver::builder().capacity(mib * MIB).build();
    let driver = Hooked::new(&sim);
    let gpu = Gpu::over(&sim, driver.clone(), config);
    (driver, gpu)
}

/// Whatever a callback may want: look, free, and allocate what is cached.
fn use_everything(allocator: &CachingAllocator, stream: &Stream, block: Option<Allocation>) {
    let _ =
        (allocator.memory_stats(), allocator.memory_summary(), allocator.snapshot(), allocator.memory_reserved());
    if let Some(block) = block {
        block.record_stream(stream).expect("its own allocator's stream");
        drop(block);
    }
    let hit = allocator.alloc(512, stream).expect("it is cached");
    drop(hit);
}

#[test]
fn the_out_of_memory_observer_may_use_the_allocator() {
    each_config(|config| {
        no_deadlock(move || {
            let gpu = Gpu::new(64, config);
            let small = gpu.alloc(512, &gpu.s0);
            let x = Mutex::new(Some(gpu.alloc(4 * MIB, &gpu.s0)));
            gpu.free(small);
            let seen = Arc::new(AtomicU64::new(0));
            let (allocator, stream, requested) = (gpu.allocator.clone(), gpu.s0.clone(), Arc::clone(&seen));
            gpu.allocator.on_out_of_memory(move |report| {
                requested.store(report.requested, Ordering::SeqCst);
                let small = allocator.alloc(512, &stream).expect("it is cached, or 2 MiB are free");
                use_everything(&allocator, &stream, x.lock().expect("no panic").take());
                drop(small);
            });
            let report = gpu.oom(62 * MIB, &gpu.s0);
            assert_eq!(
                seen.load(Ordering::SeqCst),
                report.requested,
                "the observer was not called, or told otherwise"
            );
            assert_eq!(gpu.allocated(), 0, "what the observer freed is not free");
        });
    });
}

#[test]
fn an_observer_that_causes_another_report_returns() {
    each_config(|config| {
        no_deadlock(|| {
            let gpu = Gpu::new(64, config);
            let depth = Arc::new(AtomicU64::new(0));
            let (allocator, stream, nested) = (gpu.allocator.clone(), gpu.s1.clone(), Arc::clone(&depth));
            gpu.allocator.on_out_of_memory(move |_| {
                if nested.fetch_add(1, Ordering::SeqCst) == 0 {
                    assert!(allocator.alloc(1 << 40, &stream).is_err(), "no device has that");
                }
            });
            gpu.oom(100 * MIB, &gpu.s0);
            assert_eq!((depth.load(Ordering::SeqCst), gpu.stats().num_ooms), (2, 2));
        });
    });
}

#[test]
fn no_lock_is_held_while_the_driver_waits_or_allocates() {
    // Each of these calls can take long on a real device.
    each_config(|config| {
        for call in config.moves_memory().into_iter().chain([Call::EventSynchronize]) {
            let config = config.clone();
            no_deadlock(move || {
                let (driver, gpu) = hooked(64, config);
                let small = gpu.alloc(512, &gpu.s0);
                let (x, pending) = (gpu.alloc(600, &gpu.s0), gpu.alloc(30 * MIB, &gpu.s0));
                gpu.use_on(&gpu.s1, &pending);
                gpu.free(pending);
                gpu.free(small);
                let (allocator, stream) = (gpu.allocator.clone(), gpu.s0.clone());
                let done = Arc::new(AtomicU64::new(0));
                let called = Arc::clone(&done);
                driver.once_in(call, move || {
                    use_everything(&allocator, &stream, Some(x));
                    called.store(1, Ordering::SeqCst);
                });
                // The pending block must be waited for and its segment given back: every one of those calls is made.
                let wide = gpu.alloc(48 * MIB, &gpu.s1);
                assert_eq!(done.load(Ordering::SeqCst), 1, "{call} was not made: {:?}", gpu.sim.log());
                gpu.launch(&gpu.s1, &wide);
                driver.unhook();
            });
        }
    });
}

#[test]
fn a_slow_driver_call_holds_up_no_other_stream() {
    each_config(|config| {
        no_deadlock(move || {
            let (driver, gpu) = hooked(256, config.clone());
            let (allocator, stream) = (gpu.allocator.clone(), gpu.s1.clone());
            // Pages can move between streams, so that of two streams that need the driver one waits for the other; but
            // not one that its cache can serve.
            let (held, bytes) = config.pick((0, 40 * MIB), (512 * KIB, 512 * KIB));
            let pin = gpu.alloc(held, &gpu.s1);
            driver.once_in(config.takes(), move || {
                // While stream 0 asks the driver, stream 1 does the same and is served.
                drop(allocator.alloc(bytes, &stream).expect("there is room"));
            });
            let a = gpu.alloc(40 * MIB, &gpu.s0);
            driver.unhook();
            assert_eq!(gpu.reserved(), config.pick(80, 42) * MIB, "{a:?}, {pin:?}");
        });
    });
}

#[test]
fn what_was_freed_during_a_refusal_serves_the_request() {
    each_config(|config| {
        no_deadlock(move || {
            let (driver, gpu) = hooked(64, config.clone());
            let held = gpu.alloc(64 * MIB, &gpu.s0);
            driver.once_in(config.takes(), move || drop(held));
            let a = gpu.alloc(64 * MIB, &gpu.s0);
            assert_eq!((gpu.stats().num_ooms, a.bytes()), (0, 64 * MIB), "the pool was not searched again");
            driver.unhook();
        });
    });
}

#[test]
fn what_was_freed_in_part_during_a_refusal_serves_the_request() {
    each_config(|config| {
        no_deadlock(move || {
            let (driver, gpu) = hooked(64, config.clone());
            let whole = gpu.alloc(64 * MIB, &gpu.s0);
            gpu.free(whole);
            let [held, keeps] = [(); 2].map(|()| gpu.alloc(16 * MIB, &gpu.s0));
            let rest = gpu.try_alloc(32 * MIB, &gpu.s0);
            if gpu.allocator.snapshot().segments.len() > 1 {
                return; // the oversize rule gave the segment back; nothing to share
            }
            let at = held.ptr();
            driver.once_in(config.takes(), move || drop(held));
            let a = gpu.alloc(12 * MIB, &gpu.s0);
            // At either end of the hole that is there now.
            let ends = [at.0, at.0 + config.pick(0, 4 * MIB)];
            assert!(ends.contains(&a.ptr().0), "the pool was not searched again: {a:?}, {keeps:?}, {rest:?}");
            driver.unhook();
        });
    });
}

#[test]
fn a_block_taken_while_its_segment_was_about_to_go_stays() {
    each_config(|config| {
        no_deadlock(move || {
            let (driver, gpu) = hooked(128, config.clone());
            let idle = [30, 32].map(|mib| gpu.alloc(mib * MIB, &gpu.s0));
            idle.into_iter().for_each(|block| gpu.free(block));
            let (allocator, stream) = (gpu.allocator.clone(), gpu.s0.clone());
            let taken = Arc::new(Mutex::new(Vec::new()));
            let keep = Arc::clone(&taken);
            let take = move || {
                let block = allocator.alloc(30 * MIB, &stream).expect("it is cached, or there is room");
                keep.lock().expect("no panic").push(block);
            };
            // One segment is on its way out; the other is still cached, and is taken. Idle pages leave together: the
            // other thread gets new ones, when it gets them.
            let (started, thread) = (Arc::new(Mutex::new(None)), config.is_expandable());
            let running = Arc::clone(&started);
            driver.once_in(config.gives(), move || {
                if thread {
                    *running.lock().expect("no panic") = Some(std::thread::spawn(take));
                } else {
                    take();
                }
            });
            gpu.allocator.empty_cache().expect("the driver is in order");
            if let Some(thread) = started.lock().expect("no panic").take() {
                thread.join().expect("the other thread is served");
            }
            gpu.check();
            driver.unhook();
            let block = taken.lock().expect("no panic").pop().expect("the hook ran");
            gpu.launch(&gpu.s0, &block);
            assert!(gpu.reserved() >= block.block_bytes(), "{block:?} was given back while it is live");
        });
    });
}

#[test]
fn a_failure_in_the_driver_leaves_no_lock_behind() {
    each_config(|config| {
        let events = [Call::EventCreate, Call::EventRecord, Call::EventQuery];
        for call in config.moves_memory().into_iter().chain(events) {
            let config = config.clone();
            no_deadlock(move || {
                let gpu = Gpu::new(64, config);
                let pending = gpu.alloc(30 * MIB, &gpu.s0);
                gpu.use_on(&gpu.s1, &pending);
                gpu.free(pending);
                gpu.sim.fail(Fault::nth(call, 1, Kind::Other(999)));
                let _ = gpu.try_alloc(60 * MIB, &gpu.s1);
                gpu.sim.clear_faults();
                let a = gpu.alloc(512, &gpu.s0);
                let b = gpu.alloc(512, &gpu.s1);
                gpu.free(a);
                gpu.free(b);
                gpu.sim.complete_all();
                gpu.poll();
                gpu.empty_cache();
            });
        }
    });
}
