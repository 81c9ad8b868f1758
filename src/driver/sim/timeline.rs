//! Streams of queued work on a virtual clock.
//!
//! Every stream numbers its operations from 1 and ends them in order, so that a point of a stream is one
//! number, and "everything before this event" is a [`Horizon`]: one such number for each stream concerned.

use super::memory::Extent;
use super::work::Work;
use crate::driver::{StreamHandle, StreamKey};
use rustc_hash::FxHashMap;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::atomic::{AtomicU64, Ordering};

#[cfg(vramalloc_shuttle)]
pub(super) use shuttle::thread::{ThreadId, current};
#[cfg(not(vramalloc_shuttle))]
pub(super) use std::thread::{ThreadId, current};

/// Stream identities are unique in the process, over all simulated devices.
static NEXT_STREAM_ID: AtomicU64 = AtomicU64::new(1);

/// How far streams must have come: stream identity and operation number, each stream once.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Horizon(Vec<(u64, u64)>);

impl Horizon {
    pub(super) fn get(&self, stream: u64) -> u64 {
        self.0.iter().find(|entry| entry.0 == stream).map_or(0, |entry| entry.1)
    }

    fn raise(&mut self, stream: u64, number: u64) {
        match self.0.iter_mut().find(|entry| entry.0 == stream) {
            Some(entry) => entry.1 = entry.1.max(number),
            None => self.0.push((stream, number)),
        }
    }
}

/// A queued operation.
#[derive(Debug)]
pub(super) struct Op {
    number: u64,
    /// What it waits for on other streams.
    after: Horizon,
    pub(super) work: Work,
    /// The physical memory it touches, and whether it writes there.
    pub(super) pieces: Vec<(Extent, bool)>,
    started_at: Option<u64>,
}

impl Op {
    fn ends_at(&self) -> Option<u64> {
        Some(self.started_at?.saturating_add(self.work.nanos?))
    }
}

#[derive(Debug)]
pub(super) struct Stream {
    pub(super) handle: StreamHandle,
    /// The thread whose default stream it is.
    owner: Option<ThreadId>,
    alive: bool,
    queue: VecDeque<Op>,
    issued: u64,
    finished: u64,
    /// What its next operation must wait for on other streams.
    waits: Horizon,
    /// The capture it takes part in.
    pub(super) capture: Option<u64>,
}

/// The streams of one device, and its clock.
#[derive(Debug)]
pub(super) struct Timeline {
    now: u64,
    streams: BTreeMap<u64, Stream>,
    by_handle: FxHashMap<StreamHandle, u64>,
    per_thread: FxHashMap<ThreadId, u64>,
    recycled: BTreeSet<u64>,
    next_handle: u64,
    queued: usize,
    /// Operations that ended and whose effect on memory is still to be made.
    ended: Vec<Op>,
}

impl Timeline {
    pub(super) fn new(first_handle: u64) -> Self {
        let mut timeline = Self {
            now: 0,
            streams: BTreeMap::new(),
            by_handle: FxHashMap::default(),
            per_thread: FxHashMap::default(),
            recycled: BTreeSet::new(),
            next_handle: first_handle,
            queued: 0,
            ended: Vec::new(),
        };
        let default = timeline.open(StreamHandle::DEFAULT, None);
        timeline.by_handle.insert(StreamHandle::DEFAULT, default);
        timeline.by_handle.insert(StreamHandle::LEGACY, default);
        timeline
    }

    pub(super) fn now(&self) -> u64 {
        self.now
    }

    fn open(&mut self, handle: StreamHandle, owner: Option<ThreadId>) -> u64 {
        let id = NEXT_STREAM_ID.fetch_add(1, Ordering::Relaxed);
        let stream = Stream {
            handle,
            owner,
            alive: true,
            queue: VecDeque::new(),
            issued: 0,
            finished: 0,
            waits: Horizon::default(),
            capture: None,
        };
        self.streams.insert(id, stream);
        id
    }

    pub(super) fn create_stream(&mut self) -> StreamHandle {
        let raw = self.recycled.pop_first().unwrap_or_else(|| {
            self.next_handle += 0x10;
            self.next_handle - 0x10
        });
        let handle = StreamHandle(raw);
        let id = self.open(handle, None);
        self.by_handle.insert(handle, id);
        handle
    }

    /// Frees the handle; what is queued goes on. False if there is no such stream, or it is a default one.
    pub(super) fn destroy_stream(&mut self, handle: StreamHandle) -> bool {
        if handle.0 <= StreamHandle::PER_THREAD_DEFAULT.0 {
            return false;
        }
        let Some(id) = self.by_handle.remove(&handle) else { return false };
        self.recycled.insert(handle.0);
        if let Some(stream) = self.streams.get_mut(&id) {
            stream.alive = false;
        }
        self.forget_if_done(id);
        true
    }

    /// The identity behind a handle, as the calling thread sees it.
    pub(super) fn key(&mut self, handle: StreamHandle) -> Option<StreamKey> {
        if handle == StreamHandle::PER_THREAD_DEFAULT {
            let thread = current().id();
            let id = match self.per_thread.get(&thread) {
                Some(&id) => id,
                None => {
                    let id = self.open(handle, Some(thread));
                    self.per_thread.insert(thread, id);
                    id
                }
            };
            return Some(StreamKey { handle, id });
        }
        let id = *self.by_handle.get(&handle)?;
        Some(StreamKey { handle: self.streams.get(&id)?.handle, id })
    }

    /// Whether the calling thread can queue on the stream.
    pub(super) fn is_reachable(&self, key: StreamKey) -> bool {
        self.streams.get(&key.id).is_some_and(|stream| {
            stream.alive
                && (stream.handle == key.handle || key.handle == StreamHandle::LEGACY)
                && stream.owner.is_none_or(|owner| owner == current().id())
        })
    }

    pub(super) fn stream(&self, id: u64) -> Option<&Stream> {
        self.streams.get(&id)
    }

    pub(super) fn stream_mut(&mut self, id: u64) -> Option<&mut Stream> {
        self.streams.get_mut(&id)
    }

    pub(super) fn streams_mut(&mut self) -> impl Iterator<Item = &mut Stream> {
        self.streams.values_mut()
    }

    /// Queues an operation.
    pub(super) fn enqueue(&mut self, id: u64, work: Work, pieces: Vec<(Extent, bool)>) {
        let Some(stream) = self.streams.get_mut(&id) else { return };
        stream.issued += 1;
        let op = Op { number: stream.issued, after: stream.waits.clone(), work, pieces, started_at: None };
        stream.queue.push_back(op);
        self.queued += 1;
        self.run_until(self.now);
    }

    /// Every unfinished operation, with the stream's identity.
    pub(super) fn unfinished(&self) -> impl Iterator<Item = (u64, &Op)> + '_ {
        // Without queued work, which is how replays run, no stream is looked at.
        let streams = (self.queued > 0).then_some(&self.streams).into_iter().flatten();
        streams.flat_map(|(&id, stream)| stream.queue.iter().map(move |op| (id, op)))
    }

    /// An unfinished operation that new work on `id` would race with.
    pub(super) fn race(&self, id: u64, pieces: &[(Extent, bool)]) -> Option<(u64, &Op)> {
        let known = &self.streams.get(&id)?.waits;
        self.unfinished().find(|(other, op)| {
            *other != id
                && op.number > known.get(*other)
                && op.pieces.iter().any(|(a, a_writes)| {
                    pieces.iter().any(|(b, b_writes)| (*a_writes || *b_writes) && a.overlaps(*b))
                })
        })
    }

    /// All that is queued on the stream, and all that it waits for.
    pub(super) fn horizon(&self, id: u64) -> Horizon {
        let Some(stream) = self.streams.get(&id) else { return Horizon::default() };
        let mut horizon = stream.waits.clone();
        horizon.raise(id, stream.issued);
        horizon.0.retain(|&(stream, number)| !self.has_passed(stream, number));
        horizon
    }

    /// The next operation of the stream.
    pub(super) fn next_of(&self, id: u64) -> Horizon {
        let next = self.streams.get(&id).and_then(|stream| stream.queue.front()).map(|op| (id, op.number));
        Horizon(next.into_iter().collect())
    }

    /// All that is queued on the device.
    pub(super) fn everything(&self) -> Horizon {
        if self.queued == 0 {
            return Horizon::default();
        }
        Horizon(self.streams.iter().map(|(&id, stream)| (id, stream.issued)).collect())
    }

    pub(super) fn is_past(&self, horizon: &Horizon) -> bool {
        horizon.0.iter().all(|&(stream, number)| self.has_passed(stream, number))
    }

    /// Makes what is queued on the stream from now on wait.
    pub(super) fn wait_for(&mut self, id: u64, horizon: &Horizon) {
        let Some(mut waits) = self.streams.get_mut(&id).map(|stream| std::mem::take(&mut stream.waits)) else {
            return;
        };
        horizon.0.iter().filter(|entry| entry.0 != id).for_each(|&(stream, number)| waits.raise(stream, number));
        waits.0.retain(|&(stream, number)| !self.has_passed(stream, number));
        if let Some(stream) = self.streams.get_mut(&id) {
            stream.waits = waits;
        }
    }

    fn has_passed(&self, id: u64, number: u64) -> bool {
        self.streams.get(&id).is_none_or(|stream| stream.finished >= number)
    }

    /// Lets virtual time pass; operations end when theirs has come.
    pub(super) fn elapse(&mut self, nanos: u64) {
        self.run_until(self.now.saturating_add(nanos));
    }

    /// Waits, as a host call does: timed operations take their time, the others end at once.
    pub(super) fn drive(&mut self, horizon: &Horizon) {
        for &(stream, number) in &horizon.0 {
            while !self.has_passed(stream, number) {
                let blocker = self.blocker_of(stream);
                match self.streams.get(&blocker).and_then(|stream| stream.queue.front()).and_then(Op::ends_at) {
                    Some(end) => self.run_until(end.max(self.now)),
                    None => {
                        self.finish(blocker);
                        self.run_until(self.now);
                    }
                }
            }
        }
    }

    /// The stream whose first operation runs now and must end before the first one of `id` does.
    fn blocker_of(&self, id: u64) -> u64 {
        let mut at = id;
        // An operation waits only for older ones, so this ends.
        while let Some(op) = self.streams.get(&at).and_then(|stream| stream.queue.front()) {
            match op.after.0.iter().find(|&&(stream, number)| !self.has_passed(stream, number)) {
                Some(&(stream, _)) => at = stream,
                None => break,
            }
        }
        at
    }

    fn run_until(&mut self, target: u64) {
        while self.queued > 0 {
            self.start_ready();
            let first_end =
                self.streams.iter().filter_map(|(&id, s)| Some((s.queue.front()?.ends_at()?, id))).min();
            match first_end {
                Some((end, id)) if end <= target => {
                    self.now = self.now.max(end);
                    self.finish(id);
                }
                _ => break,
            }
        }
        self.now = self.now.max(target);
    }

    /// Starts, at this moment, every first operation that waits for nothing.
    fn start_ready(&mut self) {
        let is_waiting = |stream: &Stream| stream.queue.front().is_some_and(|op| op.started_at.is_none());
        let ready: Vec<u64> = (self.streams.iter())
            .filter(|(_, stream)| is_waiting(stream))
            .filter(|(_, stream)| stream.queue.front().is_some_and(|op| self.is_past(&op.after)))
            .map(|(&id, _)| id)
            .collect();
        for id in ready {
            if let Some(op) = self.streams.get_mut(&id).and_then(|stream| stream.queue.front_mut()) {
                op.started_at = Some(self.now);
            }
        }
    }

    fn finish(&mut self, id: u64) {
        let Some(stream) = self.streams.get_mut(&id) else { return };
        let Some(op) = stream.queue.pop_front() else { return };
        stream.finished = op.number;
        self.queued -= 1;
        if op.work.effect.is_some() {
            self.ended.push(op);
        }
        self.forget_if_done(id);
    }

    fn forget_if_done(&mut self, id: u64) {
        if self.streams.get(&id).is_some_and(|stream| !stream.alive && stream.queue.is_empty()) {
            self.streams.remove(&id);
        }
    }

    pub(super) fn take_ended(&mut self) -> Vec<Op> {
        std::mem::take(&mut self.ended)
    }
}
