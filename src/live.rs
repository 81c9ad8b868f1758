//! Live allocations by address, for callers that keep bare addresses.
//!
//! Sharded, so that threads freeing different addresses seldom meet. A shard is a table with open addressing: the hot path
//! of such callers, a third of whose instructions a general map would be.

use crate::allocation::{Allocation, Parts};
use crate::pool::BlockHandle;
use crate::sync::PoolMutex;
use std::mem::ManuallyDrop;
use std::ptr::NonNull;

const SHARDS: usize = 64;

/// One part of the table, on its own cache lines.
#[repr(align(128))]
struct Shard(PoolMutex<Table>);

/// The table. Look-up, insertion and removal are O(1).
pub(crate) struct LiveTable {
    shards: Box<[Shard; SHARDS]>,
}

/// Addresses are multiples of 512, and often of far more: the multiplication spreads what lies above, into the upper bits.
/// The topmost choose the shard, those from 26 on the place in it.
#[inline(always)]
fn hash(addr: u64) -> u64 {
    (addr >> 9).wrapping_mul(0x9E37_79B9_7F4A_7C15)
}

/// Where an address belongs in a shard's table, if that is so large.
#[inline(always)]
fn home(addr: u64) -> usize {
    (hash(addr) >> 26) as usize
}

impl LiveTable {
    pub(crate) fn new() -> Self {
        let shards: Vec<_> = (0..SHARDS).map(|_| Shard(PoolMutex::new(Table::default()))).collect();
        Self { shards: shards.try_into().unwrap_or_else(|_| unreachable!("as many as were made")) }
    }

    #[inline(always)]
    fn shard(&self, addr: u64) -> &PoolMutex<Table> {
        &self.shards[(hash(addr) >> 58) as usize % SHARDS].0
    }

    /// Keeps the parts of an allocation that has a block.
    #[inline]
    pub(crate) fn insert(&self, parts: Parts) {
        self.shard(parts.block.addr).lock().insert(parts);
    }

    #[inline]
    pub(crate) fn remove(&self, addr: u64) -> Option<Parts> {
        self.shard(addr).lock().remove(addr)
    }

    pub(crate) fn with<T>(&self, addr: u64, f: impl FnOnce(&Allocation) -> T) -> Option<T> {
        let mut table = self.shard(addr).lock();
        let at = table.find(addr)?;
        let allocation = ManuallyDrop::new(Allocation::new(table.slots[at]));
        let result = f(&allocation);
        table.slots[at] = ManuallyDrop::into_inner(allocation).into_parts(); // streams may be recorded now
        Some(result)
    }

    /// The allocator goes: the memory of what is live stays as it is.
    pub(crate) fn forget_all(&self) {
        for shard in &*self.shards {
            *shard.0.lock() = Table::default();
        }
    }
}

/// Allocations by address, with linear probing; at most half full, since short runs cost less than the slots.
#[derive(Default)]
struct Table {
    /// A power of two of them, or none.
    slots: Box<[Parts]>,
    count: usize,
    /// Half of the slots.
    count_max: usize,
}

/// A slot without an allocation: one without an address.
const VACANT: Parts = Parts { pool: NonNull::dangling(), requested: 0, block: BlockHandle::EMPTY };

impl Table {
    /// The slots, of which there must be some, and the mask of their indices.
    #[inline(always)]
    fn slots(&mut self) -> (&mut [Parts], usize) {
        let slots = &mut *self.slots;
        // SAFETY: `grow` makes slots, a power of two of them, and was called before anything was put in, which is
        // when the callers come here.
        unsafe { std::hint::assert_unchecked(slots.len().is_power_of_two()) };
        let mask = slots.len() - 1;
        (slots, mask)
    }

    #[inline(always)]
    fn insert(&mut self, parts: Parts) {
        if self.count == self.count_max {
            self.grow();
        }
        self.count += 1;
        let addr = parts.block.addr;
        let (slots, mask) = self.slots();
        let mut at = home(addr) & mask;
        while slots[at].block.addr != 0 {
            debug_assert_ne!(slots[at].block.addr, addr, "handed out twice");
            at = (at + 1) & mask;
        }
        slots[at] = parts;
    }

    #[cold]
    #[inline(never)]
    fn grow(&mut self) {
        let slots = vec![VACANT; (self.slots.len() * 2).max(16)];
        self.count_max = slots.len() / 2;
        let former = std::mem::replace(&mut self.slots, slots.into());
        self.count = 0;
        for parts in former.into_iter().filter(|parts| parts.block.addr != 0) {
            self.insert(parts);
        }
    }

    #[inline(always)]
    fn find(&mut self, addr: u64) -> Option<usize> {
        if self.count == 0 || addr == 0 {
            return None;
        }
        let (slots, mask) = self.slots();
        let mut at = home(addr) & mask;
        while slots[at].block.addr != addr {
            if slots[at].block.addr == 0 {
                return None;
            }
            at = (at + 1) & mask;
        }
        Some(at)
    }

    #[inline(always)]
    fn remove(&mut self, addr: u64) -> Option<Parts> {
        let at = self.find(addr)?;
        self.count -= 1;
        let (slots, mask) = self.slots();
        let found = slots[at & mask];
        slots[at & mask].block.addr = 0;
        if slots[(at + 1) & mask].block.addr != 0 {
            self.close(at);
        }
        Some(found)
    }

    /// Closes a gap: what lies behind moves up, unless that would put it before its home, so that no search ends too
    /// early.
    #[inline(never)]
    fn close(&mut self, mut gap: usize) {
        let (slots, mask) = self.slots();
        let mut at = (gap + 1) & mask;
        while slots[at].block.addr != 0 {
            let home = home(slots[at].block.addr);
            if at.wrapping_sub(home) & mask >= at.wrapping_sub(gap) & mask {
                slots[gap & mask] = slots[at];
                slots[at].block.addr = 0;
                gap = at;
            }
            at = (at + 1) & mask;
        }
    }
}

#[cfg(all(test, not(vramalloc_shuttle)))]
mod tests {
    use super::*;
    use crate::driver::sim::SimDriver;
    use crate::{CachingAllocator, Config};
    use proptest::prelude::*;

    proptest! {
        #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]
        // Against a model, with so few slots that runs of them wrap around.
        #[test]
        fn finds_what_was_put_in(steps in prop::collection::vec((any::<bool>(), 0usize..64), 1..400)) {
            let sim = SimDriver::builder().capacity(1 << 30).build();
            let allocator = CachingAllocator::new(sim, Config::default()).unwrap();
            let stream = allocator.default_stream().unwrap();
            let mut table = Table::default();
            let mut model: Vec<u64> = Vec::new();
            for (put, which) in steps {
                if put {
                    let parts = allocator.alloc(512, &stream).unwrap().into_parts();
                    model.push(parts.block.addr);
                    table.insert(parts);
                } else if !model.is_empty() {
                    let addr = model.swap_remove(which % model.len());
                    let found = table.remove(addr).map(Allocation::new);
                    prop_assert_eq!(found.map(|allocation| allocation.ptr().0), Some(addr));
                    prop_assert!(table.find(addr).is_none());
                }
                prop_assert_eq!(table.count, model.len());
                prop_assert!(model.iter().all(|&addr| table.find(addr).is_some()));
                prop_assert_eq!(table.slots.iter().filter(|parts| parts.block.addr != 0).count(), model.len());
            }
        }
    }
}
