//! The events of a device, put together to allocations.

use crate::BlockState;
use crate::pytorch::{Action, Snapshot, Stack, block_bytes, held_bytes};
use rustc_hash::{FxHashMap, FxHashSet};

/// Later than everything.
pub(super) const NEVER: u32 = u32::MAX;

/// An allocation. Its times are moments: `n` is after the first `n` events, 0 before all.
#[derive(Clone, Copy, Debug)]
pub(super) struct Lifetime<'a> {
    pub(super) address: u64,
    /// Bytes requested.
    pub(super) requested: u64,
    /// Bytes of the block.
    pub(super) bytes: u64,
    pub(super) stream: u64,
    /// From this moment on it is held; 0 if it was before the first event.
    pub(super) born: u32,
    /// From this moment on no user holds it.
    pub(super) freed: u32,
    /// From this moment on no queued work uses it either.
    pub(super) gone: u32,
    /// The stack of its allocation, if that is known.
    pub(super) stack: Option<&'a Stack>,
    pub(super) tag: &'a str,
}

/// All allocations of a device by the moment of birth, at most one born and one freed by an event. O(events).
pub(super) fn of(snapshot: &Snapshot, device: usize) -> Vec<Lifetime<'_>> {
    let entries = snapshot.device_traces.get(device).map(Vec::as_slice).unwrap_or_default();
    // PyTorch can leave out kinds of events: then one stands for both.
    let has = |action: &Action| entries.iter().any(|entry| entry.action == *action);
    let (has_requests, has_completions) = (has(&Action::FreeRequested), has(&Action::FreeCompleted));

    let mut all: Vec<Lifetime<'_>> = Vec::new();
    let mut open: FxHashMap<u64, usize> = FxHashMap::default();
    let mut seen: FxHashSet<u64> = FxHashSet::default();
    for (moment, entry) in (1u32..).zip(entries) {
        let before = Lifetime {
            address: entry.addr,
            requested: entry.size,
            bytes: block_bytes(entry),
            stream: entry.stream,
            born: 0,
            freed: NEVER,
            gone: NEVER,
            stack: None,
            tag: "",
        };
        match entry.action {
            Action::Alloc => {
                let of_alloc = Lifetime {
                    born: moment,
                    stack: Some(&entry.frames),
                    tag: entry.user_metadata.as_ref(),
                    ..before
                };
                seen.insert(entry.addr);
                // One that is there still: its free was not recorded.
                if let Some(old) = open.insert(entry.addr, all.len()) {
                    all[old].freed = all[old].freed.min(moment);
                    all[old].gone = moment;
                }
                all.push(of_alloc);
            }
            Action::FreeRequested => {
                let freed = match open.get(&entry.addr) {
                    Some(&at) => Some(at),
                    // Born before the first event.
                    None if seen.insert(entry.addr) => {
                        open.insert(entry.addr, all.len());
                        all.push(before);
                        Some(all.len() - 1)
                    }
                    None => None,
                };
                if let Some(at) = freed {
                    all[at].freed = all[at].freed.min(moment);
                    if !has_completions {
                        all[at].gone = moment;
                        open.remove(&entry.addr);
                    }
                }
            }
            Action::FreeCompleted => match open.remove(&entry.addr) {
                Some(at) => {
                    all[at].freed = all[at].freed.min(moment);
                    all[at].gone = moment;
                }
                None if seen.insert(entry.addr) => {
                    all.push(Lifetime { freed: if has_requests { 0 } else { moment }, gone: moment, ..before });
                }
                None => {}
            },
            _ => {}
        }
    }
    let held_bytes = held_bytes(entries);
    for segment in snapshot.segments.iter().filter(|segment| segment.device as usize == device) {
        for block in segment.blocks.iter().filter(|block| block.state != BlockState::Free) {
            if let Some(&at) = open.get(&block.address) {
                all[at].stack = all[at].stack.or(Some(&block.frames));
            } else if seen.insert(block.address) {
                all.push(Lifetime {
                    address: block.address,
                    requested: block.requested_size,
                    bytes: held_bytes(block),
                    stream: segment.stream,
                    born: 0,
                    freed: if block.state == BlockState::Live { NEVER } else { 0 },
                    gone: NEVER,
                    stack: Some(&block.frames),
                    tag: "",
                });
            }
        }
    }
    all.sort_by_key(|lifetime| lifetime.born); // stable: what was there before stays in the order of its frees
    all
}
