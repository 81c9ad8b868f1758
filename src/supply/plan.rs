//! Which pages a request's place takes: the decisions of one growth, without a driver.

use super::arena::Arena;
use super::policy::{CREATE_MICROS, MOVE_MICROS, OVERSHOOT, Policy, release_micros};
use super::window::{Fill, Pieces, Run, Window, runs};
use crate::size::SizeClass;

/// A mapped handle all of which is unused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Idle {
    pub(crate) class: SizeClass,
    pub(crate) at: u64,
    pub(crate) bytes: u64,
}

/// What lies in the last handle of large memory. One that is idle can go back without leaving a hole: when large memory grows
/// again it does so there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum End {
    Used,
    /// Nothing, but work of the growing pool's stream that was queued up to this epoch may still use it.
    Waits(u64),
    Idle(Idle),
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

impl Order {
    pub(crate) const COUNT: usize = 3;
}

/// Every handle that may be moved or given back, with what orders them.
pub(crate) struct IdleHandles(Vec<(Run, Idle)>);

impl IdleHandles {
    pub(crate) fn new(arenas: &[Arena; 2], pieces: &[Pieces; 2], page_bytes: u64) -> Self {
        let mut idle = Vec::new();
        for class in SizeClass::ALL {
            let arena = &arenas[class.index()];
            for run in runs(&pieces[class.index()]).into_iter().filter(|run| run.end - run.start >= page_bytes) {
                let handles = arena.whole_handles(run.start, run.end);
                idle.extend(handles.map(|(at, handle)| (run, Idle { class, at, bytes: handle.bytes })));
            }
        }
        Self(idle)
    }

    /// All of them, in an order; among equals the lower address first, that of small memory before that of large.
    pub(crate) fn in_order(&self, order: Order) -> Vec<Idle> {
        // Two numbers below 2^48 (no device has more bytes) and the place in the list: one number that compares fast.
        const MAX: u64 = (1 << 48) - 1;
        let key = |run: &Run, handle: &Idle| {
            let (youth, size) = (u64::from(u32::MAX - run.age), MAX - handle.bytes.min(MAX));
            match order {
                Order::Scraps => ((run.end - run.start).min(MAX), size),
                Order::Oldest => (youth, size),
                Order::Largest => (size, youth),
            }
        };
        let keys = self.0.iter().enumerate().map(|(index, (run, handle))| {
            let (first, second) = key(run, handle);
            u128::from(first) << 80 | u128::from(second) << 32 | index as u128
        });
        let mut keys: Vec<u128> = keys.collect();
        keys.sort_unstable();
        keys.into_iter().map(|key| self.0[key as u32 as usize].1).collect()
    }
}

/// The best window and its plan: the first of those that need no page but fresh ones; otherwise the one that takes the
/// fewest bytes beyond the allowance, and among equals the cheapest by what the driver will charge. `idle` gives the handles that may go to a window, in an order.
///
/// If the `end` of large memory is idle, the first window is paid for with that.
pub(crate) fn cheapest(
    windows: Vec<Window>,
    policy: &Policy,
    beyond: Beyond,
    end: End,
    idle: impl Fn(&Window, Order) -> Vec<Idle>,
) -> Option<(Window, Plan)> {
    if let (Some(window), End::Idle(handle)) = (windows.first(), end) {
        return Some((window.clone(), Plan::instead_of(handle, window, policy)));
    }
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
        // A page of small memory goes first, since it leaves no hole that matters: any page does for what is small.
        let mut small = if !policy.small && policy.spares(left) {
            let fits = |handle: &Idle| window.fills.iter().any(|fill| handle.bytes <= fill.must);
            idle().into_iter().find(|handle| handle.class == SizeClass::Small && fits(handle))
        } else {
            None
        };
        let mut besides = policy.besides(left - small.map_or(0, |handle| handle.bytes));
        for fill in &window.fills {
            let moved = match small.take_if(|handle| handle.bytes <= fill.must) {
                Some(handle) => plan.moves(fill.at, handle),
                None => 0,
            };
            let must = fill.must - moved;
            let spare = (allowance - left).min(besides) / policy.page_bytes * policy.page_bytes;
            let bytes = (must + policy.ahead.min(spare).saturating_sub(must)).min(fill.room - moved);
            plan.fresh(fill.at + moved, bytes, policy.handle_max(bytes));
            allowance -= bytes;
            besides -= bytes.saturating_sub(must);
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

    /// A window filled with new handles after another handle went back.
    fn instead_of(handle: Idle, window: &Window, policy: &Policy) -> Self {
        let mut plan = Self { releases: vec![handle], ..Self::default() };
        for fill in &window.fills {
            plan.fresh(fill.at, fill.must, policy.handle_max(fill.must));
        }
        plan
    }

    /// Moves a handle to `at`; returns its bytes.
    fn moves(&mut self, at: u64, handle: Idle) -> u64 {
        self.steps.push(Step { at, bytes: handle.bytes, source: Source::Move(handle) });
        handle.bytes
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
        let fresh = if moves.len() + releases.len() >= policy.merge_moves().saturating_mul(whole) {
            // Many small handles: fewer, larger ones in their place cost less, now and the next time.
            releases.append(&mut moves);
            let each = policy.in_pages(fill.must.div_ceil(whole as u64));
            self.fresh(fill.at, fill.must, each);
            fill.must
        } else {
            let mut at = fill.at;
            for handle in moves {
                at += self.moves(at, handle);
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

#[cfg(test)]
mod tests {
    use super::super::policy::Use;
    use super::*;
    use crate::config::{Config, OnPending};
    use crate::size::MIB;

    const PAGE: u64 = 2 * MIB;
    const GIB: u64 = 1024 * MIB;
    /// Handles at addresses of their own.
    const SMALL: [Idle; 3] = [small(1), small(2), small(3)];
    const LARGE: Idle = Idle { class: SizeClass::Large, at: 9 * GIB, bytes: 20 * MIB };

    const fn small(page: u64) -> Idle {
        Idle { class: SizeClass::Small, at: page * PAGE, bytes: PAGE }
    }

    /// Room for `need` bytes at the end.
    fn window(need: u64) -> Window {
        let at = 4 * GIB;
        let fills = vec![Fill { at, must: need, room: 4 * GIB }];
        Window { start: at, end: at + need, fills, need, ..Window::default() }
    }

    /// The plan for `need` bytes of a device that holds less than the slack allows, and `below_peak` less than once.
    fn plan(
        on_pending: OnPending,
        class: SizeClass,
        need: u64,
        below_peak: u64,
        beyond: Beyond,
        end: End,
    ) -> Option<Plan> {
        let (reserved, allocated, peak_allocated) = (4 * GIB - 128 * MIB, GIB, 4 * GIB);
        let use_now =
            Use { reserved, peak_reserved: reserved + below_peak, allocated, peak_allocated, freed: GIB };
        let policy = Policy::new(&Config::default().on_pending(on_pending), PAGE, class, use_now);
        let idle = |_: &Window, _| SMALL.into_iter().chain([LARGE]).collect();
        cheapest(vec![window(need)], &policy, beyond, end, idle).map(|(_, plan)| plan)
    }

    /// The same for large memory: what is moved, and the fresh bytes.
    fn large(on_pending: OnPending, need: u64, below_peak: u64) -> (Vec<Idle>, u64) {
        let plan =
            plan(on_pending, SizeClass::Large, need, below_peak, Beyond::Forbidden, End::Used).expect("a plan");
        let mut at = 4 * GIB;
        for step in &plan.steps {
            assert_eq!(step.at, at, "side by side");
            at += step.bytes;
        }
        let moved = plan.steps.iter().filter_map(|step| match step.source {
            Source::Move(handle) => Some(handle),
            Source::Fresh => None,
        });
        (moved.collect(), plan.fresh_bytes())
    }

    #[test]
    fn small_memory_is_paid_for_with_the_end_of_large_memory() {
        let plan = |on_pending, below_peak, beyond, end| {
            plan(on_pending, SizeClass::Small, PAGE, below_peak, beyond, end)
        };
        for beyond in [Beyond::Forbidden, Beyond::Allowed, Beyond::Spent] {
            let plan = plan(OnPending::Wait, 0, beyond, End::Idle(LARGE)).expect("a plan");
            assert_eq!((plan.releases.as_slice(), plan.fresh_bytes()), ([LARGE].as_slice(), PAGE), "{beyond:?}");
        }
        for end in [End::Used, End::Waits(1)] {
            let plan = plan(OnPending::Wait, 0, Beyond::Forbidden, end).expect("a plan");
            assert_eq!((plan.releases.len(), plan.fresh_bytes()), (0, PAGE), "{end:?}");
        }
    }

    #[test]
    fn an_idle_page_of_small_memory_goes_into_large_memory_before_reserved_rises() {
        let need = 50 * PAGE;
        assert_eq!(large(OnPending::Wait, need, 0), (vec![SMALL[0]], need - PAGE), "one, and the rest is new");
        assert_eq!(large(OnPending::Wait, PAGE, 0), (vec![SMALL[0]], 0), "and nothing is created if it is enough");
        assert_eq!(large(OnPending::Wait, need, need), (vec![], need), "the peak stays what it is");
        assert_eq!(large(OnPending::Grow, need, 0), (vec![], need));
    }

    #[test]
    fn what_is_created_ahead_of_need_does_not_raise_the_peak_of_reserved_by_itself() {
        let ahead = 64 * MIB;
        assert_eq!(large(OnPending::Grow, 2 * PAGE, 10 * PAGE), (vec![], ahead));
        assert_eq!(large(OnPending::Wait, 2 * PAGE, 10 * PAGE), (vec![], 8 * PAGE));
        assert_eq!(large(OnPending::Wait, 2 * PAGE, ahead), (vec![], ahead - 2 * PAGE));
        assert_eq!(large(OnPending::Wait, 2 * PAGE, 2 * ahead), (vec![], ahead), "there is room for all of it");
        assert_eq!(large(OnPending::Wait, 2 * PAGE, 0), (vec![SMALL[0]], ahead), "it rises in any case");
    }
}
