//! What the tests have in common.

use crate::fake::{self, Fake};
use cudarc::driver::{CudaContext, CudaFunction, CudaStream, LaunchConfig};
use cudarc::nvrtc::Ptx;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use vramalloc::Config;
use vramalloc::cuda::CudaAllocator;

/// Kernels that the fake driver knows by name.
const KERNELS: &str = ".entry fill_bytes( .entry read_bytes( .entry wait_and_store(";

/// A kernel with this duration runs until somebody waits for it.
pub(crate) const FOREVER: u64 = u64::MAX;

pub(crate) const ONE: LaunchConfig =
    LaunchConfig { grid_dim: (1, 1, 1), block_dim: (1, 1, 1), shared_mem_bytes: 0 };

pub(crate) struct Bench {
    pub(crate) fake: &'static Fake,
    pub(crate) context: Arc<CudaContext>,
    pub(crate) memory: CudaAllocator,
    /// `fill_bytes`: u64 address, u64 bytes, u32 value, u64 nanos.
    pub(crate) fill: CudaFunction,
    /// `read_bytes`: u64 address, u64 bytes, u64 nanos.
    pub(crate) read: CudaFunction,
    _turn: MutexGuard<'static, ()>,
}

/// The fake device for one test at a time, or `None` with the reason on stderr.
pub(crate) fn bench(test: &str) -> Option<Bench> {
    with_config(test, Config::default())
}

pub(crate) fn with_config(test: &str, config: Config) -> Option<Bench> {
    static TURN: Mutex<()> = Mutex::new(());
    let turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    let fake = match fake::load() {
        Ok(fake) => fake,
        Err(reason) => {
            eprintln!("SKIPPED: {test}: {reason}");
            return None;
        }
    };
    let context = CudaContext::new(0).expect("context");
    let memory = CudaAllocator::new(&context, config).expect("allocator");
    let module = context.load_module(Ptx::from_src(KERNELS)).expect("module");
    let [fill, read] = ["fill_bytes", "read_bytes"].map(|name| module.load_function(name).expect(name));
    Some(Bench { fake, context, memory, fill, read, _turn: turn })
}

impl Bench {
    pub(crate) fn streams(&self) -> (Arc<CudaStream>, Arc<CudaStream>) {
        let stream = || self.context.new_stream().expect("stream");
        (stream(), stream())
    }

    /// Lets cudarc order nothing by events from now on.
    pub(crate) fn without_tracking(self) -> Self {
        // SAFETY: nothing is under way yet, and what the tests do without tracking is in order.
        unsafe { self.context.disable_event_tracking() };
        self
    }
}

impl Drop for Bench {
    fn drop(&mut self) {
        if !std::thread::panicking() {
            assert_eq!(self.fake.violations(), 0, "misuse that the simulated device saw");
            self.context.check_err().expect("nothing is parked in cudarc's context");
            assert_eq!(self.memory.take_deferred_error(), None);
        }
    }
}
