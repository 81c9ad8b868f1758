//! Streams as the allocator knows them: each with a pool of its own behind a lock of its own.

use crate::block::BlockId;
use crate::device::Device;
use crate::driver::{DevicePtr, DriverError, DriverErrorKind, StreamKey};
use crate::error::Error;
use crate::event::StreamClock;
use crate::history::{Kind, Recorder};
use crate::pool::{PoolCore, Request, Rules, Taken};
use crate::process;
use crate::segment::Segment;
use crate::supply;
use crate::sync::{Mutex, MutexGuard};
use std::any::Any;
use std::sync::Arc;

/// A stream's pool. Cache-line aligned, so that two streams' locks do not share a line.
#[repr(align(128))]
pub(crate) struct StreamPool {
    pub(crate) core: Mutex<PoolCore>,
    pub(crate) clock: Arc<StreamClock>,
    pub(crate) device: Arc<Device>,
    /// The pool's number on the device.
    pub(crate) number: usize,
    /// Held while the pool grows, so that of two threads that find it empty only one asks the driver.
    pub(crate) growing: Mutex<()>,
    /// Whether requests are rounded to 512 bytes and any thread may use the pool.
    pub(crate) is_plain: bool,
    /// [`Device::forks`], at hand.
    forks: u64,
    /// What keeps the driver's stream alive, while the pool may have to ask it.
    pub(crate) owner: Mutex<Option<Arc<dyn Any + Send + Sync>>>,
    /// The thread that a per-thread default stream belongs to.
    pub(crate) thread: Option<std::thread::ThreadId>,
}

impl StreamPool {
    pub(crate) fn new(device: &Arc<Device>, key: StreamKey, thread: Option<std::thread::ThreadId>) -> Arc<Self> {
        let number = device.peaks.register();
        let pool = Arc::new(Self {
            core: Mutex::new(PoolCore::new(Rules::new(&device.config, device.expandable))),
            clock: StreamClock::new(key, Arc::clone(&device.events)),
            device: Arc::clone(device),
            number,
            growing: Mutex::new(()),
            is_plain: thread.is_none() && device.config.roundup_power2_divisions.is_off(),
            forks: device.forks,
            owner: Mutex::new(None),
            thread,
        });
        device.add_pool(number, Arc::downgrade(&pool));
        // Whoever starts a session has the locks of the pools that are listed; this one takes part from here on.
        let mut core = pool.core.lock();
        if core.recorder.is_none()
            && let Some(session) = device.history.session()
        {
            core.recorder = Some(Recorder::new(session, key.handle.0));
        }
        drop(core);
        pool
    }

    /// The error of allocating on a retired stream.
    #[cold]
    pub(crate) fn retired(&self) -> Error {
        let kind = DriverErrorKind::StreamGone;
        Error::Driver(DriverError::with_detail(crate::driver::Call::StreamId, kind, "it was retired"))
    }

    /// The hot path: a cached block, or none.
    #[inline]
    pub(crate) fn take(&self, request: &Request) -> Option<Taken> {
        let mut core = self.core.lock();
        if core.retired | core.recorder.is_some() {
            return self.take_watched(core, request);
        }
        let taken = core.take(request)?;
        if taken.raised {
            self.raise(&mut core);
        }
        Some(taken)
    }

    /// [`take`](Self::take) on a stream that is retired, or whose history is recorded.
    #[cold]
    #[inline(never)]
    fn take_watched(&self, mut core: MutexGuard<'_, PoolCore>, request: &Request) -> Option<Taken> {
        if core.retired {
            return None;
        }
        let taken = core.take(request)?;
        core.record_alloc(taken.id);
        if taken.raised {
            self.raise(&mut core);
        }
        Some(taken)
    }

    /// The slow path's search; see [`PoolCore::take_anywhere`].
    #[cold]
    pub(crate) fn take_anywhere(&self, request: &Request) -> Option<Taken> {
        let mut core = self.core.lock();
        if core.retired {
            return None;
        }
        let taken = core.take_anywhere(request)?;
        core.record_alloc(taken.id);
        if taken.raised {
            self.raise(&mut core);
        }
        Some(taken)
    }

    /// The other half of the hot path.
    #[inline]
    pub(crate) fn free(&self, id: BlockId) {
        if process::forks() != self.forks {
            return; // another thread of the parent may have held the lock; and nothing here is the child's
        }
        let now = self.clock.now();
        let mut core = self.core.lock();
        if core.recorder.is_some() {
            return self.free_watched(core, id, now);
        }
        let raised = if core.blocks[id].shared { core.free_later(id, now) } else { core.free_now(id, now) };
        if raised | core.closed {
            self.after_free(core, raised);
        }
    }

    /// [`free`](Self::free) while the history is recorded.
    #[cold]
    #[inline(never)]
    fn free_watched(&self, mut core: MutexGuard<'_, PoolCore>, id: BlockId, now: u64) {
        core.record_free(id);
        let raised = if core.blocks[id].shared { core.free_later(id, now) } else { core.free_now(id, now) };
        self.after_free(core, raised);
    }

    #[cold]
    #[inline(never)]
    fn after_free(&self, mut core: MutexGuard<'_, PoolCore>, raised: bool) {
        if raised {
            self.raise(&mut core);
        }
        if core.closed {
            self.give_back_unused(core);
        }
    }

    /// To be called before the lock is let go when a counter rose above its ceiling.
    #[cold]
    pub(crate) fn raise(&self, core: &mut MutexGuard<'_, PoolCore>) {
        self.device.peaks.raise(self.number, &mut core.stats, &*self.device);
    }

    /// The allocator is gone: nothing is cached from now on.
    pub(crate) fn close(&self) {
        if self.device.is_forked() {
            return;
        }
        let mut core = self.core.lock();
        core.closed = true;
        self.give_back_unused(core);
    }

    /// Gives every segment back that is unused; what is pending goes with the pool.
    #[cold]
    fn give_back_unused(&self, mut core: MutexGuard<'_, PoolCore>) {
        if self.device.expandable {
            drop(core);
            self.settle();
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
        core.record_segment(Kind::SegmentFree, segment.base, segment.bytes, segment.class);
        self.device.book_leaving(segment.bytes, false);
        segment
    }

    /// Puts a segment back that the driver would not take.
    pub(crate) fn restore_segment(&self, segment: Segment) {
        let mut core = self.core.lock();
        self.device.book_leaving(segment.bytes, true);
        let class = segment.class;
        core.record_segment(Kind::SegmentAlloc, segment.base, segment.bytes, class);
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
    fn settle(&self) {
        let (latest, mut waits) = {
            let core = self.core.lock();
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
        if self.device.expandable {
            self.settle(); // the pages go back with the device
            return;
        }
        // No handle is left, so no block is live; a pending one waits no longer than the driver's free does.
        let core = self.core.lock();
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
