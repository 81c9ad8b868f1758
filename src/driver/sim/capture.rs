//! Captures of streams into graphs.

use super::oracle::Refusal;
use super::timeline::{ThreadId, Timeline, current};
use super::work::Work;
use crate::driver::StreamKey;
use std::collections::BTreeMap;

/// Whose calls a capture forbids (`CUstreamCaptureMode`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CaptureMode {
    /// Those of every thread.
    Global,
    /// Those of the thread that began the capture.
    ThreadLocal,
    /// No one's, apart from waiting for the whole device.
    Relaxed,
}

/// What a capture has collected; see [`SimDriver::launch_graph`](super::SimDriver::launch_graph).
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Graph {
    pub(super) work: Vec<Work>,
}

impl Graph {
    /// How many operations it has.
    #[must_use]
    pub fn len(&self) -> usize {
        self.work.len()
    }

    /// Whether it has none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.work.is_empty()
    }
}

#[derive(Debug)]
struct Capture {
    origin: u64,
    mode: CaptureMode,
    thread: ThreadId,
    is_valid: bool,
    graph: Graph,
}

/// The captures underway.
#[derive(Debug, Default)]
pub(super) struct Captures {
    underway: BTreeMap<u64, Capture>,
    next: u64,
}

impl Captures {
    pub(super) fn begin(&mut self, timeline: &mut Timeline, id: u64, mode: CaptureMode) -> Result<(), Refusal> {
        let stream = timeline.stream_mut(id).filter(|stream| stream.capture.is_none());
        let stream = stream.ok_or_else(|| Refusal::capturing("the stream is captured already"))?;
        self.next += 1;
        stream.capture = Some(self.next);
        let thread = current().id();
        let capture = Capture { origin: id, mode, thread, is_valid: true, graph: Graph::default() };
        self.underway.insert(self.next, capture);
        Ok(())
    }

    /// Ends a capture where it began; an error if something has broken it.
    pub(super) fn end(&mut self, timeline: &mut Timeline, key: StreamKey) -> Result<Graph, Refusal> {
        let found = self.underway.iter().find(|(_, capture)| capture.origin == key.id).map(|(&number, _)| number);
        let Some(capture) = found.and_then(|number| self.underway.remove(&number)) else {
            return Err(Refusal::invalid("no capture began on this stream"));
        };
        timeline.streams_mut().filter(|stream| stream.capture == found).for_each(|stream| stream.capture = None);
        if capture.is_valid {
            Ok(capture.graph)
        } else {
            let kind = crate::driver::DriverErrorKind::Capturing;
            Err(Refusal::honest(kind, "the capture was broken by an earlier call"))
        }
    }

    pub(super) fn is_underway(&self, number: u64) -> bool {
        self.underway.contains_key(&number)
    }

    pub(super) fn record(&mut self, number: u64, work: Work) {
        if let Some(capture) = self.underway.get_mut(&number) {
            capture.graph.work.push(work);
        }
    }

    pub(super) fn invalidate(&mut self, number: u64) {
        if let Some(capture) = self.underway.get_mut(&number) {
            capture.is_valid = false;
        }
    }

    /// Breaks what is underway if a call of this thread may not be made now.
    pub(super) fn forbid(&mut self, what: &'static str) -> Result<(), Refusal> {
        let thread = current().id();
        self.break_where(what, |capture| match capture.mode {
            CaptureMode::Global => true,
            CaptureMode::ThreadLocal => capture.thread == thread,
            CaptureMode::Relaxed => false,
        })
    }

    /// Breaks what is underway, since a call would wait for captured streams, too.
    pub(super) fn forbid_always(&mut self, what: &'static str) -> Result<(), Refusal> {
        self.break_where(what, |_| true)
    }

    fn break_where(&mut self, what: &'static str, is_broken: impl Fn(&Capture) -> bool) -> Result<(), Refusal> {
        let mut broken = false;
        for capture in self.underway.values_mut().filter(|capture| is_broken(capture)) {
            capture.is_valid = false;
            broken = true;
        }
        if broken { Err(Refusal::capturing(what)) } else { Ok(()) }
    }
}
