//! What all pools of one device share: the driver, the configuration, what is reserved, failures.

use crate::allocator::Inner;
use crate::config::Config;
use crate::driver::{Driver, DriverError, DriverErrorKind};
use crate::error::{Error, OutOfMemory, Result};
use crate::event::EventPool;
use crate::history::History;
use crate::pinned::HostPool;
use crate::process::{self, Latch, Usable};
use crate::shared::Whole;
use crate::size::SizeClass;
use crate::stats::{PeakBoard, PoolStats, Pools, Stat, StatArray, Visited};
use crate::stream::StreamPool;
use crate::supply::{self, Supply};
use crate::sync::{AtomicU64, Mutex, Ordering, RwLock};
use rustc_hash::FxHashMap;
use std::sync::{Arc, OnceLock, Weak};

/// Called with the report when a request cannot be served, before the error is returned. No lock is held.
pub(crate) type Observer = Arc<dyn Fn(&OutOfMemory) + Send + Sync>;

/// One device's shared state.
pub(crate) struct Device {
    pub(crate) driver: Arc<dyn Driver>,
    pub(crate) config: Config,
    /// Whether pages are mapped by hand; decided at construction.
    pub(crate) expandable: bool,
    pub(crate) supply: Supply,
    pub(crate) total_bytes: u64,
    /// The hard cap on reserved bytes; `u64::MAX` for none.
    limit: AtomicU64,
    /// Captures into graphs that are under way: nothing is given back and nothing waited for meanwhile.
    captures: AtomicU64,
    pub(crate) events: Arc<EventPool>,
    pub(crate) peaks: PeakBoard,
    pub(crate) ledger: Mutex<Ledger>,
    /// All pools, by number. They own the device, not the other way round.
    pools: RwLock<Vec<Weak<StreamPool>>>,
    /// Held while a pool is listed, and by who has locked all that are. Locked after pools, before the peak board.
    listing: Mutex<()>,
    /// Pools of destroyed streams that still hold something.
    retired: Mutex<Vec<Arc<StreamPool>>>,
    /// An error that cannot be returned where it happened (in a drop).
    deferred: Mutex<Option<DriverError>>,
    /// Until the context is lost.
    usable: Usable,
    /// [`process::forks`] at construction.
    pub(crate) forks: u64,
    pub(crate) observers: RwLock<Vec<Observer>>,
    /// Whether any pool has ever had magazines.
    shared: Latch,
    /// Page-locked host memory.
    pub(crate) host: Arc<HostPool>,
    /// The allocator, which owns the device.
    pub(crate) front: OnceLock<Weak<Inner>>,
    pub(crate) history: History,
    /// The ids of private pools, by the number of the stream's pool; that of one that is gone stays until its number has
    /// another. Locked last.
    private_ids: Mutex<FxHashMap<usize, (u64, u64)>>,
}

impl std::fmt::Debug for Device {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Device")
            .field("driver", &self.driver)
            .field("config", &self.config)
            .finish_non_exhaustive()
    }
}

/// What is reserved, and how often the slow paths were walked. Locked last: its holder takes no other lock.
#[derive(Debug, Default)]
pub(crate) struct Ledger {
    pub(crate) segment: StatArray,
    pub(crate) reserved_bytes: StatArray,
    pub(crate) oversize_segments: Stat,
    /// Bytes that a driver call under way will reserve if it succeeds.
    under_way: u64,
    /// Bytes of segments that left their pool and are not back at the driver yet; part of what is reserved.
    pub(crate) leaving: u64,
    pub(crate) alloc_retries: u64,
    pub(crate) ooms: u64,
    pub(crate) syncs: u64,
    pub(crate) device_allocs: u64,
    pub(crate) device_frees: u64,
}

impl Device {
    pub(crate) fn new(driver: Arc<dyn Driver>, config: Config, expandable: bool) -> Arc<Self> {
        let total_bytes = driver.capabilities().total_bytes;
        let supply = Supply::new(driver.device(), driver.capabilities().page_bytes);
        Arc::new_cyclic(|device| Self {
            host: HostPool::new(&driver, &config, Weak::clone(device)),
            limit: AtomicU64::new(config.limit.bytes(total_bytes).unwrap_or(u64::MAX)),
            captures: AtomicU64::new(0),
            events: EventPool::new(Arc::clone(&driver)),
            driver,
            config,
            expandable,
            supply,
            total_bytes,
            peaks: PeakBoard::new(),
            ledger: Mutex::new(Ledger::default()),
            pools: RwLock::new(Vec::new()),
            listing: Mutex::new(()),
            retired: Mutex::new(Vec::new()),
            deferred: Mutex::new(None),
            usable: Usable::new(),
            forks: process::watch_forks(),
            observers: RwLock::new(Vec::new()),
            shared: Latch::new(),
            front: OnceLock::new(),
            history: History::default(),
            private_ids: Mutex::default(),
        })
    }

    /// Whether the hot path may go on. Two loads.
    #[inline]
    pub(crate) fn is_usable(&self) -> bool {
        process::forks() == self.usable.at()
    }

    /// Whether this is a forked child, which must leave everything alone.
    #[inline]
    pub(crate) fn is_forked(&self) -> bool {
        process::forks() != self.forks
    }

    /// Why [`is_usable`](Self::is_usable) is false.
    pub(crate) fn unusable(&self) -> Error {
        let kind = if self.is_forked() { DriverErrorKind::Forked } else { DriverErrorKind::DeviceLost };
        let error = self.driver.check_usable().err();
        Error::Driver(error.unwrap_or_else(|| DriverError::new(crate::driver::Call::Alloc, kind)))
    }

    /// Remembers when a driver error means that nothing will work any more, and passes it on.
    pub(crate) fn noted(&self, error: DriverError) -> DriverError {
        if error.kind == DriverErrorKind::DeviceLost {
            self.usable.end();
        }
        error
    }

    /// Keeps an error for [`CachingAllocator::take_deferred_error`], the first one if there are several.
    ///
    /// [`CachingAllocator::take_deferred_error`]: crate::CachingAllocator::take_deferred_error
    pub(crate) fn defer(&self, error: DriverError) {
        let error = self.noted(error);
        if matches!(error.kind, DriverErrorKind::Deinitialized | DriverErrorKind::Forked) {
            return; // the end of the process, or not our device: nobody can act on it
        }
        self.deferred.lock().get_or_insert(error);
    }

    pub(crate) fn take_deferred(&self) -> Option<DriverError> {
        self.deferred.lock().take()
    }

    pub(crate) fn note_shared(&self) {
        self.shared.set();
    }

    pub(crate) fn has_shared(&self) -> bool {
        self.shared.is_set()
    }

    /// Lists a new pool under its number.
    pub(crate) fn add_pool(&self, number: usize, pool: Weak<StreamPool>) {
        let _listing = self.listing.lock();
        let mut pools = self.pools.write();
        if pools.len() <= number {
            pools.resize(number + 1, Weak::new());
        }
        pools[number] = pool;
    }

    /// The pools that there are, in the order of their numbers, which is the order to lock several in.
    pub(crate) fn pools(&self) -> Vec<Arc<StreamPool>> {
        self.pools.read().iter().filter_map(Weak::upgrade).collect()
    }

    /// Calls `f` with every pool locked, its magazines included. A pool that is being made takes part in nothing before `f`
    /// has returned, so what `f` sees is all that there is.
    pub(crate) fn with_all_locked<T>(&self, f: impl FnOnce(&[Arc<StreamPool>], &mut [Whole<'_>]) -> T) -> T {
        loop {
            let pools = self.pools();
            let mut cores: Vec<_> = pools.iter().map(|pool| pool.lock_whole()).collect();
            let _listing = self.listing.lock();
            // One that was listed before this last lock was taken may not be locked.
            if self.are_all(&pools) {
                return f(&pools, &mut cores);
            }
        }
    }

    fn are_all(&self, pools: &[Arc<StreamPool>]) -> bool {
        let listed = self.pools.read();
        let alive = listed.iter().filter(|pool| pool.strong_count() > 0);
        alive.map(Weak::as_ptr).eq(pools.iter().map(Arc::as_ptr))
    }

    /// The pools whose cached memory may be given to others: all but private ones that are not released.
    pub(crate) fn releasable_pools(&self) -> Vec<Arc<StreamPool>> {
        let mut pools = self.pools();
        pools.retain(|pool| !pool.is_pinned());
        pools
    }

    /// Names a new pool of a private pool.
    pub(crate) fn name_private(&self, pool: &StreamPool, id: (u64, u64)) {
        self.private_ids.lock().insert(pool.number, id);
    }

    /// The id of the private pool that a pool is part of; (0, 0) for an ordinary pool, and for one that is released.
    pub(crate) fn private_id(&self, pool: &StreamPool) -> (u64, u64) {
        if !pool.is_pinned() {
            return (0, 0);
        }
        self.private_ids.lock().get(&pool.number).copied().unwrap_or_default()
    }

    /// The hard cap on reserved bytes.
    pub(crate) fn limit(&self) -> Option<u64> {
        Some(self.limit.load(Ordering::Relaxed)).filter(|limit| *limit != u64::MAX)
    }

    pub(crate) fn set_limit(&self, bytes: Option<u64>) {
        self.limit.store(bytes.unwrap_or(u64::MAX), Ordering::Relaxed);
    }

    pub(crate) fn is_capturing(&self) -> bool {
        self.captures.load(Ordering::Acquire) > 0
    }

    pub(crate) fn begin_capture(&self) {
        self.captures.fetch_add(1, Ordering::AcqRel);
    }

    pub(crate) fn end_capture(&self) {
        self.captures.fetch_sub(1, Ordering::AcqRel);
    }

    /// Keeps the pool of a destroyed stream until it is empty.
    pub(crate) fn keep_retired(&self, pool: &Arc<StreamPool>) {
        self.retired.lock().push(Arc::clone(pool));
    }

    /// Forgets the retired pools that hold nothing any more; their sums are kept.
    pub(crate) fn reap_retired(&self) {
        // A growth or a trim under way holds memory of a pool that looks empty meanwhile.
        let _supply = self.expandable.then(|| self.supply.state.lock());
        let mut retired = self.retired.lock();
        retired.retain(|pool| {
            let mut core = pool.lock();
            if core.held() > 0 || !core.is_empty() {
                return true;
            }
            self.pools.write()[pool.number] = Weak::new();
            // From here on the numbers may be another pool's.
            self.peaks.fold(pool.number, &mut core.stats);
            for shelf in pool.shelves.get().into_iter().flatten() {
                self.peaks.fold(shelf.number, &mut shelf.magazine.lock().stats);
            }
            false
        });
    }

    /// Lets the retired pools go with the allocator.
    pub(crate) fn forget_retired(&self) {
        let retired = std::mem::take(&mut *self.retired.lock());
        drop(retired);
    }

    /// Claims `bytes` of the limit before the driver is asked for them.
    pub(crate) fn claim(&self, bytes: u64) -> bool {
        let mut ledger = self.ledger.lock();
        let after = ledger.reserved_bytes.all.current.saturating_add(ledger.under_way).saturating_add(bytes);
        if self.limit().is_some_and(|limit| after > limit) {
            return false;
        }
        ledger.under_way += bytes;
        true
    }

    /// Gives a claim back that came to nothing.
    pub(crate) fn unclaim(&self, bytes: u64) {
        self.ledger.lock().under_way -= bytes;
    }

    /// Books a claimed segment that the driver gave. Called with the lock of the pool that it goes to.
    pub(crate) fn book_segment(&self, class: SizeClass, bytes: u64) {
        let oversize = bytes >= self.config.max_split();
        let mut ledger = self.ledger.lock();
        ledger.under_way -= bytes;
        ledger.device_allocs += 1;
        ledger.segment.increase(class, 1);
        ledger.reserved_bytes.increase(class, bytes);
        if oversize {
            ledger.oversize_segments.increase(1);
        }
    }

    /// Books a segment that went back to the driver.
    pub(crate) fn unbook_segment(&self, class: SizeClass, bytes: u64) {
        let oversize = bytes >= self.config.max_split();
        let mut ledger = self.ledger.lock();
        ledger.leaving -= bytes;
        ledger.device_frees += 1;
        ledger.segment.decrease(class, 1);
        ledger.reserved_bytes.decrease(class, bytes);
        if oversize {
            ledger.oversize_segments.decrease(1);
        }
    }

    /// Notes that a segment left its pool (or, if `back`, came back). Called with the pool's lock.
    pub(crate) fn book_leaving(&self, bytes: u64, back: bool) {
        let mut ledger = self.ledger.lock();
        ledger.leaving = if back { ledger.leaving - bytes } else { ledger.leaving + bytes };
    }

    /// Books claimed pages that the driver gave.
    pub(crate) fn book_pages(&self, class: SizeClass, bytes: u64) {
        let mut ledger = self.ledger.lock();
        ledger.under_way -= bytes;
        ledger.reserved_bytes.increase(class, bytes);
    }

    /// Books pages that change their size class.
    pub(crate) fn move_pages(&self, from: SizeClass, to: SizeClass, bytes: u64) {
        if from != to {
            let mut ledger = self.ledger.lock();
            ledger.reserved_bytes.decrease(from, bytes);
            ledger.reserved_bytes.increase(to, bytes);
        }
    }

    /// Books pages that went back to the driver.
    pub(crate) fn unbook_pages(&self, class: SizeClass, bytes: u64) {
        self.ledger.lock().reserved_bytes.decrease(class, bytes);
    }

    /// The peaks of reserved bytes: all, large, small.
    pub(crate) fn reserved_peaks(&self) -> [u64; 3] {
        let reserved = &self.ledger.lock().reserved_bytes;
        [reserved.all, reserved.large_pool, reserved.small_pool].map(|stat| stat.peak)
    }

    /// Takes pages out of the sums and peaks that were created for a request which then failed, and are back.
    pub(crate) fn forget_pages(&self, class: SizeClass, bytes: u64, peaks: [u64; 3]) {
        let mut ledger = self.ledger.lock();
        let reserved = &mut ledger.reserved_bytes;
        let stats = [&mut reserved.all, &mut reserved.large_pool, &mut reserved.small_pool];
        for (stat, peak) in stats.into_iter().zip(peaks) {
            stat.peak = stat.peak.min(peak).max(stat.current);
        }
        // Pages leave through the large class; those of the small one were counted there and everywhere twice.
        let moved = if class == SizeClass::Small { bytes } else { 0 };
        for (stat, bytes) in [
            (&mut reserved.all, bytes + moved),
            (&mut reserved.large_pool, bytes),
            (&mut reserved.small_pool, moved),
        ] {
            let bytes = bytes.min(stat.allocated).min(stat.freed);
            stat.allocated -= bytes;
            stat.freed -= bytes;
        }
    }

    pub(crate) fn reserved(&self) -> u64 {
        self.ledger.lock().reserved_bytes.all.current
    }

    /// Tells the observers. No lock is held while they run, so they may use the allocator.
    pub(crate) fn observe(&self, report: &OutOfMemory) {
        let observers = self.observers.read().clone();
        for observer in observers {
            observer(report);
        }
    }

    /// A driver result with its error noted.
    pub(crate) fn checked<T>(&self, result: std::result::Result<T, DriverError>) -> Result<T> {
        result.map_err(|error| Error::Driver(self.noted(error)))
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        if self.expandable && self.driver.check_usable().is_ok() {
            supply::dismantle(&self.supply, self);
        }
    }
}

impl Pools for Device {
    fn visit_one(&self, number: usize, f: &mut dyn FnMut(&mut PoolStats)) {
        let pool = self.pools.read().get(number).and_then(Weak::upgrade);
        if let Some(mut core) = pool.as_ref().and_then(|pool| pool.try_lock_stats()) {
            f(&mut core.stats);
        }
    }

    fn visit(&self, own: usize, f: &mut dyn FnMut(&mut [Visited<'_>])) {
        let pools = {
            let listed = self.pools.read();
            let mut pools: Vec<(usize, Arc<StreamPool>)> = Vec::with_capacity(listed.len());
            pools.extend(listed.iter().enumerate().filter_map(|(number, pool)| Some((number, pool.upgrade()?))));
            pools
        };
        let mut cores = Vec::with_capacity(pools.len());
        let others = pools.iter().filter(|(number, _)| *number != own);
        cores.extend(others.map(|(number, pool)| (*number, pool.try_lock_stats())));
        let shelves = pools.iter().filter_map(|(_, pool)| pool.shelves.get()).flatten();
        let others = shelves.filter(|shelf| shelf.number != own);
        let mut magazines: Vec<_> = others.map(|shelf| (shelf.number, shelf.magazine.try_lock())).collect();
        let cores = cores.iter_mut().map(|(number, guard)| (*number, guard.as_mut().map(|core| &mut core.stats)));
        let magazines =
            magazines.iter_mut().map(|(number, guard)| (*number, guard.as_mut().map(|kept| &mut kept.stats)));
        let mut stats = Vec::with_capacity(cores.len() + magazines.len());
        stats.extend(cores.chain(magazines));
        f(&mut stats);
    }
}
