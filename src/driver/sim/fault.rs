//! Failures on demand.

use crate::driver::{Call, DriverErrorKind};

/// A failure to come: which call fails, when, and how.
///
/// A call that fails this way has no effect. A sticky kind (a lost device, a driver that is shut down) makes
/// every later call fail the same way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fault {
    call: Option<Call>,
    when: When,
    kind: DriverErrorKind,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum When {
    /// After so many more matching calls, once.
    Countdown(u64),
    Always,
}

impl Fault {
    /// Fails the `n`th `call` from now on, once; 1 is the next one.
    #[must_use]
    pub const fn nth(call: Call, n: u64, kind: DriverErrorKind) -> Self {
        Self { call: Some(call), when: When::Countdown(n), kind }
    }

    /// Fails the `n`th driver call from now on, whichever it is, once; 1 is the next one.
    #[must_use]
    pub const fn nth_any(n: u64, kind: DriverErrorKind) -> Self {
        Self { call: None, when: When::Countdown(n), kind }
    }

    /// Fails every `call` from now on.
    #[must_use]
    pub const fn always(call: Call, kind: DriverErrorKind) -> Self {
        Self { call: Some(call), when: When::Always, kind }
    }
}

/// The faults that are still to come.
#[derive(Debug, Default)]
pub(super) struct FaultPlan(Vec<Fault>);

impl FaultPlan {
    pub(super) fn add(&mut self, fault: Fault) {
        self.0.push(fault);
    }

    pub(super) fn clear(&mut self) {
        self.0.clear();
    }

    pub(super) fn pending(&self) -> usize {
        self.0.len()
    }

    /// Counts one call; how it fails, if it does. Every fault counts the call, the first one due decides.
    pub(super) fn strike(&mut self, call: Call) -> Option<DriverErrorKind> {
        let mut verdict = None;
        self.0.retain_mut(|fault| {
            if fault.call.is_some_and(|wanted| wanted != call) {
                return true;
            }
            let (due, keep) = match &mut fault.when {
                When::Always => (true, true),
                When::Countdown(left) => {
                    *left = left.saturating_sub(1);
                    (*left == 0, *left > 0)
                }
            };
            if due {
                verdict.get_or_insert(fault.kind);
            }
            keep
        });
        verdict
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use DriverErrorKind::{InvalidValue, OutOfMemory};

    #[test]
    fn counts_only_its_own_calls_and_fires_once() {
        let mut plan = FaultPlan::default();
        plan.add(Fault::nth(Call::Map, 2, InvalidValue));
        let verdicts = [Call::Map, Call::Unmap, Call::Map, Call::Map].map(|call| plan.strike(call));
        assert_eq!(verdicts, [None, None, Some(InvalidValue), None]);
        assert_eq!(plan.pending(), 0);
    }

    #[test]
    fn any_counts_every_call() {
        let mut plan = FaultPlan::default();
        plan.add(Fault::nth_any(2, OutOfMemory));
        plan.add(Fault::always(Call::Free, InvalidValue));
        let verdicts = [Call::Free, Call::Alloc, Call::Alloc].map(|call| plan.strike(call));
        assert_eq!(verdicts, [Some(InvalidValue), Some(OutOfMemory), None]);
    }
}
