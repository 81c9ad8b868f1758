//! Time for events: the processor's counter where it has one, since asking the system takes half an event's time. The
//! counter's rate follows from the two moments when both were read: the start, and when somebody wants to know.

use std::time::{Instant, SystemTime, UNIX_EPOCH};

/// A session's clock.
#[derive(Debug)]
pub(super) struct Clock {
    start: Instant,
    start_ticks: u64,
    /// Microseconds since 1970 at the start.
    start_us: u64,
}

/// Turns ticks into time, as of the moment it was made.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Dial {
    start_ticks: u64,
    start_us: u64,
    nanos_per_tick: f64,
}

impl Clock {
    pub(super) fn start() -> Self {
        let start_us = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_micros() as u64);
        let start = Instant::now();
        Self { start, start_ticks: ticks(start), start_us }
    }

    /// The time, in the processor's ticks.
    #[inline]
    pub(super) fn now(&self) -> u64 {
        ticks(self.start)
    }

    #[allow(clippy::cast_precision_loss)]
    pub(super) fn dial(&self) -> Dial {
        let (ticks, nanos) = (self.now().saturating_sub(self.start_ticks), self.start.elapsed().as_nanos());
        let nanos_per_tick = if ticks == 0 { 0.0 } else { nanos as f64 / ticks as f64 };
        Dial { start_ticks: self.start_ticks, start_us: self.start_us, nanos_per_tick }
    }
}

impl Dial {
    /// Nanoseconds since the start.
    #[must_use]
    #[allow(clippy::cast_precision_loss, clippy::cast_possible_truncation, clippy::cast_sign_loss)]
    pub(crate) fn nanos(&self, ticks: u64) -> u64 {
        (ticks.saturating_sub(self.start_ticks) as f64 * self.nanos_per_tick) as u64
    }

    /// Microseconds since 1970.
    #[must_use]
    pub(crate) fn unix_us(&self, ticks: u64) -> u64 {
        self.start_us + self.nanos(ticks) / 1000
    }
}

#[cfg(target_arch = "x86_64")]
#[inline]
fn ticks(_: Instant) -> u64 {
    // SAFETY: every x86-64 processor has this counter; reading it touches no memory.
    unsafe { std::arch::x86_64::_rdtsc() }
}

#[cfg(not(target_arch = "x86_64"))]
#[inline]
fn ticks(start: Instant) -> u64 {
    let since = start.elapsed();
    since.as_secs() * 1_000_000_000 + u64::from(since.subsec_nanos())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ticks_become_the_time_that_passed() {
        let clock = Clock::start();
        let first = clock.now();
        while clock.start.elapsed().as_millis() < 2 {}
        let last = clock.now();
        let (at_most, dial) = (clock.start.elapsed().as_nanos() as u64, clock.dial());
        assert!(dial.nanos(first) <= dial.nanos(last));
        // The dial's own readings are not at the very same moment.
        assert!((2_000_000 - 100_000..=at_most + 100_000).contains(&dial.nanos(last)), "{}", dial.nanos(last));
        assert_eq!(dial.nanos(0), 0, "before the start");
    }
}
