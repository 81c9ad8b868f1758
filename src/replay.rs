//! Replaying a trace through an allocator, and what that cost.

use crate::driver::{CallCounts, DevicePtr, StreamHandle};
use crate::trace::{Event, Trace};
use crate::{Allocation, CachingAllocator, Error, PrivatePool, Stream};
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

/// What replaying a trace gave. Peaks are over all passes.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Report {
    /// Events of the trace, which is those of one pass.
    pub events: usize,
    /// The highest sum of live requested bytes.
    pub peak_requested: u64,
    /// The allocator's [`max_memory_allocated`](CachingAllocator::max_memory_allocated).
    pub peak_allocated: u64,
    /// The allocator's [`max_memory_reserved`](CachingAllocator::max_memory_reserved).
    pub peak_reserved: u64,
    /// Driver allocations tried again after cached memory was given back.
    pub retries: u64,
    /// Out-of-memory errors.
    pub ooms: u64,
    /// Each pass.
    pub passes: Vec<Pass>,
}

/// One pass over the trace. What is live at its end is freed before the next one, which is not counted.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Pass {
    /// Driver calls and their time.
    pub driver: CallCounts,
    /// Wall time of the pass's events.
    pub elapsed: Duration,
}

impl Report {
    /// Peak reserved over peak requested; 1 if nothing was requested.
    #[must_use]
    #[allow(clippy::cast_precision_loss)]
    pub fn ratio(&self) -> f64 {
        if self.peak_requested == 0 {
            return 1.0;
        }
        self.peak_reserved as f64 / self.peak_requested as f64
    }
}

/// A trace being replayed, pass by pass.
#[derive(Debug)]
pub struct Replay<'a> {
    allocator: &'a CachingAllocator,
    trace: &'a Trace,
    streams: Vec<Stream>,
    /// The private pools, which live as long as this: no trace says when they were released.
    _private: Vec<PrivatePool>,
    /// The live allocations, by number.
    slots: Vec<Option<Allocation>>,
    /// Those that the trace does not free.
    left: Vec<usize>,
    /// The same as bare addresses, where the trace is replayed by address.
    addresses: Option<Vec<DevicePtr>>,
    passes: Vec<Pass>,
}

impl<'a> Replay<'a> {
    /// Prepares to replay `trace`; its stream number `i` (by first use) is the driver's stream `streams[i]`.
    ///
    /// # Errors
    /// [`Error::Driver`] for a handle that is no stream.
    ///
    /// # Panics
    /// If there are fewer handles than streams in the trace.
    pub fn new(
        allocator: &'a CachingAllocator,
        trace: &'a Trace,
        streams: &[StreamHandle],
    ) -> Result<Self, Error> {
        assert!(streams.len() >= trace.streams.len(), "the trace uses {} streams", trace.streams.len());
        let streams = streams[..trace.streams.len()]
            .iter()
            .map(|handle| allocator.stream(*handle))
            .collect::<Result<Vec<_>, _>>()?;
        let mut private: BTreeMap<u32, PrivatePool> = BTreeMap::new();
        let streams = streams.into_iter().enumerate().map(|(index, stream)| {
            // Whoever added a stream need not have said that it has ordinary memory.
            match trace.private.get(index).copied().flatten() {
                Some(pool) => private.entry(pool).or_insert_with(|| allocator.private_pool()).stream(&stream),
                None => Ok(stream),
            }
        });
        let streams = streams.collect::<Result<Vec<_>, _>>()?;
        let slots = std::iter::repeat_with(|| None).take(trace.allocations).collect();
        let mut freed = vec![false; trace.allocations];
        for event in &trace.events {
            if let Event::Free { id } = *event {
                freed[id as usize] = true;
            }
        }
        let left = (0..trace.allocations).filter(|&id| !freed[id]).collect();
        let _private = private.into_values().collect();
        Ok(Self { allocator, trace, streams, _private, slots, left, addresses: None, passes: Vec::new() })
    }

    /// Replays by [`alloc_raw`](CachingAllocator::alloc_raw) and [`free_raw`](CachingAllocator::free_raw) from here on,
    /// as a caller of the C interface does.
    #[must_use]
    pub fn by_address(mut self) -> Self {
        self.addresses = Some(vec![DevicePtr(0); self.trace.allocations]);
        self
    }

    /// Replays all events once, and then frees what is still live.
    ///
    /// # Errors
    /// What the allocator says; everything is freed then, too.
    pub fn pass(&mut self) -> Result<&Pass, Error> {
        self.pass_then(|_| ())
    }

    /// [`pass`](Self::pass) that calls `look` after the last event, or at the one that failed, before anything is freed.
    ///
    /// # Errors
    /// As [`pass`](Self::pass).
    pub fn pass_then(&mut self, look: impl FnOnce(&CachingAllocator)) -> Result<&Pass, Error> {
        let before = self.allocator.driver().calls();
        let start = Instant::now();
        let result = if self.addresses.is_some() { self.run_by_address() } else { self.run() };
        let elapsed = start.elapsed();
        let driver = self.allocator.driver().calls().since(&before);
        look(self.allocator);
        match result {
            Ok(()) => self.left.iter().for_each(|&id| self.slots[id] = None),
            Err(_) => self.slots.iter_mut().for_each(|slot| *slot = None),
        }
        if let Some(addresses) = &mut self.addresses {
            let left: &mut dyn Iterator<Item = usize> =
                if result.is_ok() { &mut self.left.iter().copied() } else { &mut (0..addresses.len()) };
            for id in left {
                self.allocator.free_raw(std::mem::replace(&mut addresses[id], DevicePtr(0)))?; // null is nothing
            }
        }
        result?;
        self.passes.push(Pass { driver, elapsed });
        Ok(&self.passes[self.passes.len() - 1])
    }

    fn run(&mut self) -> Result<(), Error> {
        let mut next = 0;
        for event in &self.trace.events {
            match *event {
                Event::Alloc { bytes, stream } => {
                    let allocation = self.allocator.alloc(bytes, &self.streams[stream as usize])?;
                    // Each number is allocated once a pass, so there is nothing to drop.
                    let before = self.slots[next].replace(allocation);
                    debug_assert!(before.is_none());
                    std::mem::forget(before);
                    next += 1;
                }
                Event::Free { id } => self.slots[id as usize] = None,
            }
        }
        Ok(())
    }

    fn run_by_address(&mut self) -> Result<(), Error> {
        let addresses = self.addresses.get_or_insert_default();
        let mut next = 0;
        for event in &self.trace.events {
            match *event {
                Event::Alloc { bytes, stream } => {
                    addresses[next] = self.allocator.alloc_raw(bytes, &self.streams[stream as usize])?;
                    next += 1;
                }
                Event::Free { id } => {
                    let ptr = std::mem::replace(&mut addresses[id as usize], DevicePtr(0));
                    self.allocator.free_raw(ptr)?;
                }
            }
        }
        Ok(())
    }

    /// What came of it so far.
    #[must_use]
    pub fn report(&self) -> Report {
        let stats = self.allocator.memory_stats();
        Report {
            events: self.trace.events.len(),
            peak_requested: self.trace.peak_requested,
            peak_allocated: stats.allocated_bytes.all.peak,
            peak_reserved: stats.reserved_bytes.all.peak,
            retries: stats.num_alloc_retries,
            ooms: stats.num_ooms,
            passes: self.passes.clone(),
        }
    }
}
