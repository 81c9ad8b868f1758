//! Magazines: freed blocks that threads keep at hand where several of them use one stream.
//!
//! A stream's pool has one lock. As long as its threads do not meet at it, it is the cheapest there is. Once they do, the
//! pool is given a set of magazines, one for a few threads each, with a lock of its own: a freed block goes into the
//! thread's magazine and the next request of just that size takes it from there. Towards the pool such a block is live.
//! What changed hands in a magazine is counted there; both are put back into the pool, by [`Magazine::empty`], before
//! anybody looks at the pool as a whole and before it grows.
//!
//! Blocks are kept by the bytes that were asked for, not by their rounded size, so that a block record says the truth
//! about its user without being touched.

use crate::block::NONE;
use crate::pool::BlockHandle;
use crate::stats::PoolStats;

/// Sizes that are kept at a time, and blocks of each.
const SLOTS: usize = 64;
const DEPTH: usize = 7;

/// Blocks of one requested size.
#[derive(Clone, Copy, Debug)]
struct Slot {
    requested: u64,
    count: usize,
    blocks: [BlockHandle; DEPTH],
}

const VACANT: Slot = Slot { requested: 0, count: 0, blocks: [BlockHandle::EMPTY; DEPTH] };

/// See the module's text.
#[derive(Debug)]
pub(crate) struct Magazine {
    /// Whether it is in use; a closed one stays empty.
    pub(crate) open: bool,
    /// What was handed out less what was freed here.
    pub(crate) stats: PoolStats,
    slots: Vec<Slot>,
}

impl Magazine {
    pub(crate) fn new() -> Self {
        Self { open: false, stats: PoolStats::new(), slots: vec![VACANT; SLOTS] }
    }

    #[inline]
    fn slot(&mut self, requested: u64) -> &mut Slot {
        let hash = requested.wrapping_mul(0x9E37_79B9_7F4A_7C15);
        &mut self.slots[(hash >> 58) as usize % SLOTS]
    }

    /// A block for a request of that size, or [`BlockHandle::EMPTY`].
    #[inline]
    pub(crate) fn take(&mut self, requested: u64) -> BlockHandle {
        let slot = self.slot(requested);
        if slot.requested != requested || slot.count == 0 {
            return BlockHandle::EMPTY;
        }
        slot.count -= 1;
        slot.blocks[slot.count % DEPTH]
    }

    /// Keeps a block; false if there is no room.
    #[inline]
    pub(crate) fn put(&mut self, requested: u64, block: BlockHandle) -> bool {
        debug_assert!(self.open && block.id() != NONE);
        let slot = self.slot(requested);
        if slot.requested != requested {
            if slot.count > 0 {
                return false;
            }
            slot.requested = requested;
        }
        if slot.count == DEPTH {
            return false;
        }
        slot.blocks[slot.count] = block;
        slot.count += 1;
        true
    }

    /// Blocks in it.
    #[cfg(test)]
    pub(crate) fn len(&self) -> usize {
        self.slots.iter().map(|slot| slot.count).sum()
    }

    /// Takes out everything.
    pub(crate) fn empty(&mut self) -> impl Iterator<Item = BlockHandle> + '_ {
        self.slots.iter_mut().flat_map(|slot| {
            let slot = std::mem::replace(slot, VACANT);
            slot.blocks.into_iter().take(slot.count)
        })
    }
}
