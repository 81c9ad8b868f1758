//! The driver's calls by name, and how often and how long each was made.

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};

macro_rules! calls {
    ($($(#[$doc:meta])* $variant:ident = $name:literal,)*) => {
        /// A call to the driver.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
        #[non_exhaustive]
        #[repr(u8)]
        pub enum Call { $($(#[$doc])* $variant,)* }

        impl Call {
            /// Every call, in the order of the enumeration.
            pub const ALL: &'static [Self] = &[$(Self::$variant,)*];

            /// The name of CUDA's function.
            #[must_use]
            pub const fn name(self) -> &'static str {
                match self { $(Self::$variant => $name,)* }
            }
        }
    };
}

calls! {
    /// Opening the device: initialization, device count, context.
    Open = "cuInit",
    /// Free and total memory.
    MemoryInfo = "cuMemGetInfo",
    /// Plain allocation.
    Alloc = "cuMemAlloc",
    /// Plain free.
    Free = "cuMemFree",
    /// Address range reserved.
    ReserveAddresses = "cuMemAddressReserve",
    /// Address range given back.
    FreeAddresses = "cuMemAddressFree",
    /// Physical memory created.
    CreatePages = "cuMemCreate",
    /// Physical memory given back.
    ReleasePages = "cuMemRelease",
    /// Physical memory mapped.
    Map = "cuMemMap",
    /// Physical memory unmapped.
    Unmap = "cuMemUnmap",
    /// Access granted.
    SetAccess = "cuMemSetAccess",
    /// Stream created.
    StreamCreate = "cuStreamCreate",
    /// Stream identified.
    StreamId = "cuStreamGetId",
    /// Event created.
    EventCreate = "cuEventCreate",
    /// Event destroyed.
    EventDestroy = "cuEventDestroy",
    /// Event recorded.
    EventRecord = "cuEventRecord",
    /// Event asked.
    EventQuery = "cuEventQuery",
    /// Host waited for an event.
    EventSynchronize = "cuEventSynchronize",
    /// Stream made to wait for an event.
    StreamWait = "cuStreamWaitEvent",
    /// Host waited for the device.
    Synchronize = "cuCtxSynchronize",
    /// Stream asked whether it is captured.
    IsCapturing = "cuStreamIsCapturing",
    /// Page-locked host memory allocated.
    HostAlloc = "cuMemHostAlloc",
    /// Page-locked host memory freed.
    HostFree = "cuMemFreeHost",
    /// Copy from the host queued.
    CopyToDevice = "cuMemcpyHtoDAsync",
    /// Copy to the host queued.
    CopyToHost = "cuMemcpyDtoHAsync",
    /// Copy on the device queued.
    CopyOnDevice = "cuMemcpyDtoDAsync",
    /// Filling of memory queued.
    Fill = "cuMemsetD8Async",
    /// Host waited for a stream.
    StreamSynchronize = "cuStreamSynchronize",
}

impl fmt::Display for Call {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// How often a call was made and what that cost.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CallCount {
    /// Calls, failed ones included.
    pub calls: u64,
    /// Nanoseconds spent in them.
    pub nanos: u64,
}

/// How often each call was made and what that cost: a moment's copy.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CallCounts([CallCount; Call::ALL.len()]);

impl CallCounts {
    /// The figures of one call.
    #[must_use]
    pub const fn get(&self, call: Call) -> CallCount {
        self.0[call as usize]
    }

    /// All calls together.
    #[must_use]
    pub fn total(&self) -> CallCount {
        self.0.iter().fold(CallCount::default(), |sum, count| CallCount {
            calls: sum.calls + count.calls,
            nanos: sum.nanos + count.nanos,
        })
    }

    /// What came since an `earlier` copy of the same driver's figures.
    #[must_use]
    pub fn since(&self, earlier: &Self) -> Self {
        Self(std::array::from_fn(|i| CallCount {
            calls: self.0[i].calls.saturating_sub(earlier.0[i].calls),
            nanos: self.0[i].nanos.saturating_sub(earlier.0[i].nanos),
        }))
    }

    /// The calls that were made at least once.
    pub fn iter(&self) -> impl Iterator<Item = (Call, CallCount)> + '_ {
        Call::ALL.iter().map(|&call| (call, self.get(call))).filter(|(_, count)| count.calls > 0)
    }
}

/// Counts calls from any thread; each driver owns one.
#[derive(Debug)]
pub struct CallMeter([(AtomicU64, AtomicU64); Call::ALL.len()]);

impl CallMeter {
    /// A meter at zero.
    #[must_use]
    pub fn new() -> Self {
        Self(std::array::from_fn(|_| (AtomicU64::new(0), AtomicU64::new(0))))
    }

    /// Notes one call that took `nanos`.
    pub fn add(&self, call: Call, nanos: u64) {
        let (calls, total) = &self.0[call as usize];
        calls.fetch_add(1, Ordering::Relaxed);
        total.fetch_add(nanos, Ordering::Relaxed);
    }

    /// The figures now.
    #[must_use]
    pub fn counts(&self) -> CallCounts {
        CallCounts(std::array::from_fn(|i| CallCount {
            calls: self.0[i].0.load(Ordering::Relaxed),
            nanos: self.0[i].1.load(Ordering::Relaxed),
        }))
    }
}

impl Default for CallMeter {
    fn default() -> Self {
        Self::new()
    }
}
