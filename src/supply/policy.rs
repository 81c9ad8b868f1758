//! The numbers that decide how expandable segments take, move and give back pages.
//!
//! Chosen by replaying the traces in `benches/traces`; `docs/architecture.md` has the curves and what else was tried.

use crate::config::{Config, DEFAULT_SLACK};
use crate::size::MIB;

/// A program's peak counts as at least this much when slack is turned into bytes: a small program may hold a little
/// more than its share, which costs nobody anything and saves it many moves.
const SLACK_FLOOR_BYTES: u64 = 3100 * MIB;

/// The largest handle that is created: this part of the peak, within bounds. Larger handles cost fewer calls, smaller
/// ones are less often pinned by a live block.
const HANDLE_PART: u64 = 64;
const HANDLE_MIN_BYTES: u64 = 12 * MIB;
const HANDLE_MAX_BYTES: u64 = 64 * MIB;

/// The same part without any slack, when what is pinned is all that counts. In between, part and least size follow the
/// slack in a straight line; from the default slack on they stay as they are.
const HANDLE_PART_TIGHT: u64 = 1024;

/// While there is slack, at least this part of what is reserved is created at once, ahead of need.
const AHEAD_PART: u64 = 32;
const AHEAD_SMALL_PART: u64 = 2048;

/// A moved handle may be this much larger than what is still missing.
pub(crate) const OVERSHOOT: u64 = 2;

/// From this many moves for one new handle on, the pages are given back and a new handle is made instead: it costs
/// less, and the next move of that memory is one handle.
pub(crate) const MERGE_MOVES: usize = 3;

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

/// What is decided for one growth, from the state at its start.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Policy {
    pub(crate) page_bytes: u64,
    /// Whether it is small memory that grows.
    pub(crate) small: bool,
    /// Fresh bytes that may be taken.
    pub(crate) allowance: u64,
    /// The largest handle to create.
    pub(crate) handle_max: u64,
    /// What is created ahead of need, if the allowance permits.
    pub(crate) ahead: u64,
}

impl Policy {
    pub(crate) fn new(config: &Config, page_bytes: u64, small: bool, reserved: u64, peak_allocated: u64) -> Self {
        let pages = |bytes: u64| bytes / page_bytes * page_bytes;
        let extra = config.slack - 1.0;
        #[allow(clippy::cast_precision_loss, clippy::cast_possible_truncation, clippy::cast_sign_loss)]
        let slack = (extra * peak_allocated.max(SLACK_FLOOR_BYTES) as f64) as u64;
        let handle_max = pages(handle_bytes(peak_allocated, extra)).max(page_bytes);
        let ahead = if small {
            pages(reserved / AHEAD_SMALL_PART).max(page_bytes).min(handle_max)
        } else {
            pages(reserved / AHEAD_PART).clamp(page_bytes, handle_max)
        };
        Self {
            page_bytes,
            small,
            allowance: peak_allocated.saturating_add(slack).saturating_sub(reserved),
            handle_max,
            ahead,
        }
    }

    /// `bytes` in whole pages.
    pub(crate) fn in_pages(&self, bytes: u64) -> u64 {
        bytes.next_multiple_of(self.page_bytes)
    }
}

/// The largest handle for a peak, with `extra` slack.
#[allow(clippy::cast_precision_loss, clippy::cast_possible_truncation, clippy::cast_sign_loss)]
fn handle_bytes(peak: u64, extra: f64) -> u64 {
    let ease = (extra / (DEFAULT_SLACK - 1.0)).min(1.0);
    let between = |tight: u64, easy: u64| tight + (ease * (easy - tight) as f64) as u64;
    let part = between(peak / HANDLE_PART_TIGHT, peak / HANDLE_PART);
    part.clamp(between(0, HANDLE_MIN_BYTES), HANDLE_MAX_BYTES)
}
