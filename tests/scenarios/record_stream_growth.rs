//! The host runs ahead of the device and frees blocks that another stream still uses: memory use multiplies with
//! the distance between them, and nothing says why. When the allocator finally waits, it waits for every such
//! block instead of for the few that it needs. Reported as pytorch/pytorch #147168, #171771 (waits for everything)
//! and pytorch/torchtitan #735.

use crate::dsl::{Gpu, MIB, each_kind};
use vramalloc::driver::Call;
use vramalloc::{Cause, OnPending};

/// One step of a program that runs ahead: a block, used on the other stream, freed.
#[track_caller]
fn step(gpu: &Gpu, bytes: u64) {
    let x = gpu.alloc(bytes, &gpu.s0);
    gpu.use_on(&gpu.s1, &x);
    gpu.free(x);
}

#[test]
fn a_full_device_waits_for_the_oldest_only() {
    each_kind(|config| {
        let gpu = Gpu::new(256, config);
        for turn in 1..=16usize {
            step(&gpu, 64 * MIB);
            assert!(gpu.reserved() <= 256 * MIB, "turn {turn}: {} reserved", gpu.reserved());
            // Had it waited for more than the oldest, less than four would be unfinished.
            assert_eq!(gpu.sim.unfinished(), turn.min(4), "turn {turn} waited for more than it needed");
            assert_eq!(gpu.host_waits(), turn.saturating_sub(4), "turn {turn}");
        }
        assert_eq!(gpu.host_waits(), 12);
        assert_eq!(gpu.count(Call::Synchronize), 0, "it waited for the whole device");
        assert_eq!((gpu.allocated(), gpu.active()), (0, 256 * MIB));

        gpu.complete(&gpu.s1);
        gpu.poll();
        assert_eq!((gpu.active(), gpu.reserved()), (0, 256 * MIB), "one poll must see all that has passed");
        gpu.sim.clear_log();
        let again = gpu.alloc(64 * MIB, &gpu.s0);
        assert!(gpu.sim.log().is_empty(), "{again:?} needed {:?}", gpu.sim.log());
    });
}

#[test]
fn a_roomy_device_never_waits_and_the_statistics_say_why_it_grew() {
    each_kind(|config| {
        let gpu = Gpu::new(2048, config);
        for _ in 0..16 {
            step(&gpu, 64 * MIB);
        }
        assert_eq!((gpu.reserved(), gpu.host_waits()), (1024 * MIB, 0));
        assert_eq!((gpu.pending(), gpu.allocated()), (1024 * MIB, 0), "pending must show in the statistics");
        gpu.complete(&gpu.s1);
        assert_eq!((gpu.poll(), gpu.pending()), (16, 0));
        assert_eq!(gpu.empty_cache(), 1024 * MIB);
    });
}

#[test]
fn the_small_pool_grows_and_waits_alike() {
    each_kind(|config| {
        // Two blocks a segment, and one event for both: no one looked at the stream between the two frees.
        let gpu = Gpu::new(4, config.clone());
        for turn in 1..=12usize {
            step(&gpu, MIB);
            let waits = turn.saturating_sub(4).div_ceil(2);
            assert_eq!(gpu.host_waits(), waits, "turn {turn}");
            assert_eq!(
                gpu.sim.unfinished(),
                turn - 2 * waits,
                "turn {turn} waited for more than the oldest event"
            );
        }
        assert_eq!((gpu.reserved(), gpu.count(Call::Synchronize)), (4 * MIB, 0));
    });
}

#[test]
fn two_consumers_are_waited_for_in_the_order_of_the_frees() {
    each_kind(|config| {
        let gpu = Gpu::new(256, config);
        let s2 = gpu.new_stream();
        for turn in 1..=16usize {
            let x = gpu.alloc(64 * MIB, &gpu.s0);
            gpu.use_on(if turn % 2 == 0 { &gpu.s1 } else { &s2 }, &x);
            gpu.free(x);
            assert_eq!(gpu.sim.unfinished(), turn.min(4), "turn {turn} waited for more than it needed");
        }
        assert_eq!((gpu.host_waits(), gpu.stats().num_ooms), (12, 0));
    });
}

#[test]
fn a_slow_consumer_does_not_hold_back_what_a_fast_one_has_finished() {
    each_kind(|config| {
        let gpu = Gpu::new(192, config);
        let slow = gpu.new_stream();
        let held = gpu.alloc(64 * MIB, &gpu.s0);
        gpu.use_on(&slow, &held);
        gpu.free(held);
        for turn in 0..8 {
            step(&gpu, 64 * MIB);
            gpu.complete(&gpu.s1);
            assert_eq!(gpu.sim.unfinished(), 1, "turn {turn} waited for the slow stream");
        }
        assert_eq!(
            (gpu.host_waits(), gpu.reserved()),
            (0, 128 * MIB),
            "what has passed serves again without a wait"
        );
    });
}

#[test]
fn recording_the_same_stream_again_costs_one_wait() {
    each_kind(|config| {
        let gpu = Gpu::new(64, config);
        let x = gpu.alloc(64 * MIB, &gpu.s0);
        gpu.launch(&gpu.s1, &x);
        for _ in 0..1000 {
            x.record_stream(&gpu.s1).expect("its own allocator's stream");
        }
        gpu.free(x);
        let y = gpu.alloc(64 * MIB, &gpu.s0);
        assert_eq!((gpu.host_waits(), gpu.count(Call::EventRecord)), (1, 1), "{y:?}");
    });
}

#[test]
fn forbidden_to_wait_it_names_the_pending_work() {
    each_kind(|config| {
        let gpu = Gpu::new(256, config.on_pending(OnPending::Fail));
        for _ in 0..4 {
            step(&gpu, 64 * MIB);
        }
        let report = gpu.oom(64 * MIB, &gpu.s0);
        assert_eq!((report.cause, report.pending), (Cause::PendingWork, 256 * MIB), "{report}");
        assert_eq!(gpu.host_waits(), 0);
    });
}
