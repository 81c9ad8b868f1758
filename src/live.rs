//! Live allocations by address, for callers that keep bare addresses.
//!
//! Sharded, so that threads freeing different addresses seldom meet. A shard is a table with open addressing: the hot path
//! of such callers, a third of whose instructions a general map would be.

use crate::allocation::Allocation;
use crate::driver::DevicePtr;
use crate::sync::PoolMutex;

const SHARDS: usize = 64;

/// One part of the table, on its own cache lines.
#[repr(align(128))]
struct Shard(PoolMutex<Table>);

/// The table. Look-up, insertion and removal are O(1).
pub(crate) struct LiveTable {
    shards: Box<[Shard]>,
}

/// Addresses are multiples of 512, and often of far more: the multiplication spreads what lies above, into the upper bits.
/// The topmost choose the shard, those from 26 on the place in it.
#[inline(always)]
fn hash(addr: u64) -> u64 {
    (addr >> 9).wrapping_mul(0x9E37_79B9_7F4A_7C15)
}

impl LiveTable {
    pub(crate) fn new() -> Self {
        Self { shards: (0..SHARDS).map(|_| Shard(PoolMutex::new(Table::default()))).collect() }
    }

    #[inline(always)]
    fn shard(&self, addr: u64) -> &PoolMutex<Table> {
        &self.shards[(hash(addr) >> 58) as usize % SHARDS].0
    }

    #[inline]
    pub(crate) fn insert(&self, ptr: DevicePtr, allocation: Allocation) {
        self.shard(ptr.0).lock().insert(allocation);
    }

    #[inline]
    pub(crate) fn remove(&self, ptr: DevicePtr) -> Option<Allocation> {
        self.shard(ptr.0).lock().remove(ptr.0)
    }

    pub(crate) fn with<T>(&self, ptr: DevicePtr, f: impl FnOnce(&Allocation) -> T) -> Option<T> {
        let table = self.shard(ptr.0).lock();
        let at = table.find(ptr.0)?;
        table.slots[at].as_ref().map(f)
    }

    pub(crate) fn forget_all(&self) {
        for shard in &*self.shards {
            let live = std::mem::take(&mut *shard.0.lock());
            live.slots.into_iter().flatten().for_each(Allocation::forget);
        }
    }
}

/// Allocations by address, with linear probing; at most three quarters full.
#[derive(Default)]
struct Table {
    /// A power of two of them, or none.
    slots: Vec<Option<Allocation>>,
    count: usize,
}

impl Table {
    #[inline(always)]
    fn home(&self, addr: u64) -> usize {
        (hash(addr) >> 26) as usize & (self.slots.len() - 1)
    }

    #[inline(always)]
    fn after(&self, at: usize) -> usize {
        (at + 1) & (self.slots.len() - 1)
    }

    #[inline(always)]
    fn insert(&mut self, allocation: Allocation) {
        if (self.count + 1) * 4 > self.slots.len() * 3 {
            self.grow();
        }
        self.count += 1;
        let mut at = self.home(allocation.ptr().0);
        while let Some(other) = &self.slots[at] {
            debug_assert_ne!(other.ptr(), allocation.ptr(), "handed out twice");
            at = self.after(at);
        }
        let before = self.slots[at].replace(allocation);
        std::mem::forget(before); // nothing
    }

    #[cold]
    #[inline(never)]
    fn grow(&mut self) {
        let slots = (0..(self.slots.len() * 2).max(16)).map(|_| None).collect();
        let former = std::mem::replace(&mut self.slots, slots);
        self.count = 0;
        former.into_iter().flatten().for_each(|allocation| self.insert(allocation));
    }

    #[inline(always)]
    fn find(&self, addr: u64) -> Option<usize> {
        if self.count == 0 {
            return None;
        }
        let mut at = self.home(addr);
        while self.slots[at].as_ref()?.ptr().0 != addr {
            at = self.after(at);
        }
        Some(at)
    }

    #[inline(always)]
    fn remove(&mut self, addr: u64) -> Option<Allocation> {
        let mut gap = self.find(addr)?;
        self.count -= 1;
        let found = self.slots[gap].take();
        // What lies behind moves up, unless that would put it before its home: so no search ends too early.
        let mut at = self.after(gap);
        while let Some(next) = &self.slots[at] {
            let home = self.home(next.ptr().0);
            let mask = self.slots.len() - 1;
            if at.wrapping_sub(home) & mask >= at.wrapping_sub(gap) & mask {
                self.slots.swap(gap, at);
                gap = at;
            }
            at = self.after(at);
        }
        found
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
                    let allocation = allocator.alloc(512, &stream).unwrap();
                    model.push(allocation.ptr().0);
                    table.insert(allocation);
                } else if !model.is_empty() {
                    let addr = model.swap_remove(which % model.len());
                    let found = table.remove(addr);
                    prop_assert_eq!(found.map(|allocation| allocation.ptr().0), Some(addr));
                    prop_assert!(table.find(addr).is_none());
                }
                prop_assert_eq!(table.count, model.len());
                prop_assert!(model.iter().all(|&addr| table.find(addr).is_some()));
                prop_assert_eq!(table.slots.iter().flatten().count(), model.len());
            }
        }
    }
}
