//! An allocation fails, the very same call succeeds a moment later. Waiting for pending work puts a block back
//! into the pool that would have fitted, but the allocator then only asks the driver again and never looks into
//! its own pool. Reported as pytorch/pytorch #189504 (fix: PR 191302); an older cousin is PR 19222. What must
//! hold: the first call succeeds, with no wait that was not needed.

use crate::dsl::{Gpu, KIB, Kind as _, MIB, each_kind};
use vramalloc::BlockState::{Free, Live, Pending};
use vramalloc::{Cause, OnPending};

#[test]
fn the_first_call_takes_what_waiting_brought_back() {
    each_kind(|config| {
        let gpu = Gpu::new(60, config.clone());
        let p = gpu.alloc(60 * MIB, &gpu.s0);
        gpu.free(p);
        let a = gpu.alloc(40 * MIB, &gpu.s0);
        let k = gpu.alloc(20 * MIB, &gpu.s0);
        let at = a.ptr();
        gpu.use_on(&gpu.s1, &a);
        gpu.free(a);
        assert_eq!([gpu.allocated(), gpu.pending(), gpu.reserved()], [20, 40, 60].map(|mib| mib * MIB));
        assert_eq!(gpu.blocks_of_only_segment(), [(Pending, 40), (Live, 20)]);

        let b = gpu.alloc(32 * MIB, &gpu.s0);
        let (at, blocks) = config.pick(
            (at.0, [(Live, 32), (Free, 8), (Live, 20)]),
            (at.0 + 8 * MIB, [(Free, 8), (Live, 32), (Live, 20)]), // beside the neighbour that lives longest
        );
        assert_eq!(b.ptr().0, at, "the block that waiting brought back was not used");
        assert_eq!(gpu.reserved(), 60 * MIB);
        assert_eq!(gpu.blocks_of_only_segment(), blocks, "{k:?}");
        assert_eq!(gpu.host_waits(), 1, "one wait was needed");
        assert_eq!(gpu.stats().num_ooms, 0, "nothing failed");
        gpu.launch(&gpu.s0, &b);
    });
}

#[test]
fn the_small_pool_is_searched_again_too() {
    each_kind(|config| {
        let gpu = Gpu::new(2, config);
        let a = gpu.alloc(MIB, &gpu.s0);
        let k = gpu.alloc(MIB, &gpu.s0);
        let at = a.ptr();
        gpu.use_on(&gpu.s1, &a);
        gpu.free(a);
        let b = gpu.alloc(512 * KIB, &gpu.s0);
        assert_eq!((b.ptr(), gpu.host_waits(), gpu.stats().num_ooms), (at, 1, 0), "{k:?}");
    });
}

#[test]
fn work_that_has_passed_is_found_without_a_wait() {
    each_kind(|config| {
        let gpu = Gpu::new(60, config.clone());
        let a = gpu.alloc(60 * MIB, &gpu.s0);
        let (at, calls) = (a.ptr(), gpu.memory_calls());
        gpu.use_on(&gpu.s1, &a);
        gpu.free(a);
        gpu.complete(&gpu.s1);
        let b = gpu.alloc(50 * MIB, &gpu.s0);
        assert_eq!((b.ptr(), gpu.host_waits()), (at, 0), "the event had passed: asking is enough");
        assert_eq!(gpu.memory_calls(), calls, "{}", gpu.segment_calls());
        assert!(config.is_expandable() || gpu.segment_calls() == "alloc 60 MiB");
    });
}

#[test]
fn another_streams_pending_block_serves_through_the_driver() {
    each_kind(|config| {
        let gpu = Gpu::new(60, config.clone());
        let s2 = gpu.new_stream();
        let a = gpu.alloc(60 * MIB, &gpu.s0);
        let at = a.ptr();
        gpu.use_on(&gpu.s1, &a);
        gpu.free(a);
        if config.is_expandable() {
            gpu.sim.clear_log();
        }
        let b = gpu.alloc(32 * MIB, &s2);
        assert_eq!((gpu.host_waits(), gpu.stats().num_ooms), (1, 0), "one wait was needed, nothing failed");
        if config.is_expandable() {
            // The pages go to the other stream where they are.
            assert_eq!((gpu.reserved(), b.ptr()), (60 * MIB, at), "{b:?}");
            assert_eq!(gpu.segment_calls(), "");
        } else {
            assert_eq!(gpu.reserved(), 32 * MIB, "{b:?}");
            assert_eq!(gpu.segment_calls(), "alloc 60 MiB, free 60 MiB, alloc 32 MiB");
        }
    });
}

#[test]
fn two_waits_are_made_where_two_blocks_are_needed_and_no_third() {
    each_kind(|config| {
        let gpu = Gpu::new(90, config.clone());
        let p = gpu.alloc(90 * MIB, &gpu.s0);
        gpu.free(p);
        let [a, b, c] = [(); 3].map(|()| gpu.alloc(30 * MIB, &gpu.s0));
        let at = a.ptr();
        for block in [a, b, c] {
            gpu.use_on(&gpu.s1, &block);
            gpu.free(block);
            gpu.poll(); // closes the time before: each block has an event of its own
        }
        let wide = gpu.alloc(50 * MIB, &gpu.s0);
        let at = at.0 + config.pick(0, 10 * MIB); // at one end of the hole or the other
        assert_eq!((wide.ptr().0, gpu.host_waits()), (at, 2), "the first two blocks make 60 MiB");
        assert_eq!(gpu.sim.unfinished(), 1, "the third block's work was not waited for");
        assert_eq!(gpu.pending(), 30 * MIB);
    });
}

#[test]
fn a_block_used_on_two_streams_waits_for_both() {
    each_kind(|config| {
        let gpu = Gpu::new(20, config);
        let s2 = gpu.new_stream();
        let a = gpu.alloc(20 * MIB, &gpu.s0);
        let at = a.ptr();
        gpu.use_on(&gpu.s1, &a);
        // The second stream's work is ordered after the first's, as two writers must be.
        gpu.complete(&gpu.s1);
        gpu.use_on(&s2, &a);
        gpu.free(a);
        let b = gpu.alloc(20 * MIB, &gpu.s0);
        assert_eq!(
            (b.ptr(), gpu.sim.unfinished(), gpu.stats().num_ooms),
            (at, 0, 0),
            "both streams' work must be done"
        );
        gpu.launch(&gpu.s0, &b);
    });
}

#[test]
fn a_user_who_forbids_waiting_hears_that_work_is_pending() {
    each_kind(|config| {
        let gpu = Gpu::new(60, config.on_pending(OnPending::Fail));
        let a = gpu.alloc(60 * MIB, &gpu.s0);
        gpu.use_on(&gpu.s1, &a);
        gpu.free(a);
        let report = gpu.oom(32 * MIB, &gpu.s0);
        assert_eq!((report.cause, report.pending), (Cause::PendingWork, 60 * MIB), "{report}");
        assert_eq!((gpu.host_waits(), gpu.sim.unfinished()), (0, 1), "it must not wait");
        gpu.complete(&gpu.s1);
        let b = gpu.alloc(32 * MIB, &gpu.s0);
        assert_eq!(gpu.host_waits(), 0, "{b:?}");
    });
}
