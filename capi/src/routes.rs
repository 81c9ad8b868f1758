//! Captures into graphs: which allocation goes to which private pool.
//!
//! PyTorch says before a capture that allocations of its streams are to come from a pool, by number, and after it that
//! the capture is over; much later, that a graph which used the pool is gone. Which streams a capture has, PyTorch
//! would tell by a C++ object; here the driver is asked instead whether the stream is being captured.

use crate::status::{Failure, Result};
use crate::streams::Streams;
use parking_lot::Mutex;
use rustc_hash::FxHashMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread::ThreadId;
use vramalloc::{CachingAllocator, Capturing, DevicePtr, PrivatePool, Stream};

/// The number of a pool, as PyTorch has it.
pub(crate) type PoolNumber = (u64, u64);

/// PyTorch's word for ordinary memory.
const NO_POOL: PoolNumber = (0, 0);

/// One device's pools, and the captures into them.
#[derive(Debug)]
pub(crate) struct Routes {
    /// How many captures are under way, to be read without the lock.
    captures: AtomicUsize,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    pools: FxHashMap<PoolNumber, Pool>,
    /// Newest last.
    captures: Vec<Capture>,
}

#[derive(Debug)]
struct Pool {
    pool: PrivatePool,
    /// Captures begun into it and not released.
    uses: usize,
}

#[derive(Debug)]
struct Capture {
    number: PoolNumber,
    pool: PrivatePool,
    thread: ThreadId,
    /// The driver's number of the capture, once it is known.
    id: Option<u64>,
    /// Numbers of captures into the same pool, one of which has ended: which one is not said, and the driver gives no number
    /// twice.
    others: Vec<u64>,
    _capturing: Capturing,
}

impl Capture {
    fn has(&self, id: u64) -> bool {
        self.id == Some(id) || self.others.contains(&id)
    }
}

impl Routes {
    pub(crate) fn new() -> Self {
        Self { captures: AtomicUsize::new(0), state: Mutex::default() }
    }

    /// Bytes that a pool holds.
    #[cfg(test)]
    pub(crate) fn reserved(&self, number: PoolNumber) -> u64 {
        self.state.lock().pools[&number].pool.memory_reserved()
    }

    /// Whether a capture is under way.
    #[inline]
    pub(crate) fn any(&self) -> bool {
        self.captures.load(Ordering::Acquire) > 0
    }

    /// A capture into the pool is about to begin. A pool that is not known, or released, begins anew. Several captures into
    /// one may be under way: they have streams, and so memory, of their own. (A refusal could not be answered, and the
    /// capture would go on with memory that others get, too.)
    pub(crate) fn begin(&self, allocator: &CachingAllocator, streams: &Streams, number: PoolNumber) -> Result<()> {
        if number == NO_POOL {
            let text = "(0, 0) means no pool: what is captured would get memory that others get, too; take the number of \
                        torch.cuda.graph_pool_handle()";
            return Err(Failure::Argument(text.to_owned()));
        }
        self.identify(allocator, streams);
        let mut state = self.state.lock();
        let entry = state.pools.entry(number);
        let pool = entry.or_insert_with(|| Pool { pool: allocator.private_pool_of(number), uses: 0 });
        pool.uses += 1;
        let pool = pool.pool.clone();
        let (thread, _capturing) = (std::thread::current().id(), pool.capture());
        state.captures.push(Capture { number, pool, thread, id: None, others: Vec::new(), _capturing });
        self.captures.store(state.captures.len(), Ordering::Release);
        log::debug!("device {}: capture into pool {number:?} begins", allocator.device());
        Ok(())
    }

    /// The capture is over: the newest into that pool, of this thread if it announced one.
    pub(crate) fn end(&self, number: PoolNumber) -> Result<()> {
        let mut state = self.state.lock();
        let this = std::thread::current().id();
        let of_pool = |capture: &Capture| capture.number == number;
        let own = state.captures.iter().rposition(|capture| of_pool(capture) && capture.thread == this);
        let Some(index) = own.or_else(|| state.captures.iter().rposition(of_pool)) else {
            return Err(Failure::Argument(format!("no capture into pool {number:?} is under way")));
        };
        let mut ended = state.captures.remove(index);
        // It may have been another one of them. One whose number is not known leaves one such.
        if let Some(left) = state.captures.iter_mut().rfind(|capture| of_pool(capture)) {
            left.others.append(&mut ended.others);
            left.others.extend(ended.id.or_else(|| left.id.take()));
        }
        self.captures.store(state.captures.len(), Ordering::Release);
        drop(state);
        log::debug!("capture into pool {number:?} ends, {} bytes", ended.pool.memory_reserved());
        Ok(())
    }

    /// A graph that used the pool is gone. With the last one the pool goes.
    pub(crate) fn release(&self, number: PoolNumber) -> Result<()> {
        let mut state = self.state.lock();
        let Some(pool) = state.pools.get_mut(&number) else {
            return Err(Failure::Argument(format!("there is no pool {number:?} to release")));
        };
        pool.uses -= 1;
        let gone = if pool.uses == 0 { state.pools.remove(&number) } else { None };
        drop(state);
        log::debug!("pool {number:?}: {}", if gone.is_some() { "released" } else { "one graph less" });
        Ok(())
    }

    /// Allocates from the pool that the stream is being captured into; if it is not, as ever.
    #[cold]
    pub(crate) fn alloc(&self, allocator: &CachingAllocator, bytes: u64, stream: &Stream) -> Result<DevicePtr> {
        let pool = match allocator.driver().capture_id(stream.key())? {
            Some(id) => self.pool_of(id),
            None => None,
        };
        let Some(pool) = pool else { return Ok(allocator.alloc_raw(bytes, stream)?) };
        Ok(allocator.alloc_raw(bytes, &pool.stream(stream)?)?)
    }

    /// Before another capture is announced: the number of the one whose number is not known yet, if a stream says it. After
    /// that it could be either's.
    fn identify(&self, allocator: &CachingAllocator, streams: &Streams) {
        let is_open = |capture: &Capture| capture.id.is_none();
        if !self.any() || !self.state.lock().captures.iter().any(is_open) {
            return;
        }
        // A stream that cannot be asked says nothing.
        let driver = allocator.driver();
        let mut ids: Vec<u64> =
            streams.known().iter().filter_map(|stream| driver.capture_id(stream.key()).ok().flatten()).collect();
        let captures = &mut self.state.lock().captures;
        ids.retain(|&id| !captures.iter().any(|capture| capture.has(id)));
        ids.sort_unstable();
        ids.dedup(); // several streams may be in one capture
        let mut open = captures.iter_mut().filter(|capture| is_open(capture));
        if let (&[id], Some(capture), None) = (&*ids, open.next(), open.next()) {
            capture.id = Some(id);
        }
    }

    /// The pool of a capture by the driver's number. One that is new here is the one that this thread announced last;
    /// if it announced none (it may work for another), the newest one whose number is not known.
    fn pool_of(&self, id: u64) -> Option<PrivatePool> {
        let mut state = self.state.lock();
        let captures = &mut state.captures;
        let this = std::thread::current().id();
        if let Some(known) = captures.iter().rfind(|capture| capture.has(id)) {
            return Some(known.pool.clone());
        }
        let own = || captures.iter().rposition(|capture| capture.id.is_none() && capture.thread == this);
        let new = || captures.iter().rposition(|capture| capture.id.is_none());
        let index = own().or_else(new)?;
        captures[index].id = Some(id);
        Some(captures[index].pool.clone())
    }
}
