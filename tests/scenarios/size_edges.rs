//! The edges of sizes: a request of zero bytes aliases a live neighbour or aborts; a cached block of exactly the
//! right size is not found, so that memory grows in a loop; a requested alignment is dropped on the way down.
//! Reported as sonots/cumo PR 170, kokkos #939 and NVIDIA/thrust #1052 (zero), kaldi #4478 (exact fit), RMM PR 2361
//! and openxla/xla PR 41659 (alignment).

use crate::dsl::{Gpu, KIB, Kind as _, MIB, each_config, each_kind};
use vramalloc::{Error, MAX_ALIGNMENT};

#[test]
fn zero_bytes_cost_nothing_and_alias_nothing() {
    each_config(|config| {
        let gpu = Gpu::new(64, config);
        let [z1, z2] = [(); 2].map(|()| gpu.alloc(0, &gpu.s0));
        z1.record_stream(&gpu.s1).expect("recording a use of nothing is legal");
        assert!(z1.ptr().is_null() && z2.ptr().is_null(), "zero bytes have an address: {z1:?}, {z2:?}");
        assert_eq!((z1.bytes(), z1.block_bytes()), (0, 0));
        assert!(gpu.allocator.snapshot().segments.is_empty(), "zero bytes have a block");
        gpu.free(z1);
        gpu.free(z2);
        let raw = gpu.allocator.alloc_raw(0, &gpu.s0).expect("zero bytes are legal");
        gpu.allocator.record_stream_raw(raw, &gpu.s1).expect("recording a use of nothing is legal");
        for _ in 0..2 {
            gpu.allocator.free_raw(raw).expect("freeing nothing is legal, as often as one likes");
        }
        let aligned = gpu.allocator.alloc_aligned(0, 4096, &gpu.s0).expect("zero bytes are legal");
        gpu.free(aligned);
        assert!(gpu.sim.log().is_empty(), "zero bytes needed {:?}", gpu.sim.log());
        let stats = gpu.stats();
        assert_eq!(
            (stats.allocation.all.allocated, stats.segment.all.allocated),
            (0, 0),
            "zero bytes were counted"
        );
    });
}

#[test]
fn a_segment_holds_as_many_blocks_as_fit() {
    each_kind(|config| {
        let gpu = Gpu::new(64, config);
        let block = || gpu.allocator.alloc(512, &gpu.s0).expect("there is room");
        let mut blocks: Vec<_> = (0..4096).map(|_| block()).collect();
        gpu.check();
        assert_eq!(gpu.reserved(), 2 * MIB);
        let snapshot = gpu.allocator.snapshot();
        assert_eq!(snapshot.segments[0].blocks.len(), 4096);
        assert!(
            snapshot.segments[0].blocks.iter().all(|block| block.bytes == 512),
            "an odd block among {snapshot:?}"
        );
        blocks.push(block());
        gpu.check();
        assert_eq!(gpu.reserved(), 4 * MIB, "the 4097th block needs a second segment");
        blocks.clear();
        gpu.check();
        assert_eq!(gpu.empty_cache(), 4 * MIB, "the blocks did not merge");
    });
}

#[test]
fn a_block_of_exactly_the_right_size_is_found() {
    each_config(|config| {
        for bytes in [512, 100 * KIB, MIB, 2 * MIB, 12 * MIB, 40 * MIB] {
            let gpu = Gpu::new(64, config.clone());
            let a = gpu.alloc(bytes, &gpu.s0);
            let at = a.ptr();
            gpu.free(a);
            let asked = gpu.count(config.takes());
            if !config.is_expandable() {
                assert_eq!(asked, 1, "{bytes} bytes came in pieces");
            }
            for turn in 0..10 {
                let b = gpu.alloc(bytes, &gpu.s0);
                assert_eq!(b.ptr(), at, "turn {turn}: {bytes} bytes moved");
                gpu.free(b);
            }
            assert_eq!(gpu.count(config.takes()), asked, "{bytes} bytes were reserved again");
        }
    });
}

#[test]
fn an_exact_hole_between_live_blocks_is_found() {
    each_kind(|config| {
        let gpu = Gpu::new(64, config);
        let [left, hole, right] = [(); 3].map(|()| gpu.alloc(6 * MIB, &gpu.s0));
        let at = hole.ptr();
        gpu.free(hole);
        let again = gpu.alloc(6 * MIB, &gpu.s0);
        assert_eq!(again.ptr(), at, "the hole between {left:?} and {right:?} fits exactly");
    });
}

#[test]
fn requests_get_the_block_and_the_segment_of_the_table() {
    each_kind(|config| {
        let table = [
            (1, [512, 512], [2, 2]),
            (513, [1024, 1024], [2, 2]),
            (MIB, [MIB, MIB], [2, 2]),
            (MIB + 1, [1_049_088, 1_049_088], [20, 2]),
            (10 * MIB - 512, [10_485_248, 10_485_248], [20, 10]),
            (10 * MIB, [10 * MIB, 10 * MIB], [10, 10]),
            (10 * MIB + 1, [10_486_272, 10_486_272], [12, 12]),
            (19 * MIB, [20 * MIB, 19 * MIB], [20, 20]),
            (21 * MIB, [22 * MIB, 21 * MIB], [22, 22]),
            (63 * MIB + 1, [64 * MIB, 63 * MIB + 512], [64, 64]),
        ];
        for (request, blocks, segments) in table {
            // Pages instead of segments, and no remainder that is too small to be split off.
            let kind = config.pick(0, 1);
            let (block, segment) = (blocks[kind], segments[kind]);
            let gpu = Gpu::new(64, config.clone());
            let a = gpu.alloc(request, &gpu.s0);
            assert_eq!((a.block_bytes(), gpu.reserved()), (block, segment * MIB), "{request} bytes");
            assert_eq!(gpu.allocated(), block, "{request} bytes");
            let stats = gpu.stats();
            assert_eq!(stats.requested_bytes.all.current, request, "requested must be what was asked for");
            // What can leave its segment page by page is not counted.
            let split = config.pick(segment * MIB - block, 0);
            assert_eq!(stats.inactive_split_bytes.all.current, split, "the remainder of {request} bytes");
        }
    });
}

#[test]
fn alignment_is_honoured() {
    each_config(|config| {
        let expandable = config.is_expandable();
        let gpu = Gpu::new(1024, config);
        let mut held = Vec::new();
        for bytes in [1, 512, 1000, 200 * KIB, MIB, 3 * MIB, 11 * MIB] {
            for alignment in (0..=MAX_ALIGNMENT.ilog2()).map(|bit| 1 << bit) {
                // An odd block before each, so that the next address is aligned by luck as seldom as possible.
                held.push(gpu.alloc(512, &gpu.s0));
                let a = gpu.allocator.alloc_aligned(bytes, alignment, &gpu.s0).expect("there is room");
                gpu.check();
                let address = a.ptr().0;
                assert!(address.is_multiple_of(alignment), "{bytes} bytes at {alignment}: {address:#x}");
                assert!(address.is_multiple_of(512), "{bytes} bytes at {alignment}: {address:#x}");
                assert!(a.block_bytes() >= bytes, "{bytes} bytes at {alignment}: {a:?}");
                gpu.launch(&gpu.s0, &a);
                held.push(a);
            }
        }
        while let Some(a) = held.pop() {
            gpu.free(a);
        }
        if expandable {
            gpu.complete(&gpu.s0); // unmapping waits for nobody
        }
        gpu.empty_cache();
        assert_eq!(gpu.reserved(), 0, "what was cut off for alignment did not merge again");
    });
}

#[test]
fn alignments_that_make_no_sense_are_refused() {
    each_config(|config| {
        let gpu = Gpu::new(64, config);
        for alignment in [0, 3, 513, 2 * MAX_ALIGNMENT, 1 << 63, u64::MAX] {
            for bytes in [0, 1, 4096, 12 * MIB] {
                let result = gpu.allocator.alloc_aligned(bytes, alignment, &gpu.s0);
                let is_right =
                    matches!(result, Err(Error::InvalidAlignment { alignment: told }) if told == alignment);
                assert!(is_right, "{bytes} bytes at {alignment}: {result:?}");
            }
        }
        assert!(gpu.sim.log().is_empty(), "a refused alignment needed {:?}", gpu.sim.log());
    });
}

#[test]
fn live_blocks_never_overlap() {
    each_config(|config| {
        let gpu = Gpu::new(256, config);
        let sizes = [1, 511, 512, 513, 1000, MIB - 1, MIB, MIB + 1, 3 * MIB, 10 * MIB - 1, 10 * MIB, 19 * MIB];
        let mut held: Vec<_> = sizes.iter().map(|&bytes| gpu.alloc(bytes, &gpu.s0)).collect();
        for index in (0..sizes.len()).step_by(3).rev() {
            gpu.free(held.swap_remove(index));
        }
        held.extend(sizes.iter().rev().map(|&bytes| gpu.alloc(bytes, &gpu.s0)));
        held.sort_by_key(vramalloc::Allocation::ptr);
        for pair in held.windows(2) {
            let end = pair[0].ptr().0 + pair[0].block_bytes();
            assert!(end <= pair[1].ptr().0, "{:?} and {:?} overlap", pair[0], pair[1]);
        }
    });
}
