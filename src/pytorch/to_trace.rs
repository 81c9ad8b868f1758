//! A snapshot's events as a trace to replay.

use super::{Action, Snapshot};
use crate::BlockState;
use crate::trace::{Event, Trace};
use rustc_hash::FxHashMap;
use std::collections::BTreeMap;

impl Snapshot {
    /// The allocations and frees of a device as a trace; none if it had none.
    ///
    /// What was live before the first event (it is freed later, or live at the end, and its allocation is not there)
    /// is allocated at the beginning, by address. A block that another stream used is freed when that was completed.
    /// Without a history, the trace is what is live.
    #[must_use]
    pub fn to_trace(&self, device: usize, name: &str) -> Option<Trace> {
        let entries = self.device_traces.get(device).map(Vec::as_slice).unwrap_or_default();
        let is_free = |action: &Action| *action == Action::FreeCompleted;
        // PyTorch can leave out kinds of events.
        let frees = if entries.iter().any(|entry| is_free(&entry.action)) {
            Action::FreeCompleted
        } else {
            Action::FreeRequested
        };

        // What must have been there at the beginning: address to bytes and stream.
        let mut before: BTreeMap<u64, (u64, u64)> = BTreeMap::new();
        let mut live: FxHashMap<u64, ()> = FxHashMap::default();
        let mut reused: FxHashMap<u64, ()> = FxHashMap::default();
        for entry in entries {
            if entry.action == Action::Alloc {
                live.insert(entry.addr, ());
                reused.insert(entry.addr, ());
            } else if entry.action == frees
                && live.remove(&entry.addr).is_none()
                && !reused.contains_key(&entry.addr)
            {
                before.insert(entry.addr, (entry.size, entry.stream));
                reused.insert(entry.addr, ());
            }
        }
        for segment in self.segments.iter().filter(|segment| segment.device as usize == device) {
            for block in segment.blocks.iter().filter(|block| block.state != BlockState::Free) {
                if !reused.contains_key(&block.address) {
                    before.insert(block.address, (block.requested_size, segment.stream));
                }
            }
        }

        let mut writer = Writer::new(name);
        for (&addr, &(bytes, stream)) in &before {
            writer.alloc(addr, bytes, stream);
        }
        for entry in entries {
            if entry.action == Action::Alloc {
                writer.alloc(entry.addr, entry.size, entry.stream);
            } else if entry.action == frees {
                writer.free(entry.addr);
            }
        }
        (writer.trace.allocations > 0).then_some(writer.trace)
    }
}

struct Writer {
    trace: Trace,
    /// Number and bytes, by address.
    live: FxHashMap<u64, (u32, u64)>,
    live_bytes: u64,
    streams: FxHashMap<u64, u32>,
    /// Streams other than the default one.
    others: u32,
}

impl Writer {
    fn new(name: &str) -> Self {
        let trace = Trace {
            name: name.to_owned(),
            events: Vec::new(),
            allocations: 0,
            streams: Vec::new(),
            peak_requested: 0,
        };
        Self { trace, live: FxHashMap::default(), live_bytes: 0, streams: FxHashMap::default(), others: 0 }
    }

    fn alloc(&mut self, addr: u64, bytes: u64, stream: u64) {
        self.free(addr); // whose free was not recorded
        let stream = *self.streams.entry(stream).or_insert_with(|| {
            // The default stream is number 0, as in a trace file.
            self.others += u32::from(stream != 0);
            self.trace.streams.push(if stream == 0 { 0 } else { self.others });
            u32::try_from(self.trace.streams.len() - 1).unwrap_or(u32::MAX)
        });
        let Ok(id) = u32::try_from(self.trace.allocations) else { return };
        self.trace.allocations += 1;
        self.trace.events.push(Event::Alloc { bytes, stream });
        self.live.insert(addr, (id, bytes));
        self.live_bytes = self.live_bytes.saturating_add(bytes);
        self.trace.peak_requested = self.trace.peak_requested.max(self.live_bytes);
    }

    fn free(&mut self, addr: u64) {
        if let Some((id, bytes)) = self.live.remove(&addr) {
            self.live_bytes = self.live_bytes.saturating_sub(bytes);
            self.trace.events.push(Event::Free { id });
        }
    }
}
