//! Statistics that lie: resetting the peak wipes what is live, so that the reported peak is a fifth of the true
//! one; block counts stay after the cache was emptied; a counter is silently zero in one mode. Reported as
//! flagos-ai/Torch-FL PR 364, NVIDIA/cub PR 328, pytorch/pytorch #159564, RMM PR 626. That every counter is what
//! came less what went, and that the size classes add up, is checked after every step of every scenario.

use crate::dsl::{Gpu, Kind as _, MIB, each_config, each_kind};
use vramalloc::{BlockState, MemoryStats};

/// MiB: allocated, reserved, not releasable; then the peaks of the first two.
fn figures(stats: &MemoryStats) -> [u64; 5] {
    let [allocated, reserved] = [stats.allocated_bytes.all, stats.reserved_bytes.all];
    let split = stats.inactive_split_bytes.all.current;
    [allocated.current, reserved.current, split, allocated.peak, reserved.peak].map(|bytes| bytes / MIB)
}

#[test]
fn peaks_and_currents_over_a_whole_life() {
    each_kind(|config| {
        let gpu = Gpu::new(1024, config.clone());
        // Pages instead of a segment of 20 MiB; their free parts are not bound to it.
        let (reserved, split) = config.pick((50, 13), (38, 0));
        let w = gpu.alloc(30 * MIB, &gpu.s0);
        gpu.allocator.reset_peak_memory_stats();
        gpu.check();
        assert_eq!(figures(&gpu.stats()), [30, 30, 0, 30, 30], "the reset took what is live");

        let t = gpu.alloc(7 * MIB, &gpu.s0);
        assert_eq!(figures(&gpu.stats()), [37, reserved, split, 37, reserved]);
        gpu.free(t);
        assert_eq!(figures(&gpu.stats()), [30, reserved, 0, 37, reserved]);

        let report = gpu.oom(1000 * MIB, &gpu.s0);
        assert_eq!(report.device_free, Some(994 * MIB), "the cache must be given up first: {report}");
        let stats = gpu.stats();
        assert_eq!(figures(&stats), [30, 30, 0, 37, reserved], "the failure must leave the peaks alone");
        assert_eq!((stats.num_ooms, stats.num_alloc_retries), (1, 1));

        gpu.empty_cache();
        let snapshot = gpu.allocator.snapshot();
        let cached = snapshot.segments.iter().flat_map(|segment| &segment.blocks);
        assert_eq!(cached.filter(|block| block.state == BlockState::Free).count(), 0, "cached blocks are left");
        assert_eq!(gpu.reserved() - gpu.active(), 0, "cached bytes are left");
        gpu.allocator.reset_peak_memory_stats();
        assert_eq!(figures(&gpu.stats()), [30, 30, 0, 30, 30]);

        gpu.free(w);
        gpu.empty_cache();
        assert_all_zero(&gpu);
    });
}

#[track_caller]
fn assert_all_zero(gpu: &Gpu) {
    let left: Vec<_> = gpu
        .stats()
        .to_map()
        .into_iter()
        .filter(|(name, value)| name.ends_with(".current") && *value != 0)
        .collect();
    assert!(left.is_empty(), "nothing is live, but: {left:?}");
}

#[test]
fn every_current_ends_at_zero() {
    each_config(|config| {
        let gpu = Gpu::new(512, config);
        let mut held = Vec::new();
        for bytes in [1, 512, 300_000, MIB, MIB + 1, 7 * MIB, 12 * MIB, 33 * MIB, 64 * MIB] {
            for stream in [&gpu.s0, &gpu.s1] {
                held.push(gpu.alloc(bytes, stream));
            }
        }
        for (index, block) in held.into_iter().enumerate() {
            if index % 3 == 0 && block.stream() == gpu.s0 {
                gpu.use_on(&gpu.s1, &block);
            }
            gpu.free(block);
        }
        gpu.complete(&gpu.s1);
        gpu.poll();
        gpu.empty_cache();
        assert_all_zero(&gpu);
    });
}

#[test]
fn a_peak_over_two_streams_is_the_peak_of_the_sum() {
    each_config(|config| {
        let gpu = Gpu::new(512, config);
        let a = gpu.alloc(32 * MIB, &gpu.s0);
        let b = gpu.alloc(16 * MIB, &gpu.s1);
        let most = a.block_bytes() + b.block_bytes();
        gpu.free(a);
        let c = gpu.alloc(8 * MIB, &gpu.s1);
        gpu.free(b);
        let d = gpu.alloc(32 * MIB, &gpu.s0);
        assert_eq!(gpu.stats().allocated_bytes.all.peak, most, "{c:?}, {d:?} never passed the first peak");
        assert_eq!(gpu.allocator.max_memory_allocated(), most);
    });
}

#[test]
fn a_peak_after_a_reset_starts_from_what_is_live() {
    each_config(|config| {
        let gpu = Gpu::new(512, config);
        let [a, b] = [32 * MIB, 64 * MIB].map(|bytes| gpu.alloc(bytes, &gpu.s0));
        gpu.free(b);
        gpu.allocator.reset_peak_memory_stats();
        assert_eq!(gpu.allocator.max_memory_allocated(), a.block_bytes());
        assert_eq!(gpu.allocator.max_memory_reserved(), gpu.reserved(), "the cache is still reserved");
        let c = gpu.alloc(16 * MIB, &gpu.s1);
        assert_eq!(gpu.allocator.max_memory_allocated(), a.block_bytes() + c.block_bytes());
        gpu.free(c);
        let d = gpu.alloc(512, &gpu.s1);
        assert_eq!(gpu.allocator.max_memory_allocated(), a.block_bytes() + 16 * MIB, "{d:?} set no new peak");
    });
}

#[test]
fn resetting_the_sums_leaves_currents_and_peaks() {
    each_config(|config| {
        let gpu = Gpu::new(512, config);
        let [a, b] = [32 * MIB, 4 * MIB].map(|bytes| gpu.alloc(bytes, &gpu.s0));
        gpu.free(b);
        let before = gpu.stats();
        gpu.allocator.reset_accumulated_memory_stats();
        let after = gpu.stats();
        for (was, is) in [
            (before.allocated_bytes, after.allocated_bytes),
            (before.reserved_bytes, after.reserved_bytes),
            (before.active, after.active),
        ] {
            assert_eq!((was.all.current, was.all.peak), (is.all.current, is.all.peak), "the reset went too far");
            assert_eq!((is.all.allocated, is.all.freed), (0, 0), "the sums were kept");
        }
        drop(a);
        let freed = gpu.stats().allocated_bytes.all;
        assert_eq!((freed.freed, freed.allocated), (32 * MIB, 0), "what was live at the reset is freed once");
    });
}

#[test]
fn pending_is_active_but_not_allocated() {
    each_config(|config| {
        let gpu = Gpu::new(512, config);
        let a = gpu.alloc(32 * MIB, &gpu.s0);
        gpu.use_on(&gpu.s1, &a);
        gpu.free(a);
        let stats = gpu.stats();
        assert_eq!((stats.allocated_bytes.all.current, stats.active_bytes.all.current), (0, 32 * MIB));
        assert_eq!((stats.allocation.all.current, stats.active.all.current), (0, 1));
        let b = gpu.alloc(4 * MIB, &gpu.s0);
        assert_eq!(gpu.stats().active_bytes.all.peak, 32 * MIB + b.block_bytes());
        assert_eq!(gpu.stats().allocated_bytes.all.peak, 32 * MIB);
    });
}
