//! Where a request goes, and which pages it takes: the decisions of one growth, without a driver.

use super::arena::{Arena, Handle};
use super::policy::{
    CREATE_MICROS, MERGE_MOVES, MOVE_MICROS, OVERSHOOT, Policy, SMALL_SHARE_BYTES, WINDOWS_MAX, release_micros,
};
use crate::block::BlockId;
use crate::size::SizeClass;
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

/// A mapped handle all of which is unused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Idle {
    pub(crate) class: SizeClass,
    pub(crate) at: u64,
    pub(crate) bytes: u64,
}

/// In which order idle handles are taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Order {
    /// Out of the smallest free blocks first: large ones stay whole for what comes next.
    Scraps,
    /// The longest unused first: what is not coming back.
    Oldest,
    /// The largest first: the fewest calls.
    Largest,
}

/// Free memory in one piece, whoever owns it, whose work has passed.
struct Run {
    start: u64,
    end: u64,
    /// That of the youngest part.
    age: u32,
}

fn runs(pieces: &Pieces) -> Vec<Run> {
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

/// Every handle that may be moved or given back. `except` is a range of addresses of one class that stays.
pub(crate) fn idle_handles(
    arenas: &[Arena; 2],
    pieces: &[Pieces; 2],
    page_bytes: u64,
    except: Option<(SizeClass, u64, u64)>,
    order: Order,
) -> Vec<Idle> {
    let mut idle = Vec::new();
    let key = |run: &Run, handle: &Handle| {
        let (age, size) = (u64::from(u32::MAX - run.age), u64::MAX - handle.bytes);
        match order {
            Order::Scraps => (run.end - run.start, size),
            Order::Oldest => (age, size),
            Order::Largest => (size, age),
        }
    };
    for class in SizeClass::ALL {
        let arena = &arenas[class.index()];
        for run in runs(&pieces[class.index()]).iter().filter(|run| run.end - run.start >= page_bytes) {
            for (at, handle) in arena.whole_handles(run.start, run.end) {
                let stays =
                    except.is_some_and(|(of, from, to)| of == class && at < to && at + handle.bytes > from);
                if !stays {
                    idle.push((key(run, &handle), Idle { class, at, bytes: handle.bytes }));
                }
            }
        }
    }
    idle.sort_unstable_by_key(|&(key, handle)| (key, handle.class, handle.at));
    idle.into_iter().map(|(_, handle)| handle).collect()
}

/// The best window and its plan: the first of those that need no page but fresh ones; otherwise the one that takes the
/// fewest bytes beyond the allowance, and among equals the cheapest by what the driver will charge. `idle` gives the handles that may go to a window, in an order.
pub(crate) fn cheapest(
    windows: Vec<Window>,
    policy: &Policy,
    beyond: Beyond,
    idle: impl Fn(&Window, Order) -> Vec<Idle>,
) -> Option<(Window, Plan)> {
    let mut best: Option<((u64, u64), Window, Plan)> = None;
    for window in windows {
        let fresh = policy.allowance >= window.need && beyond != Beyond::Spent;
        for order in [Order::Scraps, Order::Oldest, Order::Largest] {
            let Some(plan) = sources(&window, policy, beyond, || idle(&window, order)) else { continue };
            let cost = (plan.beyond, plan.micros());
            if best.as_ref().is_none_or(|(least, ..)| cost < *least) {
                best = Some((cost, window.clone(), plan));
            }
            if fresh {
                break;
            }
        }
        if fresh {
            break;
        }
    }
    best.map(|(_, window, plan)| (window, plan))
}

/// Where the memory of a fill comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Source {
    /// A new handle.
    Fresh,
    /// A handle that is unmapped elsewhere.
    Move(Idle),
}

/// One handle to be mapped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Step {
    pub(crate) at: u64,
    pub(crate) bytes: u64,
    pub(crate) source: Source,
}

/// What a growth does: handles given back first, then handles mapped.
#[derive(Clone, Debug, Default)]
pub(crate) struct Plan {
    pub(crate) releases: Vec<Idle>,
    pub(crate) steps: Vec<Step>,
    /// Fresh bytes beyond the allowance.
    beyond: u64,
}

/// Whether fresh memory may be taken beyond the allowance when nothing else is left.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Beyond {
    Allowed,
    Forbidden,
    /// No, and there is no allowance: nothing is fresh but what replaces pages that are given back.
    Spent,
}

/// Chooses the pages for a window's gaps; `None` if there are not enough and `beyond` forbids to take more.
fn sources(window: &Window, policy: &Policy, beyond: Beyond, idle: impl FnOnce() -> Vec<Idle>) -> Option<Plan> {
    let mut plan = Plan::default();
    let mut allowance = if beyond == Beyond::Spent { 0 } else { policy.allowance };
    let mut left = window.need;
    if allowance >= left {
        for fill in &window.fills {
            let spare = (allowance - left) / policy.page_bytes * policy.page_bytes;
            let bytes = (fill.must + policy.ahead.min(spare).saturating_sub(fill.must)).min(fill.room);
            plan.fresh(fill.at, bytes, policy.handle_max(bytes));
            allowance -= bytes;
            left -= fill.must;
        }
        return Some(plan);
    }
    let mut idle = idle();
    for fill in &window.fills {
        let given_back = plan.fill(fill, policy, beyond, allowance, &mut idle)?;
        allowance = (allowance + given_back.0).saturating_sub(given_back.1);
    }
    Some(plan)
}

impl Plan {
    /// About what the driver will charge, in microseconds.
    pub(crate) fn micros(&self) -> u64 {
        let steps = self.steps.iter().map(|step| match step.source {
            Source::Fresh => CREATE_MICROS,
            Source::Move(_) => MOVE_MICROS,
        });
        steps.chain(self.releases.iter().map(|handle| release_micros(handle.bytes))).sum()
    }

    /// Bytes that are created.
    pub(crate) fn fresh_bytes(&self) -> u64 {
        self.steps.iter().filter(|step| step.source == Source::Fresh).map(|step| step.bytes).sum()
    }

    /// New handles over `bytes` from `at` on.
    fn fresh(&mut self, mut at: u64, mut bytes: u64, handle_max: u64) {
        while bytes > 0 {
            let size = bytes.min(handle_max);
            self.steps.push(Step { at, bytes: size, source: Source::Fresh });
            at += size;
            bytes -= size;
        }
    }

    /// Fills one gap from idle handles as far as the allowance does not reach. Returns the bytes given back and the
    /// fresh bytes.
    fn fill(
        &mut self,
        fill: &Fill,
        policy: &Policy,
        beyond: Beyond,
        allowance: u64,
        idle: &mut Vec<Idle>,
    ) -> Option<(u64, u64)> {
        let (mut moves, mut releases) = (Vec::new(), Vec::new());
        let (mut missing, mut room) = (fill.must, fill.room);
        while missing > allowance {
            let limit = (missing * OVERSHOOT).min(room);
            let fits = idle.iter().position(|handle| handle.bytes <= missing || handle.bytes <= limit);
            let smallest = || {
                let fitting = idle.iter().enumerate().filter(|(_, handle)| !policy.small && handle.bytes <= room);
                fitting.min_by_key(|(_, handle)| handle.bytes).map(|(index, _)| index)
            };
            let Some(index) = fits.or_else(smallest) else { break };
            let handle = idle.remove(index);
            room -= handle.bytes;
            missing = missing.saturating_sub(handle.bytes);
            moves.push(handle);
        }
        // What does not fit is given back, and as much is made anew.
        let mut fresh_room = allowance;
        while missing > fresh_room && !idle.is_empty() {
            let short = missing - fresh_room;
            let enough = idle.iter().enumerate().filter(|(_, handle)| handle.bytes >= short);
            let index = enough.min_by_key(|(_, handle)| handle.bytes).map_or(0, |(index, _)| index);
            let handle = idle.remove(index);
            fresh_room += handle.bytes;
            releases.push(handle);
        }
        if missing > fresh_room && beyond != Beyond::Allowed {
            return None;
        }
        let whole = usize::try_from(fill.must.div_ceil(policy.handle_max(fill.must))).unwrap_or(usize::MAX);
        let fresh = if moves.len() + releases.len() >= MERGE_MOVES.saturating_mul(whole) {
            // Many small handles: fewer, larger ones in their place cost less, now and the next time.
            releases.append(&mut moves);
            let each = policy.in_pages(fill.must.div_ceil(whole as u64));
            self.fresh(fill.at, fill.must, each);
            fill.must
        } else {
            let mut at = fill.at;
            for handle in moves {
                self.steps.push(Step { at, bytes: handle.bytes, source: Source::Move(handle) });
                at += handle.bytes;
            }
            self.fresh(at, missing, policy.handle_max(missing));
            missing
        };
        let given_back = releases.iter().map(|handle| handle.bytes).sum();
        self.beyond += fresh.saturating_sub(allowance + given_back);
        self.releases.append(&mut releases);
        Some((given_back, fresh))
    }
}
