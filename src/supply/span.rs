//! Spans: the contiguous mapped memory that a pool owns in an arena. What a pool does when memory comes and goes.
//!
//! The blocks of a span are linked in address order as those of a segment are, so the hot path knows no difference.

use crate::block::{BlockId, NONE, State};
use crate::pool::PoolCore;
use crate::size::SizeClass;
use std::collections::BTreeMap;

/// A pool's spans of one size class: the first block of each, by address.
pub(crate) type Spans = BTreeMap<u64, BlockId>;

impl PoolCore {
    /// Takes `start..start + bytes` out of the free block `id`: it is no longer this pool's. What is left of the block
    /// stays; the part behind is a new block, which is returned.
    pub(crate) fn cut_span(&mut self, id: BlockId, start: u64, bytes: u64) -> Option<BlockId> {
        let block = self.blocks[id].clone();
        debug_assert!(block.state() == State::Free && block.addr <= start && start + bytes <= block.end());
        let class = block.class.index();
        let end = start + bytes;
        self.free[class].remove(&mut self.blocks, id);
        let behind = (end < block.end()).then(|| {
            let behind = self.blocks.insert(end, block.end() - end, block.class);
            let record = &mut self.blocks[behind];
            record.set_state(State::Free);
            record.epoch = block.epoch;
            record.born = block.born;
            record.next = block.next;
            self.free[class].insert(&mut self.blocks, behind, block.end() - end);
            behind
        });
        // The first block behind the cut starts a span.
        let first = behind.unwrap_or(block.next);
        if block.next != NONE {
            self.blocks[block.next].prev = behind.unwrap_or(NONE);
        }
        if first != NONE {
            self.spans[class].insert(self.blocks[first].addr, first);
        }
        if start > block.addr {
            let record = &mut self.blocks[id];
            record.size = start - block.addr;
            record.next = NONE;
            self.free[class].insert(&mut self.blocks, id, start - block.addr);
        } else {
            if block.prev == NONE {
                self.spans[class].remove(&block.addr);
            } else {
                self.blocks[block.prev].next = NONE;
            }
            self.blocks.remove(id);
        }
        behind
    }

    /// Adds mapped memory as a free block, merged with its free neighbours, and returns that block.
    pub(crate) fn insert_span(&mut self, class: SizeClass, start: u64, bytes: u64, epoch: u64) -> BlockId {
        let id = self.blocks.insert(start, bytes, class);
        let block = &mut self.blocks[id];
        block.set_state(State::Claimed);
        block.epoch = epoch;
        if let Some(next) = self.spans[class.index()].remove(&(start + bytes)) {
            self.blocks[id].next = next;
            self.blocks[next].prev = id;
        }
        let before = self.spans[class.index()].range(..start).next_back().map(|(_, &first)| self.last_of(first));
        match before.filter(|&last| self.blocks[last].end() == start) {
            Some(last) => {
                self.blocks[last].next = id;
                self.blocks[id].prev = last;
            }
            None => {
                self.spans[class.index()].insert(start, id);
            }
        }
        self.cache_claimed(id, class)
    }

    /// The last block of a span.
    fn last_of(&self, mut id: BlockId) -> BlockId {
        while self.blocks[id].next != NONE {
            id = self.blocks[id].next;
        }
        id
    }

    /// Takes a free block out of the free index, for the caller to carve.
    pub(crate) fn claim(&mut self, id: BlockId) {
        let class = self.blocks[id].class.index();
        self.free[class].remove(&mut self.blocks, id);
        self.blocks[id].set_state(State::Claimed);
    }
}
