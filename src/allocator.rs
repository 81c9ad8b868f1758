//! The caching allocator: the public face of one device's memory.

use crate::allocation::{Allocation, Parts};
use crate::block::NONE;
use crate::config::{Config, Limit, Segments};
use crate::device::{Device, Observer};
use crate::driver::{DevicePtr, Driver, DriverError, MemoryInfo, StreamHandle, StreamKey};
use crate::error::{Error, OutOfMemory, Result};
#[cfg(feature = "cuda")]
use crate::event::EventPool;
use crate::history::HistoryOptions;
use crate::live::LiveTable;
use crate::pinned::HostPool;
use crate::pool::{RETIRED, Request, Taken};
use crate::private::PrivatePool;
use crate::reclaim;
use crate::shared::Whole;
use crate::size::{MIN_BLOCK_BYTES, SEGMENT_STEP_BYTES, SizeClass, round_request};
use crate::stats::{Lane, MemoryStats, PoolStats, StatArray};
use crate::stream::{Stream, StreamPool};
use crate::sync::RwLock;
use rustc_hash::FxHashMap;
use std::ptr::NonNull;
use std::sync::{Arc, Weak};

/// The largest alignment that can be asked for, in bytes.
pub const MAX_ALIGNMENT: u64 = SEGMENT_STEP_BYTES;

/// How often `empty_cache` looks for what passed meanwhile.
const EMPTYING_ROUNDS: u32 = 4;

/// A caching allocator for one device. Cheap to clone; `Send` and `Sync`.
///
/// Memory that is freed stays reserved and serves later requests of the same stream without a driver call. Streams
/// have pools of their own, each with its own lock, so threads on their own streams do not meet.
///
/// ```
/// use vramalloc::{CachingAllocator, Config, driver::sim::SimDriver};
///
/// let device = SimDriver::builder().capacity(1 << 30).build();
/// let allocator = CachingAllocator::new(device, Config::default())?;
/// let stream = allocator.default_stream()?;
///
/// let weights = allocator.alloc(30 << 20, &stream)?;
/// let scratch = allocator.alloc(7 << 20, &stream)?;
/// assert_eq!(allocator.memory_allocated(), 37 << 20);
/// assert_eq!(allocator.memory_reserved(), 50 << 20);
/// drop(scratch); // cached: the next request of that size costs no driver call
/// assert_eq!(allocator.empty_cache()?, 20 << 20);
/// # drop(weights);
/// # Ok::<(), vramalloc::Error>(())
/// ```
#[derive(Clone)]
pub struct CachingAllocator {
    inner: Arc<Inner>,
}

pub(crate) struct Inner {
    device: Arc<Device>,
    /// By the stream's identity.
    streams: RwLock<FxHashMap<u64, Arc<StreamPool>>>,
    /// Allocations that were made, or let go, as raw addresses.
    live: LiveTable,
}

impl CachingAllocator {
    /// An allocator over `driver`.
    ///
    /// # Errors
    /// [`Error::InvalidConfig`] for a configuration that [`Config::check`] refuses, [`Error::NoVirtualMemory`] if it
    /// asks for expandable segments on a device without them, or what reserving
    /// [`initial_bytes`](Config::initial_bytes) says.
    pub fn new(driver: Arc<dyn Driver>, config: Config) -> Result<Self> {
        config.check()?;
        let virtual_memory = driver.capabilities().virtual_memory;
        let expandable = match config.segments {
            Segments::Fixed => false,
            Segments::Auto => virtual_memory,
            Segments::Expandable if virtual_memory => true,
            Segments::Expandable => {
                return Err(Error::NoVirtualMemory { device: driver.device(), name: driver.name() });
            }
        };
        let (initial, history) = (config.initial_bytes, config.history_events);
        let device = Device::new(driver, config, expandable);
        let inner = Inner { device, streams: RwLock::new(FxHashMap::default()), live: LiveTable::new() };
        let allocator = Self { inner: Arc::new(inner) };
        allocator.inner.device.front.get_or_init(|| Arc::downgrade(&allocator.inner));
        if let Some(events) = history {
            allocator.record_history(Some(HistoryOptions::default().events(events)))?;
        }
        if initial > 0 {
            allocator.reserve(initial - initial % SEGMENT_STEP_BYTES)?;
        }
        Ok(allocator)
    }

    /// Reserves `bytes` for the default stream. No user held them, so they leave no trace in the statistics of blocks.
    fn reserve(&self, bytes: u64) -> Result<()> {
        if bytes == 0 {
            return Ok(());
        }
        let stream = self.default_stream()?;
        if !self.inner.device.expandable {
            return reclaim::reserve(&stream.pool, bytes);
        }
        drop(self.alloc(bytes, &stream)?);
        let mut core = stream.pool.lock();
        let number = stream.pool.number;
        self.inner.device.peaks.reset_peaks(&mut [(number, &mut core.stats)]);
        self.inner.device.peaks.reset_accumulated(&[(number, &core.stats)]);
        Ok(())
    }

    /// The stream behind a driver handle, as the calling thread sees it. Asks the driver who it is (one cheap
    /// call); keep the result instead of asking for every allocation.
    ///
    /// A stream that will be destroyed while the allocator lives must be announced before by
    /// [`retire_stream`](Self::retire_stream), or kept alive with [`Stream::keeping`].
    ///
    /// # Errors
    /// [`Error::Driver`] if the driver does not know the handle.
    pub fn stream(&self, handle: StreamHandle) -> Result<Stream> {
        let device = &self.inner.device;
        if !device.is_usable() {
            return Err(device.unusable());
        }
        let key = device.checked(device.driver.stream_key(handle))?;
        if let Some(pool) = self.inner.streams.read().get(&key.id) {
            return Ok(Stream { pool: Arc::clone(pool) });
        }
        self.reap();
        let mut streams = self.inner.streams.write();
        let pool = streams.entry(key.id).or_insert_with(|| {
            let thread = (handle == StreamHandle::PER_THREAD_DEFAULT).then(|| std::thread::current().id());
            StreamPool::new(device, StreamKey { handle, ..key }, thread)
        });
        Ok(Stream { pool: Arc::clone(pool) })
    }

    /// The device's (legacy) default stream.
    ///
    /// # Errors
    /// As [`stream`](Self::stream).
    pub fn default_stream(&self) -> Result<Stream> {
        self.stream(StreamHandle::DEFAULT)
    }

    /// To be called before a stream is destroyed: notes how far it has come, while it can still be asked. What is
    /// cached for it stays usable by others through the driver; nothing is stranded.
    ///
    /// # Errors
    /// [`Error::WrongDevice`] for another allocator's stream, [`Error::Driver`] if no event could be recorded (what
    /// was freed last on that stream then waits for the whole device).
    pub fn retire_stream(&self, stream: &Stream) -> Result<()> {
        self.check_stream(stream)?;
        let device = &*self.inner.device;
        let id = stream.pool.clock.key.id;
        let known = self.inner.streams.write().remove(&id);
        let mut result = Ok(());
        // Its own pool, and those that private pools have for it.
        for pool in device.pools().iter().filter(|pool| pool.clock.key.id == id) {
            {
                let mut core = pool.lock();
                core.stats.attention |= RETIRED;
                pool.unshare(&mut core);
            }
            result = result.and(pool.clock.retire());
            drop(pool.owner.lock().take());
        }
        if let Some(pool) = known {
            device.keep_retired(&pool);
        }
        self.reap();
        self.inner.device.checked(result)
    }

    /// A pool of memory that nobody else gets, for captured graphs; see [`PrivatePool`].
    #[must_use]
    pub fn private_pool(&self) -> PrivatePool {
        PrivatePool::new(self.clone(), Arc::clone(&self.inner.device), None)
    }

    /// The same under an id of the caller's, by which snapshots name it (PyTorch's `segment_pool_id`): where others have
    /// numbered it already. (0, 0) means no pool.
    #[must_use]
    pub fn private_pool_of(&self, id: (u64, u64)) -> PrivatePool {
        PrivatePool::new(self.clone(), Arc::clone(&self.inner.device), Some(id))
    }

    /// Forgets retired pools that hold nothing any more.
    fn reap(&self) {
        self.inner.device.reap_retired();
    }

    fn check_stream(&self, stream: &Stream) -> Result<()> {
        if Arc::ptr_eq(&stream.pool.device, &self.inner.device) {
            return Ok(());
        }
        Err(self.wrong_device("stream", stream.device()))
    }

    #[cold]
    fn wrong_device(&self, what: &'static str, theirs: u32) -> Error {
        Error::WrongDevice { what, theirs, ours: self.device() }
    }

    /// Allocates `bytes` for use on `stream`; the contents are whatever was there. Freed when the value is dropped.
    ///
    /// Zero bytes are legal: the null address, which costs nothing. O(1) when the cache has a block.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`] when everything has been tried, with the numbers; [`Error::SizeOverflow`] from 2^60
    /// bytes on; [`Error::WrongDevice`]; [`Error::Driver`] if the driver fails otherwise. A failure changes nothing.
    #[inline]
    pub fn alloc(&self, bytes: u64, stream: &Stream) -> Result<Allocation> {
        Ok(Allocation::new(self.alloc_any(bytes, stream)?))
    }

    #[inline(always)]
    fn alloc_any(&self, requested: u64, stream: &Stream) -> Result<Parts> {
        let pool = &stream.pool;
        let device = &*self.inner.device;
        let plain = requested.wrapping_sub(1) < pool.plain_bytes;
        if plain && std::ptr::eq(&raw const *pool.device, device) && device.is_usable() {
            let block = pool.take_plain(requested);
            if block.id() != NONE {
                return Ok(Parts { pool: NonNull::from(&**pool), requested, block });
            }
        }
        self.alloc_parts(requested, MIN_BLOCK_BYTES, stream)
    }

    /// [`alloc`](Self::alloc) at a multiple of `alignment`, a power of two up to [`MAX_ALIGNMENT`]. Every
    /// allocation is aligned to 512 bytes in any case.
    ///
    /// # Errors
    /// [`Error::InvalidAlignment`], and as [`alloc`](Self::alloc).
    pub fn alloc_aligned(&self, bytes: u64, alignment: u64, stream: &Stream) -> Result<Allocation> {
        Ok(Allocation::new(self.alloc_parts(bytes, alignment, stream)?))
    }

    #[inline(never)]
    fn alloc_parts(&self, bytes: u64, alignment: u64, stream: &Stream) -> Result<Parts> {
        let device = &*self.inner.device;
        self.check_stream(stream)?;
        if !alignment.is_power_of_two() || alignment > MAX_ALIGNMENT {
            return Err(Error::InvalidAlignment { alignment });
        }
        if !device.is_usable() {
            return Err(device.unusable());
        }
        if bytes == 0 {
            return Ok(Parts::empty(&stream.pool));
        }
        let rounded = round_request(bytes, &device.config).ok_or(Error::SizeOverflow { requested: bytes })?;
        let request = Request {
            requested: bytes,
            bytes: rounded,
            alignment: alignment.max(MIN_BLOCK_BYTES),
            class: SizeClass::of(rounded),
        };
        let pool = if stream.pool.thread.is_none() { &stream.pool } else { &self.this_threads(stream)?.pool };
        let taken = match pool.take(&request) {
            Some(taken) => taken,
            None => self.alloc_slow(pool, &request)?,
        };
        Ok(Parts { pool: NonNull::from(&**pool), requested: bytes, block: taken.handle(bytes) })
    }

    #[cold]
    #[inline(never)]
    fn alloc_slow(&self, pool: &Arc<StreamPool>, request: &Request) -> Result<Taken> {
        if pool.lock().is_retired() {
            return Err(pool.retired());
        }
        reclaim::allocate(pool, request)
    }

    /// The calling thread's own default stream, whatever thread the value came from.
    #[cold]
    fn this_threads(&self, stream: &Stream) -> Result<Stream> {
        if stream.pool.thread == Some(std::thread::current().id()) {
            return Ok(stream.clone());
        }
        self.stream(StreamHandle::PER_THREAD_DEFAULT)
    }

    /// Allocates and returns the bare address, to be freed by [`free_raw`](Self::free_raw). For callers that
    /// cannot keep an [`Allocation`], as the C interface.
    ///
    /// # Errors
    /// As [`alloc`](Self::alloc).
    pub fn alloc_raw(&self, bytes: u64, stream: &Stream) -> Result<DevicePtr> {
        let parts = self.alloc_any(bytes, stream)?;
        let addr = parts.block.addr;
        if addr == 0 {
            drop(Allocation::new(parts));
        } else {
            self.inner.live.insert(parts);
        }
        Ok(DevicePtr(addr))
    }

    /// Turns an allocation into its bare address, to be freed by [`free_raw`](Self::free_raw).
    ///
    /// # Panics
    /// If it is another allocator's.
    #[must_use]
    pub fn into_raw(&self, allocation: Allocation) -> DevicePtr {
        assert!(Arc::ptr_eq(&allocation.pool().device, &self.inner.device), "an allocation of another allocator");
        let ptr = allocation.ptr();
        if !ptr.is_null() {
            self.inner.live.insert(allocation.into_parts());
        }
        ptr
    }

    /// Takes a raw address back into a value that frees it when dropped.
    ///
    /// # Errors
    /// [`Error::NotLive`] or [`Error::UnknownPointer`], as [`free_raw`](Self::free_raw).
    pub fn from_raw(&self, ptr: DevicePtr) -> Result<Allocation> {
        if self.inner.device.is_forked() {
            return Err(self.inner.device.unusable());
        }
        self.inner.live.remove(ptr.0).map(Allocation::new).ok_or_else(|| self.misuse(ptr))
    }

    /// Frees what [`alloc_raw`](Self::alloc_raw) gave. Null is nothing. One hash look-up more than dropping an
    /// [`Allocation`].
    ///
    /// # Errors
    /// [`Error::NotLive`] for an address that was freed before, [`Error::UnknownPointer`] for one that is not the
    /// start of an allocation. Neither changes anything.
    pub fn free_raw(&self, ptr: DevicePtr) -> Result<()> {
        if ptr.is_null() {
            return Ok(());
        }
        if self.inner.device.is_forked() {
            return Err(self.inner.device.unusable());
        }
        match self.inner.live.remove(ptr.0) {
            Some(parts) => {
                // SAFETY: the table's, which had the only copy.
                unsafe { parts.free() };
                Ok(())
            }
            None => Err(self.misuse(ptr)),
        }
    }

    /// [`Allocation::record_stream`] by address.
    ///
    /// # Errors
    /// As [`free_raw`](Self::free_raw); [`Error::WrongDevice`].
    pub fn record_stream_raw(&self, ptr: DevicePtr, stream: &Stream) -> Result<()> {
        if ptr.is_null() {
            return self.check_stream(stream);
        }
        if self.inner.device.is_forked() {
            return Err(self.inner.device.unusable());
        }
        self.inner
            .live
            .with(ptr.0, |allocation| allocation.record_stream(stream))
            .unwrap_or_else(|| Err(self.misuse(ptr)))
    }

    /// What is wrong with an address that is not in the table of live ones.
    #[cold]
    fn misuse(&self, ptr: DevicePtr) -> Error {
        let device = self.device();
        for pool in self.inner.device.pools() {
            let core = pool.lock_whole();
            if let Some(block) = core.block_at(ptr.0) {
                return match block.state() {
                    crate::block::State::Live => {
                        Error::UnknownPointer { ptr, device, inside: Some(DevicePtr(block.addr)) }
                    }
                    // Not an address that a block can have, so it was never handed out.
                    _ if !ptr.0.is_multiple_of(MIN_BLOCK_BYTES) => {
                        Error::UnknownPointer { ptr, device, inside: None }
                    }
                    _ => Error::NotLive { ptr, device },
                };
            }
        }
        Error::UnknownPointer { ptr, device, inside: None }
    }

    /// Finishes deferred frees whose streams have passed. Waits for nothing; returns how many blocks were cached.
    ///
    /// Allocation does this by itself when a pool has nothing left; call it to bring `active` down to the truth.
    pub fn poll(&self) -> usize {
        self.inner.device.pools().iter().map(|pool| reclaim::poll(pool)).sum()
    }

    /// Gives every cached segment back to the driver and returns the bytes. Fixed segments go by `cuMemFree`, which
    /// waits for the device's work.
    ///
    /// Pending frees are finished if their streams have passed; it waits for none of them, except for those of
    /// destroyed streams, of which only the device as a whole can tell.
    ///
    /// # Errors
    /// [`Error::Driver`] if the driver fails; what was not given back is still cached.
    pub fn empty_cache(&self) -> Result<u64> {
        let device = &*self.inner.device;
        if !device.is_usable() {
            return Err(device.unusable());
        }
        device.checked(device.driver.check_usable())?;
        let mut freed = 0;
        for _ in 0..EMPTYING_ROUNDS {
            reclaim::finish_gone(device);
            self.poll();
            reclaim::finish_gone(device); // what other streams held up until now may be a gone one's
            let now = reclaim::release_all_cached(device)?;
            freed += now;
            // Giving back took a while: more may have passed. But what other threads go on freeing is theirs.
            if now == 0 {
                break;
            }
        }
        self.reap();
        crate::tell::emptied(device, freed);
        Ok(freed)
    }

    /// Bytes held by users, in blocks.
    #[must_use]
    pub fn memory_allocated(&self) -> u64 {
        held(&self.inner.device).allocated
    }

    /// The highest [`memory_allocated`](Self::memory_allocated) since the last reset.
    #[must_use]
    pub fn max_memory_allocated(&self) -> u64 {
        self.memory_stats().allocated_bytes.all.peak
    }

    /// Bytes reserved from the driver.
    #[must_use]
    pub fn memory_reserved(&self) -> u64 {
        self.inner.device.reserved()
    }

    /// The highest [`memory_reserved`](Self::memory_reserved) since the last reset.
    #[must_use]
    pub fn max_memory_reserved(&self) -> u64 {
        self.inner.device.ledger.lock().reserved_bytes.all.peak
    }

    /// Starts all peaks anew, from what is current.
    pub fn reset_peak_memory_stats(&self) {
        let device = &*self.inner.device;
        device.with_all_locked(|pools, cores| {
            let mut stats: Vec<(usize, &mut PoolStats)> =
                pools.iter().map(|pool| pool.number).zip(cores.iter_mut().map(|core| &mut core.stats)).collect();
            device.peaks.reset_peaks(&mut stats);
            let mut ledger = device.ledger.lock();
            ledger.segment.reset_peak();
            ledger.reserved_bytes.reset_peak();
            ledger.oversize_segments.reset_peak();
        });
    }

    /// Starts all running sums and event counters anew; what is current, and the peaks, stay.
    pub fn reset_accumulated_memory_stats(&self) {
        let device = &*self.inner.device;
        device.with_all_locked(|pools, cores| {
            device.peaks.reset_accumulated(&numbered(pools, cores));
            let mut ledger = device.ledger.lock();
            ledger.segment.reset_accumulated();
            ledger.reserved_bytes.reset_accumulated();
            ledger.oversize_segments.reset_accumulated();
            ledger.alloc_retries = 0;
            ledger.ooms = 0;
            ledger.syncs = 0;
            ledger.device_allocs = 0;
            ledger.device_frees = 0;
        });
    }

    /// All statistics, at one moment. Locks every pool for that moment.
    #[must_use]
    pub fn memory_stats(&self) -> MemoryStats {
        let device = &*self.inner.device;
        device.with_all_locked(|pools, cores| {
            let lanes = device.peaks.read(&numbered(pools, cores));
            let array = |lane: Lane| StatArray::from_scopes(lanes[lane as usize]);
            let ledger = device.ledger.lock();
            // Pools that were busy count towards a peak with all that they may hold; no more than was reserved can have
            // been held.
            let held = |lane: Lane| array(lane).at_most(&ledger.reserved_bytes);
            MemoryStats {
                allocation: array(Lane::Allocation),
                allocated_bytes: held(Lane::AllocatedBytes),
                requested_bytes: array(Lane::RequestedBytes),
                active: array(Lane::Active),
                active_bytes: held(Lane::ActiveBytes),
                segment: ledger.segment,
                reserved_bytes: ledger.reserved_bytes,
                inactive_split: array(Lane::InactiveSplit),
                inactive_split_bytes: array(Lane::InactiveSplitBytes),
                oversize_allocations: array(Lane::OversizeAllocation).all,
                oversize_segments: ledger.oversize_segments,
                num_alloc_retries: ledger.alloc_retries,
                num_ooms: ledger.ooms,
                num_sync_all_streams: ledger.syncs,
                num_device_alloc: ledger.device_allocs,
                num_device_free: ledger.device_frees,
                max_split_size: device
                    .config
                    .max_split_bytes
                    .map_or(-1, |bytes| i64::try_from(bytes).unwrap_or(i64::MAX)),
            }
        })
    }

    /// The statistics as a table, with the rows of PyTorch's `torch.cuda.memory_summary()`.
    #[must_use]
    pub fn memory_summary(&self) -> String {
        crate::summary::table(&self.memory_stats(), self.device(), false)
    }

    /// The same without the rows by size class.
    #[must_use]
    pub fn memory_summary_abbreviated(&self) -> String {
        crate::summary::table(&self.memory_stats(), self.device(), true)
    }

    /// Free and total bytes of the device, as the driver reports them.
    ///
    /// # Errors
    /// [`Error::Driver`].
    pub fn mem_get_info(&self) -> Result<MemoryInfo> {
        self.inner.device.checked(self.inner.device.driver.memory_info())
    }

    /// Bytes of the device that are neither free nor reserved by this allocator: other allocators, other
    /// processes, CUDA contexts and libraries.
    ///
    /// # Errors
    /// [`Error::Driver`].
    pub fn foreign_memory(&self) -> Result<u64> {
        let info = self.mem_get_info()?;
        Ok(info.total_bytes.saturating_sub(info.free_bytes).saturating_sub(self.memory_reserved()))
    }

    /// The hard cap on reserved bytes, if one is configured: a part is taken of the device's total memory, and
    /// counts what this allocator reserves (not the CUDA context).
    #[must_use]
    pub fn limit(&self) -> Option<u64> {
        self.inner.device.limit()
    }

    /// Replaces the hard cap on reserved bytes. What is reserved beyond a lower one stays until it is given back.
    ///
    /// # Errors
    /// [`Error::InvalidConfig`] for a part that is not within 0 to 1.
    pub fn set_limit(&self, limit: Limit) -> Result<()> {
        Config { limit, ..Config::default() }.check()?;
        self.inner.device.set_limit(limit.bytes(self.inner.device.total_bytes));
        Ok(())
    }

    /// Whether this process is a fork of the one that made the allocator. It must then leave the device's memory
    /// alone: everything fails or does nothing, without a lock that a thread of the parent may have held.
    #[must_use]
    pub fn is_forked(&self) -> bool {
        self.inner.device.is_forked()
    }

    /// Whether `ptr` is a live allocation that was made, or let go, as a raw address. Never in a forked child.
    #[must_use]
    pub fn is_live_raw(&self, ptr: DevicePtr) -> bool {
        !self.inner.device.is_forked() && self.inner.live.with(ptr.0, |_| ()).is_some()
    }

    /// Every segment and block, at one moment. Locks every pool for that moment.
    #[must_use]
    pub fn snapshot(&self) -> crate::Snapshot {
        self.inner.device.with_all_locked(|pools, cores| {
            crate::Snapshot::take(
                self.device(),
                pools.iter().map(|pool| pool.clock.key).zip(cores.iter().map(|core| &**core)),
            )
        })
    }

    /// Walks every structure and checks every invariant. For tests; O(blocks).
    ///
    /// # Errors
    /// [`InvariantViolation`](crate::InvariantViolation) naming the rule and the block that breaks it.
    pub fn validate(&self) -> std::result::Result<(), crate::InvariantViolation> {
        crate::diagnose::frozen(&self.inner.device, |_, cores, supply| {
            let cores: Vec<_> = cores.iter().map(|core| &**core).collect();
            let ledger = self.inner.device.ledger.lock();
            crate::validate::check(&cores, supply, &ledger)
        })
    }

    /// Calls `observer` with every out-of-memory report, before the error is returned. No lock is held meanwhile:
    /// it may read statistics, free and allocate.
    pub fn on_out_of_memory(&self, observer: impl Fn(&OutOfMemory) + Send + Sync + 'static) {
        self.inner.device.observers.write().push(Arc::new(observer) as Observer);
    }

    /// Lets another device (by ordinal) use all memory of expandable segments: what is mapped now, and every page that
    /// is mapped or moved later (`cuMemSetAccess`). Fixed segments are open to a peer whose context enabled access to
    /// this one's (`cuCtxEnablePeerAccess`); for them this does nothing.
    ///
    /// # Errors
    /// [`Error::Driver`]; later pages are then not opened to that device either.
    pub fn grant_access(&self, device: u32) -> Result<()> {
        if !self.inner.device.expandable {
            return Ok(());
        }
        crate::supply::grant_access(&self.inner.device.supply, &self.inner.device, device)
    }

    /// The first driver error since the last call that could not be returned where it happened, as in a drop.
    #[must_use]
    pub fn take_deferred_error(&self) -> Option<DriverError> {
        self.inner.device.take_deferred()
    }

    #[cfg(feature = "metrics")]
    pub(crate) fn downgrade(&self) -> WeakAllocator {
        WeakAllocator(Arc::downgrade(&self.inner))
    }

    pub(crate) fn shared(&self) -> &Arc<Device> {
        &self.inner.device
    }

    /// The device's ordinal.
    #[must_use]
    pub fn device(&self) -> u32 {
        self.inner.device.driver.device()
    }

    /// The device's page-locked memory.
    pub(crate) fn host_pool(&self) -> &Arc<HostPool> {
        &self.inner.device.host
    }

    /// Its events, for clocks beside those of its streams.
    #[cfg(feature = "cuda")]
    pub(crate) fn events(&self) -> Arc<EventPool> {
        Arc::clone(&self.inner.device.events)
    }

    /// Keeps an error for [`take_deferred_error`](Self::take_deferred_error).
    #[cfg(feature = "cuda")]
    pub(crate) fn defer(&self, error: DriverError) {
        self.inner.device.defer(error);
    }

    /// The driver.
    #[must_use]
    pub fn driver(&self) -> &Arc<dyn Driver> {
        &self.inner.device.driver
    }

    /// The configuration in force.
    #[must_use]
    pub fn config(&self) -> &Config {
        &self.inner.device.config
    }

    /// Whether segments are expandable, which [`Segments::Auto`] leaves to the device.
    #[must_use]
    pub fn is_expandable(&self) -> bool {
        self.inner.device.expandable
    }
}

/// The statistics of pools, by number.
fn numbered<'a>(pools: &[Arc<StreamPool>], cores: &'a [Whole<'_>]) -> Vec<(usize, &'a PoolStats)> {
    pools.iter().map(|pool| pool.number).zip(cores.iter().map(|core| &core.stats)).collect()
}

/// What all pools hold, in bytes.
pub(crate) struct Held {
    pub(crate) allocated: u64,
    pub(crate) active: u64,
    pub(crate) inactive_split: u64,
    /// Of large memory, what was freed so far.
    pub(crate) freed: u64,
}

pub(crate) fn held(device: &Device) -> Held {
    device.with_all_locked(|_, cores| {
        let sum = |lane: Lane| {
            let sum: i64 = cores.iter().map(|core| core.stats.total(lane)).sum();
            u64::try_from(sum).unwrap_or(0)
        };
        Held {
            allocated: sum(Lane::AllocatedBytes),
            active: sum(Lane::ActiveBytes),
            inactive_split: sum(Lane::InactiveSplitBytes),
            freed: cores.iter().map(|core| core.stats.freed_bytes(SizeClass::Large)).sum(),
        }
    })
}

/// An allocator that is not kept alive.
#[cfg(feature = "metrics")]
#[derive(Clone)]
pub(crate) struct WeakAllocator(std::sync::Weak<Inner>);

#[cfg(feature = "metrics")]
impl WeakAllocator {
    pub(crate) fn upgrade(&self) -> Option<CachingAllocator> {
        self.0.upgrade().map(|inner| CachingAllocator { inner })
    }
}

#[cfg(feature = "metrics")]
impl std::fmt::Debug for WeakAllocator {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("WeakAllocator")
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        crate::leaks::warn(&self.device);
        if self.device.is_forked() {
            // The child may hold allocations, and another thread of the parent any lock: all of it stays as it is.
            std::mem::forget(std::mem::replace(&mut self.live, LiveTable::new()));
            std::mem::forget(std::mem::replace(&mut self.streams, RwLock::new(FxHashMap::default())));
            std::mem::forget(Arc::clone(&self.device));
            return;
        }
        // Raw addresses may still be in use, and nobody is left to say so: their segments stay the process's.
        self.live.forget_all();
        for pool in self.device.pools() {
            pool.close();
        }
        self.device.forget_retired(); // they own the device, which owned them
    }
}

impl std::fmt::Debug for CachingAllocator {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("CachingAllocator")
            .field("driver", &self.inner.device.driver)
            .field("config", &self.inner.device.config)
            .field("reserved", &self.memory_reserved())
            .finish_non_exhaustive()
    }
}

impl Allocation {
    /// The allocator that it came from.
    pub(crate) fn allocator(&self) -> Result<CachingAllocator> {
        let device = self.device();
        let inner = device.front.get().and_then(Weak::upgrade);
        let inner = inner.ok_or_else(|| Error::AllocatorGone { device: device.driver.device() })?;
        Ok(CachingAllocator { inner })
    }
}
