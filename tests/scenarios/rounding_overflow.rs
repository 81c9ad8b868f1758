//! A size near the top of the range wraps to 0 when it is rounded up: a "successful" allocation of no bytes that
//! shares its address with a cached block; above 2^63 some allocators loop for ever. Reported as pytorch/pytorch
//! #182446 (earlier: PR 57571), sonots/cumo PR 170, onnxruntime PR 32010, NVIDIA/cub #54.

use crate::dsl::{Gpu, MIB, but_failures, each_config};
use vramalloc::size::{align_up, round_request, segment_bytes};
use vramalloc::{Config, Error, MAX_ALIGNMENT, RoundupDivisions};

const TOTAL: u64 = 64 * MIB;

/// Sizes that no arithmetic may touch.
const UNROUNDABLE: [u64; 9] = [
    u64::MAX,
    u64::MAX - 1,
    u64::MAX - 510,
    u64::MAX - 511,
    1 << 63,
    (1 << 63) + 1,
    i64::MAX as u64,
    (1 << 60) + 1,
    1 << 60,
];

/// Sizes that can be rounded and that this device does not have.
const TOO_LARGE: [u64; 5] = [TOTAL + 1, 2 * TOTAL, 1 << 50, (1 << 60) - 512, (1 << 60) - 1];

#[test]
fn nothing_wraps_and_nothing_changes() {
    each_config(|config| {
        let gpu = Gpu::new(64, config);
        let a = gpu.alloc(1024, &gpu.s0);
        gpu.free(a);
        let before = gpu.stats();

        gpu.sim.clear_log();
        for bytes in UNROUNDABLE {
            let result = gpu.try_alloc(bytes, &gpu.s0);
            let is_right = matches!(result, Err(Error::SizeOverflow { requested }) if requested == bytes);
            assert!(is_right, "{bytes} bytes: {result:?}");
            assert!(gpu.sim.log().is_empty(), "{bytes} bytes: the driver was called: {:?}", gpu.sim.log());
        }
        assert_eq!(gpu.stats(), before, "a refused size changed a figure");

        for bytes in TOO_LARGE {
            let report = gpu.oom(bytes, &gpu.s0);
            assert_eq!(report.requested, bytes, "the report must name the size");
            assert_eq!(gpu.segment_calls(), "", "{bytes} bytes: the cache was touched for a hopeless request");
        }
        assert_eq!(gpu.stats().num_ooms, before.num_ooms + TOO_LARGE.len() as u64);
        assert_eq!(but_failures(gpu.stats()), but_failures(before), "a failure changed a figure");

        let b = gpu.alloc(512, &gpu.s0);
        let c = gpu.alloc(512, &gpu.s0);
        assert_ne!(b.ptr(), c.ptr(), "two live blocks share an address");
    });
}

#[test]
fn alignment_does_not_push_a_size_over_the_top() {
    each_config(|config| {
        let gpu = Gpu::new(64, config);
        for bytes in UNROUNDABLE.into_iter().chain(TOO_LARGE).chain([TOTAL]) {
            for alignment in [1, 4096, MAX_ALIGNMENT] {
                if bytes == TOTAL && alignment < 4096 {
                    continue; // fits
                }
                let result = gpu.allocator.alloc_aligned(bytes, alignment, &gpu.s0);
                gpu.check();
                let is_right = match &result {
                    Err(Error::SizeOverflow { requested }) => *requested == bytes && bytes >= 1 << 60,
                    Err(Error::OutOfMemory(report)) => report.requested == bytes && bytes < 1 << 60,
                    _ => false,
                };
                assert!(is_right, "{bytes} bytes at {alignment}: {result:?}");
            }
        }
        assert_eq!(gpu.reserved(), 0, "a failed request left something behind");
    });
}

#[test]
fn raw_addresses_are_refused_alike() {
    each_config(|config| {
        let gpu = Gpu::new(64, config);
        for bytes in UNROUNDABLE {
            let result = gpu.allocator.alloc_raw(bytes, &gpu.s0);
            assert!(matches!(result, Err(Error::SizeOverflow { .. })), "{bytes} bytes: {result:?}");
        }
        gpu.check();
    });
}

#[test]
fn the_largest_fit_is_no_overflow() {
    each_config(|config| {
        let gpu = Gpu::new(64, config);
        let all = gpu.alloc(TOTAL, &gpu.s0);
        assert_eq!((all.block_bytes(), gpu.reserved()), (TOTAL, TOTAL));
        gpu.free(all);
        let again = gpu.alloc(TOTAL - 1, &gpu.s0);
        assert_eq!(gpu.reserved(), TOTAL, "{again:?}");
    });
}

#[test]
fn a_limit_of_all_there_is_does_not_wrap() {
    each_config(|config| {
        let limit = vramalloc::Limit::Bytes(u64::MAX);
        let gpu = Gpu::new(64, config.limit(limit));
        let a = gpu.alloc(60 * MIB, &gpu.s0);
        let report = gpu.oom(60 * MIB, &gpu.s0);
        assert_eq!(report.allocated, a.block_bytes(), "{report}");
    });
}

#[test]
fn rounding_is_never_below_the_request() {
    let divided = Config::default().roundup_power2_divisions(RoundupDivisions::uniform(8));
    for config in [Config::default(), divided] {
        let near_powers = (0..64).flat_map(|bit| [-513i64, -512, -1, 0, 1, 511, 512].map(|by| (1u64 << bit, by)));
        for bytes in near_powers.filter_map(|(power, by)| power.checked_add_signed(by)).filter(|bytes| *bytes > 0)
        {
            match round_request(bytes, &config) {
                None => assert!(bytes >= 1 << 60, "{bytes} bytes are refused"),
                Some(block) => {
                    assert!(block >= bytes && block.is_multiple_of(512), "{bytes} bytes became {block}");
                    let segment =
                        segment_bytes(block, &config).expect("a block that can be rounded has a segment");
                    assert!(segment >= block, "a block of {block} got a segment of {segment}");
                }
            }
        }
    }
    assert_eq!(align_up(u64::MAX, 512), None);
    assert_eq!(align_up(u64::MAX - 511, 512), Some(u64::MAX - 511));
}
