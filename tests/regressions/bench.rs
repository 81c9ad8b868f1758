//! What the tests are written in: a simulated device and an allocator on it, of either kind of segments.

use crate::hooked::Hooked;
use std::sync::Arc;
use vramalloc::driver::Driver;
use vramalloc::driver::sim::{SimDriver, Work};
use vramalloc::{Allocation, CachingAllocator, Cause, Config, Segments, Stream};

pub(crate) const KIB: u64 = 1 << 10;
pub(crate) const MIB: u64 = 1 << 20;

/// Runs a test on each kind of segments; the last name printed is the one that failed.
pub(crate) fn each_kind(test: impl Fn(Segments)) {
    for segments in [Segments::Fixed, Segments::Expandable] {
        println!("with {segments:?}");
        test(segments);
    }
}

pub(crate) struct Bench {
    pub(crate) sim: Arc<SimDriver>,
    pub(crate) allocator: CachingAllocator,
}

impl Bench {
    pub(crate) fn new(mebibytes: u64, segments: Segments, config: &str) -> Self {
        let sim = SimDriver::builder().capacity(mebibytes * MIB).build();
        Self::over(&sim, sim.clone(), segments, config)
    }

    /// Neither a log nor real bytes: for very many operations.
    pub(crate) fn light(mebibytes: u64, segments: Segments, config: &str) -> Self {
        let sim = SimDriver::builder().capacity(mebibytes * MIB).log(false).backing(false).build();
        Self::over(&sim, sim.clone(), segments, config)
    }

    pub(crate) fn hooked(mebibytes: u64, segments: Segments) -> (Arc<Hooked>, Self) {
        let sim = SimDriver::builder().capacity(mebibytes * MIB).build();
        let driver = Hooked::new(&sim);
        let bench = Self::over(&sim, driver.clone(), segments, "");
        (driver, bench)
    }

    fn over(sim: &Arc<SimDriver>, driver: Arc<dyn Driver>, segments: Segments, config: &str) -> Self {
        let config: Config = config.parse().expect("a configuration");
        let allocator = CachingAllocator::new(driver, config.segments(segments)).expect("an allocator");
        Self { sim: Arc::clone(sim), allocator }
    }

    pub(crate) fn stream(&self) -> Stream {
        self.allocator.stream(self.sim.create_stream()).expect("a stream")
    }

    #[track_caller]
    pub(crate) fn alloc(&self, bytes: u64, stream: &Stream) -> Allocation {
        let allocation = self.allocator.alloc(bytes, stream);
        self.check();
        allocation.unwrap_or_else(|error| panic!("{bytes} bytes: {error}"))
    }

    /// Why there is no room for `bytes`.
    #[track_caller]
    pub(crate) fn refusal(&self, bytes: u64, stream: &Stream) -> Cause {
        let error = self.allocator.alloc(bytes, stream).expect_err("there is no room");
        self.check();
        error.out_of_memory().unwrap_or_else(|| panic!("{error}")).cause
    }

    /// Unfinished work that writes the whole allocation.
    #[track_caller]
    pub(crate) fn launch(&self, stream: &Stream, allocation: &Allocation) {
        let work = Work::writing(allocation.ptr(), allocation.bytes());
        self.sim.launch(stream.key(), work).expect("nothing else uses the memory");
    }

    /// Freed while `stream`, which is not its own, still works with it.
    #[track_caller]
    pub(crate) fn free_in_use_by(&self, stream: &Stream, allocation: Allocation) {
        self.launch(stream, &allocation);
        allocation.record_stream(stream).expect("its own allocator's stream");
        drop(allocation);
    }

    #[track_caller]
    pub(crate) fn check(&self) {
        self.allocator.validate().expect("valid");
        self.sim.assert_clean();
    }

    /// Ends all work and gives everything back: nothing may be left, on the device or in the books. The streams keep
    /// the allocator alive, and so go with it.
    #[track_caller]
    pub(crate) fn end<const N: usize>(self, streams: [Stream; N]) {
        self.sim.clear_faults();
        self.sim.complete_all();
        self.allocator.empty_cache().expect("the driver is in order");
        self.check();
        let reserved = self.allocator.memory_stats().reserved_bytes;
        let left = [reserved.all, reserved.small_pool, reserved.large_pool].map(|stat| stat.current);
        assert_eq!(left, [0; 3], "in all, small, large");
        drop((self.allocator, streams));
        assert!(self.sim.leaks().is_empty(), "{:?}", self.sim.leaks());
    }
}
