//! What must hold after any operation, and what a refusal must have tried.

use super::{HARNESS_BYTES, Machine, Pending};
use crate::shadow::{State, check_pattern};
use crate::{Check, MIB};
use vramalloc::size::{align_up, round_request};
use vramalloc::{BlockState, MemoryStats, OnPending, Snapshot};

impl Machine {
    /// A refusal must be for want of memory indeed: with everything given back there is no room.
    pub(super) fn check_refusal(&self, bytes: u64, alignment: Option<u64>, snapshot: &Snapshot) -> Check {
        let config = self.allocator.config();
        ensure!(
            self.pending.is_empty() || config.on_pending == OnPending::Fail || self.is_lost(),
            "refused {bytes} bytes while frees are pending"
        );
        if config.on_pending == OnPending::Wait && !self.is_lost() && !self.allocator.is_expandable() {
            ensure!(!has_unused_segment(snapshot), "refused {bytes} bytes while a whole segment is cached");
        }
        let reserved = self.allocator.memory_reserved();
        let room = self.allocator.limit().unwrap_or(u64::MAX).min(self.setup.capacity) - reserved;
        let padded =
            round_request(bytes, config).ok_or("the size rounds")? + alignment.unwrap_or(512).max(512) - 512;
        let least = align_up(padded, 2 * MIB).ok_or("the size rounds")?;
        ensure!(room < least || self.is_lost(), "refused {bytes} bytes with room for {room}, {least} needed");
        Ok(())
    }

    /// Learns which pending frees the allocator has finished, and checks that it might.
    pub(super) fn settle(&mut self) -> Check<Snapshot> {
        let snapshot = self.allocator.snapshot();
        for Pending { id, block, uses, closed } in std::mem::take(&mut self.pending) {
            let blocks = snapshot.segments.iter().flat_map(|segment| &segment.blocks);
            let mut same =
                blocks.filter(|found| found.address.0 == block.addr && found.state == BlockState::Pending);
            if same.any(|found| found.bytes == block.bytes) {
                check_pattern(&self.sim, block.addr, block.bytes, id)?;
                self.pending.push(Pending { id, block, uses, closed });
                continue;
            }
            let early = uses.iter().find(|(_, mark)| !self.marks.has_passed(&self.sim, *mark));
            ensure!(early.is_none(), "{block:?} was let go before work on stream {early:?} had passed");
            self.shadow.change(block.addr, block.bytes, State::Pending(id), None)?;
        }
        let live = self.live.iter().map(|held| (&held.block, true));
        self.model.observe(live.chain(self.pending.iter().map(|pending| (&pending.block, false))));
        Ok(snapshot)
    }

    /// Everything that must hold after any operation.
    pub(super) fn check(&self) -> Check {
        self.allocator.validate().map_err(|why| why.to_string())?;
        let violations = self.sim.violations();
        ensure!(violations.is_empty(), "the device saw: {violations:?}");
        let stats = self.allocator.memory_stats();
        self.model.compare(&stats)?;
        let snapshot = self.allocator.snapshot();
        let blocks = || snapshot.segments.iter().flat_map(|segment| &segment.blocks);
        let held: Vec<_> = blocks()
            .filter(|block| matches!(block.state, BlockState::Live | BlockState::Pending))
            .map(|block| (block.address.0, block.bytes, block.state == BlockState::Live))
            .collect();
        ensure!(
            self.shadow.held().eq(held.iter().copied()),
            "the shadow has {:?}, the snapshot {held:?}",
            self.shadow
        );
        let fixed = snapshot.segments.iter().filter(|segment| !segment.expandable);
        let ours: Vec<_> = fixed.map(|segment| (segment.address, segment.bytes)).collect();
        let theirs = self.sim.leaks().allocations;
        let theirs: Vec<_> = theirs.into_iter().filter(|(ptr, _)| *ptr != self.marks.base).collect();
        ensure!(ours == theirs, "segments {ours:?}, the driver knows {theirs:?}");
        self.check_sums(&stats, &snapshot)
    }

    fn check_sums(&self, stats: &MemoryStats, snapshot: &Snapshot) -> Check {
        let reserved = stats.reserved_bytes.all;
        let held = self.sim.used_bytes() - HARNESS_BYTES;
        ensure!(reserved.current == held, "{} bytes reserved, the driver says {held}", reserved.current);
        ensure!(self.allocator.limit().is_none_or(|limit| reserved.peak <= limit), "reserved went past the limit");
        let fixed = || snapshot.segments.iter().filter(|segment| !segment.expandable);
        ensure!(stats.segment.all.current == fixed().count() as u64, "segments: {:?}", stats.segment);
        let split = fixed().filter(|segment| segment.blocks.len() > 1);
        let unused = split.flat_map(|segment| &segment.blocks).filter(|block| block.state == BlockState::Free);
        let (count, bytes) = unused.fold((0, 0), |(count, bytes), block| (count + 1, bytes + block.bytes));
        let found = (stats.inactive_split.all.current, stats.inactive_split_bytes.all.current);
        ensure!(found == (count, bytes), "inactive_split {found:?}, the snapshot has {:?}", (count, bytes));
        ensure!(
            self.allocator.memory_allocated() == stats.allocated_bytes.all.current,
            "memory_allocated differs"
        );
        Ok(())
    }
}

pub(super) fn has_unused_segment(snapshot: &Snapshot) -> bool {
    let is_unused = |segment: &vramalloc::SegmentInfo| segment.blocks.iter().all(|b| b.state == BlockState::Free);
    snapshot.segments.iter().any(is_unused)
}
