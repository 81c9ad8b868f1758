//! Time: which work of a stream has passed.
//!
//! A stream's life is cut into *epochs*. A freed block notes the epoch that is open at that moment, which costs a
//! load. Only when a slow path asks whether an epoch has passed is it closed, by an event recorded on the stream:
//! that event stands for all that was queued before, so for every block freed in the epoch. One event serves any
//! number of frees, and a program that never asks records none.
//!
//! Closing is ordered: first the next epoch is opened, then the event is recorded. A thread that still reads the
//! old number has queued its work before the record.

use crate::driver::{Call, Driver, DriverError, DriverErrorKind, EventHandle, StreamHandle, StreamKey};
use crate::sync::{AtomicU64, Mutex, Ordering};
use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

/// Events for reuse: creating one costs twice what recording does.
#[derive(Debug)]
pub(crate) struct EventPool {
    driver: Arc<dyn Driver>,
    idle: Mutex<Vec<EventHandle>>,
}

impl EventPool {
    pub(crate) fn new(driver: Arc<dyn Driver>) -> Arc<Self> {
        Arc::new(Self { driver, idle: Mutex::new(Vec::new()) })
    }

    fn take(self: &Arc<Self>) -> Result<Event, DriverError> {
        let idle = self.idle.lock().pop();
        let handle = match idle {
            Some(handle) => handle,
            None => self.driver.create_event()?,
        };
        Ok(Event { handle, pool: Arc::clone(self) })
    }
}

impl Drop for EventPool {
    fn drop(&mut self) {
        if self.driver.check_usable().is_err() {
            return;
        }
        let idle = std::mem::take(&mut *self.idle.lock());
        for event in idle {
            // The driver is in order and the event is ours; what it says at the very end helps nobody.
            let _ = self.driver.destroy_event(event);
        }
    }
}

/// An event that goes back to its pool.
#[derive(Debug)]
struct Event {
    handle: EventHandle,
    pool: Arc<EventPool>,
}

impl Drop for Event {
    fn drop(&mut self) {
        self.pool.idle.lock().push(self.handle);
    }
}

/// One stream's epochs.
#[derive(Debug)]
pub(crate) struct StreamClock {
    pub(crate) key: StreamKey,
    /// The open epoch; counts from 1.
    now: AtomicU64,
    /// All epochs up to this one have passed.
    done: AtomicU64,
    closed: Mutex<Closed>,
    /// The user has let go of the stream: its handle may be anything by now.
    retired: AtomicBool,
    events: Arc<EventPool>,
}

#[derive(Debug)]
struct Closed {
    /// Closed epochs that have not passed yet, with the event that stands for them, oldest first.
    queue: VecDeque<(u64, Arc<Event>)>,
    /// The stream is destroyed, or no other thread can reach it: its events cannot be recorded.
    gone: bool,
}

impl StreamClock {
    pub(crate) fn new(key: StreamKey, events: Arc<EventPool>) -> Arc<Self> {
        Arc::new(Self {
            key,
            now: AtomicU64::new(1),
            done: AtomicU64::new(0),
            closed: Mutex::new(Closed { queue: VecDeque::new(), gone: false }),
            retired: AtomicBool::new(false),
            events,
        })
    }

    /// A clock for work that no event can stand for: its epochs pass when the whole device is waited for.
    #[cfg(feature = "cuda")]
    pub(crate) fn unreachable(events: Arc<EventPool>) -> Arc<Self> {
        // No call is ever made with this key, as the stream counts as gone.
        let clock = Self::new(StreamKey { handle: StreamHandle::DEFAULT, id: u64::MAX }, events);
        clock.closed.lock().gone = true;
        clock
    }

    /// The open epoch, which a block freed now notes.
    #[inline]
    pub(crate) fn now(&self) -> u64 {
        self.now.load(Ordering::Acquire)
    }

    /// Whether `epoch` is known to have passed. Asks nobody.
    #[inline]
    pub(crate) fn has_passed(&self, epoch: u64) -> bool {
        epoch <= self.done.load(Ordering::Acquire)
    }

    fn driver(&self) -> &dyn Driver {
        &*self.events.driver
    }

    /// Asks the driver how far the stream is, closing the open epoch if `epoch` is it. Waits for nothing.
    ///
    /// # Errors
    /// What the driver says to recording or querying; the epoch then counts as not passed. A stream that is gone
    /// is no error: its last epochs pass with [`wait`](Self::wait) only.
    pub(crate) fn poll(&self, epoch: u64) -> Result<bool, DriverError> {
        if self.has_passed(epoch) {
            return Ok(true);
        }
        let mut closed = self.closed.lock();
        let _ = self.close(&mut closed, epoch)?;
        while let Some((closed_epoch, event)) = closed.queue.front() {
            if !self.driver().query_event(event.handle)? {
                break;
            }
            let passed = *closed_epoch;
            closed.queue.pop_front();
            self.pass(passed);
        }
        Ok(self.has_passed(epoch))
    }

    /// Waits on the host until `epoch` has passed. Holds no lock while it waits.
    ///
    /// # Errors
    /// What the driver says; the epoch then counts as not passed.
    pub(crate) fn wait(&self, epoch: u64) -> Result<(), DriverError> {
        if self.has_passed(epoch) {
            return Ok(());
        }
        let event = {
            let mut closed = self.closed.lock();
            if !self.close(&mut closed, epoch)? {
                return Err(DriverError::new(Call::EventSynchronize, DriverErrorKind::Capturing));
            }
            closed.queue.iter().find(|(closed_epoch, _)| *closed_epoch >= epoch).cloned()
        };
        match event {
            Some((closed_epoch, event)) => {
                self.driver().synchronize_event(event.handle)?;
                self.pass(closed_epoch);
                self.closed.lock().queue.retain(|(old, _)| *old > closed_epoch);
            }
            None => {
                // Only the device as a whole can tell when a stream that is gone has come to its end.
                let open = self.now.fetch_add(1, Ordering::SeqCst);
                self.driver().synchronize()?;
                self.pass(open);
                self.closed.lock().queue.retain(|(old, _)| *old > open);
            }
        }
        Ok(())
    }

    /// Closes the open epoch while the stream can still be reached; what is freed on it later waits for the device.
    ///
    /// # Errors
    /// What the driver says.
    pub(crate) fn retire(&self) -> Result<(), DriverError> {
        let mut closed = self.closed.lock();
        let result = self.close(&mut closed, self.now());
        closed.gone = true;
        self.retired.store(true, Ordering::Release);
        result.map(|_| ())
    }

    /// Whether the user has let go of the stream, so that no driver call may name it.
    pub(crate) fn is_retired(&self) -> bool {
        self.retired.load(Ordering::Acquire)
    }

    /// Closes the open epoch if it is `epoch`, so that its event is there when it is asked for. Asks for none.
    pub(crate) fn mark(&self, epoch: u64) {
        // A failure is reported by whoever asks.
        let _ = self.close(&mut self.closed.lock(), epoch);
    }

    /// Whether only waiting for the whole device can tell that `epoch` has passed: no event stands for it, and none can, as
    /// the stream is gone, or another thread's own.
    pub(crate) fn needs_device(&self, epoch: u64) -> bool {
        if self.has_passed(epoch) {
            return false;
        }
        let mut closed = self.closed.lock();
        if !closed.gone {
            // Whether it can be reached shows when an event is recorded.
            let is_own = self.key.handle == StreamHandle::PER_THREAD_DEFAULT;
            if !(is_own && matches!(self.close(&mut closed, epoch), Ok(true))) {
                return false;
            }
        }
        closed.queue.back().is_none_or(|(latest, _)| *latest < epoch) && !self.has_passed(epoch)
    }

    /// Makes all epochs that are open by now pass only when the whole device is waited for. Returns the open one.
    pub(crate) fn abandon(&self) -> u64 {
        let mut closed = self.closed.lock();
        closed.gone = true;
        closed.queue.clear();
        // Not the epoch that an event may have stood for a moment ago.
        self.now.fetch_add(1, Ordering::SeqCst) + 1
    }

    fn pass(&self, epoch: u64) {
        self.done.fetch_max(epoch, Ordering::AcqRel);
    }

    /// Closes the open epoch if it is `epoch`; false if a capture of the stream forbids it. A stream that is gone
    /// has nothing to record.
    fn close(&self, closed: &mut Closed, epoch: u64) -> Result<bool, DriverError> {
        // Not `epoch < self.now()`: an epoch whose event could not be recorded has none that stands for it.
        let has_event = closed.queue.back().is_some_and(|(latest, _)| *latest >= epoch);
        if closed.gone || has_event || self.has_passed(epoch) {
            return Ok(true);
        }
        match self.driver().is_capturing(self.key) {
            // An event would become part of the graph. The epoch stays open until the capture ends.
            Ok(true) => return Ok(false),
            Ok(false) => {}
            Err(error) if error.kind == DriverErrorKind::StreamGone => {
                closed.gone |= self.key.handle != StreamHandle::PER_THREAD_DEFAULT;
                return Ok(true);
            }
            Err(error) => return Err(error),
        }
        let event = self.events.take()?;
        // The order of these two lines is the point; see the module's text.
        let open = self.now.fetch_add(1, Ordering::SeqCst);
        match self.driver().record_event(event.handle, self.key) {
            Ok(()) => {
                closed.queue.push_back((open, Arc::new(event)));
                Ok(true)
            }
            Err(error) if error.kind == DriverErrorKind::StreamGone => {
                // A thread's own default stream is out of reach for this thread only.
                closed.gone |= self.key.handle != StreamHandle::PER_THREAD_DEFAULT;
                Ok(true)
            }
            Err(error) => Err(error),
        }
    }
}
