//! The streams of cudarc that an allocator knows.

use super::binding::is_of_the_stream;
use super::shell::{Shell, Shells};
use crate::driver::cuda::CudaDriver;
use crate::driver::{Call, DevicePtr, Driver as _, DriverError, StreamHandle};
use crate::error::{Error, Result};
use crate::event::StreamClock;
use crate::sync::{Mutex, RwLock};
use crate::{CachingAllocator, Stream};
use cudarc::driver::{CudaContext, CudaSlice, CudaStream};
use rustc_hash::FxHashMap;
use std::any::Any;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::thread::ThreadId;

/// A stream by its handle, and for the handle that is another stream in each thread, the thread. An identity, since
/// streams that are known are kept alive, so that their handles do not come back.
type Name = (u64, Option<ThreadId>);

/// The handle of a stream of cudarc.
pub(super) fn handle(stream: &CudaStream) -> StreamHandle {
    StreamHandle(stream.cu_stream().expose_provenance() as u64)
}

/// The address of a context of cudarc.
pub(super) fn address(context: &CudaContext) -> u64 {
    context.cu_ctx().expose_provenance() as u64
}

fn name(handle: StreamHandle) -> Name {
    match handle {
        StreamHandle::LEGACY => (StreamHandle::DEFAULT.0, None),
        StreamHandle::PER_THREAD_DEFAULT => (handle.0, Some(std::thread::current().id())),
        _ => (handle.0, None),
    }
}

fn is_default(handle: StreamHandle) -> bool {
    handle.0 <= StreamHandle::PER_THREAD_DEFAULT.0
}

/// Whether cudarc destroys the stream, which nothing but its `Debug` text tells. A stream is taken for one of another
/// library if a later cudarc prints something else: then two events are lost where they could be destroyed.
fn is_owned(stream: &CudaStream) -> bool {
    format!("{stream:?}").ends_with("owned: true }")
}

/// What lives as long as the calling thread; nothing that does if the thread is about to end.
fn this_thread() -> Weak<()> {
    thread_local! {
        static LIFE: Arc<()> = Arc::new(());
    }
    LIFE.try_with(Arc::downgrade).unwrap_or_default()
}

/// What buffers share: the allocator and its streams.
pub(crate) struct Shared {
    pub(super) allocator: CachingAllocator,
    pub(super) driver: Arc<CudaDriver>,
    pub(super) context: Arc<CudaContext>,
    streams: RwLock<FxHashMap<Name, Arc<Known>>>,
    /// Work that no event can stand for.
    unreachable: Arc<StreamClock>,
}

/// A stream that the allocator knows.
pub(super) struct Known {
    pub(super) cuda: Arc<CudaStream>,
    pub(super) stream: Stream,
    pub(super) unreachable: Arc<StreamClock>,
    pub(super) driver: Arc<CudaDriver>,
    shared: Weak<Shared>,
    shells: Mutex<Shells>,
    /// cudarc destroys the stream, with `cuda`, or nobody does.
    is_lasting: bool,
    /// Of a per-thread default stream: what lives as long as the thread.
    thread: Option<Weak<()>>,
    /// Whether the user has the `Stream`, so that it must go on to work.
    is_handed_out: AtomicBool,
}

impl Shared {
    pub(super) fn new(
        allocator: CachingAllocator,
        driver: Arc<CudaDriver>,
        context: Arc<CudaContext>,
    ) -> Arc<Self> {
        let unreachable = StreamClock::unreachable(allocator.events());
        Arc::new(Self { allocator, driver, context, streams: RwLock::new(FxHashMap::default()), unreachable })
    }

    /// The stream, from now on known.
    pub(super) fn know(self: &Arc<Self>, cuda: &Arc<CudaStream>) -> Result<Arc<Known>> {
        let (handle, context) = (handle(cuda), cuda.context());
        if address(context) != address(&self.context) {
            let theirs = u32::try_from(context.ordinal()).unwrap_or(u32::MAX);
            return Err(Error::WrongDevice { what: "stream", theirs, ours: self.allocator.device() });
        }
        let name = name(handle);
        if let Some(known) = self.streams.read().get(&name).filter(|known| !known.is_retired()) {
            return Ok(Arc::clone(known));
        }
        self.retire_left();
        // Outside of the lock, as it asks the driver; whoever is second finds the first one's.
        let stream = self.allocator.stream(handle)?;
        let stream = match handle {
            StreamHandle::DEFAULT | StreamHandle::LEGACY | StreamHandle::PER_THREAD_DEFAULT => stream,
            _ => stream.keeping(Arc::clone(cuda) as Arc<dyn Any + Send + Sync>),
        };
        let new = Arc::new(Known {
            cuda: Arc::clone(cuda),
            stream,
            unreachable: Arc::clone(&self.unreachable),
            driver: Arc::clone(&self.driver),
            shared: Arc::downgrade(self),
            shells: Mutex::new(Shells::default()),
            is_lasting: is_default(handle) || is_owned(cuda),
            thread: (handle == StreamHandle::PER_THREAD_DEFAULT).then(this_thread),
            is_handed_out: AtomicBool::new(false),
        });
        let mut streams = self.streams.write();
        let known = streams.entry(name).or_insert_with(|| Arc::clone(&new));
        // One that was retired behind this list, or while it was let in again, is of no use any more. Nothing of it is dropped
        // under the lock.
        let stale = known.is_retired().then(|| std::mem::replace(known, Arc::clone(&new)));
        let known = Arc::clone(known);
        drop(streams);
        drop((stale, new));
        Ok(known)
    }

    /// The stream behind a handle in this allocator's context, if it is known or needs nobody to keep it alive.
    pub(super) fn find(self: &Arc<Self>, handle: StreamHandle) -> Option<Stream> {
        // One that was retired behind this list may have given its handle to another.
        if let Some(known) = self.streams.read().get(&name(handle)).filter(|known| !known.is_retired()) {
            return Some(known.stream.clone());
        }
        match handle {
            StreamHandle::DEFAULT | StreamHandle::LEGACY => self.allocator.stream(handle).ok(),
            // Known from now on, so that it is retired when the thread has ended.
            StreamHandle::PER_THREAD_DEFAULT => {
                let known = self.know(&self.context.per_thread_stream()).ok()?;
                Some(known.stream.clone())
            }
            _ => None,
        }
    }

    /// The stream, if it is of this context and known or needs nobody to keep it alive.
    pub(crate) fn find_in(self: &Arc<Self>, stream: &CudaStream) -> Option<Stream> {
        if address(stream.context()) == address(&self.context) { self.find(handle(stream)) } else { None }
    }

    /// Retires a stream, if it is known.
    pub(super) fn retire(&self, cuda: &CudaStream) -> Result<()> {
        let known = self.streams.write().remove(&name(handle(cuda)));
        match known {
            Some(known) => known.retire(&self.allocator),
            None => Ok(()),
        }
    }

    /// Retires the streams that nobody else has any more: no user, and no buffer; and those of threads that have ended.
    pub(super) fn retire_left(&self) {
        let mut left = Vec::new();
        self.streams.write().retain(|_, known| {
            let is_left = known.is_left();
            if is_left {
                left.push(Arc::clone(known));
            }
            !is_left
        });
        for known in left {
            if let Err(Error::Driver(error)) = known.retire(&self.allocator) {
                self.allocator.defer(error);
            }
        }
    }
}

impl Known {
    /// Whether only this crate has the stream, and nothing that is in use.
    fn is_left(self: &Arc<Self>) -> bool {
        if Arc::strong_count(self) > 1 {
            return false;
        }
        if let Some(thread) = &self.thread {
            return thread.strong_count() == 0; // whoever has it can queue nothing on it
        }
        if is_default(handle(&self.cuda)) || self.is_handed_out.load(Ordering::Relaxed) {
            return false;
        }
        // This one, the one that the pool keeps, and one in each shell.
        Arc::strong_count(&self.cuda) <= 2 + self.shells.lock().len()
    }

    /// Whether the user has let go of the stream.
    fn is_retired(&self) -> bool {
        self.stream.pool.clock.is_retired()
    }

    /// Whether the stream may be destroyed by now, so that no call may name it.
    pub(super) fn is_out_of_reach(&self) -> bool {
        !self.is_lasting && self.is_retired()
    }

    /// Whether cudarc may give up a slice of this stream's, which it does by making the stream wait for the slice's events:
    /// not where that would name a stream that may be gone, or become part of a graph.
    ///
    /// Nor where the driver is out of order, as cudarc would keep its errors. If the driver answers here, and then refuses to
    /// destroy an event, that does get there: it cannot be told from what others put there meanwhile.
    fn may_give_up(&self) -> bool {
        let waits = self.cuda.context().is_managing_stream_synchronization();
        if self.driver.check_usable().is_err() {
            return false;
        }
        if self.is_out_of_reach() {
            return !waits;
        }
        // The handle of a thread's own default stream names the calling thread's.
        let key = match self.thread {
            None => Ok(self.stream.key()),
            Some(_) => self.driver.stream_key(StreamHandle::PER_THREAD_DEFAULT),
        };
        match key.and_then(|key| self.driver.is_capturing(key)) {
            Ok(is_captured) => !(waits && is_captured),
            Err(error) => !waits && is_of_the_stream(&error),
        }
    }

    /// Gives up a slice of memory of ours. To be called in the driver's context.
    pub(super) fn give_up<T>(&self, slice: CudaSlice<T>) {
        if self.may_give_up() {
            slice.leak();
        } else {
            std::mem::forget(slice); // and with it two events, for good
        }
    }

    fn retire(&self, allocator: &CachingAllocator) -> Result<()> {
        self.clear_shells(); // while the stream is there for certain
        let result = allocator.retire_stream(&self.stream);
        self.clear_shells();
        result
    }

    pub(super) fn hand_out(&self) -> Stream {
        self.is_handed_out.store(true, Ordering::Relaxed);
        self.stream.clone()
    }

    /// The allocator's other streams; none if it is gone.
    pub(super) fn find(&self, handle: StreamHandle) -> Option<Stream> {
        self.shared.upgrade()?.find(handle)
    }

    /// A shell for a block. Creates events only if there is none from an earlier life of the block.
    pub(super) fn take_shell(&self, ptr: DevicePtr, bytes: u64) -> std::result::Result<Box<Shell>, DriverError> {
        let kept = self.shells.lock().take(ptr);
        match kept {
            Some(shell) if shell.fits(bytes) => return Ok(shell),
            Some(unfit) => {
                self.shells.lock().waste(unfit);
                self.clear_waste();
            }
            None => {}
        }
        // cudarc binds its context to the thread; this puts back what was there.
        self.driver
            .in_context(Call::EventCreate, || Shell::new(&self.driver, &self.cuda, ptr, bytes).map(Box::new))?
    }

    pub(super) fn put_shell(&self, ptr: DevicePtr, shell: Box<Shell>) {
        let is_waste = self.shells.lock().put(ptr, shell);
        if is_waste {
            self.clear_waste();
        }
    }

    fn clear_shells(&self) {
        self.shells.lock().waste_all();
        self.clear_waste();
    }

    /// Drops the shells that are of no use any more, unless cudarc may not give them up now: they then stay for later.
    #[cold]
    fn clear_waste(&self) {
        if self.driver.is_over() || !self.may_give_up() {
            return;
        }
        let mut waste = Some(self.shells.lock().take_waste());
        if self.driver.in_context(Call::EventDestroy, || drop(waste.take())).is_err() {
            std::mem::forget(waste);
        }
    }
}

impl Drop for Known {
    fn drop(&mut self) {
        // In a fork another thread of the parent may have held the lock, and nothing here is the child's.
        if !self.driver.is_over() {
            self.clear_shells();
        }
        self.shells.get_mut().forget(); // what could not be given up
    }
}

impl std::fmt::Debug for Known {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Known").field("stream", &self.stream).finish_non_exhaustive()
    }
}
