//! Captures into graphs: an event that becomes part of the graph and is asked later; the way of a request that gives
//! memory back, or waits, and so destroys the capture; a failed capture whose pool stays for good; memory of a pool that
//! goes where it does not belong. Reported as pytorch/pytorch #193982, #159594, #187795, #190348, #146431, #152861,
//! #167745.

use crate::dsl::{Gpu, MIB, each_kind};
use std::sync::Barrier;
use vramalloc::driver::sim::{CaptureMode, Graph, Work};
use vramalloc::driver::{Call, Driver, DriverErrorKind};
use vramalloc::{Config, Error, PrivatePool, Stream};

impl Gpu {
    #[track_caller]
    fn begin(&self, stream: &Stream, mode: CaptureMode) {
        self.sim.begin_capture(stream.key().handle, mode).expect("nothing is being captured");
    }

    #[track_caller]
    fn end(&self, stream: &Stream) -> Graph {
        self.sim.end_capture(stream.key().handle).expect("nothing broke the capture")
    }

    /// The pool's side of a stream.
    #[track_caller]
    fn side(&self, pool: &PrivatePool, stream: &Stream) -> Stream {
        pool.stream(stream).expect("the stream is of the same allocator")
    }

    /// The calls that a capture cannot stand, or must not have in it.
    fn forbidden(&self) -> Vec<Call> {
        let forbidden =
            [Call::Free, Call::Synchronize, Call::EventSynchronize, Call::EventRecord, Call::EventQuery];
        self.sim.log().iter().map(|entry| entry.call).filter(|call| forbidden.contains(call)).collect()
    }
}

#[test]
fn no_event_of_a_captured_stream_is_recorded_or_asked() {
    each_kind(|config| {
        let gpu = Gpu::new(64, config);
        let pending = gpu.alloc(1, &gpu.s0);
        let spare = gpu.alloc(1, &gpu.s0);
        let address = spare.ptr();
        gpu.free(spare);
        gpu.sim.clear_log();
        gpu.begin(&gpu.s1, CaptureMode::ThreadLocal);
        gpu.use_on(&gpu.s1, &pending);
        gpu.free(pending);
        let x = gpu.alloc(1, &gpu.s0);
        assert_eq!((x.ptr(), gpu.forbidden()), (address, vec![]));
        gpu.end(&gpu.s1);
        gpu.complete(&gpu.s1);
        gpu.poll();
        assert_eq!((gpu.pending(), gpu.count(Call::EventRecord)), (0, 1));
        assert_eq!(gpu.allocator.take_deferred_error(), None);
    });
}

#[test]
fn a_capture_survives_running_out_of_memory() {
    for config in [Config::default(), "max_split_size_mb:20".parse().unwrap()] {
        let gpu = Gpu::new(64, config);
        let a = gpu.alloc(40 * MIB, &gpu.s0);
        gpu.free(a);
        let elsewhere = gpu.new_stream();
        gpu.sim.clear_log();
        let pool = gpu.allocator.private_pool();
        let capturing = pool.capture();
        gpu.begin(&gpu.s1, CaptureMode::Global);
        let report = gpu.oom(30 * MIB, &gpu.side(&pool, &gpu.s1));
        assert_eq!((report.device_free, report.reserved, report.withheld), (Some(24 * MIB), 40 * MIB, 40 * MIB));
        assert!(report.to_string().contains("call empty_cache before the capture"), "{report}");
        gpu.oom(30 * MIB, &elsewhere); // another stream's request would spoil it, too
        assert_eq!(gpu.forbidden(), vec![]);
        gpu.end(&gpu.s1);
        drop(capturing);
        drop(pool);
        let c = gpu.alloc(30 * MIB, &gpu.s1);
        assert_eq!(gpu.reserved(), 30 * MIB);
        gpu.free(c);
    }
}

#[test]
fn expandable_memory_moves_into_a_capture_and_nothing_waits() {
    let gpu = Gpu::new(64, "segments:expandable".parse().unwrap());
    let a = gpu.alloc(40 * MIB, &gpu.s0);
    gpu.free(a);
    let pool = gpu.allocator.private_pool();
    let _capturing = pool.capture();
    gpu.sim.clear_log();
    gpu.begin(&gpu.s1, CaptureMode::Relaxed);
    let b = gpu.alloc(30 * MIB, &gpu.side(&pool, &gpu.s1));
    gpu.oom(60 * MIB, &gpu.side(&pool, &gpu.s1));
    gpu.oom(60 * MIB, &gpu.s0.clone());
    assert_eq!(gpu.forbidden(), vec![]);
    gpu.end(&gpu.s1);
    gpu.free(b);
}

#[test]
fn a_failed_capture_leaves_nothing_behind() {
    each_kind(|config| {
        let gpu = Gpu::new(64, config);
        for turn in 0..100 {
            let pool = gpu.allocator.private_pool();
            let capturing = pool.capture();
            gpu.begin(&gpu.s1, CaptureMode::Global);
            let x = gpu.alloc(4 * MIB, &gpu.side(&pool, &gpu.s1));
            assert!(gpu.reserved() >= 4 * MIB);
            gpu.free(x);
            if turn % 2 == 0 {
                gpu.sim.synchronize().expect_err("a capture cannot stand that");
                gpu.sim.clear_violations();
                let error = gpu.sim.end_capture(gpu.s1.key().handle).expect_err("it was spoilt");
                assert_eq!(error.kind, DriverErrorKind::Capturing);
            } else {
                gpu.end(&gpu.s1);
            }
            drop(capturing);
            drop(pool);
            gpu.empty_cache();
            assert_eq!(gpu.reserved(), 0, "turn {turn}");
        }
        assert_eq!(gpu.allocator.snapshot().segments, vec![]);
    });
}

#[test]
fn blocks_outlive_their_pool() {
    let gpu = Gpu::new(128, Config::default());
    let pool = gpu.allocator.private_pool();
    let side = gpu.side(&pool, &gpu.s0);
    let (x, y) = (gpu.alloc(4 * MIB, &side), gpu.alloc(4 * MIB, &side));
    assert_eq!((gpu.reserved(), pool.memory_reserved()), (20 * MIB, 20 * MIB));
    let segment = x.ptr().0..x.ptr().0 + 20 * MIB;
    drop(pool);
    let z = gpu.alloc(4 * MIB, &gpu.s0);
    assert!(!segment.contains(&z.ptr().0), "memory of the pool went to another");
    gpu.sim.clear_log();
    gpu.free(x);
    assert_eq!((gpu.empty_cache(), gpu.count(Call::Free)), (0, 0), "y is in the middle of it");
    gpu.free(y);
    gpu.free(z);
    assert_eq!((gpu.empty_cache(), gpu.reserved(), gpu.count(Call::Free)), (40 * MIB, 0, 2));
    match gpu.try_alloc(512, &side) {
        Err(Error::Driver(error)) if error.kind == DriverErrorKind::StreamGone => {
            assert!(error.to_string().contains("its private pool was released"), "{error}");
        }
        other => panic!("the pool is released, but: {other:?}"),
    }
}

#[test]
fn a_pool_is_for_those_who_name_it() {
    each_kind(|config| {
        let gpu = Gpu::new(128, config);
        let (p, q) = (gpu.allocator.private_pool(), gpu.allocator.private_pool());
        let barrier = Barrier::new(2);
        let [x, y] = std::thread::scope(|scope| {
            let threads = [&p, &q].map(|pool| {
                let (gpu, barrier) = (&gpu, &barrier);
                scope.spawn(move || {
                    let side = pool.stream(&gpu.s0).unwrap();
                    barrier.wait();
                    let inside = gpu.allocator.alloc(4 * MIB, &side).unwrap();
                    barrier.wait();
                    let outside = gpu.allocator.alloc(4 * MIB, &gpu.s0).unwrap();
                    (inside, outside)
                })
            });
            threads.map(|thread| thread.join().unwrap())
        });
        gpu.check();
        assert!(p.memory_reserved() >= 4 * MIB && q.memory_reserved() >= 4 * MIB);
        let others = gpu.reserved() - p.memory_reserved() - q.memory_reserved();
        assert!(others >= 8 * MIB, "both outside blocks are in the stream's own pool");
        drop((x, y));
        gpu.check();
    });
}

#[test]
fn a_graphs_memory_stays_its_own_while_the_graph_lives() {
    each_kind(|config| {
        let gpu = Gpu::new(256, config);
        let pool = gpu.allocator.private_pool();
        let side = gpu.side(&pool, &gpu.s1);
        let graph = {
            let _capturing = pool.capture();
            gpu.begin(&gpu.s1, CaptureMode::Global);
            let mut addresses = Vec::new();
            for mib in [30, 12, 3, 30] {
                let block = gpu.alloc(mib * MIB, &side);
                gpu.launch(&gpu.s1, &block);
                addresses.push(block.ptr());
                gpu.free(block);
            }
            assert_eq!(addresses[0], addresses[3], "within the graph, freed memory is used again");
            gpu.end(&gpu.s1)
        };
        let kept = pool.memory_reserved();
        gpu.empty_cache();
        assert_eq!((gpu.reserved(), pool.memory_reserved()), (kept, kept), "it may still be launched");
        // Others need all that there is, and the pool's pages are no part of it.
        let rest = 256 * MIB - kept;
        let all = gpu.alloc(rest - 2 * MIB, &gpu.s0);
        gpu.launch(&gpu.s0, &all);
        gpu.sim.launch_graph(gpu.s1.key(), &graph).expect("every address is mapped, and nobody else's");
        gpu.oom(32 * MIB, &gpu.s0.clone());
        gpu.complete(&gpu.s0);
        gpu.free(all);
        gpu.empty_cache();

        // The graph still runs when the pool goes: nothing is given to others before it is done.
        gpu.complete(&gpu.s1);
        gpu.sim.launch_graph(gpu.s0.key(), &graph).expect("on any stream");
        drop((pool, side));
        let late = gpu.alloc(200 * MIB, &gpu.s1);
        gpu.sim.launch(gpu.s1.key(), Work::writing(late.ptr(), 200 * MIB)).expect("nobody uses it any more");
        gpu.complete(&gpu.s1);
        gpu.free(late);
        gpu.complete(&gpu.s0);
        gpu.empty_cache();
        assert_eq!(gpu.reserved(), 0);
    });
}

#[test]
fn a_stream_is_itself_in_every_pool() {
    let gpu = Gpu::new(64, Config::default());
    let pool = gpu.allocator.private_pool();
    let side = gpu.side(&pool, &gpu.s0);
    assert_ne!(side, gpu.s0);
    assert_eq!(side.key(), gpu.s0.key());
    assert_eq!(gpu.side(&pool, &side), side);
    let x = gpu.alloc(MIB, &side);
    x.record_stream(&gpu.s0).unwrap();
    gpu.free(x);
    assert_eq!(gpu.pending(), 0, "the same stream needs no announcement");
    let other = Gpu::new(64, Config::default());
    assert!(matches!(pool.stream(&other.s0), Err(Error::WrongDevice { what: "stream", .. })));
    gpu.allocator.retire_stream(&side).unwrap();
    gpu.allocator.retire_stream(&gpu.s0).unwrap(); // once more does nothing
    gpu.sim.destroy_stream(side.key().handle).unwrap();
    gpu.sim.clear_log();
    for stream in [&gpu.s0, &side] {
        let refused = gpu.allocator.alloc(512, stream).unwrap_err().to_string();
        assert!(refused.contains("it was retired"), "{refused}");
    }
    assert!(pool.stream(&gpu.s0).is_err());
    drop((pool, side));
    assert_eq!((gpu.empty_cache(), gpu.reserved()), (2 * MIB, 0));
    assert_eq!(gpu.count(Call::EventRecord), 0, "the stream is gone");
}
