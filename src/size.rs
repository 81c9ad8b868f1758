//! Sizes: what a request is rounded to, which pool serves it, how large a new segment is.
//!
//! Pure and checked: a size that cannot be rounded is `None`, never a wrapped number. The rules are those of
//! PyTorch's caching allocator (`c10/cuda/CUDACachingAllocator.cpp`), so that figures can be compared.

use crate::config::Config;

/// One mebibyte.
pub(crate) const MIB: u64 = 1 << 20;

/// Every block is a positive multiple of this, and starts at a multiple of it (PyTorch `kMinBlockSize`; CUDA
/// promises at least 256 for any allocation).
pub const MIN_BLOCK_BYTES: u64 = 512;

/// The largest rounded request that the small pool serves (PyTorch `kSmallSize`).
pub const SMALL_MAX_BYTES: u64 = MIB;

/// A segment of the small pool (PyTorch `kSmallBuffer`).
pub const SMALL_SEGMENT_BYTES: u64 = 2 * MIB;

/// Rounded requests from here on get a segment of their own size (PyTorch `kMinLargeAlloc`).
pub const LARGE_OWN_SEGMENT_BYTES: u64 = 10 * MIB;

/// Segments of 10 MiB and more are multiples of this (PyTorch `kRoundLarge`); also the driver's granularity.
pub const SEGMENT_STEP_BYTES: u64 = 2 * MIB;

/// The remainder of a block in the large pool of fixed segments is split off if it is larger than this
/// (PyTorch `kSmallSize`): a smaller one could serve no request of that pool.
pub(crate) const LARGE_SPLIT_REMAINDER_BYTES: u64 = MIB;

/// A request of this many bytes or more is refused at once: no device has it, and sums of such sizes could wrap.
pub(crate) const REQUEST_MAX_BYTES: u64 = 1 << 60;

/// The two size classes of a stream's pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum SizeClass {
    /// Blocks of up to [`SMALL_MAX_BYTES`].
    Small,
    /// Everything above.
    Large,
}

impl SizeClass {
    /// Both, in the order of their index.
    pub const ALL: [Self; 2] = [Self::Small, Self::Large];

    /// The pool that serves a block of `bytes`.
    #[must_use]
    pub const fn of(bytes: u64) -> Self {
        if bytes <= SMALL_MAX_BYTES { Self::Small } else { Self::Large }
    }

    /// 0 or 1.
    pub(crate) const fn index(self) -> usize {
        self as usize
    }
}

/// The smallest multiple of `step` (a power of two) that is at least `bytes`.
#[must_use]
pub const fn align_up(bytes: u64, step: u64) -> Option<u64> {
    debug_assert!(step.is_power_of_two());
    match bytes.checked_add(step - 1) {
        Some(sum) => Some(sum & !(step - 1)),
        None => None,
    }
}

/// The smallest multiple of 512 that is at least `bytes`, which is below [`REQUEST_MAX_BYTES`].
#[inline]
pub(crate) const fn round_to_granule(bytes: u64) -> u64 {
    (bytes + (MIN_BLOCK_BYTES - 1)) & !(MIN_BLOCK_BYTES - 1)
}

/// The block size for a request of `bytes` (not 0): a multiple of 512, or a power of two's division where
/// [`Config::roundup_power2_divisions`] asks for it.
#[inline]
#[must_use]
pub fn round_request(bytes: u64, config: &Config) -> Option<u64> {
    if bytes >= REQUEST_MAX_BYTES {
        return None;
    }
    if config.roundup_power2_divisions.is_off() {
        return Some(round_to_granule(bytes));
    }
    let divisions = config.roundup_power2_divisions.for_size(bytes);
    if divisions > 1 && bytes > MIN_BLOCK_BYTES * divisions {
        return next_division(bytes, divisions);
    }
    align_up(bytes, MIN_BLOCK_BYTES)
}

/// The next of the `divisions` equal steps between two powers of two.
fn next_division(bytes: u64, divisions: u64) -> Option<u64> {
    let floor = 1u64 << (63 - bytes.leading_zeros());
    let step = (floor / divisions).max(MIN_BLOCK_BYTES);
    align_up(bytes, step)
}

/// The size of the fixed segment that a block of `block_bytes` asks the driver for.
#[must_use]
pub fn segment_bytes(block_bytes: u64, config: &Config) -> Option<u64> {
    if block_bytes <= SMALL_MAX_BYTES {
        Some(SMALL_SEGMENT_BYTES)
    } else if block_bytes < LARGE_OWN_SEGMENT_BYTES {
        Some(config.large_segment_bytes)
    } else {
        align_up(block_bytes, SEGMENT_STEP_BYTES)
    }
}

/// A byte count for people: `512 B`, `20.0 MiB`.
#[must_use]
pub fn human_bytes(bytes: u64) -> String {
    const UNITS: [&str; 6] = ["KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];
    if bytes < 1024 {
        return format!("{bytes} B");
    }
    #[allow(clippy::cast_precision_loss)] // two decimals are shown
    let mut value = bytes as f64 / 1024.0;
    let mut unit = 0;
    while value >= 1024.0 && unit + 1 < UNITS.len() {
        value /= 1024.0;
        unit += 1;
    }
    format!("{value:.2} {}", UNITS[unit])
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rounded(bytes: u64, text: &str) -> u64 {
        round_request(bytes, &text.parse::<Config>().unwrap()).unwrap()
    }

    #[test]
    fn requests_round_to_512() {
        for (bytes, block) in [(1, 512), (512, 512), (513, 1024), (MIB, MIB), (MIB + 1, 1_049_088)] {
            assert_eq!(rounded(bytes, ""), block);
        }
    }

    #[test]
    fn segments_follow_the_block() {
        let config = Config::default();
        for (block, segment) in [
            (512, 2 * MIB),
            (MIB, 2 * MIB),
            (MIB + 512, 20 * MIB),
            (10 * MIB - 512, 20 * MIB),
            (10 * MIB, 10 * MIB),
            (10 * MIB + 512, 12 * MIB),
            (33 * MIB, 34 * MIB),
        ] {
            assert_eq!(segment_bytes(block, &config), Some(segment), "block {block}");
        }
    }

    // Worked examples of PyTorch's rule.
    #[test]
    fn power_of_two_divisions() {
        for (bytes, divisions, block) in [
            (1200, 4, 1536),
            (2049, 4, 2560),
            (3000, 4, 3072),
            (300 << 10, 4, 320 << 10),
            (1200 << 10, 4, 1280 << 10),
            (3 * MIB, 4, 3 * MIB),
            (84 * MIB, 4, 96 * MIB),
            (84 * MIB, 8, 88 * MIB),
            (400 * MIB, 2, 512 * MIB),
            (513 * MIB, 4, 640 * MIB),
            (1000 * MIB, 1, 1000 * MIB),
        ] {
            assert_eq!(
                rounded(bytes, &format!("roundup_power2_divisions:{divisions}")),
                block,
                "{bytes}/{divisions}"
            );
        }
    }

    #[test]
    fn nothing_wraps_near_the_top() {
        for text in ["", "roundup_power2_divisions:4"] {
            let config = text.parse::<Config>().unwrap();
            for bytes in [u64::MAX, u64::MAX - 1, u64::MAX - 510, u64::MAX - 511, 1 << 63, (1 << 63) + 1, 1 << 60]
            {
                assert_eq!(round_request(bytes, &config), None);
            }
        }
    }

    #[test]
    fn human_sizes() {
        assert_eq!(human_bytes(512), "512 B");
        assert_eq!(human_bytes(20 * MIB), "20.00 MiB");
        assert_eq!(human_bytes(u64::MAX), "16.00 EiB");
    }
}
