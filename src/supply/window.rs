//! Where a request goes: the places that are worth a plan.

use super::arena::Arena;
use super::policy::{Policy, SMALL_SHARE_BYTES, WINDOWS_MAX};
use crate::block::BlockId;
use std::collections::{BTreeMap, BTreeSet};

/// A free block of some pool.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Piece {
    pub(crate) bytes: u64,
    /// Index of its pool among those that the caller has locked.
    pub(crate) owner: usize,
    pub(crate) id: BlockId,
    /// How long it has been free, in searches.
    pub(crate) age: u32,
    /// Whether all work that used it has passed.
    pub(crate) passed: bool,
}

/// The free blocks of one size class, of all pools, by address.
pub(crate) type Pieces = BTreeMap<u64, Piece>;

/// Free memory in one piece, whoever owns it, whose work has passed.
pub(super) struct Run {
    pub(super) start: u64,
    pub(super) end: u64,
    /// That of the youngest part.
    pub(super) age: u32,
}

pub(super) fn runs(pieces: &Pieces) -> Vec<Run> {
    let mut runs: Vec<Run> = Vec::new();
    for (&start, piece) in pieces.iter().filter(|(_, piece)| piece.passed) {
        let end = start + piece.bytes;
        match runs.last_mut() {
            Some(run) if run.end == start => {
                run.end = end;
                run.age = run.age.min(piece.age);
            }
            _ => runs.push(Run { start, end, age: piece.age }),
        }
    }
    runs
}

/// Memory to be mapped in a gap.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Fill {
    pub(crate) at: u64,
    /// Bytes that must be mapped, from `at` on.
    pub(crate) must: u64,
    /// Bytes that may be.
    pub(crate) room: u64,
}

/// A place for a request: addresses, some of them free memory of its pool, some of others, some gaps.
#[derive(Clone, Debug, Default)]
pub(crate) struct Window {
    pub(crate) start: u64,
    pub(crate) end: u64,
    pub(crate) fills: Vec<Fill>,
    /// Sum of what must be mapped.
    pub(crate) need: u64,
    /// Parts of the pool's own free blocks: start and bytes.
    pub(crate) own: Vec<(u64, u64)>,
    /// Parts of other pools' free blocks: start and bytes.
    pub(crate) others: Vec<(u64, u64)>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Gap,
    Own,
    Other,
}

#[derive(Clone, Copy, Debug)]
struct Item {
    start: u64,
    bytes: u64,
    kind: Kind,
}

/// The windows that need the fewest bytes mapped, the lowest address first among equals. None if there is no room.
///
/// Among equals, where there is less slack than by default, first those that take the least free memory of the own
/// pool, which serves its next requests without a growth, and then those that take the fewest idle handles, which could
/// be moved as long as nothing lies in them.
///
/// Looks at every run of free blocks and gaps, from each block forwards and backwards. O(runs × their length).
pub(crate) fn best_windows(
    arena: &Arena,
    pieces: &Pieces,
    own: usize,
    bytes: u64,
    policy: &Policy,
) -> Vec<Window> {
    let mut items: Vec<Item> = arena
        .gaps(policy.page_bytes)
        .into_iter()
        .map(|(start, bytes)| Item { start, bytes, kind: Kind::Gap })
        .collect();
    for (&start, piece) in pieces {
        if piece.owner == own {
            items.push(Item { start, bytes: piece.bytes, kind: Kind::Own });
        } else if piece.passed {
            if !policy.small || policy.is_tight() {
                items.push(Item { start, bytes: piece.bytes, kind: Kind::Other });
                continue;
            }
            // Of small memory whole handles change hands: parts of them would be too little for the next requests.
            let (mut from, mut to) = (0, 0);
            for (at, handle) in arena.whole_handles(start, start + piece.bytes) {
                from = if to == 0 { at } else { from };
                to = at + handle.bytes;
            }
            if to > from {
                items.push(Item { start: from, bytes: to - from, kind: Kind::Other });
            }
        }
    }
    items.sort_unstable_by_key(|item| item.start);
    let stretches = items.chunk_by(|a, b| a.start + a.bytes == b.start);
    let windows =
        stretches.filter(|run| run.iter().map(|item| item.bytes).sum::<u64>() >= bytes).flat_map(|run| {
            let forwards =
                (0..run.len()).filter_map(|from| window(arena, run[from..].iter(), bytes, false, policy));
            let backwards = (0..run.len())
                .filter(|&from| run[from].kind != Kind::Gap)
                .filter_map(|from| window(arena, run[..=from].iter().rev(), bytes, true, policy));
            forwards.chain(backwards)
        });
    let mut windows: Vec<Window> = windows.collect();
    if policy.is_tight() {
        let idle = runs(pieces).into_iter().flat_map(|run| arena.whole_handles(run.start, run.end));
        let idle: BTreeSet<u64> = idle.map(|(at, _)| at).collect();
        windows.sort_by_cached_key(|window| {
            let own: u64 = window.own.iter().map(|(_, bytes)| bytes).sum();
            (window.need, own, window.idle_bytes(arena, &idle), window.start)
        });
    } else {
        windows.sort_unstable_by_key(|window| (window.need, window.start));
    }
    windows.truncate(WINDOWS_MAX);
    windows
}

impl Window {
    /// Bytes of the handles that it touches, of those that start at an address in `idle`.
    fn idle_bytes(&self, arena: &Arena, idle: &BTreeSet<u64>) -> u64 {
        let touched = self.own.iter().chain(&self.others).flat_map(|&(start, bytes)| {
            let (start, end) = (start.max(self.start), (start + bytes).min(self.end));
            let first = arena.handles.range(..=start).next_back().map_or(start, |(&at, _)| at);
            arena.handles.range(first..end)
        });
        touched.filter(|(at, _)| idle.contains(at)).map(|(_, handle)| handle.bytes).sum()
    }
}

/// The window that starts with the first item (or, backwards, ends with it).
fn window<'a>(
    arena: &Arena,
    items: impl Iterator<Item = &'a Item>,
    bytes: u64,
    backwards: bool,
    policy: &Policy,
) -> Option<Window> {
    let mut window = Window::default();
    let mut left = bytes;
    let mut first = true;
    for item in items {
        let part = item.bytes.min(left);
        left -= part;
        let start = if backwards { item.start + item.bytes - part } else { item.start };
        let end = start + part;
        if first {
            (window.start, window.end) = (start, end);
            first = false;
        } else if backwards {
            window.start = start;
        } else {
            window.end = end;
        }
        match item.kind {
            Kind::Gap => {
                let must = policy.in_pages(part).min(item.bytes);
                window.need += must;
                let at = if backwards { item.start + item.bytes - must } else { item.start };
                window.fills.push(Fill { at, must, room: if backwards { must } else { item.bytes } });
            }
            Kind::Own => window.own.push((start, part)),
            Kind::Other if policy.small && policy.is_tight() => {
                let from = (start / SMALL_SHARE_BYTES * SMALL_SHARE_BYTES).max(item.start);
                let to = end.next_multiple_of(SMALL_SHARE_BYTES).min(item.start + item.bytes);
                window.others.push((from, to - from));
            }
            Kind::Other => {
                // As much of each handle as is free, so that most of them stay in one hand.
                let handles = arena.handles.range(..=start).next_back().map_or(start, |(&at, _)| at);
                let covered = arena.handles.range(handles..end).map(|(at, handle)| at + handle.bytes).next_back();
                let from = handles.max(item.start);
                let to = covered.unwrap_or(end).min(item.start + item.bytes);
                window.others.push((from, to - from));
            }
        }
        if left == 0 {
            window.own.sort_unstable();
            return Some(window);
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::super::arena::Handle;
    use super::*;
    use crate::config::Config;
    use crate::driver::PageHandle;
    use crate::driver::sim::SimDriver;
    use crate::size::MIB;

    const PAGE: u64 = 2 * MIB;
    const KIB: u64 = 1 << 10;

    /// Five pages in a row and gaps behind them; `free` are starts, bytes and owners.
    fn scene(free: &[(u64, u64, usize)]) -> (Arena, Pieces, u64) {
        let mut arena = Arena::default();
        let driver = SimDriver::builder().capacity(64 * MIB).build();
        arena.reserve(&*driver, 64 * MIB, PAGE, PAGE).expect("addresses");
        let base = arena.gaps(PAGE)[0].0;
        for page in 0..5 {
            arena.handles.insert(base + page * PAGE, Handle { bytes: PAGE, pages: PageHandle(page) });
        }
        let piece = |&(start, bytes, owner): &(u64, u64, usize)| {
            (base + start, Piece { bytes, owner, id: 0, age: 0, passed: true })
        };
        (arena, free.iter().map(piece).collect(), base)
    }

    /// Where pool 0's request goes first, as an offset.
    fn first(free: &[(u64, u64, usize)], bytes: u64, slack: f64, small: bool) -> Window {
        let (arena, pieces, base) = scene(free);
        let policy = Policy::new(&Config::default().slack(slack), PAGE, small, 5 * PAGE, 5 * PAGE);
        let mut window = best_windows(&arena, &pieces, 0, bytes, &policy).swap_remove(0);
        window.start -= base;
        window.end -= base;
        window.others.iter_mut().for_each(|part| part.0 -= base);
        window
    }

    #[test]
    fn with_little_slack_own_memory_is_spared() {
        let free = [(0, PAGE, 0), (2 * PAGE, PAGE, 1)];
        assert_eq!(first(&free, PAGE, 1.0, false).start, 2 * PAGE);
        assert_eq!(first(&free, PAGE, 1.014, false).start, 0, "by default the lowest address");
    }

    #[test]
    fn with_little_slack_idle_handles_are_spared() {
        // Both pages of the first hole are idle; of the second one's, the outer halves are in use.
        let free = [(0, 2 * PAGE, 1), (3 * PAGE - MIB, PAGE, 1)];
        assert_eq!(first(&free, PAGE, 1.0, false).start, 3 * PAGE - MIB);
        assert_eq!(first(&free, PAGE, 1.014, false).start, 0, "by default the lowest address");
    }

    #[test]
    fn fewer_new_pages_come_before_all_else() {
        let free = [(0, PAGE, 0)];
        let window = first(&free, PAGE, 1.0, false);
        assert_eq!((window.start, window.need), (0, 0), "its own memory rather than a new page");
    }

    #[test]
    fn with_little_slack_streams_share_a_small_page() {
        let free = [(PAGE + 300 * KIB, PAGE - 300 * KIB, 1)];
        let window = first(&free, 100 * KIB, 1.0, true);
        assert_eq!((window.start, window.need), (PAGE + 300 * KIB, 0));
        assert_eq!(window.others, [(PAGE + 300 * KIB, 212 * KIB)], "up to a multiple of 256 KiB, no more");
        let window = first(&free, 100 * KIB, 1.014, true);
        assert_eq!((window.start, window.need), (5 * PAGE, PAGE), "by default a page of its own");
    }

    #[test]
    fn memory_under_queued_work_is_not_shared() {
        let (arena, mut pieces, base) = scene(&[(MIB, MIB, 1)]);
        pieces.get_mut(&(base + MIB)).expect("the piece").passed = false;
        let policy = Policy::new(&Config::default().slack(1.0), PAGE, true, 5 * PAGE, 5 * PAGE);
        let windows = best_windows(&arena, &pieces, 0, KIB, &policy);
        assert!(windows.iter().all(|window| window.others.is_empty()), "{windows:?}");
    }
}
