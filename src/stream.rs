//! Streams as the allocator knows them: each with a pool of its own behind a lock of its own.

use crate::block::BlockId;
use crate::device::Device;
use crate::driver::{DevicePtr, DriverError, DriverErrorKind, StreamKey};
use crate::error::Error;
use crate::event::StreamClock;
use crate::history::{Kind as EventKind, Recorder};
use crate::pool::{
    BlockHandle, Bounded, CLOSED, Expandable, Fixed, Kind, PoolCore, RETIRED, Request, Rules, Taken, Tight,
};
use crate::process::{self, Latch};
use crate::segment::Segment;
use crate::shared::Shelves;
use crate::size::SizeClass;
use crate::supply::{self, policy};
use crate::sync::{AtomicU64, Mutex, Ordering, PoolGuard, PoolMutex};
use std::any::Any;
use std::sync::{Arc, OnceLock};

/// A stream's pool. Cache-line aligned, so that two streams' locks do not share a line.
///
/// Its live blocks do not count as references, which would cost two contended instructions a pair. While the allocator
/// lives it owns the pool; when it goes, a pool with live blocks owns itself ([`PoolCore::keep`]) until the last one is
/// freed.
#[repr(align(128))]
pub(crate) struct StreamPool {
    core: PoolMutex<PoolCore>,
    pub(crate) clock: Arc<StreamClock>,
    pub(crate) device: Arc<Device>,
    /// The pool's number on the device.
    pub(crate) number: usize,
    /// Held while the pool grows, so that of two threads that find it empty only one asks the driver.
    pub(crate) growing: Mutex<()>,
    /// Requests of 1 to so many bytes take the hot path: they are rounded to 512 bytes, are not oversize, and any thread
    /// may make them. 0 where not.
    pub(crate) plain_bytes: u64,
    /// A [`Hot`].
    kind: AtomicU64,
    /// The [`Hot`] that it is without magazines and with nothing to attend to.
    base: Hot,
    /// How often threads met at the pool's lock.
    pub(crate) meetings: AtomicU64,
    /// Magazines, since they have met too often.
    pub(crate) shelves: OnceLock<Shelves>,
    /// [`Device::forks`], at hand.
    pub(crate) forks: u64,
    /// What keeps the driver's stream alive, while the pool may have to ask it.
    pub(crate) owner: Mutex<Option<Arc<dyn Any + Send + Sync>>>,
    /// The thread that a per-thread default stream belongs to.
    pub(crate) thread: Option<std::thread::ThreadId>,
    /// Set once a private pool is released; `None` for a pool that never was private.
    private: Option<Latch>,
}

/// Which compilation of the hot path a pool uses; see [`Kind`].
#[derive(Clone, Copy)]
pub(crate) enum Hot {
    Fixed,
    Bounded,
    Expandable,
    Tight,
    /// The first and the third while freed blocks stay in front.
    FrontFixed,
    FrontExpandable,
    /// Any of the first four, told apart at each call: while active memory is counted apart.
    Ruled,
    /// One of these, behind magazines.
    Shared,
}

/// Perhaps the last reference to a pool.
pub(crate) type LastReference = Option<Arc<dyn Any + Send + Sync>>;

impl Hot {
    fn of(device: &Device) -> Self {
        match (device.expandable, device.config.max_split_bytes) {
            (true, _) if policy::kept_bytes(&device.config) < u64::MAX => Self::Tight,
            (true, _) => Self::Expandable,
            (false, None) => Self::Fixed,
            (false, Some(_)) => Self::Bounded,
        }
    }
}

impl StreamPool {
    pub(crate) fn new(device: &Arc<Device>, key: StreamKey, thread: Option<std::thread::ThreadId>) -> Arc<Self> {
        Self::build(device, key, thread, None)
    }

    /// A pool whose memory nobody else gets before [`release`](Self::release).
    pub(crate) fn new_private(device: &Arc<Device>, key: StreamKey) -> Arc<Self> {
        Self::build(device, key, None, Some(Latch::new()))
    }

    fn build(
        device: &Arc<Device>,
        key: StreamKey,
        thread: Option<std::thread::ThreadId>,
        private: Option<Latch>,
    ) -> Arc<Self> {
        let number = device.peaks.register();
        let rules = Rules::new(&device.config, device.expandable);
        let is_plain = thread.is_none() && device.config.roundup_power2_divisions.is_off();
        let pool = Arc::new(Self {
            core: PoolMutex::new(PoolCore::new(rules)),
            clock: StreamClock::new(key, Arc::clone(&device.events)),
            device: Arc::clone(device),
            number,
            growing: Mutex::new(()),
            kind: AtomicU64::new(Hot::of(device) as u64),
            base: Hot::of(device),
            meetings: AtomicU64::new(0),
            shelves: OnceLock::new(),
            plain_bytes: if is_plain { rules.ordinary_bytes() } else { 0 },
            forks: device.forks,
            owner: Mutex::new(None),
            thread,
            private,
        });
        device.add_pool(number, Arc::downgrade(&pool));
        // Whoever starts a session has the locks of the pools that are listed; this one takes part from here on.
        let mut core = pool.lock();
        if core.recorder().is_none()
            && let Some(session) = device.history.session()
        {
            core.set_recorder(Some(Recorder::new(session, key.handle.0)));
        }
        drop(core);
        pool
    }

    /// Whether the pool's memory is nobody else's, cached or not: it is private and not released.
    pub(crate) fn is_pinned(&self) -> bool {
        self.private.as_ref().is_some_and(|released| !released.is_set())
    }

    /// Ends a private pool: it serves nothing any more. A graph that used its memory may still run, on any stream, so
    /// what is cached passes with the whole device.
    pub(crate) fn release(&self) {
        let now = self.clock.abandon();
        let mut core = self.lock();
        core.stats.attention |= RETIRED;
        self.unshare(&mut core);
        for class in SizeClass::ALL {
            let core = &mut *core;
            let free: Vec<BlockId> = core.free[class.index()].iter(&core.blocks).collect();
            for id in free {
                let epoch = &mut core.blocks[id].epoch;
                *epoch = (*epoch).max(now);
            }
        }
        if let Some(released) = &self.private {
            released.set();
        }
    }

    /// The error of allocating on a retired stream, or from a private pool that is released.
    #[cold]
    pub(crate) fn retired(&self) -> Error {
        let kind = DriverErrorKind::StreamGone;
        let released = self.private.is_some() && !self.is_pinned();
        let why = if released { "its private pool was released" } else { "it was retired" };
        Error::Driver(DriverError::with_detail(crate::driver::Call::StreamId, kind, why))
    }

    /// Another reference to this pool.
    pub(crate) fn shared(&self) -> Arc<Self> {
        // SAFETY: every pool is made by `new`, in an `Arc`, and this one is alive: so is its count.
        unsafe {
            Arc::increment_strong_count(self);
            Arc::from_raw(self)
        }
    }

    /// The kind of pool it is without magazines and with nothing to attend to.
    pub(crate) fn base_kind(&self) -> Hot {
        self.base
    }

    pub(crate) fn set_kind(&self, kind: Hot) {
        self.kind.store(kind as u64, Ordering::Release);
    }

    #[inline(always)]
    fn is(&self, kind: Hot) -> bool {
        self.kind.load(Ordering::Acquire) == kind as u64
    }

    /// The pool's core, if it is free, for its statistics alone: a block may be in front.
    pub(crate) fn try_lock_stats(&self) -> Option<PoolGuard<'_, PoolCore>> {
        self.core.try_lock()
    }

    #[inline(always)]
    fn lock_core(&self) -> PoolGuard<'_, PoolCore> {
        self.core.try_lock().unwrap_or_else(|| {
            self.met();
            self.core.lock()
        })
    }

    /// The pool's core, with no block in front of its free index.
    pub(crate) fn lock(&self) -> PoolGuard<'_, PoolCore> {
        let mut core = self.core.lock();
        core.settle();
        core
    }

    /// The hot path: a cached block for a request of up to [`plain_bytes`](Self::plain_bytes), or none.
    #[inline(always)]
    pub(crate) fn take_plain(&self, bytes: u64) -> BlockHandle {
        if self.is(Hot::Fixed) {
            self.take_fixed(bytes)
        } else if self.is(Hot::Expandable) {
            self.take_expandable(bytes)
        } else {
            self.take_other(bytes)
        }
    }

    // None of them inlined, so that each kind's code is by itself and saves no more registers than it needs.
    #[inline(never)]
    fn take_fixed(&self, bytes: u64) -> BlockHandle {
        self.take_of::<Fixed>(bytes)
    }

    #[inline(never)]
    fn take_expandable(&self, bytes: u64) -> BlockHandle {
        self.take_of::<Expandable>(bytes)
    }

    #[inline(never)]
    fn take_other(&self, bytes: u64) -> BlockHandle {
        if self.is(Hot::FrontFixed) {
            self.take_front::<Fixed>(bytes)
        } else if self.is(Hot::FrontExpandable) {
            self.take_front::<Expandable>(bytes)
        } else if self.is(Hot::Shared) {
            self.take_shared(bytes)
        } else {
            self.take_by_rules(bytes)
        }
    }

    /// As the pool's base kind would, whatever needs attention.
    #[inline(never)]
    pub(crate) fn take_by_rules(&self, bytes: u64) -> BlockHandle {
        match self.base {
            Hot::Fixed => self.take_ruled::<Fixed>(bytes),
            Hot::Expandable => self.take_ruled::<Expandable>(bytes),
            Hot::Tight => self.take_ruled::<Tight>(bytes),
            _ => self.take_ruled::<Bounded>(bytes),
        }
    }

    #[inline(always)]
    fn take_of<K: Kind>(&self, bytes: u64) -> BlockHandle {
        let mut core = self.lock_core();
        if core.stats.attention != 0 {
            return BlockHandle::EMPTY; // the slow path will know
        }
        let Some(block) = core.take_plain::<K, false>(bytes) else { return BlockHandle::EMPTY };
        if core.stats.attention != 0 {
            self.attend(&mut core);
        }
        block
    }

    /// The same where a block may be in front.
    #[inline(never)]
    fn take_front<K: Kind>(&self, bytes: u64) -> BlockHandle {
        let mut core = self.lock_core();
        let Some(block) = core.take_front::<K>(bytes) else { return self.take_behind::<K>(core, bytes) };
        if core.stats.is_above() {
            self.attend(&mut core);
        }
        block
    }

    #[inline(never)]
    fn take_behind<K: Kind>(&self, core: PoolGuard<'_, PoolCore>, bytes: u64) -> BlockHandle {
        self.take_watched::<K>(core, bytes)
    }

    #[inline(never)]
    fn take_ruled<K: Kind>(&self, bytes: u64) -> BlockHandle {
        self.take_watched::<K>(self.lock_core(), bytes)
    }

    #[inline(always)]
    fn take_watched<K: Kind>(&self, mut core: PoolGuard<'_, PoolCore>, bytes: u64) -> BlockHandle {
        let (had_one, attention) = (core.front.is_some(), core.stats.attention);
        core.pass_front(had_one);
        if core.stats.attention != attention {
            self.attend(&mut core);
        }
        if core.is_off_the_hot_path() {
            return BlockHandle::EMPTY;
        }
        let Some(block) = core.take_plain::<K, true>(bytes) else { return BlockHandle::EMPTY };
        if core.stats.is_above() {
            self.attend(&mut core);
        }
        block
    }

    /// A cached block for any request, or none.
    pub(crate) fn take(&self, request: &Request) -> Option<Taken> {
        self.search(|core| core.take(request))
    }

    /// The slow path's search; see [`PoolCore::take_anywhere`].
    #[cold]
    pub(crate) fn take_anywhere(&self, request: &Request) -> Option<Taken> {
        self.search(|core| core.take_anywhere(request))
    }

    /// A search of all that is cached, what threads keep in magazines included.
    pub(crate) fn search(&self, find: impl FnOnce(&mut PoolCore) -> Option<Taken>) -> Option<Taken> {
        let mut core = self.lock_whole();
        if core.is_retired() {
            return None;
        }
        let taken = find(&mut core)?;
        self.handed_out(&mut core, taken.id);
        Some(taken)
    }

    /// To be called when the pool grew and handed out a block, before the lock is let go.
    pub(crate) fn grown(&self, core: &mut PoolCore, id: BlockId) {
        // Where every request goes the slow way nothing is ever taken from the front.
        if self.plain_bytes != 0 {
            core.try_front();
        }
        self.handed_out(core, id);
    }

    /// To be called when a slow path handed out a block, before the lock is let go.
    fn handed_out(&self, core: &mut PoolCore, id: BlockId) {
        core.record_alloc(id);
        self.attend(core);
    }

    /// The other half of the hot path. What it returns is to be dropped by the caller.
    #[inline(always)]
    #[must_use]
    pub(crate) fn free(&self, requested: u64, block: BlockHandle) -> LastReference {
        if self.is(Hot::Fixed) {
            self.free_fixed(block.id())
        } else if self.is(Hot::Expandable) {
            self.free_expandable(block.id())
        } else {
            self.free_other(requested, block)
        }
    }

    #[inline(never)]
    fn free_fixed(&self, id: BlockId) -> LastReference {
        self.free_of::<Fixed>(id)
    }

    #[inline(never)]
    fn free_expandable(&self, id: BlockId) -> LastReference {
        self.free_of::<Expandable>(id)
    }

    #[inline(never)]
    fn free_other(&self, requested: u64, block: BlockHandle) -> LastReference {
        if self.is(Hot::FrontFixed) {
            self.free_front::<Fixed>(block.id())
        } else if self.is(Hot::FrontExpandable) {
            self.free_front::<Expandable>(block.id())
        } else if self.is(Hot::Shared) {
            self.free_shared(requested, block)
        } else {
            self.free_by_rules(block.id())
        }
    }

    /// As the pool's base kind would, whatever needs attention.
    #[inline(never)]
    pub(crate) fn free_by_rules(&self, id: BlockId) -> LastReference {
        match self.base {
            Hot::Expandable | Hot::Tight => self.free_ruled::<Expandable>(id),
            _ => self.free_ruled::<Fixed>(id),
        }
    }

    /// The core, and the open epoch of the pool's stream.
    #[inline(always)]
    fn lock_to_free(&self) -> Option<(PoolGuard<'_, PoolCore>, u64)> {
        if process::forks() != self.forks {
            return None; // another thread of the parent may have held the lock; and nothing here is the child's
        }
        let core = self.lock_core();
        // Under the lock, so that no block of the pool has a later epoch.
        let now = self.clock.now();
        Some((core, now))
    }

    #[inline(always)]
    fn free_of<K: Kind>(&self, id: BlockId) -> LastReference {
        let (mut core, now) = self.lock_to_free()?;
        if core.stats.attention != 0 {
            return self.free_behind::<K>(core, id, now);
        }
        core.free::<K, false>(id, now);
        if core.stats.attention != 0 {
            return self.after_free(core);
        }
        None
    }

    /// The same where a block may stay in front.
    #[inline(never)]
    fn free_front<K: Kind>(&self, id: BlockId) -> LastReference {
        let (mut core, now) = self.lock_to_free()?;
        if !core.free_to_front::<K>(id, now) {
            return self.free_behind::<K>(core, id, now);
        }
        if core.stats.is_above() {
            return self.after_free(core);
        }
        None
    }

    #[inline(never)]
    fn free_behind<K: Kind>(&self, core: PoolGuard<'_, PoolCore>, id: BlockId, now: u64) -> LastReference {
        self.free_watched::<K>(core, id, now)
    }

    #[inline(never)]
    fn free_ruled<K: Kind>(&self, id: BlockId) -> LastReference {
        let (core, now) = self.lock_to_free()?;
        self.free_watched::<K>(core, id, now)
    }

    #[inline(always)]
    fn free_watched<K: Kind>(&self, mut core: PoolGuard<'_, PoolCore>, id: BlockId, now: u64) -> LastReference {
        let attention = core.stats.attention;
        core.pass_front(true);
        let is_off = core.is_off_the_hot_path();
        if is_off {
            core.record_free(id);
        }
        core.free::<K, true>(id, now);
        if is_off || core.stats.attention != attention {
            return self.after_free(core);
        }
        None
    }

    #[cold]
    #[inline(never)]
    fn after_free(&self, mut core: PoolGuard<'_, PoolCore>) -> LastReference {
        self.attend(&mut core);
        if !core.is_closed() {
            return None;
        }
        // Whoever comes after may end the pool meanwhile: what follows needs a reference of its own.
        let last = if core.live() == 0 { core.keep.take() } else { core.keep.clone() };
        self.give_back_unused(core);
        last
    }

    /// Sees to what needs attention on the hot path: raises the peaks if a counter rose above its ceiling, and picks the
    /// compilation that the pool needs from here on. To be called before the lock is let go.
    #[cold]
    pub(crate) fn attend(&self, core: &mut PoolCore) {
        if core.stats.is_above() {
            self.device.peaks.raise(self.number, &mut core.stats, &*self.device);
        }
        let kind = match self.base {
            Hot::Fixed if core.keeps_front() => Hot::FrontFixed,
            Hot::Expandable if core.keeps_front() => Hot::FrontExpandable,
            Hot::Fixed | Hot::Expandable if core.stats.is_separate() => Hot::Ruled,
            kind => kind,
        };
        if !self.is(Hot::Shared) && !self.is(kind) {
            self.set_kind(kind);
        }
    }

    /// The allocator is gone: nothing is cached from now on.
    pub(crate) fn close(self: &Arc<Self>) {
        let mut core = self.lock();
        core.stats.attention |= CLOSED;
        self.unshare(&mut core);
        if core.live() > 0 {
            core.keep = Some(Arc::clone(self) as Arc<dyn Any + Send + Sync>);
        }
        self.give_back_unused(core);
    }

    /// Gives every segment back that is unused; what is pending goes with the pool.
    #[cold]
    fn give_back_unused(&self, mut core: PoolGuard<'_, PoolCore>) {
        if self.device.expandable {
            drop(core);
            self.wait_until_unused();
            if let Err(Error::Driver(error)) = supply::trim(&self.device.supply, &self.device, 0) {
                self.device.defer(error);
            }
            return;
        }
        let unused: Vec<u32> = core.unused_segments().map(|(number, _, _)| number).collect();
        let segments: Vec<_> = unused.into_iter().map(|number| self.detach_segment(&mut core, number)).collect();
        drop(core);
        for segment in &segments {
            if self.device.driver.check_usable().is_err() {
                return; // shut down or lost: no segment can be given back any more
            }
            if let Err(error) = self.free_segment(segment) {
                self.device.defer(error);
            }
        }
    }
}

impl StreamPool {
    /// Takes an unused segment out of the pool, towards [`free_segment`](Self::free_segment).
    pub(crate) fn detach_segment(&self, core: &mut PoolCore, number: u32) -> Segment {
        let segment = core.detach_segment(number);
        core.record_segment(EventKind::SegmentFree, segment.base, segment.bytes, segment.class);
        self.device.book_leaving(segment.bytes, false);
        segment
    }

    /// Puts a segment back that the driver would not take.
    pub(crate) fn restore_segment(&self, segment: Segment) {
        let mut core = self.lock();
        self.device.book_leaving(segment.bytes, true);
        let class = segment.class;
        core.record_segment(EventKind::SegmentAlloc, segment.base, segment.bytes, class);
        let id = core.add_segment(segment);
        core.cache_claimed(id, class);
    }

    /// Gives a detached segment back to the driver. Waits for the device's work; call it without any lock.
    ///
    /// # Errors
    /// What the driver says; the segment is then still reserved, and its bytes are still booked as leaving.
    pub(crate) fn free_segment(&self, segment: &Segment) -> std::result::Result<(), DriverError> {
        self.device.driver.free(DevicePtr(segment.base))?;
        self.device.unbook_segment(segment.class, segment.bytes);
        Ok(())
    }
}

impl StreamPool {
    /// Waits until nothing uses the pool's free and pending memory any more, as the driver does in freeing a fixed
    /// segment: for the end of the allocator's life only.
    fn wait_until_unused(&self) {
        let (latest, mut waits) = {
            let core = self.lock();
            let waits: Vec<_> = core.pending.iter().flat_map(|entry| entry.waits.iter().cloned()).collect();
            let pending = core.pending.iter().map(|entry| core.blocks[entry.block].epoch).max().unwrap_or(0);
            (core.latest_free_epoch().max(pending), waits)
        };
        waits.push((Arc::clone(&self.clock), latest));
        for (clock, epoch) in waits {
            if let Err(error) = clock.wait(epoch) {
                self.device.defer(error);
            }
        }
    }
}

impl Drop for StreamPool {
    fn drop(&mut self) {
        if self.device.driver.check_usable().is_err() {
            return;
        }
        if self.owner.lock().is_some()
            && let Err(error) = self.clock.retire()
        {
            // Others may still ask the clock, and the stream perhaps ends with its owner, here.
            self.device.defer(error);
        }
        if self.device.expandable {
            self.wait_until_unused(); // the pages go back with the device
            return;
        }
        // No handle is left, so no block is live; a pending one waits no longer than the driver's free does.
        let core = self.lock();
        let segments: Vec<_> = core.segments.iter().map(|(_, segment)| segment.clone()).collect();
        drop(core);
        for segment in segments {
            self.device.book_leaving(segment.bytes, false);
            if let Err(error) = self.free_segment(&segment) {
                self.device.defer(error);
            }
        }
    }
}

impl std::fmt::Debug for StreamPool {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("StreamPool")
            .field("number", &self.number)
            .field("clock", &self.clock)
            .finish_non_exhaustive()
    }
}

/// A stream of one allocator: what allocations are made on. Cheap to clone.
///
/// Get one from [`CachingAllocator::stream`](crate::CachingAllocator::stream), once per stream, and keep it: that
/// look-up asks the driver who the stream is, allocation then does not.
#[derive(Clone)]
pub struct Stream {
    pub(crate) pool: Arc<StreamPool>,
}

impl Stream {
    /// The stream's identity.
    #[must_use]
    pub fn key(&self) -> StreamKey {
        self.pool.clock.key
    }

    /// The device's ordinal.
    #[must_use]
    pub fn device(&self) -> u32 {
        self.pool.device.driver.device()
    }

    /// Makes the allocator keep `owner`, the driver's stream object, alive for as long as it may have to ask the stream
    /// how far it is: until it is [retired](crate::CachingAllocator::retire_stream), or the allocator and all memory of
    /// the stream are gone.
    #[must_use]
    pub fn keeping(self, owner: Arc<dyn Any + Send + Sync>) -> Self {
        *self.pool.owner.lock() = Some(owner);
        self
    }
}

impl PartialEq for Stream {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.pool, &other.pool)
    }
}

impl Eq for Stream {}

impl std::fmt::Debug for Stream {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Stream").field("device", &self.device()).field("key", &self.key()).finish()
    }
}
