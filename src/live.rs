//! Live allocations by address, for callers that keep bare addresses.
//!
//! Sharded, so that threads freeing different addresses seldom meet.

use crate::allocator::Allocation;
use crate::driver::DevicePtr;
use crate::sync::Mutex;
use rustc_hash::FxHashMap;

const SHARDS: usize = 64;

/// One part of the table, on its own cache lines.
#[derive(Default)]
#[repr(align(128))]
struct Shard(Mutex<FxHashMap<u64, Allocation>>);

/// The table. Look-up, insertion and removal are O(1).
pub(crate) struct LiveTable {
    shards: Box<[Shard]>,
}

impl LiveTable {
    pub(crate) fn new() -> Self {
        Self { shards: (0..SHARDS).map(|_| Shard::default()).collect() }
    }

    #[inline]
    fn shard(&self, ptr: DevicePtr) -> &Mutex<FxHashMap<u64, Allocation>> {
        // Addresses are multiples of 512: the multiplication spreads what lies above.
        let hash = (ptr.0 >> 9).wrapping_mul(0x9E37_79B9_7F4A_7C15);
        &self.shards[(hash >> 58) as usize].0
    }

    #[inline]
    pub(crate) fn insert(&self, ptr: DevicePtr, allocation: Allocation) {
        let before = self.shard(ptr).lock().insert(ptr.0, allocation);
        debug_assert!(before.is_none(), "{ptr} was handed out twice");
    }

    #[inline]
    pub(crate) fn remove(&self, ptr: DevicePtr) -> Option<Allocation> {
        self.shard(ptr).lock().remove(&ptr.0)
    }

    pub(crate) fn with<T>(&self, ptr: DevicePtr, f: impl FnOnce(&Allocation) -> T) -> Option<T> {
        self.shard(ptr).lock().get(&ptr.0).map(f)
    }

    pub(crate) fn forget_all(&self) {
        for shard in &*self.shards {
            let live = std::mem::take(&mut *shard.0.lock());
            live.into_values().for_each(Allocation::forget);
        }
    }
}
