//! A simulated device: [`SimDriver`], a [`Driver`](super::Driver) that needs no GPU.
//!
//! It is meant for tests of your own code as much as for this crate's: nothing in it depends on the machine
//! it runs on, no call takes real time, and the same calls give the same addresses in every run.
//!
//! * **Memory has contents.** [`write`](SimDriver::write) and [`read`](SimDriver::read) go by device address
//!   through the mappings to physical memory, so that a remapped page keeps its bytes, a page mapped twice is
//!   seen twice, and memory given back is wiped. The contents cost host memory only where something was written.
//! * **Time is virtual.** [`launch`](SimDriver::launch) queues [`Work`] on a stream; it ends when its time on the
//!   virtual clock is over, or when the test says so ([`complete`](SimDriver::complete)), or when the host waits
//!   for it. Driver calls move the clock by what [`CostModel`] says they cost on a real device.
//! * **Misuse is caught.** Work that touches memory which is not mapped, which races with other streams' work,
//!   memory unmapped under unfinished work, a double free and the like are refused and remembered:
//!   [`assert_clean`](SimDriver::assert_clean).
//! * **Failures come on demand**: [`fail`](SimDriver::fail), [`lose_device`](SimDriver::lose_device).
//!
//! Copies and fills ([`Driver::copy_to_device`](super::Driver::copy_to_device) and its kin) are work like any other:
//! they take their time on the virtual clock and touch memory when they end. Page-locked host memory is read and
//! written then, too, so that reusing it too early shows in the bytes.
//!
//! Two things are stricter than on a real device. No stream is ordered with the default stream unless an event
//! says so (CUDA: as if all were non-blocking streams), and a plain allocation takes whole pages of its own.
//!
//! ```
//! use vramalloc::driver::{Driver, sim::{SimDriver, Work}};
//!
//! let device = SimDriver::builder().capacity(64 << 20).build();
//! let stream = device.create_stream();
//! let ptr = device.alloc(1 << 20)?;
//! device.write(ptr, b"hello")?;
//!
//! // A kernel that overwrites the memory, and is not done yet.
//! device.launch(stream, Work::writing(ptr, 5).filling(b'!'))?;
//! let mut bytes = [0; 5];
//! device.read(ptr, &mut bytes)?;
//! assert_eq!(&bytes, b"hello");
//!
//! device.complete(stream);
//! device.read(ptr, &mut bytes)?;
//! assert_eq!(&bytes, b"!!!!!");
//! device.free(ptr)?;
//! device.assert_clean();
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod address;
mod builder;
mod bytes;
mod capture;
mod copies;
mod cost;
mod device;
mod events;
mod fault;
mod host;
mod log;
mod memory;
mod oracle;
mod state;
mod streams;
mod timeline;
mod work;

pub use builder::{SimBuilder, SimMachine};
pub use capture::{CaptureMode, Graph};
pub use cost::CostModel;
pub use fault::Fault;
pub use log::LogEntry;
pub use oracle::{Leaks, Violation};
pub use work::{StreamRef, Work};

use super::{CallMeter, DriverErrorKind};
use crate::process::{forks, watch_forks};
use crate::sync::Mutex;
use builder::Machine;
use state::State;
use std::fmt;
use std::sync::Arc;

/// One simulated device. See the [module documentation](self).
pub struct SimDriver {
    options: SimBuilder,
    machine: Arc<Machine>,
    /// How often the process was forked when the device was made.
    forks: u64,
    meter: CallMeter,
    state: Mutex<State>,
}

impl fmt::Debug for SimDriver {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { options, machine: _, forks: _, meter: _, state: _ } = self;
        f.debug_struct("SimDriver").field("options", options).finish_non_exhaustive()
    }
}

impl SimDriver {
    /// The properties to choose from; [`SimBuilder::build`] makes the device.
    #[must_use]
    pub fn builder() -> SimBuilder {
        SimBuilder::default()
    }

    fn new(options: SimBuilder, machine: Arc<Machine>, devices: u64) -> Self {
        let state = Mutex::new(State::new(&options, devices));
        Self { options, machine, forks: watch_forks(), meter: CallMeter::new(), state }
    }

    /// Whether this process is a fork of the one that made the device.
    fn is_forked(&self) -> bool {
        forks() != self.forks
    }

    /// Makes another tenant of the device hold so many bytes.
    pub fn set_foreign_bytes(&self, bytes: u64) {
        self.state.lock().foreign_bytes = bytes;
    }

    /// The bytes that this process holds of the device, by plain allocations and by handles.
    #[must_use]
    pub fn used_bytes(&self) -> u64 {
        self.state.lock().used_bytes()
    }

    /// Plans a failure. Several can be planned at once.
    pub fn fail(&self, fault: Fault) {
        self.state.lock().faults.add(fault);
    }

    /// Forgets the failures that are still to come.
    pub fn clear_faults(&self) {
        self.state.lock().faults.clear();
    }

    /// How many planned failures are still to come.
    #[must_use]
    pub fn pending_faults(&self) -> usize {
        self.state.lock().faults.pending()
    }

    /// Makes every later call fail with [`DriverErrorKind::DeviceLost`], as after a crashed kernel.
    pub fn lose_device(&self) {
        self.state.lock().doom = Some(DriverErrorKind::DeviceLost);
    }

    /// Makes every later call fail with [`DriverErrorKind::Deinitialized`], as at the end of a process.
    pub fn deinitialize(&self) {
        self.state.lock().doom = Some(DriverErrorKind::Deinitialized);
    }

    /// The driver calls so far, oldest first; the last million of them.
    #[must_use]
    pub fn log(&self) -> Vec<LogEntry> {
        self.state.lock().log.entries()
    }

    /// Forgets the recorded calls. Their numbering goes on.
    pub fn clear_log(&self) {
        self.state.lock().log.clear();
    }

    /// Every misuse seen so far, in words.
    #[must_use]
    pub fn violations(&self) -> Vec<String> {
        self.state.lock().oracle.violations()
    }

    /// Forgets the violations, so that a test can go on after one that it provoked.
    pub fn clear_violations(&self) {
        self.state.lock().oracle.clear();
    }

    /// Checks that there was no misuse.
    ///
    /// # Panics
    /// If there was, with every violation in words.
    #[track_caller]
    pub fn assert_clean(&self) {
        let violations = self.violations();
        assert!(violations.is_empty(), "the simulated device saw:\n  {}", violations.join("\n  "));
    }

    /// What the program still holds.
    #[must_use]
    pub fn leaks(&self) -> Leaks {
        self.state.lock().leaks()
    }

    /// The virtual clock, in nanoseconds since the device was made.
    #[must_use]
    pub fn now_nanos(&self) -> u64 {
        self.state.lock().timeline.now()
    }
}
