//! The numbers that decide how expandable segments take, move and give back pages.
//!
//! Chosen by replaying the traces in `benches/traces`; `docs/architecture.md` has the curves and what else was tried.

use crate::config::{Config, DEFAULT_SLACK, OnPending};
use crate::size::{MIB, SizeClass};

/// A program's peak counts as at least this much when slack is turned into bytes: a small program may hold a little
/// more than its share, which costs nobody anything and saves it many moves.
const SLACK_FLOOR_BYTES: u64 = 3100 * MIB;

/// The largest handle that is created: this part of the peak, within bounds. Larger handles cost fewer calls, smaller
/// ones are less often pinned by a live block.
const HANDLE_PART: u64 = 64;
const HANDLE_MIN_BYTES: u64 = 12 * MIB;
const HANDLE_MAX_BYTES: u64 = 128 * MIB;
/// The same with less slack than by default.
const HANDLE_MAX_BYTES_TIGHT: u64 = 64 * MIB;

/// The same part without any slack, when what is pinned is all that counts. In between, part and least size follow the
/// slack in a straight line; from the default slack on they stay as they are.
const HANDLE_PART_TIGHT: u64 = 896;

/// Or this part of the gap that is filled, if that is more: what fills a large gap mostly comes and goes as a whole.
const HANDLE_GAP_PART_TIGHT: u64 = 40;
/// But no more than this part of the peak.
const HANDLE_GAP_MAX_PART_TIGHT: u64 = 64;

/// As long as less than this part of the peak was freed, what a program allocates are the weights that it keeps: without
/// any slack a handle may then be [`HANDLE_GAP_PART_LASTING`] of its gap, whatever the peak.
const LASTING_PART: u64 = 96;
const HANDLE_GAP_PART_LASTING: u64 = 3;

/// With less than half the default slack, large free blocks from this size on are kept for requests of this size or more. Best
/// fit would cut the others out of them wherever they lie, and leave edges in more handles than need be.
const KEPT_BYTES: u64 = 32 * MIB;

/// Of small memory that is free in a page of another stream's, multiples of this change hands where there is less slack
/// than by default: a page for each stream would be much of what may be unused. Elsewhere whole handles do.
pub(crate) const SMALL_SHARE_BYTES: u64 = 256 << 10;

/// While there is slack, at least this part of what is reserved is created at once, ahead of need.
const AHEAD_PART: u64 = 32;
const AHEAD_SMALL_PART: u64 = 2048;

/// With `on_pending:wait`, small memory is paid for with large memory while less than this part of the peak is allocated.
const LITTLE_PART: u64 = 2;

/// A moved handle may be this much larger than what is still missing.
pub(crate) const OVERSHOOT: u64 = 2;

/// From this many moves for one new handle on, the pages are given back and a new handle is made instead: it costs
/// less, and the next move of that memory is one handle.
const MERGE_MOVES: usize = 3;
/// The same with less slack than by default.
const MERGE_MOVES_TIGHT: usize = 6;

/// Places that are compared by cost before one is chosen.
pub(crate) const WINDOWS_MAX: usize = 12;

/// What the driver charges, in microseconds, to compare plans by (NVIDIA H200, driver 580): create, map and set access.
pub(crate) const CREATE_MICROS: u64 = 46;
/// Unmap, map and set access.
pub(crate) const MOVE_MICROS: u64 = 53;
/// Unmap and release.
pub(crate) const fn release_micros(bytes: u64) -> u64 {
    34 + bytes / MIB * 7 / 10
}

/// From which size on large free blocks are kept for requests of that size; `u64::MAX` if they serve all.
pub(crate) fn kept_bytes(config: &Config) -> u64 {
    if config.slack - 1.0 < (DEFAULT_SLACK - 1.0) / 2.0 { KEPT_BYTES } else { u64::MAX }
}

/// What a device has and had in use when a growth starts, in bytes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Use {
    pub(crate) reserved: u64,
    pub(crate) peak_reserved: u64,
    /// With the request.
    pub(crate) allocated: u64,
    pub(crate) peak_allocated: u64,
    /// Freed so far, of large memory.
    pub(crate) freed: u64,
}

/// What is decided for one growth, from the state at its start.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Policy {
    pub(crate) page_bytes: u64,
    /// Whether it is small memory that grows.
    pub(crate) small: bool,
    /// Fresh bytes that may be taken.
    pub(crate) allowance: u64,
    peak_allocated: u64,
    /// How much of the default slack there is, from 0 to 1.
    ease: f64,
    /// Whether there is no slack, and hardly anything was freed so far.
    lasting: bool,
    /// What is created ahead of need, if the allowance permits.
    pub(crate) ahead: u64,
    /// Whether the peak of reserved is spared (`on_pending:wait`). With less slack than by default that rests: what is idle
    /// is then soon moved anyway.
    saves: bool,
    /// Bytes by which reserved is below its peak.
    below_peak: u64,
    /// Whether little is allocated, for this program.
    little: bool,
}

impl Policy {
    pub(crate) fn new(config: &Config, page_bytes: u64, class: SizeClass, use_now: Use) -> Self {
        let Use { reserved, peak_reserved, allocated, peak_allocated, freed } = use_now;
        let small = class == SizeClass::Small;
        let pages = |bytes: u64| bytes / page_bytes * page_bytes;
        let extra = config.slack - 1.0;
        #[allow(clippy::cast_precision_loss, clippy::cast_possible_truncation, clippy::cast_sign_loss)]
        let slack = (extra * peak_allocated.max(SLACK_FLOOR_BYTES) as f64) as u64;
        let mut policy = Self {
            page_bytes,
            small,
            allowance: peak_allocated.saturating_add(slack).saturating_sub(reserved),
            peak_allocated,
            ease: (extra / (DEFAULT_SLACK - 1.0)).min(1.0),
            lasting: extra == 0.0 && freed < peak_allocated / LASTING_PART,
            ahead: 0,
            saves: config.on_pending == OnPending::Wait && config.slack >= DEFAULT_SLACK,
            below_peak: peak_reserved.saturating_sub(reserved),
            little: allocated < peak_allocated / LITTLE_PART,
        };
        let handle_max = policy.handle_max(0);
        policy.ahead = if small {
            pages(reserved / AHEAD_SMALL_PART).max(page_bytes).min(handle_max)
        } else {
            pages(reserved / AHEAD_PART).clamp(page_bytes, handle_max)
        };
        policy
    }

    /// Whether there is less slack than by default. Unused memory then counts more than driver time.
    pub(crate) fn is_tight(&self) -> bool {
        self.ease < 1.0
    }

    /// Whether `fresh` bytes would raise the peak of reserved, and that is to be spared as far as anything leaves no hole where it is
    /// taken.
    pub(crate) fn spares(&self, fresh: u64) -> bool {
        self.saves && fresh > self.below_peak
    }

    /// Whether small memory of `fresh` bytes is paid for with large memory.
    pub(crate) fn trades(&self, fresh: u64) -> bool {
        self.small && self.little && self.spares(fresh)
    }

    /// A part is filled with new pages ahead of need up to so many bytes, where `fresh` are needed in all: reserved then stays
    /// below its peak, unless `fresh` raises that itself.
    pub(crate) fn besides(&self, fresh: u64) -> u64 {
        if self.saves && fresh <= self.below_peak { self.below_peak - fresh } else { u64::MAX }
    }

    /// The largest handle to create for a gap of `bytes`.
    #[allow(clippy::cast_precision_loss, clippy::cast_possible_truncation, clippy::cast_sign_loss)]
    pub(crate) fn handle_max(&self, bytes: u64) -> u64 {
        let between = |tight: u64, easy: u64| tight + (self.ease * (easy - tight) as f64) as u64;
        let peak = self.peak_allocated;
        let of_gap = (bytes / HANDLE_GAP_PART_TIGHT).min(peak / HANDLE_GAP_MAX_PART_TIGHT);
        let lasting = if self.lasting { bytes / HANDLE_GAP_PART_LASTING } else { 0 };
        let part = between(of_gap.max(peak / HANDLE_PART_TIGHT), peak / HANDLE_PART).max(lasting);
        let most = if self.is_tight() { HANDLE_MAX_BYTES_TIGHT } else { HANDLE_MAX_BYTES };
        let handle = part.clamp(between(0, HANDLE_MIN_BYTES), most);
        (handle / self.page_bytes * self.page_bytes).max(self.page_bytes)
    }

    /// From how many moves for one new handle on that is made instead.
    pub(crate) fn merge_moves(&self) -> usize {
        if self.is_tight() { MERGE_MOVES_TIGHT } else { MERGE_MOVES }
    }

    /// `bytes` in whole pages.
    pub(crate) fn in_pages(&self, bytes: u64) -> u64 {
        bytes.next_multiple_of(self.page_bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PAGE: u64 = 2 * MIB;
    const GIB: u64 = 1024 * MIB;

    fn policy(slack: f64, peak_allocated: u64, freed: u64) -> Policy {
        let (reserved, allocated) = (peak_allocated, peak_allocated);
        let use_now = Use { reserved, peak_reserved: reserved, allocated, peak_allocated, freed };
        Policy::new(&Config::default().slack(slack), PAGE, SizeClass::Large, use_now)
    }

    fn handle(slack: f64, peak: u64, gap: u64) -> u64 {
        policy(slack, peak, peak).handle_max(gap) / MIB
    }

    #[test]
    fn handles_grow_with_the_peak_and_when_slack_is_short_with_the_gap() {
        assert_eq!(handle(1.0, GIB, 0), 2, "never less than a page");
        assert_eq!(handle(1.0, 8 * GIB, 0), 8, "1/896 of the peak, in pages");
        assert_eq!(handle(1.0, 8 * GIB, 2 * GIB), 50, "2 GiB / 40, in pages");
        assert_eq!(handle(1.0, GIB, GIB), 16, "no more than 1/64 of the peak");
    }

    #[test]
    fn what_a_program_starts_with_is_kept_in_large_handles() {
        let early = |freed: u64, gap: u64| policy(1.0, GIB, freed).handle_max(gap) / MIB;
        assert_eq!(early(GIB / 96 - 1, 60 * MIB), 20, "a third of the gap");
        assert_eq!(early(0, GIB), 64, "and no more than any handle");
        assert_eq!(early(GIB / 96, 60 * MIB), 2, "as soon as that much was freed");
    }

    #[test]
    fn from_the_default_slack_on_the_gap_is_of_no_account() {
        for slack in [DEFAULT_SLACK, 1.05] {
            for (peak, bytes) in [(0, 12), (GIB, 16), (2 * GIB, 32), (8 * GIB, 128), (80 * GIB, 128)] {
                assert_eq!([handle(slack, peak, 0), handle(slack, peak, 8 * GIB)], [bytes; 2], "{slack} {peak}");
            }
        }
    }

    /// A policy of one that waits, 10 pages below its peak of reserved.
    fn waits(slack: f64, class: SizeClass, allocated: u64) -> Policy {
        let use_now =
            Use { reserved: GIB, peak_reserved: GIB + 10 * PAGE, allocated, peak_allocated: GIB, freed: GIB };
        Policy::new(&Config::default().slack(slack).on_pending(OnPending::Wait), PAGE, class, use_now)
    }

    #[test]
    fn who_waits_spares_the_peak_of_reserved() {
        for slack in [DEFAULT_SLACK, 1.05] {
            let waits = waits(slack, SizeClass::Large, GIB);
            assert_eq!([10 * PAGE, 11 * PAGE].map(|fresh| waits.spares(fresh)), [false, true], "{slack}");
            assert_eq!(
                [0, PAGE, 10 * PAGE].map(|fresh| waits.besides(fresh)),
                [10 * PAGE, 9 * PAGE, 0],
                "{slack}"
            );
            assert_eq!(waits.besides(11 * PAGE), u64::MAX, "the peak rises in any case");
        }
        for other in [policy(DEFAULT_SLACK, GIB, GIB), waits(1.01, SizeClass::Large, GIB)] {
            assert!(
                !other.spares(11 * PAGE) && other.besides(PAGE) == u64::MAX,
                "with less slack or without waiting"
            );
        }
    }

    #[test]
    fn who_waits_pays_for_small_memory_while_little_is_allocated() {
        let trades = |class, allocated, fresh| waits(DEFAULT_SLACK, class, allocated).trades(fresh);
        assert!(trades(SizeClass::Small, GIB / 2 - 1, 11 * PAGE));
        assert!(!trades(SizeClass::Small, GIB / 2, 11 * PAGE), "half of the peak is in use");
        assert!(!trades(SizeClass::Small, 0, 10 * PAGE), "the peak stays what it is");
        assert!(!trades(SizeClass::Large, 0, 11 * PAGE));
    }

    #[test]
    fn handles_never_shrink_as_slack_grows() {
        for gap in [0, 40 * MIB, GIB] {
            let sizes: Vec<_> = (0..=20).map(|step| handle(1.0 + f64::from(step) * 0.001, 6 * GIB, gap)).collect();
            assert!(sizes.is_sorted(), "{sizes:?}");
        }
    }
}
