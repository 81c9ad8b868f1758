//! See the [README](https://docs.rs/crate/vramalloc) for what this crate is, and `docs/architecture.md` for how it
//! works.

pub mod driver;

mod allocator;
mod block;
pub mod config;
mod device;
mod error;
mod event;
mod free_index;
mod live;
mod open;
mod pool;
mod process;
mod reclaim;
#[cfg(feature = "replay")]
pub mod replay;
mod segment;
pub mod size;
mod snapshot;
mod stats;
mod stream;
mod summary;
mod supply;
mod sync;
#[cfg(feature = "replay")]
pub mod trace;
mod validate;

pub use allocator::{Allocation, CachingAllocator, MAX_ALIGNMENT};
pub use config::{Config, ConfigError, Limit, OnPending, RoundupDivisions, Segments};
pub use driver::{DevicePtr, Driver, DriverError, DriverErrorKind, StreamHandle};
pub use error::{Cause, Error, OutOfMemory, Result};
pub use open::{DeviceChoice, OpenDevice, ParseDeviceError, why_no_gpu};
pub use snapshot::{BlockInfo, BlockState, SegmentInfo, Snapshot};
pub use stats::{MemoryStats, Stat, StatArray};
pub use stream::Stream;
pub use validate::InvariantViolation;
