//! The blocks of page-locked memory: which are unused, and what the others wait for.

use super::size::largest_for;
use crate::driver::{DriverError, HostPtr};
use crate::event::StreamClock;
use crate::stats::Stat;
use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

/// Statistics of page-locked host memory; sizes in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct HostMemoryStats {
    /// Buffers that users hold.
    pub allocation: Stat,
    /// What they asked for.
    pub requested_bytes: Stat,
    /// The bytes of their blocks.
    pub allocated_bytes: Stat,
    /// That, and blocks that were dropped but are still used by copies.
    pub active_bytes: Stat,
    /// Held of the host.
    pub reserved_bytes: Stat,
    /// Calls to `cuMemHostAlloc` that succeeded.
    pub num_host_alloc: u64,
    /// Calls to `cuMemFreeHost` that succeeded.
    pub num_host_free: u64,
    /// Times that a request waited for copies (which perhaps had just passed).
    pub num_waits: u64,
}

/// A piece of page-locked memory.
#[derive(Clone, Copy, Debug)]
pub(super) struct HostBlock {
    pub(super) ptr: HostPtr,
    /// Its class.
    pub(super) bytes: u64,
    pub(super) requested: u64,
}

/// What must have passed before a block can be used again.
pub(super) type Waits = Vec<(Arc<StreamClock>, u64)>;

#[derive(Debug)]
pub(super) struct Pending {
    pub(super) block: HostBlock,
    pub(super) waits: Waits,
}

#[derive(Debug, Default)]
pub(super) struct State {
    /// Unused blocks by class, last in, first out.
    pub(super) free: BTreeMap<u64, Vec<HostPtr>>,
    /// Blocks that copies may still use, in the order of their drops.
    pub(super) pending: VecDeque<Pending>,
    pub(super) stats: HostMemoryStats,
    /// Bytes that a driver call under way will reserve if it succeeds.
    pub(super) under_way: u64,
}

/// When so many blocks of a size, and so many bytes, are used by copies under way, the host is far enough ahead: it waits
/// for the oldest instead of taking more, since `cuMemHostAlloc` is slow and stalls the device, too.
const AHEAD_BLOCKS: usize = 4;
const AHEAD_BYTES: u64 = 4 << 20;

impl State {
    pub(super) fn take(&mut self, class: u64, requested: u64) -> Option<HostBlock> {
        let (&bytes, blocks) =
            self.free.range_mut(class..=largest_for(class)).find(|(_, blocks)| !blocks.is_empty())?;
        let ptr = blocks.pop()?;
        let block = HostBlock { ptr, bytes, requested };
        self.stats.active_bytes.increase(bytes);
        self.book(block);
        Some(block)
    }

    pub(super) fn book(&mut self, block: HostBlock) {
        self.stats.allocation.increase(1);
        self.stats.requested_bytes.increase(block.requested);
        self.stats.allocated_bytes.increase(block.bytes);
    }

    pub(super) fn put(&mut self, block: HostBlock) {
        self.stats.active_bytes.decrease(block.bytes);
        self.free.entry(block.bytes).or_default().push(block.ptr);
    }

    /// The blocks under way that could serve a class, oldest first.
    fn under_way_for(&self, class: u64) -> impl Iterator<Item = &Pending> {
        let fitting = class..=largest_for(class);
        self.pending.iter().filter(move |entry| fitting.contains(&entry.block.bytes))
    }

    /// What the oldest block that could serve a class waits for, if enough of them are under way.
    pub(super) fn ahead(&self, class: u64) -> Option<Waits> {
        let blocks = self.under_way_for(class);
        let (count, bytes) = blocks.fold((0, 0), |(count, bytes), entry| (count + 1, bytes + entry.block.bytes));
        let oldest = self.under_way_for(class).next()?;
        (count >= AHEAD_BLOCKS && bytes >= AHEAD_BYTES).then(|| oldest.waits.clone())
    }

    /// The same, if they are all under way on one stream: then none passes before the oldest, and there is nothing to ask.
    pub(super) fn ahead_in_order(&self, class: u64) -> Option<Waits> {
        let waits = self.ahead(class)?;
        let [(clock, _)] = &*waits else { return None };
        let is_the_same = |entry: &Pending| matches!(&*entry.waits, [(other, _)] if Arc::ptr_eq(other, clock));
        self.under_way_for(class).all(is_the_same).then_some(waits)
    }

    /// What blocks that could serve a class wait for, if that can only be waited for, and they get many: asking never makes
    /// them free.
    pub(super) fn stranded(&self, class: u64) -> Option<Waits> {
        let is_stranded = |entry: &&Pending| entry.waits.iter().any(|(clock, epoch)| clock.needs_device(*epoch));
        let mut stranded = self.under_way_for(class).filter(is_stranded);
        let oldest = stranded.next()?;
        stranded.nth(AHEAD_BLOCKS - 2).map(|_| oldest.waits.clone())
    }

    /// To be called when a block was handed out. If it was the last, the next request asks for the oldest that is under way:
    /// the event that tells is recorded now. So it stands for what was queued before this block's copy, which can then run
    /// while the host goes on; and one event stands for as many as possible.
    pub(super) fn mark(&self, class: u64) {
        if self.free.range(class..=largest_for(class)).all(|(_, blocks)| blocks.is_empty())
            && let Some(oldest) = self.under_way_for(class).next()
        {
            oldest.waits.iter().for_each(|(clock, epoch)| clock.mark(*epoch));
        }
    }

    /// Makes blocks free whose copies are known to have passed. Asks nobody.
    pub(super) fn collect(&mut self) {
        let asked = self.sift(|_, _| false);
        debug_assert!(asked.is_ok(), "nobody was asked");
    }

    /// Makes blocks free whose copies have passed.
    pub(super) fn poll(&mut self) -> std::result::Result<(), DriverError> {
        self.sift(|_, _| true)
    }

    /// The same, until one that can serve a class is free.
    pub(super) fn poll_for(&mut self, class: u64) -> std::result::Result<(), DriverError> {
        let fitting = class..=largest_for(class);
        let can_serve = |block: &HostBlock| fitting.contains(&block.bytes);
        self.sift(|block, freed| can_serve(block) && !freed.is_some_and(can_serve))
    }

    /// Makes blocks free whose copies have passed, asking about those that are to be asked about, given the one that was
    /// freed last. A clock that has not come to an epoch is not asked for later ones.
    fn sift(
        &mut self,
        mut is_asked: impl FnMut(&HostBlock, Option<&HostBlock>) -> bool,
    ) -> std::result::Result<(), DriverError> {
        let mut behind: Vec<Arc<StreamClock>> = Vec::new();
        let mut freed: Option<HostBlock> = None;
        let mut failed = Ok(());
        for entry in std::mem::take(&mut self.pending) {
            let ask = is_asked(&entry.block, freed.as_ref());
            let mut passed = true;
            for (clock, epoch) in &entry.waits {
                let is_behind = || behind.iter().any(|other| Arc::ptr_eq(other, clock));
                if ask && failed.is_ok() && !clock.has_passed(*epoch) && !is_behind() {
                    failed = clock.poll(*epoch).map(drop);
                    if !clock.has_passed(*epoch) {
                        behind.push(Arc::clone(clock));
                    }
                }
                passed &= clock.has_passed(*epoch);
            }
            if passed {
                self.put(entry.block);
                freed = Some(entry.block);
            } else {
                self.pending.push_back(entry);
            }
        }
        failed
    }

    /// Takes free blocks out, the largest first, until `bytes` are together; they still count as reserved.
    pub(super) fn take_unused(&mut self, bytes: u64) -> Vec<(HostPtr, u64)> {
        let (mut taken, mut sum) = (Vec::new(), 0);
        for (&class, blocks) in self.free.iter_mut().rev() {
            while sum < bytes
                && let Some(ptr) = blocks.pop()
            {
                taken.push((ptr, class));
                sum += class;
            }
        }
        taken
    }
}

/// Waits on the host until all of it has passed.
pub(super) fn wait(waits: &Waits) -> std::result::Result<(), DriverError> {
    waits.iter().try_for_each(|(clock, epoch)| clock.wait(*epoch))
}
