//! Threads: a freed block is visible in the free list before the event that protects it is recorded, so that
//! another thread gets it while it is in use; emptying the cache races with allocation. Reported as NVIDIA/cub
//! PR 156, PaddlePaddle PR 68657 and PR 73463, CuPy PR 105, pytorch/pytorch #97833, mlx #2099. What one thread may
//! do while another is inside the driver is the matter of [`super::locks_in_driver_calls`].

use crate::checks::check_allocator;
use crate::dsl::{Gpu, MIB, each_config};
use std::sync::Barrier;
use std::sync::atomic::{AtomicBool, Ordering};
use vramalloc::driver::sim::Work;
use vramalloc::{BlockState, CachingAllocator, Error, Stream};

#[test]
fn a_freed_block_is_not_handed_out_before_its_event() {
    each_config(|config| {
        for round in 0..150 {
            // Room for one block, or for two: the second thread waits for the first one's, or takes new memory.
            let gpu = Gpu::new(if round % 2 == 0 { 32 } else { 64 }, config.clone());
            let a = gpu.alloc(32 * MIB, &gpu.s0);
            gpu.use_on(&gpu.s1, &a);
            let start = Barrier::new(2);
            std::thread::scope(|scope| {
                scope.spawn(|| {
                    start.wait();
                    drop(a);
                });
                scope.spawn(|| {
                    start.wait();
                    let b = loop {
                        match gpu.allocator.alloc(32 * MIB, &gpu.s0) {
                            Ok(block) => break block,
                            Err(Error::OutOfMemory(_)) => std::thread::yield_now(), // not freed yet
                            Err(other) => panic!("round {round}: {other}"),
                        }
                    };
                    let work = Work::writing(b.ptr(), b.bytes());
                    gpu.sim.launch(gpu.s0.key(), work).expect("the block must not be in use any more");
                });
            });
            gpu.check();
        }
    });
}

/// Allocates, writes a mark, looks whether it stayed, frees.
fn churn(allocator: &CachingAllocator, gpu: &Gpu, stream: &Stream, mark: u8, turns: u64) {
    for turn in 0..turns {
        let bytes = [4 * MIB, 512, 300_000, 12 * MIB][(turn % 4) as usize];
        let block = allocator.alloc(bytes, stream).expect("there is room");
        gpu.sim.write(block.ptr(), &[mark; 64]).expect("the block is ours");
        std::thread::yield_now();
        let mut seen = [0; 64];
        gpu.sim.read(block.ptr(), &mut seen).expect("the block is ours");
        assert_eq!(seen, [mark; 64], "turn {turn}: another thread wrote into {block:?}");
    }
}

#[test]
fn allocating_emptying_and_looking_do_not_disturb_each_other() {
    each_config(|config| {
        let gpu = Gpu::new(512, config);
        let (left, right) = (gpu.allocator.clone(), gpu.allocator.clone());
        std::thread::scope(|scope| {
            scope.spawn(|| churn(&left, &gpu, &gpu.s0, 1, 1000));
            scope.spawn(|| churn(&right, &gpu, &gpu.s0, 2, 1000)); // the same stream, another thread
            scope.spawn(|| churn(&right, &gpu, &gpu.s1, 3, 1000));
            scope.spawn(|| {
                for _ in 0..100 {
                    gpu.allocator.empty_cache().expect("the driver is in order");
                }
            });
            scope.spawn(|| {
                for turn in 0..100 {
                    let snapshot = gpu.allocator.snapshot();
                    for segment in &snapshot.segments {
                        let blocks: u64 = segment.blocks.iter().map(|block| block.bytes).sum();
                        assert_eq!(blocks, segment.bytes, "look {turn}: the blocks do not fill {segment:?}");
                    }
                    let live = snapshot.segments.iter().flat_map(|segment| &segment.blocks);
                    let live = live.filter(|block| block.state == BlockState::Live).count();
                    assert!(live <= 3, "look {turn}: {live} blocks live, of three threads with one each");
                    check_allocator_alone(&gpu.allocator);
                }
            });
        });
        gpu.check();
        gpu.empty_cache();
        assert_eq!((gpu.reserved(), gpu.allocated()), (0, 0));
    });
}

/// What must hold at any moment, other threads being at work.
#[track_caller]
fn check_allocator_alone(allocator: &CachingAllocator) {
    if let Err(broken) = allocator.validate() {
        panic!("in the middle of it: {broken}");
    }
    let stats = allocator.memory_stats();
    let (allocated, active) = (stats.allocated_bytes.all.current, stats.active_bytes.all.current);
    let reserved = stats.reserved_bytes.all.current;
    assert!(
        allocated <= active && active <= reserved,
        "allocated {allocated}, active {active}, reserved {reserved}"
    );
}

#[test]
fn a_block_passed_between_threads_and_streams_is_never_raced_for() {
    each_config(|config| {
        let gpu = Gpu::new(96, config);
        let (send, receive) = std::sync::mpsc::sync_channel(2);
        std::thread::scope(|scope| {
            let gpu = &gpu;
            scope.spawn(move || {
                for turn in 0..300 {
                    let block = gpu.allocator.alloc(if turn % 2 == 0 { 12 * MIB } else { 700_000 }, &gpu.s0);
                    let block = block.expect("waiting makes room");
                    let work = Work::writing(block.ptr(), block.bytes());
                    gpu.sim.launch(gpu.s0.key(), work).expect("a block handed out is unused");
                    gpu.sim.complete(gpu.s0.key());
                    send.send(block).expect("the other thread is there");
                }
            });
            scope.spawn(move || {
                for block in receive {
                    let work = Work::reading(block.ptr(), block.bytes());
                    gpu.sim.launch(gpu.s1.key(), work).expect("the producer is done with it");
                    block.record_stream(&gpu.s1).expect("its own allocator's stream");
                    drop(block); // the read is still queued
                }
            });
        });
        gpu.check();
        gpu.complete(&gpu.s1);
        gpu.poll();
        gpu.empty_cache();
        assert_eq!((gpu.reserved(), gpu.pending()), (0, 0));
    });
}

#[test]
fn streams_come_and_go_while_others_allocate() {
    each_config(|config| {
        let gpu = Gpu::new(512, config);
        let over = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                for _ in 0..200 {
                    let stream = gpu.allocator.stream(gpu.sim.create_stream()).expect("just created");
                    drop(gpu.allocator.alloc(4 * MIB, &stream).expect("there is room"));
                    gpu.allocator.retire_stream(&stream).expect("the stream is alive");
                    gpu.sim.destroy_stream(stream.key().handle).expect("the stream is alive");
                }
                over.store(true, Ordering::SeqCst);
            });
            scope.spawn(|| {
                while !over.load(Ordering::SeqCst) {
                    churn(&gpu.allocator, &gpu, &gpu.s0, 5, 20);
                    gpu.allocator.poll();
                    gpu.allocator.empty_cache().expect("the driver is in order");
                }
            });
        });
        gpu.empty_cache();
        check_allocator(&gpu.allocator, &gpu.sim);
        assert_eq!(gpu.reserved(), 0, "a retired stream kept memory");
        assert_eq!(gpu.allocator.take_deferred_error(), None);
    });
}
