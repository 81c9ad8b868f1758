//! What happened: a ring of events, off by default.
//!
//! Each pool has a [`Recorder`] while recording is on, and none otherwise: under the pool's lock, which it has anyway,
//! it writes one record of 64 bytes into a chunk of its own. Full chunks go to the device's [`Session`], which drops
//! its oldest chunk when it has more than was asked for; so pools never meet over an event, and nothing is allocated
//! once the ring is full. Records carry a number drawn from one counter, by which a snapshot puts them in order.
//!
//! A device's history is one session from [`record_history`](crate::CachingAllocator::record_history) to the next.

mod clock;
mod record;
mod recorder;
mod ring;
mod stacks;
mod tags;

pub(crate) use clock::Dial;
pub(crate) use record::{Kind, Record};
pub(crate) use recorder::{Note, Recorder};
pub(crate) use ring::{Annotated, Session};
pub(crate) use stacks::StackId;
#[cfg(feature = "metrics")]
pub(crate) use tags::OTHER;
pub use tags::Scope;
pub(crate) use tags::{TagId, tag_name};

use crate::driver::DevicePtr;
use crate::leaks::LeakReport;
use crate::size::SizeClass;
use crate::sync::Mutex;
use std::sync::Arc;

/// Of which events the call stack is kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
#[non_exhaustive]
pub enum Stacks {
    /// Of none.
    #[default]
    Off,
    /// Of allocations. A capture costs one to several microseconds, by the depth of the stack.
    Alloc,
    /// Of allocations and frees.
    All,
}

/// What [`record_history`](crate::CachingAllocator::record_history) keeps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct HistoryOptions {
    /// The newest events that are kept; 64 bytes each. With 0 only what is live is known: when it was allocated, under
    /// which tag and stack.
    pub events: usize,
    /// Of which events the call stack is kept. Needs the feature `stacks`.
    pub stacks: Stacks,
}

impl Default for HistoryOptions {
    /// A million events, no stacks.
    fn default() -> Self {
        Self { events: 1_000_000, stacks: Stacks::Off }
    }
}

impl HistoryOptions {
    /// The same with at most `events` events.
    #[must_use]
    pub const fn events(self, events: usize) -> Self {
        Self { events, ..self }
    }

    /// The same with call stacks.
    #[must_use]
    pub const fn stacks(self, stacks: Stacks) -> Self {
        Self { stacks, ..self }
    }
}

/// Called with what is live when the allocator goes.
pub(crate) type LeakObserver = Box<dyn Fn(&LeakReport) + Send + Sync>;

/// A device's session.
#[derive(Default)]
pub(crate) struct History {
    session: Mutex<Option<Arc<Session>>>,
    leak_observer: Mutex<Option<LeakObserver>>,
}

impl History {
    /// Starts a session, or none; the former one's events are forgotten once its recorders are gone. The caller has
    /// every pool's lock and the supply's, so that no event falls between two sessions.
    pub(crate) fn switch(&self, session: Option<Arc<Session>>) {
        *self.session.lock() = session;
    }

    /// The session, while one is running.
    pub(crate) fn session(&self) -> Option<Arc<Session>> {
        self.session.lock().clone()
    }

    pub(crate) fn on_leak(&self, observer: LeakObserver) {
        *self.leak_observer.lock() = Some(observer);
    }

    /// Takes the observer: it is called once, at the end.
    pub(crate) fn take_leak_observer(&self) -> Option<LeakObserver> {
        self.leak_observer.lock().take()
    }

    /// Records an event that belongs to no pool's lock: pages, out of memory, scopes.
    #[cold]
    #[inline(never)]
    pub(crate) fn record(&self, kind: Kind, addr: DevicePtr, bytes: u64, stream: u64, class: SizeClass) {
        if let Some(session) = self.session() {
            session.record(kind, addr.0, bytes, stream, class);
        }
    }
}
