//! Statistics: exact totals and peaks without a lock or a cache line that all streams share.
//!
//! Each pool counts under its own lock, in [`PoolStats`]. A peak of the whole device is the maximum of a sum over
//! pools, which no pool sees. So each pool has, for each counter, a *ceiling*: the sum of all pools' ceilings is at
//! most the device's peak. While a counter stays at or below its ceiling there can be no new peak, and nobody
//! else is asked. A pool that rises above it takes the slow path, [`PeakBoard::raise`]: it looks at the other pools
//! (those whose lock is free: exactly; a busy one counts with its ceiling, which it cannot exceed meanwhile) and
//! deals the ceilings out anew. A peak is therefore never below the true one, and exact when pools are not in use
//! at the same moment.

use crate::size::SizeClass;
use crate::sync::Mutex;

/// The counters that pools keep.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Lane {
    Allocation,
    AllocatedBytes,
    RequestedBytes,
    OversizeAllocation,
    InactiveSplit,
    InactiveSplitBytes,
    Active,
    ActiveBytes,
}

pub(crate) const LANES: usize = 8;

/// One value a counter.
pub(crate) type Lanes = [i64; LANES];

/// The device's peaks and the ceilings are kept for small, large, and both together.
pub(crate) const SCOPES: usize = 3;
const ALL: usize = 2;

/// A pool's counters, under its lock.
///
/// A counter is kept as its *room*, the distance to its ceiling: what is handed out is taken off, and a sign tells that
/// the ceiling was passed. One subtraction in memory and one branch that is never taken; the lanes lie so that the
/// compiler makes no vectors of them, whose loads would wait for the stores of single lanes.
#[derive(Clone, Debug)]
pub(crate) struct PoolStats {
    /// By lane and scope. The active lanes are kept only if [`SEPARATE`] is set.
    room: [[i64; SCOPES]; LANES],
    /// Sum of all increases, by lane and size class. Those of the active lanes are those of the allocated ones.
    increased: [[i64; 2]; LANES],
    /// By scope; see the module's text.
    ceiling: [Lanes; SCOPES],
    /// What the hot path must not pass by: [`ABOVE`], [`SEPARATE`], and the pool's own bits. One byte, one comparison.
    pub(crate) attention: u8,
}

/// The pool is off the board: its number may be another's.
const FOLDED: u8 = 128;
/// A counter is above its ceiling, and [`PeakBoard::raise`] is due before the pool's lock is let go.
pub(crate) const ABOVE: u8 = 1;
/// A free was deferred here. Until then active is allocated, and is not counted apart.
pub(crate) const SEPARATE: u8 = 32;

impl PoolStats {
    pub(crate) fn new() -> Self {
        Self {
            room: [[0; SCOPES]; LANES],
            increased: [[0; 2]; LANES],
            ceiling: [[0; LANES]; SCOPES],
            attention: 0,
        }
    }

    /// Adds to a counter.
    #[inline(always)]
    fn raise(&mut self, class: SizeClass, lane: Lane, by: u64) {
        let (class, lane, by) = (class.index(), lane as usize, by as i64);
        self.increased[lane][class] += by;
        for scope in [class, ALL] {
            self.room[lane][scope] -= by;
            if self.room[lane][scope] < 0 {
                self.passed();
            }
        }
    }

    #[cold]
    #[inline(never)]
    fn passed(&mut self) {
        self.attention |= ABOVE;
    }

    /// Whether a counter is above its ceiling.
    #[inline]
    pub(crate) fn is_above(&self) -> bool {
        self.attention & ABOVE != 0
    }

    #[inline(always)]
    fn lower(&mut self, class: SizeClass, lane: Lane, by: u64) {
        self.room[lane as usize][class.index()] += by as i64;
        self.room[lane as usize][ALL] += by as i64;
    }

    /// Whether active memory is counted apart.
    #[inline(always)]
    pub(crate) fn is_separate(&self) -> bool {
        self.attention & SEPARATE != 0
    }

    /// Counts a block that is handed out. `WATCHED`: [`SEPARATE`] may be set.
    #[inline(always)]
    pub(crate) fn hand_out<const WATCHED: bool>(&mut self, class: SizeClass, bytes: u64, requested: u64) {
        debug_assert!(WATCHED || !self.is_separate());
        self.raise(class, Lane::Allocation, 1);
        self.raise(class, Lane::AllocatedBytes, bytes);
        self.raise(class, Lane::RequestedBytes, requested);
        if WATCHED && self.is_separate() {
            self.raise(class, Lane::Active, 1);
            self.raise(class, Lane::ActiveBytes, bytes);
        }
    }

    /// Counts a block that its user frees and that is cached at once. `WATCHED` as above.
    #[inline(always)]
    pub(crate) fn free<const WATCHED: bool>(&mut self, class: SizeClass, bytes: u64, requested: u64) {
        debug_assert!(WATCHED || !self.is_separate());
        self.lower(class, Lane::Allocation, 1);
        self.lower(class, Lane::AllocatedBytes, bytes);
        self.lower(class, Lane::RequestedBytes, requested);
        if WATCHED && self.is_separate() {
            self.lower(class, Lane::Active, 1);
            self.lower(class, Lane::ActiveBytes, bytes);
        }
    }

    /// From here on active is counted apart.
    fn separate(&mut self) {
        if self.is_separate() {
            return;
        }
        for scope in 0..SCOPES {
            let current = self.scope(scope);
            for lane in [Lane::Active as usize, Lane::ActiveBytes as usize] {
                self.room[lane][scope] = self.ceiling[scope][lane] - current[lane];
            }
        }
        self.attention |= SEPARATE;
    }

    /// Takes over what `other` counted, and its ceilings.
    fn absorb(&mut self, other: &mut Self) {
        if self.is_separate() || other.is_separate() {
            self.separate();
            other.separate();
        }
        for lane in 0..LANES {
            for scope in 0..SCOPES {
                self.room[lane][scope] += std::mem::take(&mut other.room[lane][scope]);
                self.ceiling[scope][lane] += std::mem::take(&mut other.ceiling[scope][lane]);
            }
            for class in 0..2 {
                self.increased[lane][class] += std::mem::take(&mut other.increased[lane][class]);
            }
        }
    }

    /// Counts a block that its user frees and that stays active.
    pub(crate) fn free_requested(&mut self, class: SizeClass, bytes: u64) {
        self.separate();
        self.lower(class, Lane::Allocation, 1);
        self.lower(class, Lane::AllocatedBytes, bytes);
    }

    /// Counts a block that [`free_requested`](Self::free_requested) counted and that is cached now.
    pub(crate) fn free_completed(&mut self, class: SizeClass, bytes: u64, requested: u64) {
        self.lower(class, Lane::RequestedBytes, requested);
        self.lower(class, Lane::Active, 1);
        self.lower(class, Lane::ActiveBytes, bytes);
    }

    /// Counts a free part of a segment partly in use.
    #[inline(always)]
    pub(crate) fn split_appears(&mut self, class: SizeClass, blocks: u64, bytes: u64) {
        self.raise(class, Lane::InactiveSplit, blocks);
        self.raise(class, Lane::InactiveSplitBytes, bytes);
    }

    /// Counts a part that became larger by `bytes`.
    #[inline(always)]
    pub(crate) fn split_grows(&mut self, class: SizeClass, bytes: u64) {
        self.raise(class, Lane::InactiveSplitBytes, bytes);
    }

    /// Counts a part that became smaller by `bytes`.
    #[inline(always)]
    pub(crate) fn split_shrinks(&mut self, class: SizeClass, bytes: u64) {
        self.lower(class, Lane::InactiveSplitBytes, bytes);
    }

    /// Counts such parts that are no more.
    #[inline(always)]
    pub(crate) fn split_goes(&mut self, class: SizeClass, blocks: u64, bytes: u64) {
        self.lower(class, Lane::InactiveSplit, blocks);
        self.lower(class, Lane::InactiveSplitBytes, bytes);
    }

    /// Counts an oversize block that is handed out.
    pub(crate) fn hand_out_oversize(&mut self, class: SizeClass) {
        self.raise(class, Lane::OversizeAllocation, 1);
    }

    /// Counts an oversize block that its user frees.
    pub(crate) fn free_oversize(&mut self, class: SizeClass) {
        self.lower(class, Lane::OversizeAllocation, 1);
    }

    /// The counters of a size class.
    pub(crate) fn currents(&self, class: usize) -> Lanes {
        self.scope(class)
    }

    /// One counter over both size classes.
    pub(crate) fn total(&self, lane: Lane) -> i64 {
        self.scope(ALL)[lane as usize]
    }

    /// Bytes of a size class that were freed so far.
    pub(crate) fn freed_bytes(&self, class: SizeClass) -> u64 {
        let (class, lane) = (class.index(), Lane::AllocatedBytes as usize);
        count(self.increased[lane][class] - self.current(class, lane))
    }

    /// The sums of increases of a size class.
    fn increases(&self, class: usize) -> Lanes {
        let mut lanes: Lanes = std::array::from_fn(|lane| self.increased[lane][class]);
        lanes[Lane::Active as usize] = lanes[Lane::Allocation as usize];
        lanes[Lane::ActiveBytes as usize] = lanes[Lane::AllocatedBytes as usize];
        lanes
    }

    fn with_active(&self, mut lanes: Lanes) -> Lanes {
        if !self.is_separate() {
            lanes[Lane::Active as usize] = lanes[Lane::Allocation as usize];
            lanes[Lane::ActiveBytes as usize] = lanes[Lane::AllocatedBytes as usize];
        }
        lanes
    }

    fn scope(&self, scope: usize) -> Lanes {
        self.with_active(std::array::from_fn(|lane| self.ceiling[scope][lane] - self.room[lane][scope]))
    }

    /// One counter of a scope.
    fn current(&self, scope: usize, lane: usize) -> i64 {
        let lane = self.counted_as(lane);
        self.ceiling[scope][lane] - self.room[lane][scope]
    }

    /// Whether a counter of a scope is above its ceiling.
    fn is_lane_above(&self, scope: usize, lane: usize) -> bool {
        self.room[self.counted_as(lane)][scope] < 0
    }

    /// The counter that a lane is read from: active is allocated until it is counted apart.
    fn counted_as(&self, lane: usize) -> usize {
        const ACTIVE: usize = Lane::Active as usize;
        const ACTIVE_BYTES: usize = Lane::ActiveBytes as usize;
        match lane {
            ACTIVE if !self.is_separate() => Lane::Allocation as usize,
            ACTIVE_BYTES if !self.is_separate() => Lane::AllocatedBytes as usize,
            lane => lane,
        }
    }

    /// Makes what is current the ceilings of a scope, and returns it.
    fn close(&mut self, scope: usize) -> Lanes {
        let current = self.scope(scope);
        self.ceiling[scope] = current;
        for lane in &mut self.room {
            lane[scope] = 0;
        }
        current
    }

    /// Sets the ceilings of a scope. Where active is not counted apart, the ceiling of allocated guards both.
    fn set_ceiling(&mut self, scope: usize, mut ceiling: Lanes) {
        if !self.is_separate() {
            for (allocated, active) in
                [(Lane::Allocation, Lane::Active), (Lane::AllocatedBytes, Lane::ActiveBytes)]
            {
                ceiling[allocated as usize] = ceiling[allocated as usize].min(ceiling[active as usize]);
            }
        }
        for (lane, ceiling) in ceiling.into_iter().enumerate() {
            self.room[lane][scope] += ceiling - self.ceiling[scope][lane];
        }
        self.ceiling[scope] = ceiling;
    }
}

/// The device's side of the peaks. Locked while a pool's lock is held, never the other way round.
#[derive(Debug)]
pub(crate) struct PeakBoard {
    state: Mutex<BoardState>,
}

#[derive(Debug)]
struct BoardState {
    peak: [Lanes; SCOPES],
    /// The ceilings of each pool, by the pool's number.
    granted: Vec<[Lanes; SCOPES]>,
    /// The highest values of each pool. No ceiling is above them, so no pool counts with more than it once held.
    highest: Vec<[Lanes; SCOPES]>,
    /// The pool that the room was given to last.
    rich: usize,
    /// Numbers of pools that are gone, for reuse.
    vacant: Vec<usize>,
    /// Totals of pools that are gone.
    gone: [Lanes; 2],
    /// What is taken off the running sums: their values at the last reset.
    increased_base: [Lanes; 2],
    decreased_base: [Lanes; 2],
}

/// Gives the board the statistics of pools whose lock it can have at once.
pub(crate) trait Pools {
    /// Calls `f` for every pool but number `own`, with its statistics if its lock is free, and keeps each lock
    /// until all have been visited.
    fn visit(&self, own: usize, f: &mut dyn FnMut(&mut [Visited<'_>]));

    /// Calls `f` with the statistics of one pool, if its lock is free.
    fn visit_one(&self, number: usize, f: &mut dyn FnMut(&mut PoolStats));
}

/// A pool's number, and its statistics if its lock was free.
pub(crate) type Visited<'a> = (usize, Option<&'a mut PoolStats>);

impl PeakBoard {
    pub(crate) fn new() -> Self {
        Self {
            state: Mutex::new(BoardState {
                peak: [[0; LANES]; SCOPES],
                granted: Vec::new(),
                highest: Vec::new(),
                rich: 0,
                vacant: Vec::new(),
                gone: [[0; LANES]; 2],
                increased_base: [[0; LANES]; 2],
                decreased_base: [[0; LANES]; 2],
            }),
        }
    }

    /// The number of a new pool.
    pub(crate) fn register(&self) -> usize {
        let mut state = self.state.lock();
        if let Some(number) = state.vacant.pop() {
            return number;
        }
        state.granted.push([[0; LANES]; SCOPES]);
        state.highest.push([[0; LANES]; SCOPES]);
        state.granted.len() - 1
    }

    /// A pool that is empty for good: its sums are kept.
    pub(crate) fn fold(&self, number: usize, stats: &mut PoolStats) {
        let mut state = self.state.lock();
        state.granted[number] = [[0; LANES]; SCOPES];
        state.highest[number] = [[0; LANES]; SCOPES];
        state.vacant.push(number);
        for class in 0..2 {
            for lane in 0..LANES {
                debug_assert_eq!(stats.currents(class)[lane], 0);
                state.gone[class][lane] += stats.increases(class)[lane];
            }
        }
        *stats = PoolStats { attention: stats.attention | FOLDED, ..PoolStats::new() };
    }

    /// Gives pool `to` what `from` counted, and its ceilings. Both are locked by the caller.
    pub(crate) fn merge(&self, to: usize, stats: &mut PoolStats, from: usize, other: &mut PoolStats) {
        if stats.attention & FOLDED != 0 {
            return; // taken off by another thread while this one was on its way; there is nothing in either
        }
        stats.absorb(other);
        let mut state = self.state.lock();
        for scope in 0..SCOPES {
            let granted = std::mem::take(&mut state.granted[from][scope]);
            state.highest[from][scope] = [0; LANES];
            for (lane, granted) in granted.into_iter().enumerate() {
                state.granted[to][scope][lane] += granted;
                let reached = state.granted[to][scope][lane];
                let highest = &mut state.highest[to][scope][lane];
                *highest = (*highest).max(reached);
            }
        }
    }

    /// Raises the peaks to what pool `own` now makes of them, and deals out the ceilings.
    #[cold]
    #[inline(never)]
    pub(crate) fn raise(&self, own: usize, stats: &mut PoolStats, pools: &dyn Pools) {
        stats.attention &= !ABOVE;
        let mut state = self.state.lock();
        if state.granted.len() == 1 {
            for scope in 0..SCOPES {
                for (peak, current) in state.peak[scope].iter_mut().zip(stats.scope(scope)) {
                    *peak = (*peak).max(current);
                }
            }
            for scope in 0..SCOPES {
                stats.set_ceiling(scope, state.peak[scope]);
            }
            state.granted[own] = state.peak;
            state.highest[own] = state.peak;
            return;
        }
        // Who was given the room last may still have enough of it.
        let rich = std::mem::replace(&mut state.rich, own);
        let mut taken = false;
        if rich != own {
            pools.visit_one(rich, &mut |other| taken = state.take_room(own, stats, rich, other));
        }
        if taken {
            return;
        }
        pools.visit(own, &mut |others| state.deal(own, stats, others));
    }

    /// The highest sum of allocated bytes.
    pub(crate) fn peak_allocated(&self) -> u64 {
        count(self.state.lock().peak[ALL][Lane::AllocatedBytes as usize])
    }

    /// Starts the peaks anew from what is current. All pools' statistics, locked by the caller, by number.
    pub(crate) fn reset_peaks(&self, pools: &mut [(usize, &mut PoolStats)]) {
        let mut state = self.state.lock();
        for scope in 0..SCOPES {
            let mut sum = [0; LANES];
            for (number, stats) in pools.iter_mut().filter(|(_, stats)| stats.attention & FOLDED == 0) {
                let current = stats.scope(scope);
                stats.set_ceiling(scope, current);
                state.granted[*number][scope] = current;
                state.highest[*number][scope] = current;
                for lane in 0..LANES {
                    sum[lane] += current[lane];
                }
            }
            state.peak[scope] = sum;
        }
    }

    /// Starts the running sums anew. All pools' statistics, locked by the caller.
    pub(crate) fn reset_accumulated(&self, pools: &[(usize, &PoolStats)]) {
        let mut state = self.state.lock();
        let (increased, decreased, _) = state.sums(pools);
        state.increased_base = increased;
        state.decreased_base = decreased;
    }

    /// The device's figures. All pools' statistics, locked by the caller.
    pub(crate) fn read(&self, pools: &[(usize, &PoolStats)]) -> [[Stat; SCOPES]; LANES] {
        let state = self.state.lock();
        let (increased, decreased, current) = state.sums(pools);
        std::array::from_fn(|lane| {
            let class = |class: usize| Stat {
                current: count(current[class][lane]),
                peak: count(state.peak[class][lane]),
                allocated: count(increased[class][lane] - state.increased_base[class][lane]),
                freed: count(decreased[class][lane] - state.decreased_base[class][lane]),
            };
            let (small, large) = (class(0), class(1));
            let all = Stat {
                current: small.current + large.current,
                peak: count(state.peak[ALL][lane]),
                allocated: small.allocated + large.allocated,
                freed: small.freed + large.freed,
            };
            [all, large, small]
        })
    }
}

/// A counter as the positive number that it is.
fn count(value: i64) -> u64 {
    debug_assert!(value >= 0, "a counter fell below zero");
    u64::try_from(value).unwrap_or(0)
}

impl BoardState {
    /// The short way: takes the room that one other pool has. The ceilings' sum stays what it was, so there is no new peak.
    /// False, and nothing is changed, if that is not enough.
    fn take_room(&mut self, own: usize, stats: &mut PoolStats, number: usize, other: &mut PoolStats) -> bool {
        for scope in 0..SCOPES {
            for lane in (0..LANES).filter(|&lane| stats.is_lane_above(scope, lane)) {
                let wanted = stats.current(scope, lane) - self.granted[own][scope][lane];
                if wanted > self.granted[number][scope][lane] - other.current(scope, lane) {
                    return false;
                }
            }
        }
        // Where it is enough for what is needed now, the rest is taken at once, too: of each counter as much as this pool ever
        // held.
        for scope in 0..SCOPES {
            let (mine, theirs) = (stats.scope(scope), other.scope(scope));
            let highest = &mut self.highest[own][scope];
            let (mut granted, mut left) = (self.granted[own][scope], self.granted[number][scope]);
            for lane in 0..LANES {
                highest[lane] = highest[lane].max(mine[lane]);
                let moved = (highest[lane] - granted[lane]).min(left[lane] - theirs[lane]).max(0);
                left[lane] -= moved;
                granted[lane] += moved;
            }
            other.set_ceiling(scope, left);
            stats.set_ceiling(scope, granted);
            (self.granted[own][scope], self.granted[number][scope]) = (granted, left);
        }
        true
    }

    fn deal(&mut self, own: usize, stats: &mut PoolStats, others: &mut [Visited<'_>]) {
        // Streams of one thread take turns, and their requests come in bursts: all the room goes to the one that wants
        // more. Pools that are busy at this moment belong to threads that do not take turns: each gets its part.
        let seen = others.iter().filter(|(_, stats)| stats.is_some()).count() as i64;
        let parts = if others.len() as i64 == seen { 0 } else { seen + 1 };
        for scope in 0..SCOPES {
            let mine = stats.scope(scope);
            let mut sum = mine;
            for (number, other) in others.iter_mut() {
                let granted = &mut self.granted[*number][scope];
                if let Some(other) = other {
                    *granted = other.close(scope);
                }
                for lane in 0..LANES {
                    sum[lane] += granted[lane];
                }
            }
            let (peak, highest) = (&mut self.peak[scope], &mut self.highest[own][scope]);
            let mut granted = mine;
            let mut share = [0; LANES];
            for lane in 0..LANES {
                peak[lane] = peak[lane].max(sum[lane]);
                highest[lane] = highest[lane].max(mine[lane]);
                let room = peak[lane] - sum[lane];
                share[lane] = room.checked_div(parts).unwrap_or(0);
                granted[lane] = (mine[lane] + room - share[lane] * seen).min(highest[lane]);
            }
            self.granted[own][scope] = granted;
            stats.set_ceiling(scope, granted);
            if parts == 0 {
                continue;
            }
            for (number, other) in others.iter_mut() {
                if let Some(other) = other {
                    let granted = &mut self.granted[*number][scope];
                    for lane in 0..LANES {
                        granted[lane] = (granted[lane] + share[lane]).min(self.highest[*number][scope][lane]);
                    }
                    other.set_ceiling(scope, *granted);
                }
            }
        }
    }

    /// Sums over all pools: increases, decreases, currents.
    fn sums(&self, pools: &[(usize, &PoolStats)]) -> ([Lanes; 2], [Lanes; 2], [Lanes; 2]) {
        let mut increased = self.gone;
        let mut current = [[0; LANES]; 2];
        for (_, stats) in pools {
            for class in 0..2 {
                let (increases, currents) = (stats.increases(class), stats.currents(class));
                for lane in 0..LANES {
                    increased[class][lane] += increases[lane];
                    current[class][lane] += currents[lane];
                }
            }
        }
        let decreased =
            std::array::from_fn(|class| std::array::from_fn(|lane| increased[class][lane] - current[class][lane]));
        (increased, decreased, current)
    }
}

/// One counter: its value, its highest value since the last reset, and the sums of its increases and decreases.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stat {
    /// Now.
    pub current: u64,
    /// The highest value since [`reset_peak_memory_stats`](crate::CachingAllocator::reset_peak_memory_stats).
    pub peak: u64,
    /// Sum of increases since
    /// [`reset_accumulated_memory_stats`](crate::CachingAllocator::reset_accumulated_memory_stats).
    pub allocated: u64,
    /// Sum of decreases, likewise.
    pub freed: u64,
}

impl Stat {
    pub(crate) fn increase(&mut self, by: u64) {
        self.current += by;
        self.allocated += by;
        self.peak = self.peak.max(self.current);
    }

    pub(crate) fn decrease(&mut self, by: u64) {
        self.current = self.current.checked_sub(by).unwrap_or_else(|| {
            debug_assert!(false, "a counter fell below zero");
            0
        });
        self.freed += by;
    }

    pub(crate) fn reset_peak(&mut self) {
        self.peak = self.current;
    }

    pub(crate) fn reset_accumulated(&mut self) {
        self.allocated = 0;
        self.freed = 0;
    }
}

/// One counter of the device: over all, and by size class.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StatArray {
    /// Small and large pools together.
    pub all: Stat,
    /// The large pools.
    pub large_pool: Stat,
    /// The small pools.
    pub small_pool: Stat,
}

impl StatArray {
    pub(crate) fn from_scopes([all, large_pool, small_pool]: [Stat; SCOPES]) -> Self {
        Self { all, large_pool, small_pool }
    }

    /// The same with no peak above that of `other`.
    pub(crate) fn at_most(mut self, other: &Self) -> Self {
        self.all.peak = self.all.peak.min(other.all.peak);
        self.large_pool.peak = self.large_pool.peak.min(other.large_pool.peak);
        self.small_pool.peak = self.small_pool.peak.min(other.small_pool.peak);
        self
    }

    fn of_class(&mut self, class: SizeClass) -> &mut Stat {
        match class {
            SizeClass::Small => &mut self.small_pool,
            SizeClass::Large => &mut self.large_pool,
        }
    }

    pub(crate) fn increase(&mut self, class: SizeClass, by: u64) {
        self.all.increase(by);
        self.of_class(class).increase(by);
    }

    pub(crate) fn decrease(&mut self, class: SizeClass, by: u64) {
        self.all.decrease(by);
        self.of_class(class).decrease(by);
    }

    pub(crate) fn reset_peak(&mut self) {
        [&mut self.all, &mut self.large_pool, &mut self.small_pool].into_iter().for_each(Stat::reset_peak);
    }

    pub(crate) fn reset_accumulated(&mut self) {
        [&mut self.all, &mut self.large_pool, &mut self.small_pool].into_iter().for_each(Stat::reset_accumulated);
    }
}

/// All statistics of an allocator, with the meaning of PyTorch's `torch.cuda.memory_stats()`. Bytes or counts.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct MemoryStats {
    /// Blocks held by users.
    pub allocation: StatArray,
    /// Bytes of those blocks.
    pub allocated_bytes: StatArray,
    /// Bytes that users asked for, before rounding.
    pub requested_bytes: StatArray,
    /// Blocks held by users or by queued work.
    pub active: StatArray,
    /// Bytes of those blocks.
    pub active_bytes: StatArray,
    /// Segments reserved from the driver (fixed ones; an expandable range counts as none, as in PyTorch).
    pub segment: StatArray,
    /// Bytes reserved from the driver.
    pub reserved_bytes: StatArray,
    /// Free blocks of segments that are partly in use, which cannot be given back.
    pub inactive_split: StatArray,
    /// Bytes of those blocks.
    pub inactive_split_bytes: StatArray,
    /// Blocks at or above `max_split_size`.
    pub oversize_allocations: Stat,
    /// Segments at or above `max_split_size`.
    pub oversize_segments: Stat,
    /// Driver allocations tried again after cached memory was given back.
    pub num_alloc_retries: u64,
    /// Out-of-memory errors given to users.
    pub num_ooms: u64,
    /// Times the host waited for pending frees.
    pub num_sync_all_streams: u64,
    /// Driver allocations (and maps) that succeeded.
    pub num_device_alloc: u64,
    /// Driver frees (and unmaps).
    pub num_device_free: u64,
    /// `max_split_size` in bytes; -1 if there is none.
    pub max_split_size: i64,
}

impl MemoryStats {
    /// Every figure under PyTorch's dotted key (`allocated_bytes.all.peak`), sorted by key.
    #[must_use]
    pub fn to_map(&self) -> std::collections::BTreeMap<String, i64> {
        let mut map = std::collections::BTreeMap::new();
        let signed = |value: u64| i64::try_from(value).unwrap_or(i64::MAX);
        let mut put = |prefix: String, stat: &Stat| {
            for (name, value) in [
                ("current", stat.current),
                ("peak", stat.peak),
                ("allocated", stat.allocated),
                ("freed", stat.freed),
            ] {
                map.insert(format!("{prefix}.{name}"), signed(value));
            }
        };
        for (name, array) in self.arrays() {
            put(format!("{name}.all"), &array.all);
            put(format!("{name}.large_pool"), &array.large_pool);
            put(format!("{name}.small_pool"), &array.small_pool);
        }
        put("oversize_allocations".to_owned(), &self.oversize_allocations);
        put("oversize_segments".to_owned(), &self.oversize_segments);
        for (name, value) in [
            ("num_alloc_retries", signed(self.num_alloc_retries)),
            ("num_ooms", signed(self.num_ooms)),
            ("num_sync_all_streams", signed(self.num_sync_all_streams)),
            ("num_device_alloc", signed(self.num_device_alloc)),
            ("num_device_free", signed(self.num_device_free)),
            ("max_split_size", self.max_split_size),
        ] {
            map.insert(name.to_owned(), value);
        }
        map
    }

    fn arrays(&self) -> [(&'static str, &StatArray); 9] {
        [
            ("allocation", &self.allocation),
            ("allocated_bytes", &self.allocated_bytes),
            ("requested_bytes", &self.requested_bytes),
            ("active", &self.active),
            ("active_bytes", &self.active_bytes),
            ("segment", &self.segment),
            ("reserved_bytes", &self.reserved_bytes),
            ("inactive_split", &self.inactive_split),
            ("inactive_split_bytes", &self.inactive_split_bytes),
        ]
    }
}
