//! The free blocks of one size class, found by size: two-level segregated fit.
//!
//! Sizes are counted in granules of 512 bytes. Up to 128 granules (64 KiB) every size has a bin of its own;
//! above, each power of two is divided into 64 bins, so that the sizes in one bin differ by less than 1.6 %.
//! Two levels of bitmaps find the next bin that holds anything. Within a bin the smallest sufficient block of the
//! first [`SCAN_MAX`] is taken, the last freed among equals: the best fit, exactly so while bins are short, at a
//! cost that does not grow with the number of blocks.
//!
//! The list links live in the block records, so nothing here allocates.

use crate::block::{BlockId, BlockTable, NONE};
use crate::size::MIN_BLOCK_BYTES;

/// Blocks looked at in one bin before the search goes on with the next.
pub(crate) const SCAN_MAX: usize = 32;

/// log2 of the bins for one power of two.
const SUB_BITS: u32 = 6;
const SUBS: usize = 1 << SUB_BITS;
/// Powers of two. Sizes up to 2^60 bytes need 47 of them; a power of two of rows needs no bounds check.
const ROWS: usize = 64;
const BINS: usize = ROWS * SUBS;

/// Free blocks by size.
#[derive(Debug)]
pub(crate) struct FreeIndex {
    /// Which rows hold anything.
    rows: u64,
    /// Which bins of a row do.
    bins: [u64; ROWS],
    heads: Box<[BlockId; BINS]>,
    count: usize,
}

/// The bin of a size in bytes: row times [`SUBS`] plus place in the row.
#[inline(always)]
fn bin_of(bytes: u64) -> usize {
    let granules = bytes / MIN_BLOCK_BYTES;
    debug_assert!(granules > 0);
    // Row 0 is 1..64 granules and row 1 64..128 in steps of 1, row 2 128..256 in steps of 2, and so on. The leading
    // bit of a size in row 1 and above carries into the row's number.
    let shift = (63 - (granules | SUBS as u64).leading_zeros()) - SUB_BITS;
    ((u64::from(shift) << SUB_BITS) + (granules >> shift)) as usize & (BINS - 1)
}

impl FreeIndex {
    pub(crate) fn new() -> Self {
        let heads = vec![NONE; BINS].into_boxed_slice().try_into();
        Self { rows: 0, bins: [0; ROWS], heads: heads.unwrap_or_else(|_| unreachable!()), count: 0 }
    }

    /// Blocks in the index.
    pub(crate) fn len(&self) -> usize {
        self.count
    }

    /// Adds a block, first in its bin.
    #[inline(always)]
    pub(crate) fn insert(&mut self, blocks: &mut BlockTable, id: BlockId) {
        let block = &mut blocks[id];
        let bin = bin_of(block.size);
        let head = std::mem::replace(&mut self.heads[bin], id);
        block.bin_prev = NONE;
        block.bin_next = head;
        if head == NONE {
            self.bins[bin / SUBS] |= 1 << (bin % SUBS);
            self.rows |= 1 << (bin / SUBS);
        } else {
            blocks[head].bin_prev = id;
        }
        self.count += 1;
    }

    /// Takes a block out. Its size must be what it was when it was inserted.
    #[inline]
    pub(crate) fn remove(&mut self, blocks: &mut BlockTable, id: BlockId) {
        let block = &blocks[id];
        let (prev, next) = (block.bin_prev, block.bin_next);
        let bin = bin_of(block.size);
        self.unlink(blocks, bin, prev, next);
    }

    #[inline(always)]
    fn unlink(&mut self, blocks: &mut BlockTable, bin: usize, prev: BlockId, next: BlockId) {
        self.count -= 1;
        if next != NONE {
            blocks[next].bin_prev = prev;
        }
        if prev != NONE {
            blocks[prev].bin_next = next;
            return;
        }
        self.heads[bin] = next;
        if next == NONE {
            let row = bin / SUBS;
            self.bins[row] &= !(1 << (bin % SUBS));
            if self.bins[row] == 0 {
                self.rows &= !(1 << row);
            }
        }
    }

    /// The best fit for `bytes` and its bin, left in the index.
    #[inline(always)]
    pub(crate) fn find(&self, blocks: &BlockTable, bytes: u64) -> Option<(BlockId, usize)> {
        let bin = bin_of(bytes);
        let head = self.heads[bin];
        if head != NONE {
            let id = scan(blocks, head, bytes);
            if id != NONE {
                return Some((id, bin));
            }
        }
        // Every block of a later bin is large enough.
        let (row, sub) = (bin / SUBS, bin % SUBS);
        let later = self.bins[row] & (u64::MAX << sub << 1);
        let bin = if later != 0 {
            row * SUBS + later.trailing_zeros() as usize
        } else {
            let rows = self.rows & (u64::MAX << row << 1);
            if rows == 0 {
                return None;
            }
            let row = rows.trailing_zeros() as usize % ROWS;
            row * SUBS + self.bins[row].trailing_zeros() as usize
        };
        Some((scan(blocks, self.heads[bin % BINS], bytes), bin % BINS))
    }

    /// The smallest block that `fits`, which nothing below `bytes` does: the bin of `bytes` to its end, then
    /// [`find`](Self::find)'s way through the later ones.
    pub(crate) fn find_anywhere(
        &self,
        blocks: &BlockTable,
        bytes: u64,
        fits: impl Fn(u64) -> bool,
    ) -> Option<BlockId> {
        let first = self.list(blocks, bin_of(bytes)).filter(|&id| fits(blocks[id].size));
        first
            .min_by_key(|&id| blocks[id].size)
            .or_else(|| self.find(blocks, bytes).map(|(id, _)| id).filter(|&id| fits(blocks[id].size)))
    }

    /// Takes out what [`find`](Self::find) found.
    #[inline(always)]
    pub(crate) fn take(&mut self, blocks: &mut BlockTable, id: BlockId, bin: usize) {
        let block = &blocks[id];
        let (prev, next) = (block.bin_prev, block.bin_next);
        self.unlink(blocks, bin, prev, next);
    }

    /// The largest block's bytes; 0 if there is none. Looks at one bin.
    pub(crate) fn largest(&self, blocks: &BlockTable) -> u64 {
        if self.rows == 0 {
            return 0;
        }
        let row = 63 - self.rows.leading_zeros() as usize;
        let sub = 63 - self.bins[row].leading_zeros() as usize;
        self.list(blocks, row * SUBS + sub).map(|id| blocks[id].size).max().unwrap_or(0)
    }

    /// All blocks, by bin.
    pub(crate) fn iter<'a>(&'a self, blocks: &'a BlockTable) -> impl Iterator<Item = BlockId> + 'a {
        let rows = (0..ROWS).filter(move |&row| self.bins[row] != 0);
        rows.flat_map(|row| row * SUBS..(row + 1) * SUBS).flat_map(move |bin| self.list(blocks, bin))
    }

    fn list<'a>(&'a self, blocks: &'a BlockTable, bin: usize) -> impl Iterator<Item = BlockId> + 'a {
        let head = self.heads[bin];
        std::iter::successors((head != NONE).then_some(head), |&id| {
            let next = blocks[id].bin_next;
            (next != NONE).then_some(next)
        })
    }

    /// Checks bitmaps, bins and links. For `validate`.
    pub(crate) fn check(&self, blocks: &BlockTable) -> Result<(), String> {
        let mut count = 0;
        for row in 0..ROWS {
            if (self.rows >> row & 1 == 1) != (self.bins[row] != 0) {
                return Err(format!("row {row} of the free index disagrees with its bitmap"));
            }
            // In one comparison, since most rows are empty and `validate` is called often.
            if self.bins[row] == 0 && self.heads[row * SUBS..(row + 1) * SUBS] != [NONE; SUBS] {
                return Err(format!("row {row} of the free index holds what its bitmap does not show"));
            }
        }
        let rows = (0..ROWS).filter(|&row| self.bins[row] != 0);
        for bin in rows.flat_map(|row| row * SUBS..(row + 1) * SUBS) {
            if (self.bins[bin / SUBS] >> (bin % SUBS) & 1 == 1) != (self.heads[bin] != NONE) {
                return Err(format!("bin {bin} of the free index disagrees with its bitmap"));
            }
            let mut before = NONE;
            for id in self.list(blocks, bin) {
                let block = &blocks[id];
                if block.bin_prev != before || bin_of(block.size) != bin {
                    return Err(format!("block at {:#x} is wrong in bin {bin}", block.addr));
                }
                before = id;
                count += 1;
            }
        }
        if count == self.count {
            Ok(())
        } else {
            Err(format!("the free index counts {} and holds {count}", self.count))
        }
    }
}

/// The smallest block of at least `bytes` among the first of a list, the first among equals. A block of just that
/// size ends the scan, so in a bin of one size the head is taken.
#[inline(always)]
fn scan(blocks: &BlockTable, head: BlockId, bytes: u64) -> BlockId {
    let (mut best, mut best_excess) = (NONE, u64::MAX);
    let mut id = head;
    for _ in 0..SCAN_MAX {
        let block = &blocks[id];
        // Wraps to a huge number where the block is too small.
        let excess = block.size.wrapping_sub(bytes);
        if excess < best_excess {
            (best, best_excess) = (id, excess);
            if excess == 0 {
                break;
            }
        }
        id = block.bin_next;
        if id == NONE {
            break;
        }
    }
    if best_excess > u64::MAX / 2 { NONE } else { best }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::block::State;
    use proptest::prelude::*;

    #[test]
    fn bins_are_ordered_and_exact_up_to_64_kib() {
        let mut last = 0;
        for granules in 1..=1_000_000u64 {
            let bin = bin_of(granules * 512);
            assert!(bin == last || bin == last + 1, "{granules}: {bin} after {last}");
            assert!(granules > 128 || bin == last + 1, "{granules} shares a bin");
            last = bin;
        }
        assert!(bin_of(1 << 60) < BINS - SUBS);
    }

    fn table(sizes: &[u64]) -> (BlockTable, FreeIndex) {
        let (mut blocks, mut index) = (BlockTable::new(), FreeIndex::new());
        let mut addr = 1 << 30;
        for &size in sizes {
            let id = blocks.insert(addr, size, 0, crate::size::SizeClass::Large);
            blocks[id].set_state(State::Free);
            index.insert(&mut blocks, id);
            addr += size;
        }
        (blocks, index)
    }

    proptest! {
        // With fewer blocks than a scan looks at, the answer is the best fit.
        #[test]
        fn finds_the_best_fit(sizes in prop::collection::vec(1u64..40_000, 1..=SCAN_MAX), want in 1u64..40_000) {
            let sizes: Vec<u64> = sizes.into_iter().map(|g| g * 512).collect();
            let (mut blocks, mut index) = table(&sizes);
            index.check(&blocks).map_err(TestCaseError::fail)?;
            let best = index.iter(&blocks).map(|id| blocks[id].size).filter(|size| *size >= want * 512).min();
            let found = index.find(&blocks, want * 512);
            prop_assert_eq!(found.map(|(id, _)| blocks[id].size), best);
            prop_assert_eq!(index.largest(&blocks), sizes.iter().copied().max().unwrap_or(0));
            let ids: Vec<_> = index.iter(&blocks).collect();
            for id in ids {
                index.remove(&mut blocks, id);
                index.check(&blocks).map_err(TestCaseError::fail)?;
            }
            prop_assert_eq!(index.len(), 0);
        }
    }
}
