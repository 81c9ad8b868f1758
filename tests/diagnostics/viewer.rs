//! What PyTorch's viewers expect of a snapshot, checked: they replay the events backwards from the segments, and draw
//! nonsense, or nothing, where the two do not agree.

use std::collections::BTreeMap;
use vramalloc::BlockState;
use vramalloc::pytorch::{Action, Snapshot};

/// Disjoint ranges by start, with whose they are.
#[derive(Default, Debug, PartialEq, Eq)]
pub(crate) struct Ranges(BTreeMap<u64, u64>);

impl Ranges {
    fn covers(&self, start: u64, bytes: u64) -> bool {
        let (mut at, end) = (start, start + bytes);
        while at < end {
            match self.0.range(..=at).next_back() {
                Some((&from, &size)) if from + size > at => at = from + size,
                _ => return false,
            }
        }
        true
    }

    fn add(&mut self, start: u64, bytes: u64) {
        let overlaps = self.0.range(..start + bytes).next_back().is_some_and(|(&from, &size)| from + size > start);
        assert!(!overlaps, "{start:#x} is there twice");
        self.0.insert(start, bytes);
    }

    fn remove(&mut self, start: u64, bytes: u64) {
        assert!(self.covers(start, bytes), "{start:#x}, {bytes} bytes, is not there");
        let (mut at, end) = (start, start + bytes);
        while at < end {
            let (&from, &size) = self.0.range(..=at).next_back().unwrap();
            self.0.remove(&from);
            if from < at {
                self.0.insert(from, at - from);
            }
            at = from + size;
        }
        if at > end {
            self.0.insert(end, at - end);
        }
    }

    /// Neighbours made one.
    fn joined(&self) -> Vec<(u64, u64)> {
        let mut joined: Vec<(u64, u64)> = Vec::new();
        for (&start, &bytes) in &self.0 {
            match joined.last_mut() {
                Some(last) if last.0 + last.1 == start => last.1 += bytes,
                _ => joined.push((start, bytes)),
            }
        }
        joined
    }
}

/// Checks the same of a file of PyTorch's, which lacks the bytes of blocks.
#[cfg(feature = "replay")]
pub(crate) fn check_pytorchs(snapshot: &Snapshot) {
    check(snapshot, true);
}

/// Checks the viewers' rules. With `complete` the events begin with an empty allocator.
pub(crate) fn check(snapshot: &Snapshot, complete: bool) {
    let devices = snapshot.device_traces.len();
    for segment in &snapshot.segments {
        assert!((segment.device as usize) < devices);
        assert!(segment.address + segment.total_size < 1 << 53, "exact as a double");
        let mut at = segment.address;
        for block in &segment.blocks {
            assert_eq!(block.address, at, "the blocks tile their segment");
            assert!(block.requested_size <= block.size);
            at += block.size;
        }
        assert_eq!(at, segment.address + segment.total_size);
        let sum = |states: &[BlockState]| -> u64 {
            let blocks = segment.blocks.iter().filter(|block| states.contains(&block.state));
            blocks.map(|block| block.size).sum()
        };
        assert_eq!(segment.allocated_size, sum(&[BlockState::Live]));
        assert_eq!(segment.active_size, sum(&[BlockState::Live, BlockState::Pending]));
    }
    for (device, trace) in snapshot.device_traces.iter().enumerate() {
        check_device(snapshot, device, trace, complete);
    }
}

fn check_device(snapshot: &Snapshot, device: usize, trace: &[vramalloc::pytorch::TraceEntry], complete: bool) {
    let mut mapped = Ranges::default();
    // Address to requested bytes: held, and freed but still active.
    let (mut live, mut pending) = (BTreeMap::new(), BTreeMap::new());
    for segment in snapshot.segments.iter().filter(|segment| segment.device as usize == device) {
        mapped.add(segment.address, segment.total_size);
        for block in &segment.blocks {
            match block.state {
                BlockState::Live => drop(live.insert(block.address, block.requested_size)),
                BlockState::Pending => drop(pending.insert(block.address, block.requested_size)),
                _ => {}
            }
        }
    }
    let mut last = u64::MAX;
    for event in trace.iter().rev() {
        assert!(event.time_us <= last, "time goes forward");
        last = event.time_us;
        let block = (event.addr, event.size);
        match event.action {
            Action::Alloc => {
                assert_eq!(live.remove(&event.addr), Some(event.size), "what was allocated is live: {event:?}");
                assert!(mapped.covers(event.addr, event.block_size), "{event:?}");
            }
            Action::FreeRequested => {
                assert_eq!(
                    pending.remove(&block.0),
                    Some(block.1),
                    "it stays active till it is completed: {event:?}"
                );
                assert!(mapped.covers(event.addr, event.block_size), "{event:?}");
                assert!(live.insert(block.0, block.1).is_none(), "{event:?}");
            }
            Action::FreeCompleted => {
                assert!(mapped.covers(event.addr, event.block_size), "{event:?}");
                assert!(pending.insert(block.0, block.1).is_none(), "{event:?}");
            }
            Action::SegmentAlloc | Action::SegmentMap => mapped.remove(event.addr, event.size),
            Action::SegmentFree | Action::SegmentUnmap => mapped.add(event.addr, event.size),
            Action::Oom => {}
            ref other => panic!("{other:?}"),
        }
    }
    if complete {
        assert_eq!(mapped.joined(), [], "nothing was there before the events");
        assert!(live.is_empty() && pending.is_empty(), "{live:?} {pending:?}");
    }
}
