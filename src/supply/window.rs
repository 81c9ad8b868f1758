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
#[derive(Clone, Copy)]
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
/// Looks at every run of free blocks and gaps, from each block forwards and backwards. O(n log n) for n blocks and gaps.
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
    let mut candidates: Vec<Candidate<'_>> = items
        .chunk_by(|a, b| a.start + a.bytes == b.start)
        .flat_map(|run| candidates(run, bytes, policy))
        .collect();
    let key = |candidate: &Candidate<'_>| (candidate.need, if policy.is_tight() { candidate.own } else { 0 });
    candidates.sort_by_key(key);
    // Those that the rest of the order decides among.
    let last = candidates.get(WINDOWS_MAX - 1).map(key);
    let enough = candidates.partition_point(|candidate| last.is_none_or(|last| key(candidate) <= last));
    candidates.truncate(enough);
    if policy.is_tight() {
        let idle = runs(pieces).into_iter().flat_map(|run| arena.whole_handles(run.start, run.end));
        let idle: BTreeSet<u64> = idle.map(|(at, _)| at).collect();
        let mut windows: Vec<_> = candidates
            .iter()
            .map(|candidate| {
                let window = candidate.window(arena, bytes, policy);
                ((candidate.need, candidate.own, window.idle_bytes(arena, &idle), window.start), window)
            })
            .collect();
        windows.sort_by_key(|(key, _)| *key);
        return windows.into_iter().take(WINDOWS_MAX).map(|(_, window)| window).collect();
    }
    candidates.sort_by_key(|candidate| (candidate.need, candidate.start));
    candidates.iter().take(WINDOWS_MAX).map(|candidate| candidate.window(arena, bytes, policy)).collect()
}

/// A window by what speaks for it.
struct Candidate<'a> {
    /// What it is taken from: from the first item on, or from the last one backwards.
    items: &'a [Item],
    backwards: bool,
    start: u64,
    /// Bytes to be mapped.
    need: u64,
    /// Bytes of the pool's own free memory.
    own: u64,
}

impl Candidate<'_> {
    fn window(&self, arena: &Arena, bytes: u64, policy: &Policy) -> Window {
        let window = if self.backwards {
            window(arena, self.items.iter().rev(), bytes, true, policy)
        } else {
            window(arena, self.items.iter(), bytes, false, policy)
        };
        debug_assert_eq!((window.start, window.need), (self.start, self.need));
        window
    }
}

/// The windows of neighbouring items: from each one forwards, and from each that is mapped backwards. O(items).
fn candidates<'a>(run: &'a [Item], bytes: u64, policy: &Policy) -> Vec<Candidate<'a>> {
    let mut found = Vec::new();
    // Sums over the items from `from` to `to`, without the latter.
    let (mut from, mut to, mut sum) = (0, 0, Sum::default());
    while from < run.len() {
        while to < run.len() && sum.bytes < bytes {
            sum.add(&run[to], run[to].bytes, policy);
            to += 1;
        }
        if sum.bytes < bytes {
            break; // nor from any later one
        }
        let last = &run[to - 1];
        let mut part = sum;
        part.cut(last, sum.bytes - bytes, policy);
        found.push(Candidate {
            items: &run[from..to],
            backwards: false,
            start: run[from].start,
            need: part.need,
            own: part.own,
        });
        sum.cut(&run[from], run[from].bytes, policy);
        from += 1;
    }
    let (mut from, mut sum) = (0, Sum::default());
    for (index, item) in run.iter().enumerate() {
        sum.add(item, item.bytes, policy);
        while sum.bytes - run[from].bytes >= bytes {
            sum.cut(&run[from], run[from].bytes, policy);
            from += 1;
        }
        if sum.bytes < bytes || item.kind == Kind::Gap {
            continue;
        }
        let excess = sum.bytes - bytes;
        let mut part = sum;
        part.cut(&run[from], excess, policy);
        found.push(Candidate {
            items: &run[from..=index],
            backwards: true,
            start: run[from].start + excess,
            need: part.need,
            own: part.own,
        });
    }
    found
}

/// What some items come to.
#[derive(Clone, Copy, Default)]
struct Sum {
    bytes: u64,
    need: u64,
    own: u64,
}

impl Sum {
    fn add(&mut self, item: &Item, bytes: u64, policy: &Policy) {
        self.bytes += bytes;
        match item.kind {
            Kind::Gap => self.need += policy.in_pages(bytes).min(item.bytes),
            Kind::Own => self.own += bytes,
            Kind::Other => {}
        }
    }

    /// Leaves `excess` bytes of an item out, all of which are in the sum.
    fn cut(&mut self, item: &Item, excess: u64, policy: &Policy) {
        let (whole, left) = (item.bytes, item.bytes - excess);
        self.bytes -= excess;
        match item.kind {
            Kind::Gap => {
                self.need = self.need + policy.in_pages(left).min(whole) - policy.in_pages(whole).min(whole)
            }
            Kind::Own => self.own -= excess,
            Kind::Other => {}
        }
    }
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

/// The window that starts with the first item (or, backwards, ends with it); they are enough.
fn window<'a>(
    arena: &Arena,
    items: impl Iterator<Item = &'a Item>,
    bytes: u64,
    backwards: bool,
    policy: &Policy,
) -> Window {
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
    }
    debug_assert_eq!(left, 0, "the items are enough");
    window.own.sort_unstable();
    window
}

#[cfg(test)]
mod tests {
    use super::super::arena::Handle;
    use super::super::policy::Use;
    use super::*;
    use crate::config::Config;
    use crate::driver::PageHandle;
    use crate::driver::sim::SimDriver;
    use crate::size::{MIB, SizeClass};
    use proptest::prelude::*;

    const PAGE: u64 = 2 * MIB;
    const KIB: u64 = 1 << 10;

    fn policy(slack: f64, class: SizeClass) -> Policy {
        let all = 5 * PAGE;
        let use_now = Use { reserved: all, peak_reserved: all, allocated: all, peak_allocated: all, freed: all };
        Policy::new(&Config::default().slack(slack), PAGE, class, use_now)
    }

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
        let policy = policy(slack, if small { SizeClass::Small } else { SizeClass::Large });
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
        let policy = policy(1.0, SizeClass::Small);
        let windows = best_windows(&arena, &pieces, 0, KIB, &policy);
        assert!(windows.iter().all(|window| window.others.is_empty()), "{windows:?}");
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 256, ..ProptestConfig::default() })]
        // The sums by which windows are compared, and the windows that are built of them, against one item after another.
        #[test]
        fn candidates_are_what_their_windows_are(
            parts in prop::collection::vec((0u8..3, 1u64..9), 1..40),
            bytes in 1u64..40,
        ) {
            let policy = policy(1.014, SizeClass::Large);
            let mut at = 0;
            let mut run = Vec::new();
            for (kind, parts) in parts {
                // Gaps are whole pages, blocks are not.
                let (kind, bytes) = match kind {
                    0 => (Kind::Gap, parts * PAGE),
                    1 => (Kind::Own, parts * 300 * KIB),
                    _ => (Kind::Other, parts * 300 * KIB),
                };
                run.push(Item { start: at, bytes, kind });
                at += bytes;
            }
            let bytes = bytes * 256 * KIB;
            let found = candidates(&run, bytes, &policy);
            let forwards = (0..run.len()).filter(|&from| run[from..].iter().map(|item| item.bytes).sum::<u64>() >= bytes);
            let backwards = (0..run.len()).filter(|&last| {
                run[last].kind != Kind::Gap && run[..=last].iter().map(|item| item.bytes).sum::<u64>() >= bytes
            });
            prop_assert_eq!(found.len(), forwards.count() + backwards.count());
            let arena = Arena::default();
            for candidate in found {
                let window = candidate.window(&arena, bytes, &policy);
                let own: u64 = window.own.iter().map(|(_, bytes)| bytes).sum();
                prop_assert_eq!(window.end - window.start, bytes);
                prop_assert_eq!((window.start, window.need, own), (candidate.start, candidate.need, candidate.own));
                prop_assert_eq!(window.need, window.fills.iter().map(|fill| fill.must).sum::<u64>());
            }
        }
    }
}
