//! What the scenarios are written in: a device, an allocator over it and its streams, checked after every step.

use crate::checks::check_allocator;
pub(crate) use crate::kinds::{Kind, each_config, each_kind};
use std::sync::Arc;
use vramalloc::driver::sim::{SimDriver, Work};
use vramalloc::driver::{Call, Driver, DriverErrorKind};
use vramalloc::{
    Allocation, BlockState, CachingAllocator, Config, Error, MemoryStats, OutOfMemory, Result, Stream,
};

pub(crate) const KIB: u64 = 1 << 10;
pub(crate) const MIB: u64 = 1 << 20;
pub(crate) const GIB: u64 = 1 << 30;

/// A device, the one allocator over it, and two streams.
pub(crate) struct Gpu {
    pub(crate) sim: Arc<SimDriver>,
    pub(crate) allocator: CachingAllocator,
    pub(crate) s0: Stream,
    pub(crate) s1: Stream,
}

impl Gpu {
    /// A fresh device of `mib` MiB.
    #[track_caller]
    pub(crate) fn new(mib: u64, config: Config) -> Self {
        let sim = SimDriver::builder().capacity(mib * MIB).build();
        Self::over(&sim, sim.clone(), config)
    }

    /// An allocator over `driver`, which leads to `sim`.
    #[track_caller]
    pub(crate) fn over(sim: &Arc<SimDriver>, driver: Arc<dyn Driver>, config: Config) -> Self {
        let allocator = CachingAllocator::new(driver, config).expect("the configuration is good");
        let [s0, s1] =
            [(); 2].map(|()| allocator.stream(sim.create_stream()).expect("the stream was just created"));
        let gpu = Self { sim: Arc::clone(sim), allocator, s0, s1 };
        gpu.sim.clear_log();
        gpu.check();
        gpu
    }

    /// One more stream.
    #[track_caller]
    pub(crate) fn new_stream(&self) -> Stream {
        self.allocator.stream(self.sim.create_stream()).expect("the stream was just created")
    }

    #[track_caller]
    pub(crate) fn try_alloc(&self, bytes: u64, stream: &Stream) -> Result<Allocation> {
        let result = self.allocator.alloc(bytes, stream);
        self.check();
        result
    }

    /// Allocates; that must work.
    #[track_caller]
    pub(crate) fn alloc(&self, bytes: u64, stream: &Stream) -> Allocation {
        match self.try_alloc(bytes, stream) {
            Ok(block) => block,
            Err(error) => panic!("alloc({bytes}) failed: {error}"),
        }
    }

    /// Allocates; that must fail for want of memory.
    #[track_caller]
    pub(crate) fn oom(&self, bytes: u64, stream: &Stream) -> OutOfMemory {
        match self.try_alloc(bytes, stream) {
            Err(Error::OutOfMemory(report)) => *report,
            other => panic!("alloc({bytes}) must be out of memory, but: {other:?}"),
        }
    }

    #[track_caller]
    pub(crate) fn free(&self, block: Allocation) {
        drop(block);
        self.check();
    }

    /// Queues an unfinished operation that writes the block on `stream`.
    #[track_caller]
    pub(crate) fn launch(&self, stream: &Stream, block: &Allocation) {
        let work = Work::writing(block.ptr(), block.bytes());
        if let Err(violation) = self.sim.launch(stream.key(), work) {
            panic!("the block may be in use by other work: {violation}");
        }
        self.check();
    }

    /// Queues work on a stream that is not the block's own, and says so to the allocator.
    #[track_caller]
    pub(crate) fn use_on(&self, stream: &Stream, block: &Allocation) {
        self.launch(stream, block);
        block.record_stream(stream).expect("the stream is of the same allocator");
        self.check();
    }

    #[track_caller]
    pub(crate) fn complete(&self, stream: &Stream) {
        self.sim.complete(stream.key());
        self.check();
    }

    #[track_caller]
    pub(crate) fn poll(&self) -> usize {
        let finished = self.allocator.poll();
        self.check();
        finished
    }

    #[track_caller]
    pub(crate) fn empty_cache(&self) -> u64 {
        let freed = self.allocator.empty_cache().expect("the driver is in order");
        self.check();
        freed
    }

    /// What must hold after every step of every scenario.
    #[track_caller]
    pub(crate) fn check(&self) {
        check_allocator(&self.allocator, &self.sim);
        let (reserved, used) = (self.reserved(), self.sim.used_bytes());
        assert_eq!(reserved, used, "the allocator claims {reserved} bytes, the device says it holds {used}");
    }

    pub(crate) fn stats(&self) -> MemoryStats {
        self.allocator.memory_stats()
    }

    pub(crate) fn reserved(&self) -> u64 {
        self.allocator.memory_reserved()
    }

    pub(crate) fn allocated(&self) -> u64 {
        self.allocator.memory_allocated()
    }

    pub(crate) fn active(&self) -> u64 {
        self.stats().active_bytes.all.current
    }

    /// Freed by the user, still held by queued work.
    pub(crate) fn pending(&self) -> u64 {
        self.active() - self.allocated()
    }

    /// The successful calls that took, moved or gave back memory since the last `clear_log`, as "alloc 20 MiB, free
    /// 20 MiB".
    pub(crate) fn segment_calls(&self) -> String {
        let log = self.sim.log();
        let calls = log.iter().filter(|entry| entry.ok()).filter_map(|entry| {
            let name = match entry.call {
                Call::Alloc => "alloc",
                Call::Free => "free",
                Call::CreatePages => "create",
                Call::Map => "map",
                Call::Unmap => "unmap",
                Call::ReleasePages => "release",
                _ => return None,
            };
            Some(format!("{name} {} MiB", entry.bytes / MIB))
        });
        calls.collect::<Vec<_>>().join(", ")
    }

    /// How often memory was asked for, mapped, unmapped or given back since the last `clear_log`, failures included.
    pub(crate) fn memory_calls(&self) -> usize {
        let calls = [Call::Alloc, Call::Free, Call::CreatePages, Call::Map, Call::Unmap, Call::ReleasePages];
        calls.into_iter().map(|call| self.count(call)).sum()
    }

    /// How often memory was taken away from its address or given back since the last `clear_log`, failures included.
    pub(crate) fn givings(&self) -> usize {
        [Call::Free, Call::Unmap, Call::ReleasePages].into_iter().map(|call| self.count(call)).sum()
    }

    /// How often `call` was made since the last `clear_log`, failures included.
    pub(crate) fn count(&self, call: Call) -> usize {
        self.sim.log().iter().filter(|entry| entry.call == call).count()
    }

    /// How often the host waited for an event or the whole device since the last `clear_log`.
    pub(crate) fn host_waits(&self) -> usize {
        self.count(Call::EventSynchronize) + self.count(Call::Synchronize)
    }

    /// The blocks of the only segment: state and MiB.
    #[track_caller]
    pub(crate) fn blocks_of_only_segment(&self) -> Vec<(BlockState, u64)> {
        let snapshot = self.allocator.snapshot();
        assert_eq!(snapshot.segments.len(), 1, "more or less than one segment: {snapshot:#?}");
        snapshot.segments[0].blocks.iter().map(|block| (block.state, block.bytes / MIB)).collect()
    }
}

/// Statistics without the counters of failures and retries, which alone a failed call may change.
pub(crate) fn but_failures(mut stats: MemoryStats) -> MemoryStats {
    (stats.num_ooms, stats.num_alloc_retries, stats.num_sync_all_streams) = (0, 0, 0);
    stats
}

/// The driver's error, which the result must be.
#[track_caller]
pub(crate) fn driver_error<T: std::fmt::Debug>(result: Result<T>) -> DriverErrorKind {
    match result {
        Err(Error::Driver(error)) => error.kind,
        other => panic!("the driver's error must come through, but: {other:?}"),
    }
}

/// Runs `act` in a thread of its own; a deadlock is a failure instead of a test that hangs for ever.
#[track_caller]
pub(crate) fn no_deadlock(act: impl FnOnce() + Send + 'static) {
    let (done, wait) = std::sync::mpsc::channel();
    let runner = std::thread::spawn(move || {
        act();
        let _ = done.send(());
    });
    // The clock only decides when to give up on a hanging test, never whether a finished one passes.
    match wait.recv_timeout(std::time::Duration::from_secs(120)) {
        Err(std::sync::mpsc::RecvTimeoutError::Timeout) => panic!("deadlock: the step has not returned"),
        _ => runner.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)),
    }
}
