//! The record of every driver call.

use crate::driver::{Call, DevicePtr, DriverErrorKind, EventHandle, PageHandle, StreamHandle};
use std::collections::VecDeque;

/// How many calls are remembered; older ones are dropped.
const REMEMBERED: usize = 1_000_000;

/// What a call was about; fields that do not apply are `None`, null or 0.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Subject {
    pub(super) ptr: DevicePtr,
    pub(super) bytes: u64,
    pub(super) pages: Option<PageHandle>,
    pub(super) event: Option<EventHandle>,
    pub(super) stream: Option<StreamHandle>,
}

/// One driver call. Two runs of the same single-threaded program give the same entries.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct LogEntry {
    /// Counts the driver's calls from 0.
    pub seq: u64,
    /// The call.
    pub call: Call,
    /// The device address it was about, or that it answered; null if it is about none.
    pub ptr: DevicePtr,
    /// The bytes it was about; 0 if it is about none.
    pub bytes: u64,
    /// The physical memory it was about, or that it answered.
    pub pages: Option<PageHandle>,
    /// The event it was about, or that it answered.
    pub event: Option<EventHandle>,
    /// The stream it was about.
    pub stream: Option<StreamHandle>,
    /// Virtual time at which it began.
    pub at_nanos: u64,
    /// Virtual time it took, waiting included.
    pub nanos: u64,
    /// How it failed; `None` if it did not.
    pub error: Option<DriverErrorKind>,
}

impl LogEntry {
    /// Whether the call succeeded.
    #[must_use]
    pub const fn ok(&self) -> bool {
        self.error.is_none()
    }

    /// Whether this is a call that makes the host wait for the device's work.
    #[must_use]
    pub const fn is_host_wait(&self) -> bool {
        matches!(
            self.call,
            Call::Free | Call::HostFree | Call::Synchronize | Call::EventSynchronize | Call::StreamSynchronize
        )
    }
}

/// The last calls, oldest first.
#[derive(Debug)]
pub(super) struct CallLog {
    enabled: bool,
    entries: VecDeque<LogEntry>,
}

impl CallLog {
    pub(super) fn new(enabled: bool) -> Self {
        Self { enabled, entries: VecDeque::new() }
    }

    pub(super) fn push(&mut self, entry: LogEntry) {
        if !self.enabled {
            return;
        }
        if self.entries.len() == REMEMBERED {
            self.entries.pop_front();
        }
        self.entries.push_back(entry);
    }

    pub(super) fn entries(&self) -> Vec<LogEntry> {
        self.entries.iter().copied().collect()
    }

    pub(super) fn clear(&mut self) {
        self.entries.clear();
    }
}
