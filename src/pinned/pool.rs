//! The pool behind page-locked buffers.

use super::size::{class_of, largest_for};
use crate::config::{Config, OnPending};
use crate::device::Device;
use crate::driver::{Driver, DriverError, DriverErrorKind, HostPtr};
use crate::error::{Error, Result};
use crate::event::StreamClock;
use crate::process;
use crate::stats::Stat;
use crate::sync::Mutex;
use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Weak};

/// Statistics of page-locked host memory; sizes in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct HostMemoryStats {
    /// Buffers that users hold.
    pub allocation: Stat,
    /// What they asked for.
    pub requested_bytes: Stat,
    /// The bytes of their blocks.
    pub allocated_bytes: Stat,
    /// That, and blocks that were dropped but are still used by copies.
    pub active_bytes: Stat,
    /// Held of the host.
    pub reserved_bytes: Stat,
    /// Calls to `cuMemHostAlloc` that succeeded.
    pub num_host_alloc: u64,
    /// Calls to `cuMemFreeHost` that succeeded.
    pub num_host_free: u64,
    /// Times that a request waited for copies (which perhaps had just passed).
    pub num_waits: u64,
}

/// A piece of page-locked memory.
#[derive(Clone, Copy, Debug)]
pub(crate) struct HostBlock {
    pub(super) ptr: HostPtr,
    /// Its class.
    pub(super) bytes: u64,
    pub(super) requested: u64,
}

/// What must have passed before a block can be used again.
pub(super) type Waits = Vec<(Arc<StreamClock>, u64)>;

#[derive(Debug)]
struct Pending {
    block: HostBlock,
    waits: Waits,
}

#[derive(Debug, Default)]
struct State {
    /// Unused blocks by class, last in, first out.
    free: BTreeMap<u64, Vec<HostPtr>>,
    /// Blocks that copies may still use, in the order of their drops.
    pending: VecDeque<Pending>,
    stats: HostMemoryStats,
    /// Bytes that a driver call under way will reserve if it succeeds.
    under_way: u64,
}

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

/// When so many blocks of a size, and so many bytes, are used by copies under way, the host is far enough ahead: it waits
/// for the oldest instead of taking more, since `cuMemHostAlloc` is slow and stalls the device, too.
const AHEAD_BLOCKS: usize = 4;
const AHEAD_BYTES: u64 = 4 << 20;

/// What a request came to without the driver giving memory.
enum Attempt {
    Served(HostBlock),
    /// The limit leaves room for a block.
    Claimed,
    /// Enough is under way; this is the oldest of it.
    Ahead(Waits),
    Full,
}

impl State {
    fn take(&mut self, class: u64, requested: u64) -> Option<HostBlock> {
        let (&bytes, blocks) =
            self.free.range_mut(class..=largest_for(class)).find(|(_, blocks)| !blocks.is_empty())?;
        let ptr = blocks.pop()?;
        let block = HostBlock { ptr, bytes, requested };
        self.stats.active_bytes.increase(bytes);
        self.book(block);
        Some(block)
    }

    fn book(&mut self, block: HostBlock) {
        self.stats.allocation.increase(1);
        self.stats.requested_bytes.increase(block.requested);
        self.stats.allocated_bytes.increase(block.bytes);
    }

    fn put(&mut self, block: HostBlock) {
        self.stats.active_bytes.decrease(block.bytes);
        self.free.entry(block.bytes).or_default().push(block.ptr);
    }

    /// The blocks under way that could serve a class, oldest first.
    fn under_way_for(&self, class: u64) -> impl Iterator<Item = &Pending> {
        let fitting = class..=largest_for(class);
        self.pending.iter().filter(move |entry| fitting.contains(&entry.block.bytes))
    }

    /// What the oldest block that could serve a class waits for, if enough of them are under way.
    fn ahead(&self, class: u64) -> Option<Waits> {
        let blocks = self.under_way_for(class);
        let (count, bytes) = blocks.fold((0, 0), |(count, bytes), entry| (count + 1, bytes + entry.block.bytes));
        let oldest = self.under_way_for(class).next()?;
        (count >= AHEAD_BLOCKS && bytes >= AHEAD_BYTES).then(|| oldest.waits.clone())
    }

    /// The same, if they are all under way on one stream: then none passes before the oldest, and there is nothing to ask.
    fn ahead_in_order(&self, class: u64) -> Option<Waits> {
        let waits = self.ahead(class)?;
        let [(clock, _)] = &*waits else { return None };
        let is_the_same = |entry: &Pending| matches!(&*entry.waits, [(other, _)] if Arc::ptr_eq(other, clock));
        self.under_way_for(class).all(is_the_same).then_some(waits)
    }

    /// What blocks that could serve a class wait for, if that can only be waited for, and they get many: asking never makes
    /// them free.
    fn stranded(&self, class: u64) -> Option<Waits> {
        let is_stranded = |entry: &&Pending| entry.waits.iter().any(|(clock, epoch)| clock.needs_device(*epoch));
        let mut stranded = self.under_way_for(class).filter(is_stranded);
        let oldest = stranded.next()?;
        stranded.nth(AHEAD_BLOCKS - 2).map(|_| oldest.waits.clone())
    }

    /// To be called when a block was handed out. If it was the last, the next request asks for the oldest that is under way:
    /// the event that tells is recorded now. So it stands for what was queued before this block's copy, which can then run
    /// while the host goes on; and one event stands for as many as possible.
    fn mark(&self, class: u64) {
        if self.free.range(class..=largest_for(class)).all(|(_, blocks)| blocks.is_empty())
            && let Some(oldest) = self.under_way_for(class).next()
        {
            oldest.waits.iter().for_each(|(clock, epoch)| clock.mark(*epoch));
        }
    }

    /// Makes blocks free whose copies are known to have passed. Asks nobody.
    fn collect(&mut self) {
        let asked = self.sift(|_, _| false);
        debug_assert!(asked.is_ok(), "nobody was asked");
    }

    /// Makes blocks free whose copies have passed.
    fn poll(&mut self) -> std::result::Result<(), DriverError> {
        self.sift(|_, _| true)
    }

    /// The same, until one that can serve a class is free.
    fn poll_for(&mut self, class: u64) -> std::result::Result<(), DriverError> {
        let fitting = class..=largest_for(class);
        let can_serve = |block: &HostBlock| fitting.contains(&block.bytes);
        self.sift(|block, freed| can_serve(block) && !freed.is_some_and(can_serve))
    }

    /// Makes blocks free whose copies have passed, asking about those that are to be asked about, given the one that was
    /// freed last. A clock that has not come to an epoch is not asked for later ones.
    fn sift(
        &mut self,
        mut is_asked: impl FnMut(&HostBlock, Option<&HostBlock>) -> bool,
    ) -> std::result::Result<(), DriverError> {
        let mut behind: Vec<Arc<StreamClock>> = Vec::new();
        let mut freed: Option<HostBlock> = None;
        let mut failed = Ok(());
        for entry in std::mem::take(&mut self.pending) {
            let ask = is_asked(&entry.block, freed.as_ref());
            let mut passed = true;
            for (clock, epoch) in &entry.waits {
                let is_behind = || behind.iter().any(|other| Arc::ptr_eq(other, clock));
                if ask && failed.is_ok() && !clock.has_passed(*epoch) && !is_behind() {
                    failed = clock.poll(*epoch).map(drop);
                    if !clock.has_passed(*epoch) {
                        behind.push(Arc::clone(clock));
                    }
                }
                passed &= clock.has_passed(*epoch);
            }
            if passed {
                self.put(entry.block);
                freed = Some(entry.block);
            } else {
                self.pending.push_back(entry);
            }
        }
        failed
    }

    /// Takes free blocks out, the largest first, until `bytes` are together; they still count as reserved.
    fn take_unused(&mut self, bytes: u64) -> Vec<(HostPtr, u64)> {
        let (mut taken, mut sum) = (Vec::new(), 0);
        for (&class, blocks) in self.free.iter_mut().rev() {
            while sum < bytes
                && let Some(ptr) = blocks.pop()
            {
                taken.push((ptr, class));
                sum += class;
            }
        }
        taken
    }
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

    /// Gives unused memory back, or waits for the copies that were queued first; false if neither helps.
    fn make_room(&self, class: u64) -> Result<bool> {
        if self.is_held_up() {
            return Ok(false);
        }
        let excess = self.excess(class);
        let mut state = self.state.lock();
        self.checked(state.poll())?;
        let unused = state.take_unused(excess);
        let oldest = state.pending.front().map(|entry| entry.waits.clone());
        drop(state);
        if !unused.is_empty() {
            return self.give_back(unused).map(|_| true);
        }
        match oldest {
            Some(waits) if self.may_wait => self.wait_for(&waits),
            _ => Ok(false),
        }
    }

    /// Waits for copies; false if a capture forbids it.
    fn wait_for(&self, waits: &Waits) -> Result<bool> {
        self.state.lock().stats.num_waits += 1;
        match wait(waits) {
            Err(error) if error.kind == DriverErrorKind::Capturing => Ok(false),
            waited => self.checked(waited).map(|()| true),
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

/// Waits on the host until all of it has passed.
pub(super) fn wait(waits: &Waits) -> std::result::Result<(), DriverError> {
    waits.iter().try_for_each(|(clock, epoch)| clock.wait(*epoch))
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
