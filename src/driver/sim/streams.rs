//! Streams, work and captures, as a test or a simulated program uses them.

use super::SimDriver;
use super::bytes::note;
use super::capture::{CaptureMode, Graph};
use super::oracle::Violation;
use super::state::State;
use super::work::{StreamRef, Work};
use crate::driver::{Call, Driver, DriverError, DriverErrorKind, Result as DriverResult, StreamHandle, StreamKey};

/// Streams and time. None of these is a driver call of [`Driver`]: they are what the
/// program around the allocator does, and are neither logged nor charged.
impl SimDriver {
    /// Creates a stream. Its handle may be that of a destroyed one, its identity never is.
    #[must_use]
    pub fn create_stream(&self) -> StreamHandle {
        self.state.lock().timeline.create_stream()
    }

    /// Destroys a stream. What is queued on it goes on; [`complete`](Self::complete) reaches it by its
    /// [key](crate::driver::StreamKey).
    ///
    /// # Errors
    /// If there is no such stream, or it is a default stream.
    pub fn destroy_stream(&self, handle: StreamHandle) -> Result<(), Violation> {
        let mut state = self.state.lock();
        if let Some(number) = state.timeline.key(handle).and_then(|key| state.timeline.stream(key.id)?.capture) {
            state.captures.invalidate(number);
        }
        note(&mut state, |state| {
            let is_done = state.timeline.destroy_stream(handle);
            is_done.then_some(()).ok_or_else(|| Violation(format!("no stream {:#x} to destroy", handle.0)))
        })
    }

    /// Queues work on a stream, or adds it to the graph if the stream is captured.
    ///
    /// # Errors
    /// If the stream is gone, or the work touches memory that may not be used or that unfinished work of
    /// another stream uses, too, without being ordered before it. Nothing is queued then.
    pub fn launch(&self, stream: impl Into<StreamRef>, work: Work) -> Result<(), Violation> {
        self.on_stream(stream.into(), |state, key| state.launch(key, work))
    }

    /// Queues what a capture collected, in the order it was collected in.
    ///
    /// # Errors
    /// As for [`launch`](Self::launch); the work before the one that failed is queued.
    pub fn launch_graph(&self, stream: impl Into<StreamRef>, graph: &Graph) -> Result<(), Violation> {
        let launch =
            |state: &mut State, key| graph.work.iter().try_for_each(|work| state.launch(key, work.clone()));
        self.on_stream(stream.into(), launch)
    }

    fn on_stream(
        &self,
        stream: StreamRef,
        act: impl FnOnce(&mut State, StreamKey) -> Result<(), Violation>,
    ) -> Result<(), Violation> {
        if self.is_forked() {
            return Err(Violation("the process was forked after the device was opened".to_owned()));
        }
        let mut state = self.state.lock();
        if let Some(kind) = state.doom {
            return Err(Violation(kind.to_string()));
        }
        note(&mut state, |state| {
            let key = state.resolve(stream).filter(|&key| state.timeline.is_reachable(key));
            act(state, key.ok_or_else(|| Violation(format!("no stream {stream:?} for this thread")))?)
        })
    }

    /// Ends all that is queued on a stream, and all that it waits for. Timed work takes its virtual time.
    /// A stream that is gone and has nothing queued is complete.
    pub fn complete(&self, stream: impl Into<StreamRef>) {
        let mut state = self.state.lock();
        if let Some(key) = state.resolve(stream.into()) {
            let horizon = state.timeline.horizon(key.id);
            state.wait(&horizon);
        }
    }

    /// Ends the oldest operation queued on a stream, and all that it waits for. Whether there was one.
    pub fn complete_one(&self, stream: impl Into<StreamRef>) -> bool {
        let mut state = self.state.lock();
        let next = state.resolve(stream.into()).map(|key| state.timeline.next_of(key.id)).unwrap_or_default();
        let is_any = !state.timeline.is_past(&next);
        state.wait(&next);
        is_any
    }

    /// Ends all that is queued on the device.
    pub fn complete_all(&self) {
        let mut state = self.state.lock();
        let everything = state.timeline.everything();
        state.wait(&everything);
    }

    /// How many operations are unfinished on the device.
    #[must_use]
    pub fn unfinished(&self) -> usize {
        self.state.lock().timeline.unfinished().count()
    }

    /// Lets virtual time pass; work whose time is over ends.
    pub fn advance(&self, nanos: u64) {
        self.state.lock().elapse(nanos);
    }

    /// Begins to capture a stream.
    ///
    /// # Errors
    /// [`DriverErrorKind::StreamGone`], or [`DriverErrorKind::Capturing`] if it is captured already.
    pub fn begin_capture(&self, stream: impl Into<StreamRef>, mode: CaptureMode) -> DriverResult<()> {
        self.capture_call(stream.into(), |state, key| {
            let State { captures, timeline, .. } = state;
            captures.begin(timeline, key.id, mode)
        })
    }

    /// Ends a capture on the stream where it began.
    ///
    /// # Errors
    /// [`DriverErrorKind::Capturing`] if an illegal call has broken the capture; it is over all the same.
    pub fn end_capture(&self, stream: impl Into<StreamRef>) -> DriverResult<Graph> {
        self.capture_call(stream.into(), |state, key| {
            let State { captures, timeline, .. } = state;
            captures.end(timeline, key)
        })
    }

    /// Breaks the capture that a stream takes part in, as an illegal call does.
    pub fn invalidate_capture(&self, stream: impl Into<StreamRef>) {
        let mut state = self.state.lock();
        let key = state.resolve(stream.into());
        if let Some(number) = key.and_then(|key| state.timeline.stream(key.id)?.capture) {
            state.captures.invalidate(number);
        }
    }

    /// A call about a capture. The contract has none, so that its errors go by the nearest name.
    fn capture_call<T>(
        &self,
        stream: StreamRef,
        act: impl FnOnce(&mut State, StreamKey) -> Result<T, super::oracle::Refusal>,
    ) -> DriverResult<T> {
        self.check_usable()?;
        let mut state = self.state.lock();
        let key = state.resolve(stream).ok_or(DriverError::new(Call::IsCapturing, DriverErrorKind::StreamGone))?;
        act(&mut state, key).map_err(|refusal| {
            if refusal.is_violation {
                state.oracle.note(refusal.detail.clone().into_owned());
            }
            DriverError::with_detail(Call::IsCapturing, refusal.kind, refusal.detail)
        })
    }
}

impl State {
    fn resolve(&mut self, stream: StreamRef) -> Option<StreamKey> {
        match stream {
            StreamRef::Handle(handle) => self.timeline.key(handle),
            StreamRef::Key(key) => Some(key),
        }
    }

    pub(super) fn launch(&mut self, key: StreamKey, work: Work) -> Result<(), Violation> {
        let mut pieces = Vec::new();
        for (ranges, writes) in [(&work.reads, false), (&work.writes, true)] {
            for &(ptr, bytes) in ranges {
                let found = self.locate(ptr, bytes, writes).map_err(|why| {
                    Violation(format!("work on stream {:#x} touches bad memory: {why}", key.handle.0))
                })?;
                pieces.extend(found.into_iter().map(|piece| (piece, writes)));
            }
        }
        if let Some(number) = self.timeline.stream(key.id).and_then(|stream| stream.capture) {
            self.captures.record(number, work);
            return Ok(());
        }
        if let Some((other, op)) = self.timeline.race(key.id, &pieces) {
            let handle = self.timeline.stream(other).map_or(0, |stream| stream.handle.0);
            let (own, theirs): (Vec<_>, Vec<_>) = (work.ranges().collect(), op.work.ranges().collect());
            return Err(Violation(format!(
                "race: work on stream {:#x} over {own:?} is not ordered after unfinished work \
                 on stream {handle:#x} over {theirs:?}",
                key.handle.0,
            )));
        }
        self.timeline.enqueue(key.id, work, pieces);
        Ok(())
    }
}
