//! The driver gives the handle of a destroyed stream to a new one, and one handle means another stream in each
//! thread. An allocator that takes handles for identities hands a block that is still in use to the new stream,
//! or strands what the dead one had cached, or runs into "invalid handle" much later. Reported as RMM #2251 and
//! #649, cuML #2632, CuPy #5069, NVIDIA/cub #373.

use crate::dsl::{Gpu, MIB, each_config};
use vramalloc::driver::StreamHandle;
use vramalloc::driver::sim::Work;
use vramalloc::{Allocation, OnPending, Stream};

/// Whether two blocks share a byte.
fn overlap(a: (u64, u64), b: &Allocation) -> bool {
    a.0 < b.ptr().0 + b.block_bytes() && b.ptr().0 < a.0 + a.1
}

/// Destroys a stream, announced to the allocator or not.
#[track_caller]
fn destroy(gpu: &Gpu, stream: &Stream, announced: bool) {
    if announced {
        gpu.allocator.retire_stream(stream).expect("the stream is alive");
    }
    gpu.sim.destroy_stream(stream.key().handle).expect("the stream is alive");
    gpu.check();
}

#[track_caller]
fn assert_no_deferred(gpu: &Gpu) {
    let deferred = gpu.allocator.take_deferred_error();
    assert_eq!(deferred, None, "a dead stream surfaced as an error");
}

#[test]
fn a_recycled_handle_is_another_stream() {
    for announced in [true, false] {
        each_config(|config| {
            let gpu = Gpu::new(64, config);
            let dead = gpu.new_stream();
            let a = gpu.alloc(4 * MIB, &dead);
            let range = (a.ptr().0, a.block_bytes());
            gpu.launch(&dead, &a);
            gpu.free(a);
            destroy(&gpu, &dead, announced);

            let born = gpu.new_stream();
            assert_eq!(born.key().handle, dead.key().handle, "the device recycles handles");
            assert_ne!(born.key().id, dead.key().id);
            let b = gpu.alloc(4 * MIB, &born);
            assert!(!overlap(range, &b) || gpu.sim.unfinished() == 0, "{b:?} is still in use by the dead stream");
            gpu.launch(&born, &b);

            gpu.sim.complete_all();
            gpu.empty_cache();
            let segment = gpu.allocator.snapshot().segments.iter().map(|segment| segment.bytes).sum::<u64>();
            assert_eq!(gpu.allocator.snapshot().segments.len(), 1, "memory is stranded on the dead stream");
            assert_eq!(gpu.reserved(), segment);
            gpu.free(b);
            gpu.empty_cache();
            assert_eq!(gpu.reserved(), 0);
            assert_no_deferred(&gpu);
        });
    }
}

#[test]
fn a_full_device_reaches_what_a_dead_stream_had_cached() {
    for announced in [true, false] {
        each_config(|config| {
            let gpu = Gpu::new(64, config);
            let dead = gpu.new_stream();
            let a = gpu.alloc(64 * MIB, &dead);
            gpu.launch(&dead, &a);
            gpu.free(a);
            destroy(&gpu, &dead, announced);
            let born = gpu.new_stream();
            let b = gpu.alloc(64 * MIB, &born);
            gpu.launch(&born, &b);
            assert_eq!(gpu.stats().num_ooms, 0);
            assert_no_deferred(&gpu);
        });
    }
}

#[test]
fn a_block_recorded_on_a_stream_that_dies_waits_for_its_work() {
    // The stream dies before the block is freed, or after; announced or not.
    for (announced, freed_first) in [(true, true), (true, false), (false, true), (false, false)] {
        each_config(|config| {
            println!("announced: {announced}, freed first: {freed_first}");
            let gpu = Gpu::new(64, config);
            let user = gpu.new_stream();
            let a = gpu.alloc(64 * MIB, &gpu.s0);
            gpu.use_on(&user, &a);
            if freed_first {
                gpu.free(a);
                destroy(&gpu, &user, announced);
            } else {
                destroy(&gpu, &user, announced);
                gpu.free(a);
            }
            gpu.poll();
            assert_eq!((gpu.pending(), gpu.sim.unfinished()), (64 * MIB, 1), "the work is unfinished");
            // Nothing else is left: this must wait for that work and no less.
            let b = gpu.alloc(64 * MIB, &gpu.s0);
            assert_eq!(gpu.sim.unfinished(), 0, "{b:?} is still in use by the dead stream");
            gpu.launch(&gpu.s0, &b);
            assert_no_deferred(&gpu);
        });
    }
}

#[test]
fn a_block_recorded_on_a_stream_that_dies_is_not_stranded() {
    for (announced, freed_first) in [(true, true), (true, false), (false, true), (false, false)] {
        each_config(|config| {
            println!("announced: {announced}, freed first: {freed_first}");
            let gpu = Gpu::new(64, config);
            let user = gpu.new_stream();
            let a = gpu.alloc(4 * MIB, &gpu.s0);
            gpu.use_on(&user, &a);
            gpu.complete(&user); // all done: the driver forgets the stream for good when it is destroyed
            if freed_first {
                gpu.free(a);
                destroy(&gpu, &user, announced);
            } else {
                destroy(&gpu, &user, announced);
                gpu.free(a);
            }
            gpu.poll();
            gpu.empty_cache();
            assert_eq!((gpu.pending(), gpu.reserved()), (0, 0), "the block is stranded on the dead stream");
            assert_no_deferred(&gpu);
        });
    }
}

#[test]
fn a_full_device_gets_past_a_stream_that_is_gone_for_good() {
    for announced in [true, false] {
        each_config(|config| {
            let gpu = Gpu::new(64, config);
            let user = gpu.new_stream();
            let a = gpu.alloc(64 * MIB, &gpu.s0);
            gpu.use_on(&user, &a);
            gpu.complete(&user);
            destroy(&gpu, &user, announced);
            gpu.free(a);
            let b = gpu.alloc(64 * MIB, &gpu.s0);
            assert_eq!(gpu.stats().num_ooms, 0, "{b:?}");
            assert_no_deferred(&gpu);
        });
    }
}

#[test]
fn a_handle_that_is_reborn_does_not_answer_for_the_dead() {
    each_config(|config| {
        let gpu = Gpu::new(64, config);
        let user = gpu.new_stream();
        let a = gpu.alloc(64 * MIB, &gpu.s0);
        gpu.use_on(&user, &a);
        gpu.sim.destroy_stream(user.key().handle).expect("the stream is alive");
        let born = gpu.new_stream(); // the same handle, with nothing queued
        assert_eq!(born.key().handle, user.key().handle);
        gpu.free(a);
        gpu.poll();
        assert_eq!(gpu.pending(), 64 * MIB, "the new stream is idle, the old one's work is not done");
        let b = gpu.alloc(64 * MIB, &gpu.s0);
        gpu.launch(&gpu.s0, &b);
        assert_no_deferred(&gpu);
    });
}

#[test]
fn a_live_block_outlives_its_stream() {
    for announced in [true, false] {
        each_config(|config| {
            let gpu = Gpu::new(64, config);
            let dead = gpu.new_stream();
            let a = gpu.alloc(4 * MIB, &dead);
            destroy(&gpu, &dead, announced);
            gpu.sim.write(a.ptr(), b"alive").expect("the block is live");
            gpu.free(a);
            gpu.empty_cache();
            assert_eq!(gpu.reserved(), 0, "the block is stranded on the dead stream");
            assert_no_deferred(&gpu);
        });
    }
}

#[test]
fn retired_streams_do_not_pile_up() {
    each_config(|config| {
        let gpu = Gpu::new(64, config);
        for turn in 0..200 {
            let stream = gpu.new_stream();
            let a = gpu.alloc(64 * MIB, &stream);
            gpu.use_on(&gpu.s0, &a);
            gpu.complete(&gpu.s0);
            gpu.free(a);
            destroy(&gpu, &stream, true);
            assert!(gpu.reserved() <= 64 * MIB, "turn {turn}");
        }
        gpu.empty_cache();
        assert_eq!((gpu.reserved(), gpu.pending()), (0, 0));
        assert!(gpu.sim.leaks().events <= 4, "an event a stream is left: {:?}", gpu.sim.leaks());
    });
}

#[test]
fn each_thread_has_its_own_default_stream() {
    each_config(|config| {
        let gpu = Gpu::new(64, config.clone());
        let mine = gpu.allocator.stream(StreamHandle::PER_THREAD_DEFAULT).expect("every thread has one");
        let a = gpu.alloc(10_000, &mine);
        let range = (a.ptr().0, a.block_bytes());
        gpu.launch(&mine, &a);
        gpu.free(a);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let theirs = gpu.allocator.stream(StreamHandle::PER_THREAD_DEFAULT).expect("every thread has one");
                assert_eq!(theirs.key().handle, mine.key().handle);
                assert_ne!(theirs, mine, "two threads share one default stream");
                let b = gpu.alloc(10_000, &theirs);
                let waited = config.on_pending == OnPending::Wait && gpu.sim.unfinished() == 0;
                assert!(!overlap(range, &b) || waited, "{b:?} is still in use by the first thread");
                gpu.launch(&theirs, &b);
                // Even through the other thread's value it is this thread's stream.
                let c = gpu.alloc(10_000, &mine);
                assert_eq!(c.stream(), theirs, "the handle means the calling thread's stream");
                assert!(!overlap(range, &c) || waited, "{c:?} is still in use by the first thread");
                let work = Work::writing(c.ptr(), c.bytes());
                gpu.sim.launch(StreamHandle::PER_THREAD_DEFAULT, work).expect("the block is this thread's");
            });
        });
        gpu.check();
    });
}

#[test]
fn the_default_stream_by_its_two_handles_is_one() {
    each_config(|config| {
        let gpu = Gpu::new(64, config);
        let [by_null, by_name] =
            [StreamHandle::DEFAULT, StreamHandle::LEGACY].map(|handle| gpu.allocator.stream(handle));
        let default = gpu.allocator.default_stream();
        assert_eq!(by_null, default);
        assert_eq!(by_name, default, "one stream has two pools");
    });
}
