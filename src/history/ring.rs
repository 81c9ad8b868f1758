//! A session: the chunks of records that are kept, the clock, the stacks.

use super::clock::{Clock, Dial};
use super::record::{Kind, Record};
use super::stacks::{StackId, StackTable};
use super::tags::{self, TagId};
use super::{HistoryOptions, Stacks};
use crate::size::SizeClass;
use crate::sync::{AtomicU64, Mutex, Ordering};
use std::collections::VecDeque;
use std::sync::Arc;

/// Records a chunk.
const CHUNK: usize = 1024;

/// The newest annotations that are kept.
const ANNOTATIONS_MAX: usize = 1 << 16;

/// What the program noted.
#[derive(Clone, Debug)]
pub(crate) struct Annotated {
    pub(crate) ticks: u64,
    pub(crate) thread: u64,
    pub(crate) text: Arc<str>,
}

/// One recording of one device.
#[derive(Debug)]
pub(crate) struct Session {
    pub(crate) options: HistoryOptions,
    next: AtomicU64,
    clock: Clock,
    kept: Mutex<Kept>,
    notes: Mutex<VecDeque<Annotated>>,
    /// The ids of private pools, from number 1. Locked last.
    private_ids: Mutex<Vec<(u64, u64)>>,
    pub(crate) stacks: StackTable,
}

/// Locked last.
#[derive(Debug)]
struct Kept {
    /// Full chunks, in the order in which they were handed in.
    chunks: VecDeque<Vec<Record>>,
    /// Records in them.
    records: usize,
    /// Records before this number may be missing.
    horizon: u64,
    /// Events that belong to no pool.
    own: Vec<Record>,
    /// An empty chunk, for the next who needs one.
    spare: Option<Vec<Record>>,
}

impl Kept {
    fn keep(&mut self, chunk: Vec<Record>, most: usize) {
        self.records += chunk.len();
        self.chunks.push_back(chunk);
        while let Some(oldest) = self.chunks.front()
            && self.records - oldest.len() >= most
        {
            self.records -= oldest.len();
            self.horizon = self.horizon.max(oldest.last().map_or(0, |record| record.seq + 1));
            let mut oldest = self.chunks.pop_front().unwrap_or_default();
            oldest.clear();
            self.spare = Some(oldest);
        }
    }
}

impl Session {
    /// Whether this build can capture stacks.
    pub(crate) const CAPTURES_STACKS: bool = StackTable::AVAILABLE;

    pub(crate) fn new(options: HistoryOptions) -> Arc<Self> {
        let kept = Kept { chunks: VecDeque::new(), records: 0, horizon: 0, own: Vec::new(), spare: None };
        Arc::new(Self {
            options,
            next: AtomicU64::new(1),
            clock: Clock::start(),
            kept: Mutex::new(kept),
            notes: Mutex::new(VecDeque::new()),
            private_ids: Mutex::new(Vec::new()),
            stacks: StackTable::new(),
        })
    }

    /// The next number, and the time.
    #[inline]
    pub(super) fn stamp(&self) -> (u64, u64) {
        (self.next.fetch_add(1, Ordering::Relaxed), self.clock.now())
    }

    /// A private pool's number here; 0 for (0, 0), which is none.
    pub(super) fn private_number(&self, id: (u64, u64)) -> u32 {
        if id == (0, 0) {
            return 0;
        }
        let mut ids = self.private_ids.lock();
        // Most often it is the newest one that is asked for again, for another stream.
        let known = ids.iter().rposition(|known| *known == id);
        let index = known.unwrap_or_else(|| {
            ids.push(id);
            ids.len() - 1
        });
        u32::try_from(index + 1).unwrap_or(0)
    }

    /// The ids of private pools; number `n` has the one at `n - 1`.
    pub(crate) fn private_ids(&self) -> Vec<(u64, u64)> {
        self.private_ids.lock().clone()
    }

    /// The number that the next event will have.
    pub(crate) fn next_seq(&self) -> u64 {
        self.next.load(Ordering::Relaxed)
    }

    /// The time, by the session's clock.
    pub(crate) fn now(&self) -> u64 {
        self.clock.now()
    }

    /// What turns the times of records into nanoseconds, and into microseconds since 1970.
    pub(crate) fn dial(&self) -> Dial {
        self.clock.dial()
    }

    /// The calling thread's stack, if `wanted`.
    #[inline]
    pub(super) fn stack_of(&self, wanted: bool) -> StackId {
        if wanted { self.stacks.capture() } else { StackId::NONE }
    }

    /// An empty chunk.
    pub(super) fn chunk(&self) -> Vec<Record> {
        Vec::with_capacity(CHUNK.min(self.options.events))
    }

    /// Takes a full chunk, and gives an empty one.
    #[cold]
    pub(super) fn hand_in(&self, chunk: Vec<Record>) -> Vec<Record> {
        let mut kept = self.kept.lock();
        kept.keep(chunk, self.options.events);
        kept.spare.take().unwrap_or_else(|| self.chunk())
    }

    /// Takes what a recorder has left.
    pub(super) fn hand_in_last(&self, chunk: Vec<Record>) {
        if !chunk.is_empty() {
            self.kept.lock().keep(chunk, self.options.events);
        }
    }

    /// Records a scope of the calling thread.
    pub(crate) fn record_scope(&self, kind: Kind, tag: TagId) {
        self.record_tagged(kind, tags::thread_number(), 0, 0, SizeClass::Small, tag);
    }

    /// Records what the program notes.
    pub(crate) fn annotate(&self, text: &str) {
        let mut notes = self.notes.lock();
        if notes.len() == ANNOTATIONS_MAX {
            notes.pop_front();
        }
        let ticks = self.clock.now();
        notes.push_back(Annotated { ticks, thread: tags::thread_number(), text: text.into() });
    }

    /// What the program noted, oldest first.
    pub(crate) fn annotations(&self) -> Vec<Annotated> {
        self.notes.lock().iter().cloned().collect()
    }

    /// Records an event that belongs to no pool.
    pub(super) fn record(&self, kind: Kind, addr: u64, bytes: u64, stream: u64, class: SizeClass) {
        self.record_tagged(kind, addr, bytes, stream, class, tags::current());
    }

    fn record_tagged(&self, kind: Kind, addr: u64, bytes: u64, stream: u64, class: SizeClass, tag: TagId) {
        if self.options.events == 0 {
            return;
        }
        let is_scope = matches!(kind, Kind::ScopeBegin | Kind::ScopeEnd);
        let stack = self.stack_of(self.options.stacks != Stacks::Off && !is_scope);
        let mut kept = self.kept.lock();
        let (seq, ticks) = self.stamp();
        let (block_bytes, private) = (bytes, 0);
        kept.own.push(Record { seq, ticks, addr, bytes, block_bytes, stream, stack, tag, kind, class, private });
        if kept.own.len() >= CHUNK.min(self.options.events) {
            let full = std::mem::take(&mut kept.own);
            kept.keep(full, self.options.events);
            kept.own = kept.spare.take().unwrap_or_else(|| self.chunk());
        }
    }

    /// The newest records that are kept, in order, with times that do not go back, together with those that pools have not handed in yet. The caller
    /// has the pools' locks.
    pub(crate) fn collect<'a>(&self, pools: impl Iterator<Item = &'a [Record]>) -> Vec<Record> {
        let kept = self.kept.lock();
        let mut records: Vec<Record> = kept.chunks.iter().flatten().chain(&kept.own).copied().collect();
        records.extend(pools.flatten());
        records.retain(|record| record.seq >= kept.horizon);
        drop(kept);
        records.sort_unstable_by_key(|record| record.seq);
        let excess = records.len().saturating_sub(self.options.events);
        records.drain(..excess);
        // Two processors' counters may differ by a little.
        let mut latest = 0;
        for record in &mut records {
            latest = latest.max(record.ticks);
            record.ticks = latest;
        }
        records
    }
}
