//! The block in front: where a stream's frees and requests of one size take turns, a freed block is not merged at once.
//!
//! A workspace that is taken and dropped again and again would be cut out of its surroundings and merged with them each
//! time. Instead the block that was freed last may stay in front of the free index: counted as cached, but neither merged
//! nor listed. The next operation either hands it out again, and only if best fit would have chosen just this place, or
//! [settles](PoolCore::settle) it first. Whoever else locks the pool settles it, too ([`StreamPool::lock`]). So no placement
//! and no counter is any other than it would be without.
//!
//! A large block of a fixed segment that is larger than its request, as its rest was too small to be split off, is never
//! handed out from there.
//!
//! Settling costs a little more than merging at once. So a pool that seldom hands out what is in front stops leaving blocks
//! there, and tries again when it has grown: then what the program does may have changed.
//!
//! [`StreamPool::lock`]: crate::stream::StreamPool::lock

use crate::block::{Block, BlockId, NONE, State};
use crate::pool::{BlockHandle, Kind, PoolCore};
use crate::size::{MIN_BLOCK_BYTES, SizeClass, round_to_granule};
use crate::stats::SEPARATE;

/// In [`PoolStats::attention`](crate::stats::PoolStats::attention): freed blocks stay in front.
pub(crate) const FRONT: u8 = 16;

/// Misses that a pool begins with, that each hit adds, and that it saves up at most: below one hit in five it stops.
const CREDIT_AT_FIRST: u8 = 8;
const CREDIT_OF_A_HIT: u8 = 4;
const CREDIT_MAX: u8 = 16;

/// See the module's text.
#[derive(Debug)]
pub(crate) struct Front {
    /// The block in front, live in its record; [`NONE`] if there is none.
    block: BlockId,
    /// The block that was handed out from the front last, if nothing has changed since: its place is still the best for
    /// its size.
    best: BlockId,
    /// With [`FRONT`], how many misses are left.
    credit: u8,
}

impl Front {
    pub(crate) fn new() -> Self {
        Self { block: NONE, best: NONE, credit: 0 }
    }

    /// Whether there is a block.
    pub(crate) fn is_some(&self) -> bool {
        self.block != NONE
    }
}

impl PoolCore {
    /// Leaves freed blocks in front from here on, where the rules permit.
    pub(crate) fn try_front(&mut self) {
        if self.rules.may_front() && !self.keeps_front() {
            self.stats.attention |= FRONT;
            self.front.credit = CREDIT_AT_FIRST;
        }
    }

    /// The block in front, if [`take_plain`](Self::take_plain) would choose its place.
    #[inline(always)]
    pub(crate) fn take_front<K: Kind>(&mut self, requested: u64) -> Option<BlockHandle> {
        let id = self.front.block;
        let fits = id != NONE
            && self.blocks[id].size == round_to_granule(requested)
            && (self.front.best == id || self.is_best::<K>(id));
        fits.then(|| self.hand_out_front::<K>(id, requested))
    }

    /// [`free`](Self::free) of a block that stays in front, if it may.
    #[inline(always)]
    pub(crate) fn free_to_front<K: Kind>(&mut self, id: BlockId, now: u64) -> bool {
        let Block { size, requested, class, prev, next, special, .. } = self.blocks[id];
        // With a free block before it, it would begin there.
        if self.stats.attention & !SEPARATE != FRONT
            || self.front.is_some()
            || special != 0
            || self.blocks.is_free(prev)
        {
            return false;
        }
        self.stats.free::<true>(class, size, requested);
        if !K::EXPANDABLE {
            let (neighbours, size_behind, behind) = self.behind(next);
            self.count_cached(class, size, neighbours, size + size_behind, (prev | behind) == NONE);
        }
        self.blocks[id].epoch = now;
        self.front.block = id;
        if self.front.best != id {
            self.front.best = NONE;
        }
        true
    }

    /// Settles the pool for another operation. `counts`: it is a miss, as nothing came of the block in front, or nothing
    /// could be left there.
    pub(crate) fn pass_front(&mut self, counts: bool) {
        self.settle();
        if counts && self.keeps_front() {
            self.front.credit -= 1;
            if self.front.credit == 0 {
                self.stats.attention &= !FRONT;
            }
        }
    }

    /// Merges and lists the block in front, if there is one. The pool is then as it would be without.
    #[inline]
    pub(crate) fn settle(&mut self) {
        self.front.best = NONE;
        if self.front.is_some() {
            self.settle_front();
        }
    }

    #[inline(never)]
    fn settle_front(&mut self) {
        let id = std::mem::replace(&mut self.front.block, NONE);
        let Block { size, class, epoch, .. } = self.blocks[id];
        self.coalesce::<false>(id, size, class, epoch);
    }

    /// What merging with the block `next` would add: how many blocks, their bytes, and what lies behind then.
    #[inline(always)]
    fn behind(&self, next: BlockId) -> (u64, u64, BlockId) {
        let Block { size, next: behind, .. } = self.blocks[next];
        if self.blocks.is_free(next) { (1, size, behind) } else { (0, 0, next) }
    }

    /// Whether a request for all of the block in front would get just that, were it merged with what is free behind it.
    #[inline(always)]
    fn is_best<K: Kind>(&self, id: BlockId) -> bool {
        let Block { size, class, prev, next, .. } = self.blocks[id];
        if !self.blocks.is_free(next) {
            return true; // it fits exactly, and was freed last
        }
        let Block { size: rest, next: behind, .. } = self.blocks[next];
        let is_cut_here = if K::EXPANDABLE {
            class == SizeClass::Small || !self.is_older_behind(prev, behind)
        } else {
            rest >= self.rules.split_remainder(class)
        };
        if !is_cut_here {
            return false;
        }
        let free = &self.free[class.index()];
        let other = match free.find(&self.blocks, size) {
            Some(found) if found == next => free.after(&self.blocks, next),
            other => other,
        };
        other.is_none_or(|other| self.blocks[other].size >= size + rest)
    }

    /// Lists a free block as the last that was freed.
    #[cold]
    #[inline(never)]
    fn freshen(&mut self, id: BlockId, class: SizeClass) {
        let free = &mut self.free[class.index()];
        free.remove(&mut self.blocks, id);
        let size = self.blocks[id].size;
        free.insert(&mut self.blocks, id, size);
    }

    #[inline(always)]
    fn hand_out_front<K: Kind>(&mut self, id: BlockId, requested: u64) -> BlockHandle {
        self.front.block = NONE;
        let known = std::mem::replace(&mut self.front.best, id) == id;
        self.front.credit = (self.front.credit + CREDIT_OF_A_HIT).min(CREDIT_MAX);
        self.searches = self.searches.wrapping_add(1);
        let Block { addr, size, class, prev, next, epoch, .. } = self.blocks[id];
        debug_assert!(!self.is_off_the_hot_path(), "what sets this settles first");
        let (neighbours, rest, behind) = self.behind(next);
        let part = (prev | behind) != NONE;
        if neighbours == 1 {
            // The rest of a block that was cut just now.
            (self.blocks[next].born, self.blocks[next].epoch) = (self.searches, epoch);
            if !known && self.blocks[next].bin_prev != NONE {
                self.freshen(next, class); // which comes first among equals
            }
            if !K::EXPANDABLE {
                self.count_split(class, size, rest, part);
            }
        } else if part && !K::EXPANDABLE {
            self.stats.split_goes(class, 1, size);
        }
        let block = &mut self.blocks[id];
        block.born = self.searches;
        block.requested = requested;
        debug_assert!(block.state() == State::Live && size - MIN_BLOCK_BYTES < requested && requested <= size);
        self.stats.hand_out::<true>(class, size, requested);
        BlockHandle { addr, tag: u64::from(id) }
    }
}

#[cfg(all(test, not(vramalloc_shuttle)))]
mod tests {
    use super::*;
    use crate::driver::sim::{SimDriver, Work};
    use crate::{Allocation, BlockState, CachingAllocator, Config, Driver, Segments, Stream};
    use proptest::prelude::*;
    use std::sync::Arc;

    const KIB: u64 = 1 << 10;
    const MIB: u64 = 1 << 20;

    fn world(expandable: bool) -> (CachingAllocator, Stream) {
        let (allocator, stream, _) = world_of(expandable);
        (allocator, stream)
    }

    fn world_of(expandable: bool) -> (CachingAllocator, Stream, Arc<SimDriver>) {
        let sim = SimDriver::builder().capacity(1 << 32).build();
        let stream = sim.create_stream();
        let segments = if expandable { Segments::Expandable } else { Segments::Fixed };
        let driver = Arc::clone(&sim) as Arc<dyn Driver>;
        let allocator = CachingAllocator::new(driver, Config::default().segments(segments)).unwrap();
        let stream = allocator.stream(stream).unwrap();
        (allocator, stream, sim)
    }

    /// Makes the pool leave blocks in front whatever comes of it, or never.
    fn set(stream: &Stream, on: bool) {
        let mut core = stream.pool.try_lock_stats().unwrap();
        if on {
            core.stats.attention |= FRONT;
            core.front.credit = CREDIT_MAX;
        } else {
            core.settle();
            core.stats.attention &= !FRONT;
        }
        stream.pool.attend(&mut core);
    }

    /// Address, size and state of every block.
    fn blocks(allocator: &CachingAllocator) -> Vec<(u64, u64, u64, BlockState)> {
        let segments = allocator.snapshot().segments;
        let blocks = segments.iter().flat_map(|segment| &segment.blocks);
        blocks.map(|block| (block.address.0, block.bytes, block.requested, block.state)).collect()
    }

    fn is_front(stream: &Stream) -> bool {
        stream.pool.try_lock_stats().unwrap().front.is_some()
    }

    fn is_on(stream: &Stream) -> bool {
        stream.pool.try_lock_stats().unwrap().keeps_front()
    }

    #[test]
    fn a_workspace_stays_in_front() {
        for expandable in [false, true] {
            let (allocator, stream) = world(expandable);
            let first = allocator.alloc(MIB, &stream).unwrap();
            let ptr = first.ptr();
            drop(first);
            assert!(is_front(&stream));
            for bytes in [MIB, MIB - 511, MIB] {
                let again = allocator.alloc(bytes, &stream).unwrap();
                assert_eq!((again.ptr(), again.bytes(), again.block_bytes()), (ptr, bytes, MIB));
                assert!(!is_front(&stream));
                assert_eq!(allocator.memory_stats().requested_bytes.all.current, bytes);
            }
        }
    }

    #[test]
    fn whoever_looks_sees_it_merged() {
        let (allocator, stream) = world(false);
        drop(allocator.alloc(MIB, &stream).unwrap());
        assert!(is_front(&stream));
        let blocks: Vec<_> = allocator.snapshot().segments.iter().map(|segment| segment.blocks.len()).collect();
        assert_eq!(blocks, [1]);
        drop(allocator.alloc(MIB, &stream).unwrap());
        assert!(is_front(&stream));
        assert_eq!(allocator.empty_cache().unwrap(), 2 * MIB);
        allocator.validate().unwrap();
    }

    #[test]
    fn a_pool_without_hits_stops_and_tries_again_when_it_grows() {
        let (allocator, stream) = world(false);
        let _held = allocator.alloc(MIB, &stream).unwrap();
        assert!(is_on(&stream));
        for round in 0..u64::from(CREDIT_AT_FIRST) {
            assert!(is_on(&stream), "{round}");
            drop(allocator.alloc((round + 1) * KIB, &stream).unwrap());
        }
        drop(allocator.alloc(KIB, &stream).unwrap());
        assert!(!is_on(&stream));
        drop(allocator.alloc(KIB, &stream).unwrap());
        assert!(!is_front(&stream));
        let _grown = allocator.alloc(30 * MIB, &stream).unwrap();
        assert!(is_on(&stream));
    }

    proptest! {
        // The same program with and without, on two streams of which one has unfinished work: the same addresses, the same
        // statistics.
        #[test]
        fn nothing_is_placed_elsewhere(
            steps in prop::collection::vec((0u8..20, 0usize..8, any::<prop::sample::Index>()), 1..300),
            expandable: bool,
        ) {
            const SIZES: [u64; 8] = [512, KIB, 20 * KIB, 700 * KIB, MIB, 3 * MIB / 2, 12 * MIB, 24 * MIB];
            let worlds = [world_of(expandable), world_of(expandable)];
            let others = worlds.each_ref().map(|(allocator, ..)| allocator.default_stream().unwrap());
            let mut held: Vec<[Allocation; 2]> = Vec::new();
            let alloc = |bytes: u64, on_other: bool| {
                [0, 1].map(|world| {
                    let stream = if on_other { &others[world] } else { &worlds[world].1 };
                    worlds[world].0.alloc(bytes, stream).unwrap()
                })
            };
            for (step, size, which) in steps {
                for ((_, stream, _), on) in worlds.iter().zip([false, true]) {
                    set(stream, on);
                }
                match step {
                    0..8 => {
                        let pair = alloc(SIZES[size], step == 0);
                        prop_assert_eq!(pair[0].ptr(), pair[1].ptr());
                        held.push(pair);
                    }
                    // The last one mostly, and of the same size again.
                    8..12 if !held.is_empty() => {
                        let bytes = held.pop().unwrap()[0].bytes();
                        let again = alloc(bytes, false);
                        prop_assert_eq!(again[0].ptr(), again[1].ptr());
                        held.push(again);
                    }
                    12..16 if !held.is_empty() => drop(held.swap_remove(which.index(held.len()))),
                    16 if !held.is_empty() => {
                        let pair = &held[which.index(held.len())];
                        for (allocation, other) in pair.iter().zip(&others) {
                            allocation.record_stream(other).unwrap();
                        }
                    }
                    17..19 if !held.is_empty() => {
                        for ((_, _, sim), allocation) in worlds.iter().zip(held.last().unwrap()) {
                            let work = Work::writing(allocation.ptr(), 512).lasting(1_000_000 * (1 + size as u64));
                            sim.launch(allocation.stream().key().handle, work).unwrap();
                        }
                    }
                    _ => {
                        let [a, b] = worlds.each_ref().map(|(allocator, ..)| {
                            allocator.validate().unwrap();
                            (allocator.memory_stats(), blocks(allocator))
                        });
                        prop_assert_eq!(a, b);
                    }
                }
            }
            drop(held);
            for (allocator, ..) in &worlds {
                allocator.validate().unwrap();
                prop_assert_eq!(allocator.memory_allocated(), 0);
            }
            prop_assert_eq!(worlds[0].0.memory_stats(), worlds[1].0.memory_stats());
        }
    }
}
