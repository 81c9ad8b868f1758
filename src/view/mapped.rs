//! Which ranges of addresses had memory, and when.

use super::lifetimes::NEVER;
use crate::pytorch::{Action, Snapshot};
use std::collections::BTreeMap;

/// A range that came from the driver at once. Its times are moments, as a [`Lifetime`](super::lifetimes::Lifetime)'s.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Mapped {
    pub(super) address: u64,
    pub(super) bytes: u64,
    pub(super) stream: u64,
    /// 0 if it was there before the first event.
    pub(super) from: u32,
    pub(super) to: u32,
    /// Whether it is pages in an expandable segment.
    pub(super) is_pages: bool,
}

/// All ranges of a device, by address. They overlap at no time, unless the events contradict each other: what is
/// unmapped twice counts as there before the first. O(events · log(ranges)).
pub(super) fn of(snapshot: &Snapshot, device: usize) -> Vec<Mapped> {
    let entries = snapshot.device_traces.get(device).map(Vec::as_slice).unwrap_or_default();
    let mut ranges = Ranges::default();
    for (moment, entry) in (1u32..).zip(entries) {
        let is_pages = matches!(entry.action, Action::SegmentMap | Action::SegmentUnmap);
        let change =
            Mapped { address: entry.addr, bytes: entry.size, stream: entry.stream, from: 0, to: NEVER, is_pages };
        match entry.action {
            Action::SegmentAlloc | Action::SegmentMap => ranges.map(Mapped { from: moment, ..change }),
            Action::SegmentFree | Action::SegmentUnmap => ranges.unmap(change, moment),
            _ => {}
        }
    }
    for segment in snapshot.segments.iter().filter(|segment| segment.device as usize == device) {
        ranges.complete(Mapped {
            address: segment.address,
            bytes: segment.total_size,
            stream: segment.stream,
            from: 0,
            to: NEVER,
            is_pages: segment.is_expandable,
        });
    }
    ranges.done.extend(ranges.open.into_values());
    ranges.done.sort_by_key(|range| (range.address, range.from));
    ranges.done
}

impl Mapped {
    fn end(&self) -> u64 {
        self.address.saturating_add(self.bytes)
    }

    /// The part of it in `from..to`.
    fn part(&self, from: u64, to: u64) -> Option<Self> {
        let (address, end) = (self.address.max(from), self.end().min(to));
        (address < end).then(|| Self { address, bytes: end - address, ..*self })
    }
}

#[derive(Default)]
struct Ranges {
    /// Those that there are now, by address; they do not overlap.
    open: BTreeMap<u64, Mapped>,
    done: Vec<Mapped>,
}

impl Ranges {
    /// The first range that there is in a range.
    fn first_in(&self, range: &Mapped) -> Option<Mapped> {
        let before = self.open.range(..range.address).next_back().filter(|(_, old)| old.end() > range.address);
        let found = before.or_else(|| self.open.range(range.address..range.end()).next());
        found.map(|(_, old)| *old)
    }

    fn map(&mut self, range: Mapped) {
        // What is there already: its end was not recorded.
        while let Some(old) = self.first_in(&range) {
            self.cut(old, &range, range.from);
        }
        if range.bytes > 0 {
            self.open.insert(range.address, range);
        }
    }

    fn unmap(&mut self, range: Mapped, moment: u32) {
        self.complete(range);
        while let Some(old) = self.first_in(&range) {
            self.cut(old, &range, moment);
        }
    }

    /// Ends what `old` has in `range`.
    fn cut(&mut self, old: Mapped, range: &Mapped, moment: u32) {
        self.open.remove(&old.address);
        self.done.extend(old.part(range.address, range.end()).map(|part| Mapped { to: moment, ..part }));
        for rest in [old.part(0, range.address), old.part(range.end(), u64::MAX)].into_iter().flatten() {
            self.open.insert(rest.address, rest);
        }
    }

    /// Adds what of a range is not there: it was before the first event.
    fn complete(&mut self, range: Mapped) {
        let mut from = range.address;
        let mut missing = Vec::new();
        while let Some(old) = range.part(from, u64::MAX).and_then(|rest| self.first_in(&rest)) {
            missing.extend(range.part(from, old.address));
            from = old.end();
        }
        missing.extend(range.part(from, u64::MAX));
        self.open.extend(missing.into_iter().map(|part| (part.address, part)));
    }
}
