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
use crate::stats::ABOVE;
use crate::stream::{Hot, LastReference, StreamPool};
use crate::sync::{Ordering, PoolGuard, PoolMutex, thread_number};

/// Magazines of a pool.
const MAGAZINES: usize = 32;
/// So often must threads have met at the pool's lock.
const MEETINGS: u64 = 64;

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
    _magazines: Vec<PoolGuard<'a, Magazine>>,
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
        if self.meetings.fetch_add(1, Ordering::Relaxed) == MEETINGS {
            self.share();
        }
    }

    fn share(&self) {
        let shelves = self.shelves.get_or_init(|| {
            let shelf = |_| {
                let number = self.device.peaks.register();
                Shelf { magazine: PoolMutex::new(Magazine::new()), number }
            };
            (0..MAGAZINES).map(shelf).collect()
        });
        let core = self.core.lock();
        if core.stats.attention & !ABOVE != 0 || self.plain_bytes == 0 {
            return; // on its way out
        }
        for shelf in shelves {
            shelf.magazine.lock().open = true;
        }
        self.device.note_shared();
        self.set_kind(Hot::Shared);
        drop(core);
    }

    /// Ends the use of magazines, for good.
    pub(crate) fn unshare(&self, core: &mut PoolCore) {
        self.set_kind(self.base_kind());
        for mut magazine in self.empty_magazines(core) {
            magazine.open = false;
        }
    }

    /// The pool as it would be without magazines, for as long as the result is held.
    pub(crate) fn lock_whole(&self) -> Whole<'_> {
        let mut core = self.core.lock();
        let magazines = self.empty_magazines(&mut core);
        Whole { core, _magazines: magazines }
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
        magazines
    }

    /// The calling thread's magazine, if it is in use, and its number.
    fn magazine(&self) -> Option<(PoolGuard<'_, Magazine>, usize)> {
        let shelf = &self.shelves.get()?[thread_number() % MAGAZINES];
        let magazine = shelf.magazine.lock();
        magazine.open.then_some((magazine, shelf.number))
    }

    /// [`take_plain`](Self::take_plain) of a pool with magazines.
    pub(crate) fn take_shared(&self, bytes: u64) -> BlockHandle {
        if let Some((mut magazine, number)) = self.magazine() {
            let magazine = &mut *magazine;
            let block = magazine.take(bytes);
            if block.id() != NONE {
                let class = SizeClass::of(round_to_granule(bytes));
                magazine.stats.hand_out(class, block.block_bytes(bytes), bytes);
                if magazine.stats.is_above() {
                    self.device.peaks.raise(number, &mut magazine.stats, &*self.device);
                }
                return block;
            }
        }
        self.take_by(self.base_kind(), bytes)
    }

    /// [`free`](Self::free) of a pool with magazines.
    pub(crate) fn free_shared(&self, requested: u64, block: BlockHandle) -> LastReference {
        if process::forks() != self.forks {
            return None;
        }
        if requested <= self.plain_bytes && !block.is_recorded() {
            if let Some((mut magazine, _)) = self.magazine() {
                if magazine.put(requested, block) {
                    let class = SizeClass::of(round_to_granule(requested));
                    magazine.stats.free(class, block.block_bytes(requested), requested);
                    return None;
                }
            }
        }
        self.free_by(self.base_kind(), block.id())
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
