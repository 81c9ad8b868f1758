//! The simulated device with a hook that runs inside every driver call: to look at the allocator at the worst of
//! moments, to act as another thread would, or only to count.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{PoisonError, RwLock};
use vramalloc::driver::sim::SimDriver;
use vramalloc::driver::{
    Call, CallCounts, Capabilities, DevicePtr, Driver, EventHandle, HostPtr, MemoryInfo, PageHandle, Result,
    StreamHandle, StreamKey,
};

type Hook = Arc<dyn Fn(Call) + Send + Sync>;

/// See the module's text.
pub(crate) struct Hooked {
    sim: Arc<SimDriver>,
    hook: RwLock<Option<Hook>>,
    calls: AtomicU64,
}

impl Hooked {
    pub(crate) fn new(sim: &Arc<SimDriver>) -> Arc<Self> {
        Arc::new(Self { sim: Arc::clone(sim), hook: RwLock::new(None), calls: AtomicU64::new(0) })
    }

    /// Runs `hook` in every call from now on, before the device acts.
    pub(crate) fn on_call(&self, hook: impl Fn(Call) + Send + Sync + 'static) {
        *self.hook.write().unwrap_or_else(PoisonError::into_inner) = Some(Arc::new(hook));
    }

    /// Runs `act` in the next `call`, once.
    pub(crate) fn once_in(&self, call: Call, act: impl FnOnce() + Send + 'static) {
        let act = std::sync::Mutex::new(Some(act));
        self.on_call(move |made| {
            let due = (made == call).then(|| act.lock().unwrap_or_else(PoisonError::into_inner).take()).flatten();
            if let Some(act) = due {
                act();
            }
        });
    }

    pub(crate) fn unhook(&self) {
        *self.hook.write().unwrap_or_else(PoisonError::into_inner) = None;
    }

    /// How many calls the allocator has made, refused ones included.
    pub(crate) fn calls_made(&self) -> u64 {
        self.calls.load(Ordering::SeqCst)
    }

    fn enter(&self, call: Call) -> &SimDriver {
        self.calls.fetch_add(1, Ordering::SeqCst);
        let hook = self.hook.read().unwrap_or_else(PoisonError::into_inner).clone();
        if let Some(hook) = hook {
            hook(call);
        }
        &self.sim
    }
}

impl fmt::Debug for Hooked {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Hooked").field("sim", &self.sim).finish_non_exhaustive()
    }
}

macro_rules! forward {
    ($($call:ident => fn $name:ident($($arg:ident: $type:ty),*) -> $answer:ty;)*) => {
        impl Driver for Hooked {
            $(fn $name(&self, $($arg: $type),*) -> Result<$answer> { self.enter(Call::$call).$name($($arg),*) })*

            fn device(&self) -> u32 {
                self.sim.device()
            }

            fn name(&self) -> String {
                self.sim.name()
            }

            fn label(&self) -> String {
                self.sim.label()
            }

            fn capabilities(&self) -> Capabilities {
                self.sim.capabilities()
            }

            fn check_usable(&self) -> Result<()> {
                self.sim.check_usable()
            }

            fn calls(&self) -> CallCounts {
                self.sim.calls()
            }
        }
    };
}

forward! {
    MemoryInfo => fn memory_info() -> MemoryInfo;
    Alloc => fn alloc(bytes: u64) -> DevicePtr;
    Free => fn free(ptr: DevicePtr) -> ();
    ReserveAddresses => fn reserve_addresses(bytes: u64) -> DevicePtr;
    FreeAddresses => fn free_addresses(base: DevicePtr, bytes: u64) -> ();
    CreatePages => fn create_pages(bytes: u64) -> PageHandle;
    ReleasePages => fn release_pages(pages: PageHandle) -> ();
    Map => fn map(ptr: DevicePtr, bytes: u64, pages: PageHandle) -> ();
    Unmap => fn unmap(ptr: DevicePtr, bytes: u64) -> ();
    SetAccess => fn set_access(ptr: DevicePtr, bytes: u64, devices: &[u32]) -> ();
    StreamId => fn stream_key(handle: StreamHandle) -> StreamKey;
    EventCreate => fn create_event() -> EventHandle;
    EventDestroy => fn destroy_event(event: EventHandle) -> ();
    EventRecord => fn record_event(event: EventHandle, stream: StreamKey) -> ();
    EventQuery => fn query_event(event: EventHandle) -> bool;
    EventSynchronize => fn synchronize_event(event: EventHandle) -> ();
    StreamWait => fn stream_wait_event(stream: StreamKey, event: EventHandle) -> ();
    Synchronize => fn synchronize() -> ();
    IsCapturing => fn is_capturing(stream: StreamKey) -> bool;
    HostAlloc => fn alloc_host(bytes: u64) -> HostPtr;
    HostFree => fn free_host(ptr: HostPtr) -> ();
}
