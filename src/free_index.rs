//! The free blocks of one size class, found by size: two-level segregated fit.
//!
//! Each power of two is divided into 64 bins, so that up to 64 KiB every size (a multiple of 512 bytes) has a bin of its
//! own, and above, the sizes in one bin differ by less than 1.6 %. Two levels of
//! bitmaps (a bit a bin, above it a bit a row of 64 bins) find the next bin that holds anything. A bin is kept in the order of size,
//! the last freed first among equals, so that its first block is the best fit. An insertion looks at no more than
//! [`SCAN_MAX`] blocks and a search neither, so the cost does not grow with the number of blocks; in a bin with more
//! blocks than that the order behind them, and so the fit, is only nearly the best.
//!
//! The list links live in the block records, so nothing here allocates.

use crate::block::{Block, BlockId, NONE, Records};
use crate::size::MIN_BLOCK_BYTES;
use std::alloc::{Layout, alloc_zeroed, handle_alloc_error};

/// Blocks looked at in one bin.
pub(crate) const SCAN_MAX: usize = 32;

/// log2 of the bins for one power of two.
const SUB_BITS: u32 = 6;
const SUBS: usize = 1 << SUB_BITS;
/// Powers of two from 512 bytes on. Sizes below 2^61 bytes (a request of up to 2^60 and its alignment) need 52 of them; a power of two of rows needs no bounds check.
const ROWS: usize = 64;
const BINS: usize = ROWS * SUBS;

/// Free blocks by size.
#[derive(Debug)]
pub(crate) struct FreeIndex(Box<Bins>);

#[derive(Debug)]
struct Bins {
    /// Which rows hold anything.
    rows: u64,
    /// Which bins of a row do.
    bins: [u64; ROWS],
    heads: [BlockId; BINS],
}

/// The bin of a size in bytes: the number of its power of two, times [`SUBS`], plus its place there. Those are the
/// exponent and the leading bits of the mantissa of the size as a floating-point number, side by side.
#[inline(always)]
fn bin_of(bytes: u64) -> usize {
    const MANTISSA_BITS: u32 = 52;
    const EXPONENT_OF_512: u64 = 1023 + 9;
    debug_assert!((MIN_BLOCK_BYTES..1 << 61).contains(&bytes));
    let bits = (bytes as i64 as f64).to_bits() >> (MANTISSA_BITS - SUB_BITS);
    known((bits - (EXPONENT_OF_512 << SUB_BITS)) as usize)
}

/// Tells the compiler that a bin is one.
#[inline(always)]
fn known(bin: usize) -> usize {
    // SAFETY: bins are computed by `bin_of` from the sizes of blocks and requests, from 512 bytes to less than
    // 2^61, or are what it computed, kept in a record: within 52 rows.
    unsafe { std::hint::assert_unchecked(bin < BINS) };
    bin
}

/// The bits above `bit`.
#[inline(always)]
fn above(bit: usize) -> u64 {
    u64::MAX << (bit % 64) << 1
}

/// The numbers of the bits that are set, the lowest first.
fn set_bits(bits: u64) -> impl Iterator<Item = usize> {
    let left = |bits: &u64| (*bits != 0).then_some(*bits);
    std::iter::successors(left(&bits), move |bits| left(&(bits & (bits - 1))))
        .map(|bits| bits.trailing_zeros() as usize)
}

impl FreeIndex {
    pub(crate) fn new() -> Self {
        const { assert!(NONE == 0) };
        let layout = Layout::new::<Bins>();
        // In place, and of pages that are zero already, rather than by way of the stack.
        // SAFETY: the layout is not of size zero.
        let bins: *mut Bins = unsafe { alloc_zeroed(layout) }.cast();
        if bins.is_null() {
            handle_alloc_error(layout);
        }
        // SAFETY: allocated just now by the global allocator with that layout; zeros are empty bins.
        Self(unsafe { Box::from_raw(bins) })
    }

    /// Adds a block of `size` bytes, in its bin's order.
    #[inline(always)]
    pub(crate) fn insert(&mut self, blocks: &mut Records, id: BlockId, size: u64) {
        let index = &mut *self.0;
        let bin = bin_of(size);
        blocks[id].bin = bin as u16;
        let head = index.heads[bin];
        if head == NONE {
            index.bins[bin / SUBS] |= 1 << (bin % SUBS);
            index.rows |= 1 << (bin / SUBS);
        } else if blocks[head].size < size {
            return insert_behind(blocks, head, id);
        }
        index.heads[bin] = id;
        blocks[head].bin_prev = id;
        let block = &mut blocks[id];
        block.bin_prev = NONE;
        block.bin_next = head;
    }

    /// Takes a block out.
    #[inline(always)]
    pub(crate) fn remove(&mut self, blocks: &mut Records, id: BlockId) {
        let block = &blocks[id];
        let (prev, next) = (block.bin_prev, block.bin_next);
        if prev != NONE {
            blocks[prev].bin_next = next;
            blocks[next].bin_prev = prev;
            return;
        }
        self.behead(blocks, known(block.bin as usize), next);
    }

    /// Makes `next` the first block of a bin.
    #[inline(always)]
    fn behead(&mut self, blocks: &mut Records, bin: usize, next: BlockId) {
        let index = &mut *self.0;
        index.heads[bin] = next;
        blocks[next].bin_prev = NONE;
        if next == NONE {
            let row = &mut index.bins[bin / SUBS];
            *row &= !(1 << (bin % SUBS));
            if *row == 0 {
                index.rows &= !(1 << (bin / SUBS));
            }
        }
    }

    /// The next bin behind `bin` that holds anything.
    #[inline(always)]
    fn next_bin(&self, bin: usize) -> Option<usize> {
        let row = bin / SUBS;
        let later = self.0.bins[row] & above(bin);
        if later != 0 {
            return Some(row * SUBS + later.trailing_zeros() as usize);
        }
        let rows = self.0.rows & above(row);
        if rows == 0 {
            return None;
        }
        let row = rows.trailing_zeros() as usize % ROWS;
        Some(row * SUBS + self.0.bins[row].trailing_zeros() as usize % SUBS)
    }

    /// The best fit for `bytes`, left in the index.
    #[inline(always)]
    pub(crate) fn find(&self, blocks: &Records, bytes: u64) -> Option<BlockId> {
        let bin = bin_of(bytes);
        let mut id = self.0.heads[bin];
        if id != NONE {
            if blocks[id].size < bytes {
                id = find_behind(blocks, id, bytes);
            }
            if id != NONE {
                return Some(id);
            }
        }
        // Every block of a later bin is large enough.
        Some(self.0.heads[self.next_bin(bin)?])
    }

    /// The block behind `id` in the order of the index.
    #[inline(always)]
    pub(crate) fn after(&self, blocks: &Records, id: BlockId) -> Option<BlockId> {
        let Block { bin, bin_next, .. } = blocks[id];
        if bin_next != NONE {
            return Some(bin_next);
        }
        Some(self.0.heads[self.next_bin(known(bin as usize))?])
    }

    /// The smallest block that `fits`, which nothing below `bytes` does: the bin of `bytes` to its end, then
    /// [`find`](Self::find)'s way through the later ones.
    pub(crate) fn find_anywhere(
        &self,
        blocks: &Records,
        bytes: u64,
        fits: impl Fn(u64) -> bool,
    ) -> Option<BlockId> {
        let first = self.list(blocks, bin_of(bytes)).filter(|&id| fits(blocks[id].size));
        first
            .min_by_key(|&id| blocks[id].size)
            .or_else(|| self.find(blocks, bytes).filter(|&id| fits(blocks[id].size)))
    }

    /// The blocks of `bytes` or more, by bin.
    pub(crate) fn iter_from<'a>(&'a self, blocks: &'a Records, bytes: u64) -> impl Iterator<Item = BlockId> + 'a {
        let bins = std::iter::successors(Some(bin_of(bytes)), move |&bin| self.next_bin(bin));
        bins.flat_map(move |bin| self.list(blocks, bin)).filter(move |&id| blocks[id].size >= bytes)
    }

    /// The largest block's bytes; 0 if there is none. Looks at one bin.
    pub(crate) fn largest(&self, blocks: &Records) -> u64 {
        if self.0.rows == 0 {
            return 0;
        }
        let row = 63 - self.0.rows.leading_zeros() as usize;
        let sub = 63 - self.0.bins[row].leading_zeros() as usize;
        self.list(blocks, row * SUBS + sub).map(|id| blocks[id].size).max().unwrap_or(0)
    }

    /// All blocks, by bin.
    pub(crate) fn iter<'a>(&'a self, blocks: &'a Records) -> impl Iterator<Item = BlockId> + 'a {
        let bins =
            set_bits(self.0.rows).flat_map(move |row| set_bits(self.0.bins[row]).map(move |sub| row * SUBS + sub));
        bins.flat_map(move |bin| self.list(blocks, bin))
    }

    fn list<'a>(&'a self, blocks: &'a Records, bin: usize) -> impl Iterator<Item = BlockId> + 'a {
        let head = self.0.heads[bin];
        std::iter::successors((head != NONE).then_some(head), |&id| {
            let next = blocks[id].bin_next;
            (next != NONE).then_some(next)
        })
    }

    /// Checks bitmaps, bins and links, and returns how many blocks there are. For `validate`.
    pub(crate) fn check(&self, blocks: &Records) -> Result<usize, String> {
        let mut count = 0;
        for row in 0..ROWS {
            if (self.0.rows >> row & 1 == 1) != (self.0.bins[row] != 0) {
                return Err(format!("row {row} of the free index disagrees with its bitmap"));
            }
            // In one comparison, since most rows are empty and `validate` is called often.
            if self.0.bins[row] == 0 && self.0.heads[row * SUBS..(row + 1) * SUBS] != [NONE; SUBS] {
                return Err(format!("row {row} of the free index holds what its bitmap does not show"));
            }
        }
        let rows = (0..ROWS).filter(|&row| self.0.bins[row] != 0);
        for bin in rows.flat_map(|row| row * SUBS..(row + 1) * SUBS) {
            if (self.0.bins[bin / SUBS] >> (bin % SUBS) & 1 == 1) != (self.0.heads[bin] != NONE) {
                return Err(format!("bin {bin} of the free index disagrees with its bitmap"));
            }
            let mut before = NONE;
            for id in self.list(blocks, bin) {
                let block = &blocks[id];
                if block.bin_prev != before || block.bin as usize != bin || bin_of(block.size) != bin {
                    return Err(format!("block at {:#x} is wrong in bin {bin}", block.addr));
                }
                before = id;
                count += 1;
            }
        }
        Ok(count)
    }
}

/// Links `id` into a list behind `before`, which is smaller, and behind the others that are.
#[inline(never)]
fn insert_behind(blocks: &mut Records, mut before: BlockId, id: BlockId) {
    let size = blocks[id].size;
    let mut next = blocks[before].bin_next;
    for _ in 2..SCAN_MAX {
        if next == NONE || blocks[next].size >= size {
            break;
        }
        (before, next) = (next, blocks[next].bin_next);
    }
    blocks[before].bin_next = id;
    let block = &mut blocks[id];
    block.bin_prev = before;
    block.bin_next = next;
    blocks[next].bin_prev = id;
}

/// The first block of at least `bytes` behind `id` in its list.
#[inline(never)]
fn find_behind(blocks: &Records, mut id: BlockId, bytes: u64) -> BlockId {
    for _ in 1..SCAN_MAX {
        id = blocks[id].bin_next;
        if id == NONE || blocks[id].size >= bytes {
            return id;
        }
    }
    NONE
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::block::{BlockTable, State};
    use proptest::prelude::*;

    #[test]
    fn bins_are_ordered_and_exact_up_to_64_kib() {
        let mut last = bin_of(512);
        for granules in 2..=1_000_000u64 {
            let bin = bin_of(granules * 512);
            assert!(bin >= last, "{granules}: {bin} after {last}");
            assert!(granules > 128 || bin > last, "{granules} shares a bin");
            last = bin;
        }
        assert!(bin_of(1 << 60) < BINS - SUBS);
        for shift in 17..60u32 {
            // The sizes of a bin lie within one 64th of its power of two.
            let (low, step) = (1u64 << shift, 1u64 << (shift - SUB_BITS));
            assert_eq!(bin_of(low), bin_of(low + step - 512), "2^{shift}");
            assert_eq!(bin_of(low) + 1, bin_of(low + step), "2^{shift}");
        }
    }

    fn table(sizes: &[u64]) -> (BlockTable, FreeIndex) {
        let (mut blocks, mut index) = (BlockTable::new(), FreeIndex::new());
        let mut addr = 1 << 30;
        for &size in sizes {
            let id = blocks.insert(addr, size, crate::size::SizeClass::Large);
            blocks[id].set_state(State::Free);
            index.insert(&mut blocks, id, size);
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
            prop_assert_eq!(found.map(|id| blocks[id].size), best);
            prop_assert_eq!(index.largest(&blocks), sizes.iter().copied().max().unwrap_or(0));
            let ids: Vec<_> = index.iter(&blocks).collect();
            for id in ids {
                index.remove(&mut blocks, id);
                index.check(&blocks).map_err(TestCaseError::fail)?;
            }
            prop_assert_eq!(index.check(&blocks).map_err(TestCaseError::fail)?, 0);
        }
    }
}
