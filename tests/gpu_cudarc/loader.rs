//! A loader that copies batches through page-locked buffers while kernels run on another stream.

use crate::gpu;
use cudarc::driver::{CudaEvent, CudaFunction, CudaStream, LaunchConfig, PushKernelArg};
use cudarc::nvrtc::Ptx;
use std::sync::Arc;
use std::time::{Duration, Instant};
use vramalloc::cuda::CudaAllocator;
use vramalloc::driver::Call;
use vramalloc::{Config, DeviceBuffer};

const BATCHES: usize = 1000;
const LEN: usize = 1 << 20; // of u32: 4 MiB a batch
const KERNEL_NANOS: u64 = 100_000;

const ONE: LaunchConfig = LaunchConfig { grid_dim: (1, 1, 1), block_dim: (1, 1, 1), shared_mem_bytes: 0 };

/// Keeps a stream busy for a while; takes the batch so that the launch is ordered after its copy.
const PTX: &str = "
.version 6.4
.target sm_70
.address_size 64

.visible .entry busy(.param .u64 batch, .param .u64 nanos)
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

struct Loader {
    memory: CudaAllocator,
    copies: Arc<CudaStream>,
    compute: Arc<CudaStream>,
    busy: CudaFunction,
    places: Vec<DeviceBuffer<u32>>,
}

impl Loader {
    fn compute(&self, place: &DeviceBuffer<u32>, nanos: u64) {
        let mut args = self.compute.launch_builder(&self.busy);
        // SAFETY: the kernel touches no memory.
        unsafe { args.arg(place).arg(&nanos).launch(ONE) }.expect("launch");
    }

    /// Loads all batches, and computes on each if `nanos` says how long.
    fn run(&mut self, copies: bool, nanos: Option<u64>) -> Duration {
        let begin = Instant::now();
        for batch in 0..BATCHES {
            let which = batch % self.places.len();
            if copies {
                let mut host = self.memory.alloc_pinned::<u32>(LEN).expect("pinned");
                host.as_mut_slice().expect("slice")[..1024].fill(batch as u32);
                // cudarc's events make the copy wait for the kernel that used the place before.
                self.copies.memcpy_htod(&host, &mut self.places[which]).expect("copy");
            }
            if let Some(nanos) = nanos {
                self.compute(&self.places[which], nanos);
            }
        }
        self.compute.synchronize().expect("synchronize");
        self.copies.synchronize().expect("synchronize");
        begin.elapsed()
    }
}

fn done(event: &CudaEvent) -> bool {
    event.try_is_complete().expect("query")
}

#[test]
fn a_loader_overlaps_with_compute() {
    let Some(gpu) = gpu("a_loader_overlaps_with_compute", &[]) else { return };
    let memory = CudaAllocator::new(&gpu.context, Config::default()).expect("allocator");
    let (copies, compute) = (gpu.context.new_stream().expect("stream"), gpu.context.new_stream().expect("stream"));
    let busy = gpu.context.load_module(Ptx::from_src(PTX)).expect("module").load_function("busy").expect("kernel");
    let places = (0..3).map(|_| memory.alloc_zeros::<u32>(LEN, &copies).expect("alloc")).collect();
    memory.stream(&compute).expect("stream");
    let mut loader = Loader { memory, copies, compute, busy, places };
    loader.run(true, Some(1000)); // the first time costs what the first time costs

    let before = loader.memory.driver().calls();
    let copies_alone = loader.run(true, None);
    let compute_alone = loader.run(false, Some(KERNEL_NANOS));
    let together = loader.run(true, Some(KERNEL_NANOS));
    let calls = loader.memory.driver().calls().since(&before);
    let of = |call| calls.get(call).calls;
    let stats = loader.memory.host_memory_stats();
    eprintln!(
        "{BATCHES} batches of {} MiB: copies alone {copies_alone:.1?}, kernels alone {compute_alone:.1?}, both \
         {together:.1?}",
        (LEN * 4) >> 20
    );
    eprintln!(
        "page-locked memory: {} bytes, {} cuMemHostAlloc and {} cuMemFreeHost in all, {} in these {} batches; to ask for \
         copies: {} records, {} queries, {} waits",
        stats.reserved_bytes.peak,
        stats.num_host_alloc,
        stats.num_host_free,
        of(Call::HostAlloc) + of(Call::HostFree),
        2 * BATCHES,
        of(Call::EventRecord),
        of(Call::EventQuery),
        of(Call::EventSynchronize),
    );
    assert!(stats.num_host_alloc <= 8, "{stats:?}");
    assert_eq!(of(Call::HostAlloc) + of(Call::HostFree), 0, "all from the cache");
    for place in &loader.places {
        let first = place.slice(..1).to_vec().expect("download")[0] as usize;
        assert!(first >= BATCHES - 3, "the last batches are there: {first}");
    }

    // Without a clock: a copy ends while a kernel that began before it still runs.
    let mut place = loader.memory.alloc_zeros::<u32>(LEN, &loader.copies).expect("alloc");
    let host = loader.memory.alloc_pinned::<u32>(LEN).expect("pinned");
    loader.copies.synchronize().expect("synchronize");
    loader.compute(&loader.places[0], 500_000_000);
    let computed = loader.compute.record_event(None).expect("event");
    loader.copies.memcpy_htod(&host, &mut place).expect("copy");
    let copied = loader.copies.record_event(None).expect("event");
    drop(host);
    while !done(&copied) {
        std::hint::spin_loop();
    }
    assert!(!done(&computed), "the copy waited for the kernel of another stream");
    loader.compute.synchronize().expect("synchronize");
}
