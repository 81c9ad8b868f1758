//! Events, and the calls about them.

use super::oracle::Refusal;
use super::state::State;
use super::timeline::Horizon;
use crate::driver::{DriverErrorKind, EventHandle, StreamKey};
use rustc_hash::FxHashMap;

/// What an event stands for.
#[derive(Clone, Debug, Default)]
struct Mark {
    horizon: Horizon,
    /// The capture it was recorded in; such an event stands for a place in a graph, not for a moment.
    capture: Option<u64>,
}

/// The events of a device. Handles are not reused, so that a stale one is always noticed.
#[derive(Debug)]
pub(super) struct Events {
    marks: FxHashMap<u64, Mark>,
    next: u64,
}

impl Events {
    pub(super) fn new(first: u64) -> Self {
        Self { marks: FxHashMap::default(), next: first }
    }

    pub(super) fn len(&self) -> usize {
        self.marks.len()
    }

    pub(super) fn create(&mut self) -> EventHandle {
        let handle = self.next;
        self.next += 1;
        self.marks.insert(handle, Mark::default());
        EventHandle(handle)
    }

    pub(super) fn destroy(&mut self, event: EventHandle) -> Result<(), Refusal> {
        self.marks.remove(&event.0).map(|_| ()).ok_or_else(no_event)
    }

    fn mark(&self, event: EventHandle) -> Result<&Mark, Refusal> {
        self.marks.get(&event.0).ok_or_else(no_event)
    }
}

fn no_event() -> Refusal {
    Refusal::invalid("no such event, or destroyed already")
}

fn no_stream() -> Refusal {
    Refusal::honest(DriverErrorKind::StreamGone, "")
}

impl State {
    pub(super) fn reach(&self, key: StreamKey) -> Result<(), Refusal> {
        if self.timeline.is_reachable(key) { Ok(()) } else { Err(no_stream()) }
    }

    /// A stream by its identity, alive; also another thread's.
    pub(super) fn capture_of(&self, key: StreamKey) -> Result<Option<u64>, Refusal> {
        self.timeline.stream(key.id).map(|stream| stream.capture).ok_or_else(no_stream)
    }

    /// Breaks the capture of a stream, if there is one, by a call that may not be made during it.
    pub(super) fn forbid_captured(&mut self, key: StreamKey, what: &'static str) -> Result<(), Refusal> {
        match self.capture_of(key)? {
            None => Ok(()),
            Some(number) => {
                self.captures.invalidate(number);
                Err(Refusal::capturing(what))
            }
        }
    }

    pub(super) fn record_event(&mut self, event: EventHandle, key: StreamKey) -> Result<(), Refusal> {
        self.reach(key)?;
        let capture = self.capture_of(key)?;
        let horizon = self.timeline.horizon(key.id);
        *self.events.marks.get_mut(&event.0).ok_or_else(no_event)? = Mark { horizon, capture };
        Ok(())
    }

    pub(super) fn stream_wait_event(&mut self, key: StreamKey, event: EventHandle) -> Result<(), Refusal> {
        self.reach(key)?;
        let mark = self.events.mark(event)?;
        match (self.capture_of(key)?, mark.capture) {
            (None, None) => {
                let horizon = mark.horizon.clone();
                self.timeline.wait_for(key.id, &horizon);
                Ok(())
            }
            (Some(own), Some(other)) if own == other => Ok(()),
            // A stream that waits for a captured one joins its capture.
            (None, Some(joined)) if self.captures.is_underway(joined) => {
                if let Some(stream) = self.timeline.stream_mut(key.id) {
                    stream.capture = Some(joined);
                }
                Ok(())
            }
            (own, other) => {
                own.into_iter().chain(other).for_each(|number| self.captures.invalidate(number));
                Err(Refusal::capturing("a wait from inside a capture for what is outside, or the other way"))
            }
        }
    }

    /// The horizon of an event that the host may ask about.
    fn askable(&mut self, event: EventHandle, what: &'static str) -> Result<Horizon, Refusal> {
        let mark = self.events.mark(event)?;
        if let Some(number) = mark.capture {
            self.captures.invalidate(number);
            return Err(Refusal::capturing("the event was recorded in a capture"));
        }
        let horizon = mark.horizon.clone();
        self.captures.forbid(what)?;
        Ok(horizon)
    }

    pub(super) fn query_event(&mut self, event: EventHandle) -> Result<bool, Refusal> {
        let horizon = self.askable(event, "an event was asked during a capture")?;
        Ok(self.timeline.is_past(&horizon))
    }

    pub(super) fn synchronize_event(&mut self, event: EventHandle) -> Result<(), Refusal> {
        let horizon = self.askable(event, "the host waited during a capture")?;
        self.wait(&horizon);
        Ok(())
    }

    pub(super) fn synchronize(&mut self) -> Result<(), Refusal> {
        self.captures.forbid_always("the host waited for a device with a captured stream")?;
        let everything = self.timeline.everything();
        self.wait(&everything);
        Ok(())
    }
}
