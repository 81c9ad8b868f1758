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
    /// Without a history, the trace is what is live. What came from a private pool is on a stream of its own in the trace,
    /// which says so ([`Trace::private`]).
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
        let mut before: BTreeMap<u64, (u64, From)> = BTreeMap::new();
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
                before.insert(entry.addr, (entry.size, (entry.stream, entry.pool_id)));
                reused.insert(entry.addr, ());
            }
        }
        for segment in self.segments.iter().filter(|segment| segment.device as usize == device) {
            for block in segment.blocks.iter().filter(|block| block.state != BlockState::Free) {
                if !reused.contains_key(&block.address) {
                    let from = (segment.stream, segment.segment_pool_id);
                    before.insert(block.address, (block.requested_size, from));
                }
            }
        }

        let mut writer = Writer::new(name);
        for (&addr, &(bytes, from)) in &before {
            writer.alloc(addr, bytes, from);
        }
        for entry in entries {
            if entry.action == Action::Alloc {
                writer.alloc(entry.addr, entry.size, (entry.stream, entry.pool_id));
            } else if entry.action == frees {
                writer.free(entry.addr);
            }
        }
        (writer.trace.allocations > 0).then_some(writer.trace)
    }
}

/// The stream's handle, and the private pool's id.
type From = (u64, (u64, u64));

struct Writer {
    trace: Trace,
    /// Number and bytes, by address.
    live: FxHashMap<u64, (u32, u64)>,
    live_bytes: u64,
    /// Where each came from: the number in the trace.
    from: FxHashMap<From, u32>,
    /// The number of each stream other than the default one.
    streams: FxHashMap<u64, u32>,
    /// The number of each private pool.
    pools: FxHashMap<(u64, u64), u32>,
}

impl Writer {
    fn new(name: &str) -> Self {
        let trace = Trace {
            name: name.to_owned(),
            events: Vec::new(),
            allocations: 0,
            streams: Vec::new(),
            private: Vec::new(),
            peak_requested: 0,
        };
        let (live, from, streams, pools) = Default::default();
        Self { trace, live, live_bytes: 0, from, streams, pools }
    }

    fn alloc(&mut self, addr: u64, bytes: u64, from: From) {
        self.free(addr); // whose free was not recorded
        let Self { trace, from: known, streams, pools, .. } = self;
        let stream = *known.entry(from).or_insert_with(|| {
            let (stream, pool) = from;
            let next = number(streams.len() + 1);
            // The default stream is number 0, as in a trace file.
            trace.streams.push(if stream == 0 { 0 } else { *streams.entry(stream).or_insert(next) });
            let next = number(pools.len());
            trace.private.push((pool != (0, 0)).then(|| *pools.entry(pool).or_insert(next)));
            number(trace.streams.len() - 1)
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

fn number(of: usize) -> u32 {
    u32::try_from(of).unwrap_or(u32::MAX)
}
