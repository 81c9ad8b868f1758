//! How much was in use at each event.

use super::{Action, Block, Snapshot, TraceEntry};
use crate::BlockState;
use crate::size::MIN_BLOCK_BYTES;

/// Bytes in use at a moment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Usage {
    /// In blocks held by users.
    pub allocated: u64,
    /// In those and in blocks that queued work still used.
    pub active: u64,
    /// In segments.
    pub reserved: u64,
}

impl Usage {
    /// The larger of each figure.
    #[must_use]
    pub fn max(self, other: Self) -> Self {
        Self {
            allocated: self.allocated.max(other.allocated),
            active: self.active.max(other.active),
            reserved: self.reserved.max(other.reserved),
        }
    }
}

/// The events of a device, each with what was in use after it.
#[derive(Clone, Debug)]
pub struct UsageOverTime<'a> {
    entries: std::slice::Iter<'a, TraceEntry>,
    /// Allocated, active, reserved. Signed, and wide: a damaged file may say anything.
    now: [i128; 3],
}

/// The bytes of an entry's block. A file that does not have them (PyTorch's) leaves the request, rounded.
pub(crate) fn block_bytes(entry: &TraceEntry) -> u64 {
    if entry.block_size > 0 { entry.block_size } else { rounded(entry.size) }
}

/// The bytes of blocks that are in use, on the same terms as [those of the entries](block_bytes) beside them.
pub(crate) fn held_bytes(entries: &[TraceEntry]) -> impl Fn(&Block) -> u64 + use<> {
    let is_exact = entries.is_empty() || entries.iter().any(|entry| entry.block_size > 0);
    move |block| if is_exact { block.size } else { rounded(block.requested_size) }
}

fn rounded(bytes: u64) -> u64 {
    bytes.max(1).checked_next_multiple_of(MIN_BLOCK_BYTES).unwrap_or(u64::MAX)
}

fn changes(entry: &TraceEntry) -> [i128; 3] {
    let (block, size) = (i128::from(block_bytes(entry)), i128::from(entry.size));
    match entry.action {
        Action::Alloc => [block, block, 0],
        Action::FreeRequested => [-block, 0, 0],
        Action::FreeCompleted => [0, -block, 0],
        Action::SegmentAlloc | Action::SegmentMap => [0, 0, size],
        Action::SegmentFree | Action::SegmentUnmap => [0, 0, -size],
        Action::Snapshot | Action::Oom | Action::Other(_) => [0, 0, 0],
    }
}

impl UsageOverTime<'_> {
    /// What was in use before the next event.
    #[must_use]
    pub fn usage(&self) -> Usage {
        let [allocated, active, reserved] = self.now.map(|bytes| u64::try_from(bytes.max(0)).unwrap_or(u64::MAX));
        Usage { allocated, active, reserved }
    }
}

impl<'a> Iterator for UsageOverTime<'a> {
    type Item = (&'a TraceEntry, Usage);

    fn next(&mut self) -> Option<Self::Item> {
        let entry = self.entries.next()?;
        for (now, change) in self.now.iter_mut().zip(changes(entry)) {
            *now += change;
        }
        Some((entry, self.usage()))
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        self.entries.size_hint()
    }
}

impl Snapshot {
    /// The events of a device, oldest first, with what was in use after each; what was in use before the first follows
    /// from what is at the end. In files without the bytes of blocks (PyTorch's own), requests are rounded to 512.
    #[must_use]
    pub fn usage_over_time(&self, device: usize) -> UsageOverTime<'_> {
        let entries = self.device_traces.get(device).map(Vec::as_slice).unwrap_or_default();
        let held_bytes = held_bytes(entries);
        let mut now = [0i128; 3];
        for segment in self.segments.iter().filter(|segment| segment.device as usize == device) {
            now[2] += i128::from(segment.total_size);
            for block in segment.blocks.iter().filter(|block| block.state != BlockState::Free) {
                let bytes = i128::from(held_bytes(block));
                now[0] += if block.state == BlockState::Live { bytes } else { 0 };
                now[1] += bytes;
            }
        }
        for entry in entries {
            for (now, change) in now.iter_mut().zip(changes(entry)) {
                *now -= change;
            }
        }
        UsageOverTime { entries: entries.iter(), now }
    }

    /// The highest figures of a device, each at its own time.
    #[must_use]
    pub fn peak_usage(&self, device: usize) -> Usage {
        let over_time = self.usage_over_time(device);
        let start = over_time.usage();
        over_time.fold(start, |peak, (_, usage)| peak.max(usage))
    }
}
