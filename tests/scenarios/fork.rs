//! A forked child inherits the parent's buffers and, at its exit, tries to free the parent's GPU memory with a
//! driver that must not be used after a fork: it hangs, crashes, or prints errors. Reported as RMM #2203 and
//! onnxruntime PR 31961. These are real forks. What must hold: no driver call in the child, a clear error, no
//! deadlock whatever other threads were doing, and a parent that notices nothing.

use crate::dsl::{Gpu, Kind as _, MIB, driver_error, each_config, each_kind};
use crate::hooked::Hooked;
use std::io::{PipeReader, PipeWriter, Read, Write};
use std::sync::{Arc, Barrier};
use vramalloc::driver::sim::SimDriver;
use vramalloc::driver::{Call, Driver, DriverErrorKind as Kind};
use vramalloc::{CachingAllocator, Config};

/// One side of a fork.
enum Side {
    Child(PipeWriter),
    Parent(PipeReader, libc::pid_t),
}

impl Side {
    fn fork() -> Self {
        let (reader, writer) = std::io::pipe().expect("a pipe");
        // SAFETY: the child uses only what this test made, allocates through the C library, which makes itself
        // usable in a forked child, and leaves by `_exit`.
        match unsafe { libc::fork() } {
            -1 => panic!("fork failed: {}", std::io::Error::last_os_error()),
            0 => {
                // SAFETY: a plain system call; a child that hangs is ended by the alarm, so that the test fails.
                unsafe { libc::alarm(60) };
                Self::Child(writer)
            }
            child => Self::Parent(reader, child),
        }
    }

    /// Leaves the child with its verdict; in the parent, waits for it.
    #[track_caller]
    fn join(self, verdict: Result<(), String>) {
        match self {
            Self::Child(mut pipe) => {
                if let Err(why) = verdict {
                    let _ = pipe.write_all(why.as_bytes());
                }
                let _ = pipe.write_all(b"."); // the child came to its end
                // SAFETY: ends this process only, without running what the parent registered.
                unsafe { libc::_exit(0) };
            }
            Self::Parent(mut pipe, child) => {
                let (mut said, mut status) = (String::new(), 0);
                pipe.read_to_string(&mut said).expect("the child's words");
                // SAFETY: `child` is this process's child, and `status` outlives the call.
                assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child, "waiting for the child");
                assert_eq!((said.as_str(), status), (".", 0), "the child's words and exit status");
            }
        }
    }
}

fn ensure(holds: bool, what: impl FnOnce() -> String) -> Result<(), String> {
    if holds { Ok(()) } else { Err(what()) }
}

/// A device with something of everything: live, raw, pending, cached, an event.
fn lived_in(config: Config) -> (Arc<Hooked>, Gpu, Vec<vramalloc::Allocation>, vramalloc::DevicePtr) {
    let sim = SimDriver::builder().capacity(256 * MIB).build();
    let driver = Hooked::new(&sim);
    let gpu = Gpu::over(&sim, driver.clone(), config);
    let live = [512, 4 * MIB, 12 * MIB].map(|bytes| gpu.alloc(bytes, &gpu.s0));
    gpu.use_on(&gpu.s1, &live[1]);
    let raw = gpu.allocator.alloc_raw(4096, &gpu.s1).expect("there is room");
    let [idle, pending] = [12 * MIB, 14 * MIB].map(|bytes| gpu.alloc(bytes, &gpu.s1));
    gpu.use_on(&gpu.s0, &pending);
    gpu.free(pending);
    gpu.poll();
    gpu.free(idle);
    (driver, gpu, live.into(), raw)
}

/// What the child does: everything, with nothing of it reaching the driver.
fn in_child(
    driver: &Hooked,
    gpu: Gpu,
    mut live: Vec<vramalloc::Allocation>,
    raw: vramalloc::DevicePtr,
) -> Result<(), String> {
    let calls = driver.calls_made();
    for bytes in [512, 4 * MIB, 30 * MIB] {
        let result = gpu.allocator.alloc(bytes, &gpu.s0);
        let is_right = matches!(&result, Err(vramalloc::Error::Driver(error)) if error.kind == Kind::Forked);
        ensure(is_right, || format!("alloc({bytes}) in the child: {result:?}"))?;
    }
    let emptied = gpu.allocator.empty_cache();
    ensure(emptied.is_err(), || format!("empty_cache in the child: {emptied:?}"))?;
    let _ = gpu.allocator.free_raw(raw);
    drop(live.pop());
    let Gpu { sim, allocator, s0, s1 } = gpu;
    drop((allocator, s0, s1));
    drop(live);
    ensure(driver.calls_made() == calls, || format!("{} driver calls in the child", driver.calls_made() - calls))?;
    let violations = sim.violations();
    ensure(violations.is_empty(), || format!("in the child: {violations:?}"))
}

#[test]
fn the_child_makes_no_driver_call_and_the_parent_notices_nothing() {
    each_config(|config| {
        let (driver, gpu, live, raw) = lived_in(config);
        let (stats, used) = (gpu.stats(), gpu.sim.used_bytes());
        let side = Side::fork();
        if let Side::Child(_) = side {
            let verdict = in_child(&driver, gpu, live, raw);
            side.join(verdict);
            unreachable!("the child has left");
        }
        side.join(Ok(()));
        assert_eq!((gpu.stats(), gpu.sim.used_bytes()), (stats, used), "the parent's allocator has changed");
        gpu.check();
        let more = gpu.alloc(30 * MIB, &gpu.s0);
        gpu.free(more);
        gpu.allocator.free_raw(raw).expect("it is live in the parent");
        live.into_iter().for_each(|block| gpu.free(block));
        gpu.sim.complete_all();
        gpu.empty_cache();
        assert_eq!(gpu.reserved(), 0);
    });
}

#[test]
fn blocks_may_outlive_the_allocator_in_the_child() {
    each_config(|config| {
        let (driver, gpu, live, _) = lived_in(config);
        let side = Side::fork();
        if let Side::Child(_) = side {
            let calls = driver.calls_made();
            let Gpu { sim, allocator, s0, s1 } = gpu;
            drop((allocator, s0, s1));
            drop(live);
            let more = driver.calls_made() - calls;
            drop(sim);
            side.join(ensure(more == 0, || format!("{more} driver calls in the child")));
            unreachable!("the child has left");
        }
        side.join(Ok(()));
        gpu.check();
    });
}

#[test]
fn a_fork_while_another_thread_is_in_the_driver_does_not_hang_the_child() {
    // The other thread holds whatever it holds while it allocates, gives back or waits.
    each_kind(|config| {
        let mut calls = config.moves_memory();
        calls.extend([Call::EventQuery, Call::EventRecord, Call::EventSynchronize]);
        calls.into_iter().for_each(|call| fork_while_in(call, config.clone()));
    });
}

#[track_caller]
fn fork_while_in(call: Call, config: Config) {
    println!("in {call}");
    let (driver, gpu, live, raw) = lived_in(config);
    let go_on = Arc::new(Barrier::new(2));
    let leave = Arc::clone(&go_on);
    let (inside, made) = std::sync::mpsc::channel();
    let done = inside.clone();
    driver.once_in(call, move || {
        let _ = inside.send(true);
        leave.wait();
    });
    let (allocator, stream) = (gpu.allocator.clone(), gpu.s1.clone());
    let busy = std::thread::spawn(move || {
        let late = allocator.alloc(2 * MIB, &stream).expect("there is room");
        late.record_stream(&allocator.default_stream().expect("every device has one")).expect("it is ours");
        drop(late);
        // Larger than what is free: everything is asked, waited for and given back.
        let result = allocator.alloc(230 * MIB, &stream).map(drop);
        let _ = done.send(false);
        result
    });
    assert!(made.recv().expect("one of the two tells"), "{call} was not made");
    let side = Side::fork();
    if let Side::Child(_) = side {
        let verdict = in_child(&driver, gpu, live, raw);
        side.join(verdict);
        unreachable!("the child has left");
    }
    side.join(Ok(()));
    go_on.wait();
    busy.join().expect("the other thread does not panic").expect("its request can be served");
    gpu.check();
}

#[test]
fn a_child_may_open_its_own() {
    each_config(|config| {
        let parent = Gpu::new(64, config.clone());
        let side = Side::fork();
        if let Side::Child(_) = side {
            let open = || -> Result<(), String> {
                let own = SimDriver::builder().capacity(64 * MIB).build();
                let allocator =
                    CachingAllocator::new(own.clone(), config.clone()).map_err(|why| why.to_string())?;
                let stream = allocator.default_stream().map_err(|why| why.to_string())?;
                drop(allocator.alloc(4 * MIB, &stream).map_err(|why| why.to_string())?);
                drop((stream, allocator));
                ensure(own.leaks().is_empty(), || format!("the child's own allocator left {:?}", own.leaks()))
            };
            side.join(open());
            unreachable!("the child has left");
        }
        side.join(Ok(()));
        parent.check();
    });
}

#[test]
fn a_child_that_only_frees_leaves_its_parents_figures() {
    each_config(|config| {
        let gpu = Gpu::new(64, config);
        let a = gpu.alloc(4 * MIB, &gpu.s0);
        let side = Side::fork();
        if let Side::Child(_) = side {
            drop(a);
            let refused = driver_error(gpu.allocator.alloc(512, &gpu.s0)) == Kind::Forked;
            let usable = gpu.sim.check_usable();
            side.join(ensure(refused && usable.is_err(), || format!("the child may go on: {usable:?}")));
            unreachable!("the child has left");
        }
        side.join(Ok(()));
        assert_eq!(gpu.allocated(), a.block_bytes());
        gpu.free(a);
    });
}
