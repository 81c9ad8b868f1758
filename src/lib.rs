//! A caching, stream-aware memory allocator for GPU programs on cudarc, with a simulated device.
//!
//! [`CachingAllocator`] is one device's allocator: it keeps what is freed and serves later requests of the same stream
//! from it, without a driver call. It runs on a [`Driver`]: CUDA (`driver::cuda`) or the simulated device
//! ([`driver::sim`]); [`OpenDevice`] takes whichever there is. [`Allocators`] is a front for several devices.
//!
//! | | |
//! | --- | --- |
//! | [`Stream`] | what allocations are made on; look it up once and keep it |
//! | [`Allocation`] | device memory that is freed when dropped |
//! | [`DeviceBuffer`] | the same, typed: views, copies, and everything that cudarc's `CudaSlice` goes into |
//! | [`PinnedBuffer`] | page-locked host memory, cached |
//! | [`Config`] | kinds of segments, limits, thresholds; also from a string, also from `VRAMALLOC_CONF` |
//! | [`MemoryStats`], [`Snapshot`] | what it did, what it holds |
//! | [`HistoryOptions`], [`pytorch`] | what happened, for PyTorch's viewers |
//! | [`LeakReport`], [`FragmentationReport`], [`MemoryBreakdown`] | what is not freed, what pins memory, who holds it |
//! | [`Error`], [`OutOfMemory`] | what went wrong, with the numbers |
//!
//! The words are the field's: *reserved* is what the allocator holds of the device, *allocated* what users hold, *active*
//! allocated and freed but still used by queued work, a *segment* one reservation from the driver, a *block* a piece of
//! one. The repository's `docs/architecture.md` tells how it works inside.

pub mod driver;

mod allocation;
mod allocator;
mod allocators;
mod block;
mod breakdown;
pub mod buffer;
pub mod config;
#[cfg(feature = "cuda")]
pub mod cuda;
mod device;
mod diagnose;
mod error;
mod event;
mod fragmentation;
mod free_index;
mod front;
mod history;
mod leaks;
mod live;
#[cfg(not(vramalloc_shuttle))]
mod lock;
mod magazine;
#[cfg(feature = "metrics")]
pub mod metrics;
#[cfg(feature = "nvml")]
pub mod nvml;
#[cfg(feature = "nvtx")]
mod nvtx;
mod open;
mod pinned;
mod pool;
mod private;
mod process;
pub mod pytorch;
mod reclaim;
#[cfg(feature = "replay")]
pub mod replay;
mod segment;
mod shared;
pub mod size;
mod snapshot;
mod stats;
mod stream;
mod summary;
mod supply;
mod survey;
mod sync;
mod tell;
#[cfg(feature = "replay")]
pub mod trace;
mod validate;
#[cfg(feature = "replay")]
mod view;

pub use allocation::Allocation;
pub use allocator::{CachingAllocator, MAX_ALIGNMENT};
pub use allocators::Allocators;
pub use breakdown::{MemoryBreakdown, StreamUsage, TagUsage};
pub use buffer::{DeviceBuffer, DeviceView, DeviceViewMut};
pub use bytemuck; // its traits say what may be zeroed, copied and reinterpreted
pub use config::{Config, ConfigError, Limit, OnPending, RoundupDivisions, Segments};
pub use driver::{DevicePtr, Driver, DriverError, DriverErrorKind, StreamHandle};
pub use error::{Cause, Error, OutOfMemory, Result};
pub use fragmentation::{FragmentationReport, Pinned, PinnedUnit};
pub use history::{HistoryOptions, Scope, Stacks};
pub use leaks::{LeakGroup, LeakReport, LiveAllocation, Mark};
pub use open::{DeviceChoice, OpenDevice, ParseDeviceError, why_no_gpu};
pub use pinned::{HostMemoryStats, PinnedBuffer};
pub use private::{Capturing, PrivatePool};
pub use snapshot::{BlockInfo, BlockState, SegmentInfo, Snapshot};
pub use stats::{MemoryStats, Stat, StatArray};
pub use stream::Stream;
pub use validate::InvariantViolation;

#[cfg(all(doctest, feature = "cuda"))]
#[doc = include_str!("../README.md")]
struct Readme;

#[cfg(all(doctest, feature = "cuda"))]
#[doc = include_str!("../docs/cudarc.md")]
struct Migration;

#[cfg(all(doctest, feature = "cuda"))]
#[doc = include_str!("../docs/frameworks.md")]
struct Frameworks;

#[cfg(doctest)]
#[doc = include_str!("../docs/diagnostics.md")]
struct Diagnostics;
