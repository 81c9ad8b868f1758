//! What the simulated device holds against its user.

use super::log::Subject;
use crate::driver::{Call, DevicePtr, DriverErrorKind, PageHandle};
use std::borrow::Cow;

/// How many violations are kept; later ones are only counted.
const KEPT: usize = 1_000;

/// A use that a real device would refuse, or worse, answer with corruption.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct Violation(pub(super) String);

/// Why a driver call is refused.
#[derive(Debug)]
pub(super) struct Refusal {
    pub(super) kind: DriverErrorKind,
    pub(super) detail: Cow<'static, str>,
    /// Whether a correct program never sees it.
    pub(super) is_violation: bool,
}

impl Refusal {
    /// Bad luck: a correct program must live with it.
    pub(super) fn honest(kind: DriverErrorKind, detail: impl Into<Cow<'static, str>>) -> Self {
        Self { kind, detail: detail.into(), is_violation: false }
    }

    /// Arguments that a real driver refuses, too.
    pub(super) fn invalid(detail: impl Into<Cow<'static, str>>) -> Self {
        Self { kind: DriverErrorKind::InvalidValue, detail: detail.into(), is_violation: true }
    }

    /// A use that a real driver would not notice.
    pub(super) fn unnoticed(detail: impl Into<Cow<'static, str>>) -> Self {
        Self { kind: DriverErrorKind::Violation, detail: detail.into(), is_violation: true }
    }

    /// A call that breaks a capture.
    pub(super) fn capturing(detail: impl Into<Cow<'static, str>>) -> Self {
        Self { kind: DriverErrorKind::Capturing, detail: detail.into(), is_violation: true }
    }
}

impl From<Violation> for Refusal {
    fn from(violation: Violation) -> Self {
        Self::unnoticed(violation.0)
    }
}

/// Every violation so far.
#[derive(Debug, Default)]
pub(super) struct Oracle {
    kept: Vec<String>,
    dropped: u64,
}

impl Oracle {
    pub(super) fn note(&mut self, what: String) {
        if self.kept.len() < KEPT {
            self.kept.push(what);
        } else {
            self.dropped += 1;
        }
    }

    pub(super) fn note_call(&mut self, seq: u64, call: Call, subject: &Subject, detail: &str) {
        self.note(format!("call {seq}, {call}({}, {}): {detail}", subject.ptr, subject.bytes));
    }

    pub(super) fn violations(&self) -> Vec<String> {
        let more = (self.dropped > 0).then(|| format!("and {} more", self.dropped));
        self.kept.iter().cloned().chain(more).collect()
    }

    pub(super) fn clear(&mut self) {
        *self = Self::default();
    }
}

/// What a program still holds of a device.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Leaks {
    /// Plain allocations: address and bytes.
    pub allocations: Vec<(DevicePtr, u64)>,
    /// Physical memory: handle and bytes. Memory whose handle was released counts while it is mapped.
    pub pages: Vec<(PageHandle, u64)>,
    /// Address ranges: base and bytes.
    pub ranges: Vec<(DevicePtr, u64)>,
    /// Events.
    pub events: usize,
    /// Pieces of page-locked host memory.
    pub host_allocations: usize,
}

impl Leaks {
    /// Whether nothing is held.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }
}
