//! Streams by their raw handles, so that allocating on a known one asks no driver.
//!
//! A handle is no identity: the driver reuses it. So a stream must be retired before it is destroyed
//! (`vram_retire_stream`), which takes it out of here.

use crate::status::Result;
use parking_lot::RwLock;
use rustc_hash::FxHashMap;
use std::cell::Cell;
use std::sync::atomic::{AtomicU64, Ordering};
use vramalloc::{CachingAllocator, Stream, StreamHandle};

/// The streams of one device that were seen.
#[derive(Debug)]
pub(crate) struct Streams {
    known: RwLock<FxHashMap<u64, Stream>>,
    /// Unique among all values that this has in any table of the process; a new one when a stream is forgotten.
    version: AtomicU64,
}

/// What a thread used last: it finds that again without a lock.
struct Last {
    version: u64,
    handle: u64,
    stream: Stream,
}

thread_local! {
    static LAST: Cell<Option<Last>> = const { Cell::new(None) };
}

fn next_version() -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    NEXT.fetch_add(1, Ordering::Relaxed)
}

/// A stream's handle by its usual name: the default stream has two.
pub(crate) fn named(handle: u64) -> StreamHandle {
    match StreamHandle(handle) {
        StreamHandle::LEGACY => StreamHandle::DEFAULT,
        handle => handle,
    }
}

/// Forgets what this thread used last, so that a destroyed allocator is not kept by it.
pub(crate) fn forget_last() {
    drop(LAST.try_with(Cell::take));
}

impl Streams {
    pub(crate) fn new() -> Self {
        Self { known: RwLock::default(), version: AtomicU64::new(next_version()) }
    }

    /// Calls `f` with the stream of a raw handle. The driver is asked the first time only.
    pub(crate) fn with<T>(
        &self,
        allocator: &CachingAllocator,
        handle: u64,
        f: impl FnOnce(&Stream) -> Result<T>,
    ) -> Result<T> {
        let handle = named(handle).0;
        let version = self.version.load(Ordering::Acquire);
        // A thread that is about to end has no memory of its own left.
        let last = LAST.try_with(Cell::take).ok().flatten();
        if let Some(last) = last
            && last.version == version
            && last.handle == handle
        {
            let result = f(&last.stream);
            let _ = LAST.try_with(|cell| cell.set(Some(last)));
            return result;
        }
        let stream = self.find(allocator, handle)?;
        let result = f(&stream);
        let _ = LAST.try_with(|cell| cell.set(Some(Last { version, handle, stream })));
        result
    }

    fn find(&self, allocator: &CachingAllocator, handle: u64) -> Result<Stream> {
        if StreamHandle(handle) == StreamHandle::PER_THREAD_DEFAULT {
            // Another stream in each thread: only the thread's own memory of it counts.
            return Ok(allocator.stream(StreamHandle(handle))?);
        }
        if let Some(stream) = self.known.read().get(&handle) {
            return Ok(stream.clone());
        }
        let stream = allocator.stream(StreamHandle(handle))?;
        log::debug!("device {}: stream {handle:#x} is {:?}", allocator.device(), stream.key());
        Ok(self.known.write().entry(handle).or_insert(stream).clone())
    }

    /// Those that were seen and not retired, but for the threads' own.
    pub(crate) fn known(&self) -> Vec<Stream> {
        self.known.read().values().cloned().collect()
    }

    /// Retires the stream, if it is known.
    pub(crate) fn retire(&self, allocator: &CachingAllocator, handle: u64) -> Result<()> {
        let handle = named(handle).0;
        let stream = {
            let mut known = self.known.write();
            self.version.store(next_version(), Ordering::Release);
            known.remove(&handle)
        };
        match stream {
            Some(stream) => Ok(allocator.retire_stream(&stream)?),
            None => Ok(()),
        }
    }
}
