//! Public bug reports about GPU allocators, turned into deterministic scenarios on the simulated device.
//!
//! Each module opens with what used to go wrong for users and where it was reported. [`dsl`] is what they are
//! written in: after every step the allocator's invariants, its statistics and the device's own verdict are checked.

mod checks;
mod dsl;
mod hooked;
mod kinds;

mod bad_free;
mod captures;
#[cfg(unix)]
mod fork;
mod fraction_base;
mod gc_threshold;
mod limit_arithmetic;
mod locks_in_driver_calls;
mod record_stream_growth;
mod research_pool_after_sync;
mod rounding_overflow;
mod size_edges;
mod split_stranding;
mod stale_errors;
mod stats_truth;
mod sticky_errors;
mod stream_identity;
mod teardown;
mod threads;
mod wrong_current_device;
