//! Streams that several threads use at once: how a pool comes by its [magazines](crate::magazine) and is rid of them.
//!
//! Locks are taken in this order: the pool's core, its magazines in the order of their place, the board of peaks. A
//! thread at a magazine lets go of it before it turns to the core.

use crate::block::NONE;
use crate::device::Device;
use crate::magazine::Magazine;
use crate::pool::{BlockHandle, PoolCore};
use crate::process;
use crate::size::{SizeClass, round_to_granule};
use crate::stream::{Hot, LastReference, StreamPool};
use crate::sync::{Ordering, PoolGuard, PoolMutex, thread_number};

/// Magazines of a pool.
const MAGAZINES: usize = 32;
/// So often must threads have met at the pool's lock; under the model checker, which makes few steps, once.
const MEETINGS: u64 = if cfg!(vramalloc_shuttle) { 0 } else { 64 };

/// One magazine, on cache lines of its own.
#[repr(align(128))]
pub(crate) struct Shelf {
    pub(crate) magazine: PoolMutex<Magazine>,
    /// Its number on the board of peaks.
    pub(crate) number: usize,
}

/// A pool's magazines.
pub(crate) type Shelves = Box<[Shelf]>;

/// A pool with all its magazines, locked: they are empty, and the pool counts for all.
pub(crate) struct Whole<'a> {
    core: PoolGuard<'a, PoolCore>,
    magazines: Vec<PoolGuard<'a, Magazine>>,
}

impl std::ops::Deref for Whole<'_> {
    type Target = PoolCore;

    fn deref(&self) -> &PoolCore {
        &self.core
    }
}

impl std::ops::DerefMut for Whole<'_> {
    fn deref_mut(&mut self) -> &mut PoolCore {
        &mut self.core
    }
}

impl StreamPool {
    /// Notes that threads met at the pool's lock; from some number on the pool has magazines.
    #[cold]
    #[inline(never)]
    pub(crate) fn met(&self) {
        if self.meetings.fetch_add(1, Ordering::Relaxed) % (MEETINGS + 1) == MEETINGS {
            self.share();
        }
    }

    /// Gives the pool magazines.
    fn share(&self) {
        let core = self.lock();
        if core.is_off_the_hot_path() || self.plain_bytes == 0 {
            return;
        }
        let shelves = self.shelves.get_or_init(|| {
            let shelf = |_| {
                let number = self.device.peaks.register();
                Shelf { magazine: PoolMutex::new(Magazine::new()), number }
            };
            (0..MAGAZINES).map(shelf).collect()
        });
        for shelf in shelves {
            shelf.magazine.lock().open = true;
        }
        self.device.note_shared();
        self.set_kind(Hot::Shared);
        drop(core);
    }

    /// Ends the use of magazines.
    pub(crate) fn unshare(&self, core: &mut PoolCore) {
        let mut magazines = self.empty_magazines(core);
        self.close_magazines(&mut magazines);
        self.attend(core);
    }

    /// The same for a pool that is locked with them.
    pub(crate) fn unshare_whole(&self, whole: &mut Whole<'_>) {
        self.close_magazines(&mut whole.magazines);
        self.attend(&mut whole.core);
    }

    fn close_magazines(&self, magazines: &mut [PoolGuard<'_, Magazine>]) {
        self.set_kind(self.base_kind());
        magazines.iter_mut().for_each(|magazine| magazine.open = false);
    }

    /// The pool as it would be without magazines, for as long as the result is held.
    pub(crate) fn lock_whole(&self) -> Whole<'_> {
        let mut core = self.lock();
        let magazines = self.empty_magazines(&mut core);
        Whole { core, magazines }
    }

    /// Puts what the magazines hold and what they counted into the pool; they are left empty and locked.
    fn empty_magazines(&self, core: &mut PoolCore) -> Vec<PoolGuard<'_, Magazine>> {
        let Some(shelves) = self.shelves.get() else { return Vec::new() };
        let mut magazines: Vec<_> = shelves.iter().map(|shelf| shelf.magazine.lock()).collect();
        for (magazine, shelf) in magazines.iter_mut().zip(shelves) {
            // With that the pool has counted the blocks as freed.
            self.device.peaks.merge(self.number, &mut core.stats, shelf.number, &mut magazine.stats);
            for block in magazine.empty() {
                core.cache_kept(block.id(), self.clock.now());
            }
        }
        self.attend(core);
        magazines
    }

    /// The calling thread's magazine, if it is in use, and its number.
    fn magazine(&self) -> Option<(PoolGuard<'_, Magazine>, usize)> {
        let shelf = &self.shelves.get()?[thread_number() % MAGAZINES];
        let magazine = shelf.magazine.lock();
        magazine.open.then_some((magazine, shelf.number))
    }

    /// [`take_plain`](Self::take_plain) of a pool with magazines.
    #[inline(never)]
    pub(crate) fn take_shared(&self, bytes: u64) -> BlockHandle {
        if let Some((mut magazine, number)) = self.magazine() {
            let magazine = &mut *magazine;
            let block = magazine.take(bytes);
            if block.id() != NONE {
                let class = SizeClass::of(round_to_granule(bytes));
                magazine.stats.hand_out::<true>(class, block.block_bytes(bytes), bytes);
                if magazine.stats.is_above() {
                    self.device.peaks.raise(number, &mut magazine.stats, &*self.device);
                }
                return block;
            }
        }
        self.take_by_rules(bytes)
    }

    /// [`free`](Self::free) of a pool with magazines.
    #[inline(never)]
    pub(crate) fn free_shared(&self, requested: u64, block: BlockHandle) -> LastReference {
        if process::forks() != self.forks {
            return None;
        }
        // An ordinary request can have an oversize block, which is counted apart.
        if block.block_bytes(requested) <= self.plain_bytes
            && !block.is_recorded()
            && let Some((mut magazine, _)) = self.magazine()
            && magazine.put(requested, block)
        {
            let class = SizeClass::of(round_to_granule(requested));
            magazine.stats.free::<true>(class, block.block_bytes(requested), requested);
            return None;
        }
        self.free_by_rules(block.id())
    }
}

impl Device {
    /// Empties the magazines of all pools, where there are any.
    pub(crate) fn empty_magazines(&self) {
        if self.has_shared() {
            for pool in self.pools() {
                drop(pool.lock_whole());
            }
        }
    }
}

#[cfg(all(test, not(vramalloc_shuttle)))]
mod tests {
    use crate::driver::sim::SimDriver;
    use crate::{Allocation, CachingAllocator, Config, Error, Limit, Segments, Stream};
    use proptest::prelude::*;

    const MIB: u64 = 1 << 20;

    fn world(config: Config) -> (CachingAllocator, Stream) {
        let sim = SimDriver::builder().capacity(1 << 30).build();
        let stream = sim.create_stream();
        let allocator = CachingAllocator::new(sim, config).unwrap();
        let stream = allocator.stream(stream).unwrap();
        (allocator, stream)
    }

    fn kept(stream: &Stream) -> usize {
        let shelves = stream.pool.shelves.get().unwrap();
        shelves.iter().map(|shelf| shelf.magazine.lock().len()).sum()
    }

    #[test]
    fn a_freed_block_is_handed_out_again_without_the_pool() {
        let (allocator, stream) = world(Config::default());
        stream.pool.share();
        let first = allocator.alloc(5000, &stream).unwrap();
        let at = first.ptr();
        drop(first);
        assert_eq!(kept(&stream), 1);
        let core = stream.pool.lock(); // with the pool locked
        let again = allocator.alloc(5000, &stream).unwrap();
        assert_eq!(again.ptr(), at);
        drop(again);
        drop(core);
        assert_eq!((allocator.memory_allocated(), kept(&stream)), (0, 0), "whoever looks empties the magazines");
        allocator.validate().unwrap();
    }

    #[test]
    fn what_is_kept_is_found_before_the_pool_grows() {
        let (allocator, stream) = world(Config::default().limit(Limit::Bytes(40 * MIB)));
        stream.pool.share();
        let blocks: Vec<Allocation> = (0..2).map(|_| allocator.alloc(20 * MIB, &stream).unwrap()).collect();
        drop(blocks);
        assert_eq!(kept(&stream), 2);
        let other = allocator.alloc(19 * MIB, &stream).unwrap();
        assert_eq!(allocator.memory_reserved(), 40 * MIB);
        drop(other);
        assert_eq!(allocator.empty_cache().unwrap(), 40 * MIB);
    }

    #[test]
    fn a_block_that_other_streams_use_waits_for_them() {
        let (allocator, stream) = world(Config::default());
        stream.pool.share();
        let other = allocator.default_stream().unwrap();
        let block = allocator.alloc(MIB, &stream).unwrap();
        block.record_stream(&other).unwrap();
        drop(block);
        assert_eq!(kept(&stream), 0);
        allocator.validate().unwrap();
    }

    #[test]
    fn a_second_free_and_a_foreign_address_are_told_apart() {
        let (allocator, stream) = world(Config::default());
        stream.pool.share();
        let ptr = allocator.alloc_raw(MIB, &stream).unwrap();
        allocator.free_raw(ptr).unwrap();
        assert!(matches!(allocator.free_raw(ptr), Err(Error::NotLive { .. })));
    }

    #[test]
    fn magazines_end_with_the_stream_and_with_the_allocator() {
        let (allocator, stream) = world(Config::default());
        stream.pool.share();
        let held = allocator.alloc(MIB, &stream).unwrap();
        drop(allocator.alloc(2 * MIB, &stream).unwrap());
        allocator.retire_stream(&stream).unwrap();
        assert_eq!(kept(&stream), 0);
        drop(held);
        assert_eq!(kept(&stream), 0);
        allocator.validate().unwrap();

        let (allocator, stream) = world(Config::default());
        let driver = std::sync::Arc::clone(allocator.driver());
        stream.pool.share();
        let held = allocator.alloc(MIB, &stream).unwrap();
        drop(allocator.alloc(2 * MIB, &stream).unwrap());
        drop((allocator, stream));
        assert!(driver.memory_info().unwrap().free_bytes < driver.capabilities().total_bytes);
        drop(held);
        assert_eq!(driver.memory_info().unwrap().free_bytes, driver.capabilities().total_bytes);
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]
        // The same program with and without magazines: the same is counted, and nothing overlaps.
        #[test]
        fn counts_are_those_of_a_pool_without(
            steps in prop::collection::vec((0u8..8, 0usize..12, 0usize..64), 1..400),
            expandable: bool,
        ) {
            const SIZES: [u64; 12] = [1, 512, 513, 4096, 5000, 65536, 300_000, MIB, MIB + 1, 3 * MIB, 12 * MIB, 25 * MIB];
            let config = || {
                Config::default().segments(if expandable { Segments::Expandable } else { Segments::Fixed })
            };
            let (plain, shared) = (world(config()), world(config()));
            shared.1.pool.share();
            let mut held: Vec<(Allocation, Allocation)> = Vec::new();
            for (step, size, which) in steps {
                match step {
                    0..4 => held.push((
                        plain.0.alloc(SIZES[size], &plain.1).unwrap(),
                        shared.0.alloc(SIZES[size], &shared.1).unwrap(),
                    )),
                    4..7 if !held.is_empty() => drop(held.swap_remove(which % held.len())),
                    _ => {
                        shared.0.validate().unwrap();
                        let (a, b) = (plain.0.memory_stats(), shared.0.memory_stats());
                        prop_assert_eq!(a.allocation, b.allocation);
                        prop_assert_eq!(a.active, b.active);
                        prop_assert_eq!(a.requested_bytes, b.requested_bytes);
                        prop_assert!(b.allocated_bytes.all.peak >= b.allocated_bytes.all.current);
                    }
                }
                let mut ranges: Vec<_> = held.iter().map(|(_, b)| (b.ptr().0, b.ptr().0 + b.block_bytes())).collect();
                ranges.sort_unstable();
                prop_assert!(ranges.windows(2).all(|pair| pair[0].1 <= pair[1].0), "two blocks overlap");
            }
            drop(held);
            prop_assert_eq!(shared.0.memory_allocated(), 0);
            shared.0.validate().unwrap();
            shared.0.empty_cache().unwrap();
            prop_assert_eq!(shared.0.memory_reserved(), 0);
        }
    }
}
