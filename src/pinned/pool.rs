//! The pool behind page-locked buffers.

use super::blocks::{HostBlock, HostMemoryStats, Pending, State, Waits, wait};
use super::size::class_of;
use crate::config::{Config, OnPending};
use crate::device::Device;
use crate::driver::{Driver, DriverError, DriverErrorKind, HostPtr};
use crate::error::{Error, Result};
use crate::event::StreamClock;
use crate::process;
use crate::stats::Stat;
use crate::sync::Mutex;
use std::sync::{Arc, Weak};

/// A device's page-locked memory.
#[derive(Debug)]
pub(crate) struct HostPool {
    driver: Arc<dyn Driver>,
    limit: Option<u64>,
    may_wait: bool,
    device: Weak<Device>,
    forks: u64,
    /// Who knows cudarc's streams.
    #[cfg(feature = "cuda")]
    pub(crate) cuda: std::sync::OnceLock<Weak<crate::cuda::Shared>>,
    state: Mutex<State>,
}

/// What a request came to without the driver giving memory.
enum Attempt {
    Served(HostBlock),
    /// The limit leaves room for a block.
    Claimed,
    /// Enough is under way; this is the oldest of it.
    Ahead(Waits),
    Full,
}

impl HostPool {
    pub(crate) fn new(driver: &Arc<dyn Driver>, config: &Config, device: Weak<Device>) -> Arc<Self> {
        Arc::new(Self {
            driver: Arc::clone(driver),
            limit: config.host_limit_bytes,
            may_wait: config.on_pending != OnPending::Fail,
            device,
            forks: process::watch_forks(),
            #[cfg(feature = "cuda")]
            cuda: std::sync::OnceLock::new(),
            state: Mutex::new(State::default()),
        })
    }

    /// Keeps an error that cannot be returned, if the allocator is there to report it.
    #[cfg(feature = "cuda")]
    pub(super) fn defer(&self, error: DriverError) {
        if let Some(device) = self.device.upgrade() {
            device.defer(error);
        }
    }

    /// Whether a stream is captured, so that what is queued on it does not run now.
    pub(super) fn is_captured(&self, clock: &StreamClock) -> Result<bool> {
        self.checked(self.driver.is_capturing(clock.key))
    }

    fn checked<T>(&self, result: std::result::Result<T, DriverError>) -> Result<T> {
        result.map_err(|error| {
            Error::Driver(self.device.upgrade().map_or(error.clone(), |device| device.noted(error)))
        })
    }

    /// Whether a capture is announced, which a question, a wait or a free could spoil.
    fn is_held_up(&self) -> bool {
        self.device.upgrade().is_some_and(|device| device.is_capturing())
    }

    pub(super) fn alloc(&self, requested: u64) -> Result<HostBlock> {
        let class = class_of(requested).ok_or(Error::SizeOverflow { requested })?;
        self.checked(self.driver.check_usable())?;
        let mut may_wait = self.may_wait;
        loop {
            match self.attempt(class, requested, may_wait)? {
                Attempt::Served(block) => return Ok(block),
                Attempt::Claimed => {
                    if let Some(block) = self.ask_driver(class, requested)? {
                        return Ok(block);
                    }
                }
                Attempt::Ahead(waits) => {
                    may_wait = self.wait_for(&waits)?;
                    continue;
                }
                Attempt::Full => {}
            }
            if !self.make_room(class)? {
                return Err(self.out_of_memory(class, requested));
            }
        }
    }

    /// Looks at what there is, and at the limit. Makes no call that waits.
    fn attempt(&self, class: u64, requested: u64, may_wait: bool) -> Result<Attempt> {
        let may_ask = !self.is_held_up();
        let mut state = self.state.lock();
        let served = state.take(class, requested).or_else(|| {
            state.collect();
            state.take(class, requested)
        });
        if let Some(block) = served {
            if may_ask {
                state.mark(class);
            }
            return Ok(Attempt::Served(block));
        }
        if may_ask {
            if let Some(waits) = state.ahead_in_order(class).filter(|_| may_wait) {
                return Ok(Attempt::Ahead(waits));
            }
            let polled = state.poll_for(class);
            if let Some(block) = state.take(class, requested) {
                state.mark(class);
                return Ok(Attempt::Served(block));
            }
            self.checked(polled)?;
            if may_wait && let Some(waits) = state.ahead(class).or_else(|| state.stranded(class)) {
                return Ok(Attempt::Ahead(waits));
            }
        }
        let after = state.stats.reserved_bytes.current + state.under_way + class;
        if self.limit.is_some_and(|limit| after > limit) {
            return Ok(Attempt::Full);
        }
        state.under_way += class;
        Ok(Attempt::Claimed)
    }

    /// Memory from the driver for what was claimed; `None` if the host has none.
    fn ask_driver(&self, class: u64, requested: u64) -> Result<Option<HostBlock>> {
        let answer = self.driver.alloc_host(class);
        let may_ask = !self.is_held_up();
        let mut state = self.state.lock();
        state.under_way -= class;
        match answer {
            Ok(ptr) => {
                let block = HostBlock { ptr, bytes: class, requested };
                state.stats.num_host_alloc += 1;
                state.stats.reserved_bytes.increase(class);
                state.stats.active_bytes.increase(class);
                state.book(block);
                if may_ask {
                    state.mark(class);
                }
                Ok(Some(block))
            }
            Err(error) if error.kind == DriverErrorKind::OutOfMemory => Ok(None),
            Err(error) => {
                drop(state);
                self.checked(Err(error))
            }
        }
    }

    /// How many bytes have to go for a block to fit.
    fn excess(&self, class: u64) -> u64 {
        let state = self.state.lock();
        let after = state.stats.reserved_bytes.current + state.under_way + class;
        match self.limit {
            Some(limit) if after > limit => after - limit,
            _ => class,
        }
    }

    /// Gives unused memory back, or waits for the copies that were queued first, of those that can be waited for; false if
    /// neither helps.
    fn make_room(&self, class: u64) -> Result<bool> {
        if self.is_held_up() {
            return Ok(false);
        }
        let excess = self.excess(class);
        let mut state = self.state.lock();
        self.checked(state.poll())?;
        let unused = state.take_unused(excess);
        if !unused.is_empty() {
            drop(state);
            return self.give_back(unused).map(|_| true);
        }
        let pending: Vec<Waits> = state.pending.iter().map(|entry| entry.waits.clone()).collect();
        drop(state);
        for waits in pending.iter().filter(|_| self.may_wait) {
            if self.wait_for(waits)? {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Waits for copies; false if a capture forbids it.
    fn wait_for(&self, waits: &Waits) -> Result<bool> {
        match wait(waits) {
            Err(error) if error.kind == DriverErrorKind::Capturing => Ok(false),
            waited => {
                self.state.lock().stats.num_waits += 1;
                self.checked(waited).map(|()| true)
            }
        }
    }

    /// Frees blocks that were taken out; what the driver refuses is put back. Waits for the device's work.
    fn give_back(&self, blocks: Vec<(HostPtr, u64)>) -> Result<u64> {
        let (mut freed, mut failed) = (0, Ok(()));
        for (ptr, class) in blocks {
            let answer = if failed.is_ok() { self.driver.free_host(ptr) } else { failed.clone() };
            let mut state = self.state.lock();
            match answer {
                Ok(()) => {
                    state.stats.num_host_free += 1;
                    state.stats.reserved_bytes.decrease(class);
                    freed += class;
                }
                Err(error) => {
                    state.free.entry(class).or_default().push(ptr);
                    failed = Err(error);
                }
            }
        }
        self.checked(failed)?;
        Ok(freed)
    }

    fn out_of_memory(&self, class: u64, requested: u64) -> Error {
        let stats = self.state.lock().stats;
        Error::HostOutOfMemory {
            requested,
            rounded: class,
            allocated: stats.allocated_bytes.current,
            pending: stats.active_bytes.current.saturating_sub(stats.allocated_bytes.current),
            reserved: stats.reserved_bytes.current,
            limit: self.limit,
        }
    }

    /// Whether this is another process, so that nothing here is its own.
    pub(super) fn is_forked(&self) -> bool {
        process::forks() != self.forks
    }

    /// Takes a block back that copies may still use. Makes no driver call.
    pub(super) fn free(&self, block: HostBlock, waits: Waits) {
        let mut state = self.state.lock();
        state.stats.allocation.decrease(1);
        state.stats.requested_bytes.decrease(block.requested);
        state.stats.allocated_bytes.decrease(block.bytes);
        if waits.iter().all(|(clock, epoch)| clock.has_passed(*epoch)) {
            state.put(block);
        } else {
            state.pending.push_back(Pending { block, waits });
        }
    }

    pub(super) fn empty(&self) -> Result<u64> {
        self.checked(self.driver.check_usable())?;
        if self.is_held_up() {
            return Ok(0);
        }
        let polled = self.state.lock().poll();
        // What no event can tell of is waited for: else nothing would ever ask again.
        let stranded: Waits = {
            let state = self.state.lock();
            let waits = state.pending.iter().flat_map(|entry| &entry.waits);
            waits.filter(|(clock, epoch)| clock.needs_device(*epoch)).cloned().collect()
        };
        let waited = wait(&stranded);
        let mut state = self.state.lock();
        state.collect();
        let unused = state.take_unused(u64::MAX);
        drop(state);
        let freed = self.give_back(unused)?;
        self.checked(polled.and(waited))?;
        Ok(freed)
    }

    pub(super) fn stats(&self) -> HostMemoryStats {
        self.state.lock().stats
    }

    fn each_stat(&self, change: impl Fn(&mut Stat)) {
        let stats = &mut self.state.lock().stats;
        let HostMemoryStats { allocation, requested_bytes, allocated_bytes, active_bytes, reserved_bytes, .. } =
            stats;
        [allocation, requested_bytes, allocated_bytes, active_bytes, reserved_bytes].into_iter().for_each(change);
    }

    pub(super) fn reset_peaks(&self) {
        self.each_stat(Stat::reset_peak);
    }

    pub(super) fn reset_accumulated(&self) {
        self.each_stat(Stat::reset_accumulated);
        let stats = &mut self.state.lock().stats;
        (stats.num_host_alloc, stats.num_host_free, stats.num_waits) = (0, 0, 0);
    }
}

impl Drop for HostPool {
    fn drop(&mut self) {
        if self.is_forked() {
            // Another thread of the parent may have held a lock that the end of a clock takes.
            return std::mem::forget(std::mem::take(self.state.get_mut()));
        }
        if self.driver.check_usable().is_err() {
            return;
        }
        // No buffer is left. The driver's free waits for the device, but not for streams of other contexts.
        let pending = std::mem::take(&mut self.state.lock().pending);
        for entry in pending {
            if wait(&entry.waits).is_ok() {
                self.state.lock().put(entry.block);
            }
        }
        let unused = self.state.lock().take_unused(u64::MAX);
        // Nobody is left to hear of a refusal; the memory then stays the process's.
        let _ = self.give_back(unused);
    }
}
