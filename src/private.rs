//! Private pools: memory that nobody else gets, for work whose addresses are fixed, as a captured graph's.

use crate::allocator::CachingAllocator;
use crate::device::Device;
use crate::error::{Error, Result};
use crate::stream::{Stream, StreamPool};
use crate::sync::Mutex;
use rustc_hash::FxHashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Memory of its own for a captured graph, or several that run one after the other. Cheap to clone; released when the
/// last clone is dropped.
///
/// A graph uses the addresses that it was captured with each time it is launched, also those that were freed within the
/// capture. What is allocated on a [`stream`](Self::stream) of the pool comes from memory that stays where it is, mapped
/// and unused by anybody else, until the pool is released: keep the pool for as long as the graph. Then it is cached like
/// any other memory, once the device has done all its work; allocations that are still held stay valid.
///
/// ```
/// use vramalloc::driver::sim::{CaptureMode, SimDriver, Work};
/// use vramalloc::{CachingAllocator, Config};
///
/// let device = SimDriver::builder().capacity(1 << 30).build();
/// let allocator = CachingAllocator::new(device.clone(), Config::default())?;
/// let handle = device.create_stream();
/// let stream = allocator.stream(handle)?;
///
/// let pool = allocator.private_pool();
/// let graph = {
///     let _capturing = pool.capture();
///     device.begin_capture(handle, CaptureMode::Global)?;
///     let scratch = allocator.alloc(4 << 20, &pool.stream(&stream)?)?;
///     device.launch(handle, Work::writing(scratch.ptr(), 4 << 20))?;
///     drop(scratch); // nobody gets this memory while the graph may run
///     device.end_capture(handle)?
/// };
/// device.launch_graph(handle, &graph)?;
/// drop(pool); // after the graph
/// assert_eq!(allocator.empty_cache()?, 20 << 20);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone)]
pub struct PrivatePool {
    inner: Arc<Inner>,
}

struct Inner {
    allocator: CachingAllocator,
    device: Arc<Device>,
    id: (u64, u64),
    /// By the stream's identity.
    pools: Arc<Mutex<FxHashMap<u64, Arc<StreamPool>>>>,
}

impl PrivatePool {
    pub(crate) fn new(allocator: CachingAllocator, device: Arc<Device>, id: Option<(u64, u64)>) -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        // As PyTorch numbers the pools that users make.
        let id = id.unwrap_or_else(|| (0, NEXT.fetch_add(1, Ordering::Relaxed)));
        Self { inner: Arc::new(Inner { allocator, device, id, pools: Arc::default() }) }
    }

    /// By which snapshots name it (PyTorch's `segment_pool_id`), until it is released.
    #[must_use]
    pub fn id(&self) -> (u64, u64) {
        self.inner.id
    }

    /// The pool's side of a stream: the same stream, but what is allocated on it is this pool's. Allocating on it is
    /// refused after the release.
    ///
    /// # Errors
    /// [`Error::WrongDevice`] for another allocator's stream, [`Error::Driver`] for a retired one.
    pub fn stream(&self, stream: &Stream) -> Result<Stream> {
        let Inner { allocator, device, id, pools } = &*self.inner;
        if !Arc::ptr_eq(&stream.pool.device, device) {
            return Err(Error::WrongDevice { what: "stream", theirs: stream.device(), ours: allocator.device() });
        }
        if stream.pool.lock().is_retired() {
            return Err(stream.pool.retired());
        }
        let key = stream.pool.clock.key;
        let mut pools = pools.lock();
        let pool = pools.entry(key.id).or_insert_with(|| {
            let pool = StreamPool::new_private(device, key);
            device.name_private(&pool, *id);
            let mut core = pool.lock();
            let recorder = core.set_recorder(None).map(|recorder| recorder.of_private_pool(*id));
            core.set_recorder(recorder);
            drop(core);
            pool
        });
        Ok(Stream { pool: Arc::clone(pool) })
    }

    /// To be held while a stream is captured, from before the capture begins until it has ended: the allocator then gives
    /// nothing back to the driver, waits for nothing and records no event on its own, in any thread: that could spoil the
    /// capture.
    #[must_use = "the capture is over for the allocator when this is dropped"]
    pub fn capture(&self) -> Capturing {
        crate::supply::poll_streams(&self.inner.device); // what has passed by now may still move
        self.inner.device.begin_capture();
        Capturing { device: Arc::clone(&self.inner.device) }
    }

    /// The allocator.
    #[must_use]
    pub fn allocator(&self) -> &CachingAllocator {
        &self.inner.allocator
    }

    /// Bytes that the pool holds: allocated, pending and cached.
    #[must_use]
    pub fn memory_reserved(&self) -> u64 {
        let pools = self.inner.pools.lock();
        let bytes = |pool: &Arc<StreamPool>| {
            let core = pool.lock_whole();
            let runs = core.runs().flat_map(|run| core.chain(run.first));
            runs.map(|id| core.blocks[id].size).sum::<u64>()
        };
        pools.values().map(bytes).sum()
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        if self.device.is_forked() {
            // The child may hold allocations of theirs.
            std::mem::forget(Arc::clone(&self.pools));
            return;
        }
        for pool in self.pools.lock().values() {
            pool.release();
            self.device.keep_retired(pool);
        }
        self.device.reap_retired();
    }
}

impl std::fmt::Debug for PrivatePool {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("PrivatePool").field("reserved", &self.memory_reserved()).finish_non_exhaustive()
    }
}

/// A capture under way; see [`PrivatePool::capture`].
pub struct Capturing {
    device: Arc<Device>,
}

impl Drop for Capturing {
    fn drop(&mut self) {
        self.device.end_capture();
    }
}

impl std::fmt::Debug for Capturing {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Capturing").finish_non_exhaustive()
    }
}
