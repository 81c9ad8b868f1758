//! The allocator on a real GPU, with kernels queued on every stream that stamp and check its memory.
//!
//! Where there is no GPU each test skips with a line on stderr; with `VRAMALLOC_REQUIRE_GPU` set they fail instead.
//! They take turns, as each measures what the driver does meanwhile.
#![cfg(all(feature = "cuda", feature = "replay"))]

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use vramalloc::driver::cuda::{CudaDriver, CudaKernel, KernelArg, LaunchShape};
use vramalloc::driver::{Call, CallCounts, DevicePtr, Driver, StreamHandle};
use vramalloc::trace::{Event, Trace};
use vramalloc::{Allocation, CachingAllocator, Config, Limit, Segments, Stream};

const MIB: u64 = 1 << 20;

/// `stamp` writes a tag to 256 words spread over a block, `check` counts those that do not hold it, and `wait` keeps
/// a stream busy for a while.
const PTX: &std::ffi::CStr = c"
.version 6.4
.target sm_70
.address_size 64

.visible .entry stamp(.param .u64 block, .param .u64 words, .param .u64 stride, .param .u32 tag)
{
    .reg .pred %out;
    .reg .b32  %i, %tag;
    .reg .b64  %p, %n, %s, %w;
    ld.param.u64 %p, [block];
    ld.param.u64 %n, [words];
    ld.param.u64 %s, [stride];
    ld.param.u32 %tag, [tag];
    mov.u32 %i, %tid.x;
    mul.wide.u32 %w, %i, 1;
    mul.lo.u64 %w, %w, %s;
    setp.ge.u64 %out, %w, %n;
    @%out bra done;
    shl.b64 %w, %w, 2;
    add.u64 %p, %p, %w;
    st.global.u32 [%p], %tag;
done:
    ret;
}

.visible .entry check(.param .u64 block, .param .u64 words, .param .u64 stride, .param .u32 tag, .param .u64 wrong)
{
    .reg .pred %out;
    .reg .b32  %i, %tag, %found;
    .reg .b64  %p, %n, %s, %w, %c;
    ld.param.u64 %p, [block];
    ld.param.u64 %n, [words];
    ld.param.u64 %s, [stride];
    ld.param.u32 %tag, [tag];
    ld.param.u64 %c, [wrong];
    mov.u32 %i, %tid.x;
    mul.wide.u32 %w, %i, 1;
    mul.lo.u64 %w, %w, %s;
    setp.ge.u64 %out, %w, %n;
    @%out bra done;
    shl.b64 %w, %w, 2;
    add.u64 %p, %p, %w;
    ld.global.u32 %found, [%p];
    setp.eq.u32 %out, %found, %tag;
    @%out bra done;
    red.global.add.u32 [%c], 1;
done:
    ret;
}

.visible .entry wait(.param .u64 nanos)
{
    .reg .pred %early;
    .reg .b64  %n, %begin, %now;
    ld.param.u64 %n, [nanos];
    mov.u64 %begin, %globaltimer;
again:
    mov.u64 %now, %globaltimer;
    sub.u64 %now, %now, %begin;
    setp.lt.u64 %early, %now, %n;
    @%early bra again;
    ret;
}
";

/// The first GPU with the kernels, for one test at a time.
struct Gpu {
    driver: Arc<CudaDriver>,
    stamp: CudaKernel,
    check: CudaKernel,
    wait: CudaKernel,
    /// Counts words that `check` found wrong.
    wrong: DevicePtr,
    _turn: MutexGuard<'static, ()>,
}

impl Gpu {
    fn open(test: &str) -> Option<Self> {
        static TURN: Mutex<()> = Mutex::new(());
        let turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
        let driver = match CudaDriver::open(0) {
            Ok(driver) => driver,
            Err(error) if std::env::var_os("VRAMALLOC_REQUIRE_GPU").is_some() => panic!("{test}: {error}"),
            Err(error) => {
                eprintln!("SKIPPED: {test}: {error}");
                return None;
            }
        };
        let module = driver.load_ptx(PTX).expect("the kernels");
        let kernel = |name| module.kernel(name).expect("a kernel");
        let (stamp, check, wait) = (kernel(c"stamp"), kernel(c"check"), kernel(c"wait"));
        let wrong = driver.alloc(512).expect("512 bytes");
        // SAFETY: 512 bytes of this test's own, which nothing else uses.
        unsafe { driver.memcpy_htod(wrong, &[0; 512]) }.expect("copied");
        Some(Self { driver, stamp, check, wait, wrong, _turn: turn })
    }

    fn allocator(&self, config: &str) -> CachingAllocator {
        let driver = Arc::clone(&self.driver) as Arc<dyn Driver>;
        CachingAllocator::new(driver, config.parse().expect("a configuration")).expect("an allocator")
    }

    fn stream(&self, allocator: &CachingAllocator) -> Stream {
        allocator.stream(self.driver.create_stream().expect("a stream")).expect("its pool")
    }

    fn sampled(allocation: &Allocation, tag: u32) -> [KernelArg; 4] {
        let words = allocation.block_bytes() / 4;
        let stride = (words / 256).max(1);
        [KernelArg::Ptr(allocation.ptr()), KernelArg::U64(words), KernelArg::U64(stride), KernelArg::U32(tag)]
    }

    fn stamp(&self, stream: &Stream, allocation: &Allocation, tag: u32) {
        let args = Self::sampled(allocation, tag);
        // SAFETY: the kernel writes within the allocation, which work queued on its stream may use.
        unsafe { self.stamp.launch(stream.key().handle, LaunchShape::row(1, 256), &args) }.expect("launched");
    }

    fn check(&self, stream: &Stream, allocation: &Allocation, tag: u32) {
        let [block, words, stride, tag] = Self::sampled(allocation, tag);
        let args = [block, words, stride, tag, KernelArg::Ptr(self.wrong)];
        // SAFETY: the kernel reads within the allocation and adds to this test's own counter.
        unsafe { self.check.launch(stream.key().handle, LaunchShape::row(1, 256), &args) }.expect("launched");
    }

    fn wait(&self, stream: &Stream, millis: u64) {
        let args = [KernelArg::U64(millis * 1_000_000)];
        // SAFETY: the kernel touches no memory.
        unsafe { self.wait.launch(stream.key().handle, LaunchShape::row(1, 1), &args) }.expect("launched");
    }

    /// Whether work is still queued on a stream, by an event of its own.
    fn is_busy(&self, stream: &Stream) -> bool {
        let event = self.driver.create_event().expect("an event");
        self.driver.record_event(event, stream.key()).expect("recorded");
        let passed = self.driver.query_event(event).expect("asked");
        self.driver.destroy_event(event).expect("destroyed");
        !passed
    }

    /// Waits for everything and reads the counter.
    fn wrong_words(&self) -> u32 {
        self.driver.synchronize().expect("no kernel crashed");
        let mut bytes = [0; 4];
        // SAFETY: the counter is this test's own, and nothing runs any more.
        unsafe { self.driver.memcpy_dtoh(&mut bytes, self.wrong) }.expect("copied");
        u32::from_le_bytes(bytes)
    }
}

impl Drop for Gpu {
    fn drop(&mut self) {
        let _ = self.driver.free(self.wrong);
    }
}

fn host_waits(counts: &CallCounts) -> u64 {
    [Call::EventSynchronize, Call::Synchronize].map(|call| counts.get(call).calls).iter().sum()
}

const KINDS: [&str; 2] = ["segments:fixed", "segments:expandable"];

#[test]
fn blocks_keep_their_contents_under_churn() {
    let Some(gpu) = Gpu::open("blocks_keep_their_contents_under_churn") else { return };
    for kind in KINDS {
        let allocator = gpu.allocator(&format!("{kind},limit:2GiB"));
        let streams: Vec<_> = (0..4).map(|_| gpu.stream(&allocator)).collect();
        let mut live: Vec<(Allocation, usize, u32)> = Vec::new();
        let mut random = 0x9E37_79B9_7F4A_7C15_u64;
        let mut next = |bound: u64| {
            random ^= random << 13;
            random ^= random >> 7;
            random ^= random << 17;
            random % bound
        };
        for tag in 1..=20_000u32 {
            let own = next(4) as usize;
            let bytes = (512 << next(17)) + next(4096);
            match allocator.alloc(bytes, &streams[own]) {
                Ok(block) => {
                    gpu.stamp(&streams[own], &block, tag);
                    live.push((block, own, tag));
                }
                Err(error) => assert!(error.out_of_memory().is_some(), "{kind}: {error}"),
            }
            while live.len() > 150 {
                let (block, own, tag) = live.swap_remove(next(live.len() as u64) as usize);
                gpu.check(&streams[own], &block, tag);
                drop(block);
            }
        }
        for (block, own, tag) in live.drain(..) {
            gpu.check(&streams[own], &block, tag);
        }
        assert_eq!(gpu.wrong_words(), 0, "{kind}: words were overwritten");
        allocator.validate().unwrap_or_else(|broken| panic!("{kind}: {broken}"));
        allocator.poll();
        allocator.empty_cache().expect("emptied");
        assert_eq!(allocator.memory_reserved(), 0, "{kind}");
        assert_eq!(allocator.take_deferred_error(), None, "{kind}");
    }
}

#[test]
fn recorded_streams_are_waited_for() {
    let Some(gpu) = Gpu::open("recorded_streams_are_waited_for") else { return };
    for kind in KINDS {
        let allocator = gpu.allocator(kind);
        let (own, other) = (gpu.stream(&allocator), gpu.stream(&allocator));
        let block = allocator.alloc(8 * MIB, &own).expect("8 MiB");
        let address = block.ptr();
        gpu.stamp(&own, &block, 7);
        gpu.driver.synchronize().expect("stamped");
        gpu.wait(&other, 200);
        gpu.check(&other, &block, 7);
        block.record_stream(&other).expect("the same allocator");
        drop(block);
        let next = allocator.alloc(8 * MIB, &own).expect("8 MiB");
        assert!(gpu.is_busy(&other), "{kind}: the kernel ran shorter than the test takes");
        assert_ne!(next.ptr(), address, "{kind}: reused under a kernel");
        gpu.stamp(&own, &next, 8);
        assert_eq!(gpu.wrong_words(), 0, "{kind}");
        assert_eq!(allocator.poll(), 1, "{kind}");
    }
}

#[test]
fn emptying_the_cache_does_not_wait_for_a_kernel() {
    let Some(gpu) = Gpu::open("emptying_the_cache_does_not_wait_for_a_kernel") else { return };
    let allocator = gpu.allocator("segments:expandable");
    let (busy, idle) = (gpu.stream(&allocator), gpu.stream(&allocator));
    let block = allocator.alloc(64 * MIB, &busy).expect("64 MiB");
    gpu.stamp(&busy, &block, 1);
    let blocks: Vec<_> = (0..500).map(|_| allocator.alloc(24 * MIB, &idle).expect("24 MiB")).collect();
    drop(blocks);
    gpu.driver.synchronize().expect("stamped");
    gpu.wait(&busy, 500);
    gpu.check(&busy, &block, 1);
    drop(block);
    let begin = std::time::Instant::now();
    let freed = allocator.empty_cache().expect("emptied");
    let took = begin.elapsed();
    assert!(gpu.is_busy(&busy), "it waited for the kernel: {took:?}");
    assert!(freed >= 500 * 24 * MIB, "{freed} bytes given back");
    eprintln!("empty_cache of 500 cached blocks of 24 MiB beside a running kernel: {took:?}");
    assert_eq!(gpu.wrong_words(), 0);
    allocator.empty_cache().expect("emptied");
    assert_eq!(allocator.memory_reserved(), 0);
}

#[test]
fn out_of_memory_is_reported_and_recovered_from() {
    let Some(gpu) = Gpu::open("out_of_memory_is_reported_and_recovered_from") else { return };
    let total = gpu.driver.capabilities().total_bytes;
    for segments in [Segments::Fixed, Segments::Expandable] {
        let driver = Arc::clone(&gpu.driver) as Arc<dyn Driver>;
        let config = Config::default().segments(segments).limit(Limit::Fraction(0.25));
        let allocator = CachingAllocator::new(driver, config).expect("an allocator");
        let stream = allocator.default_stream().expect("the default stream");
        let limit = allocator.limit().expect("a limit");
        assert!(limit.abs_diff(total / 4) <= 2 * MIB);
        let half = allocator.alloc(limit / 2, &stream).expect("half of the limit");
        let error = allocator.alloc(limit / 2 + 4 * MIB, &stream).expect_err("more than the limit");
        let report = error.out_of_memory().unwrap_or_else(|| panic!("{error}"));
        assert_eq!((report.limit, report.allocated), (Some(limit), half.block_bytes()));
        assert!(report.device_free.is_some_and(|free| free < report.device_total));
        drop(half);
        allocator.alloc(limit / 2 + 4 * MIB, &stream).expect("room after the free");
        allocator.validate().expect("valid");
    }
    let allocator = gpu.allocator("");
    let stream = allocator.default_stream().expect("the default stream");
    assert!(allocator.alloc(total + MIB, &stream).is_err());
    drop(allocator.alloc(MIB, &stream).expect("no error is left behind"));
}

/// Replays a trace twice, with a kernel on its own stream for each allocation, and one that checks before each free.
fn replay_with_kernels(gpu: &Gpu, trace: &Trace, kind: &str) {
    let allocator = gpu.allocator(kind);
    let streams: Vec<Stream> = trace
        .streams
        .iter()
        .map(|number| match number {
            0 => allocator.stream(StreamHandle::DEFAULT).expect("the default stream"),
            _ => gpu.stream(&allocator),
        })
        .collect();
    let before = gpu.driver.calls();
    let begin = std::time::Instant::now();
    for _ in 0..2 {
        let mut live: Vec<Option<(Allocation, u32)>> = Vec::with_capacity(trace.allocations);
        let free = |slot: &mut Option<(Allocation, u32)>, tag: u32| {
            if let Some((block, stream)) = slot.take() {
                gpu.check(&streams[stream as usize], &block, tag);
            }
        };
        for event in &trace.events {
            match *event {
                Event::Alloc { bytes, stream } => {
                    let block = allocator.alloc(bytes, &streams[stream as usize]).expect("room");
                    if bytes > 0 {
                        gpu.stamp(&streams[stream as usize], &block, live.len() as u32);
                    }
                    live.push((bytes > 0).then_some((block, stream)));
                }
                Event::Free { id } => free(&mut live[id as usize], id),
            }
        }
        for (id, slot) in live.iter_mut().enumerate() {
            free(slot, id as u32);
        }
    }
    let waits = host_waits(&gpu.driver.calls().since(&before));
    let elapsed = begin.elapsed();
    let wrong = gpu.wrong_words();
    let stats = allocator.memory_stats();
    let ratio = stats.reserved_bytes.all.peak as f64 / trace.peak_requested as f64;
    eprintln!(
        "{:<16} {kind:<20} kernels on every stream: ratio {ratio:.4}, {waits} host waits, {:.0} ms",
        trace.name,
        elapsed.as_secs_f64() * 1e3
    );
    assert_eq!(wrong, 0, "{}, {kind}: words were overwritten", trace.name);
    assert_eq!(waits, 0, "{}, {kind}: the host waited", trace.name);
    allocator.validate().unwrap_or_else(|broken| panic!("{}, {kind}: {broken}", trace.name));
}

#[test]
fn traces_replay_with_kernels_on_every_stream() {
    let Some(gpu) = Gpu::open("traces_replay_with_kernels_on_every_stream") else { return };
    let folder = std::env::var("VRAMALLOC_TRACES")
        .unwrap_or_else(|_| format!("{}/benches/traces", env!("CARGO_MANIFEST_DIR")));
    // Under a sanitizer a part will do: it slows every kernel down a hundredfold.
    let most = std::env::var("VRAMALLOC_TRACE_EVENTS").map_or(usize::MAX, |text| text.parse().expect("a number"));
    for name in ["resnet50", "gpt2_amp", "gnn", "unet_multires", "serving_streams", "llama_generate"] {
        let mut trace = Trace::read(format!("{folder}/{name}.csv.gz")).expect("a trace");
        if trace.events.len() > most {
            trace.events.truncate(most);
            trace.name.push_str(" (a part)");
        }
        for kind in KINDS {
            replay_with_kernels(&gpu, &trace, kind);
        }
    }
}
