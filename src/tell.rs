//! What other tools hear of the allocator as it happens: events of the `tracing` crate, marks for Nsight Systems. Each is
//! behind a feature; all of it is on slow paths, with no lock held.

use crate::device::Device;
use crate::error::{OutOfMemory, Result};
use crate::pool::{Request, Taken};

/// A request left the hot path.
#[cfg_attr(not(any(feature = "tracing", feature = "nvtx")), expect(unused_variables))]
pub(crate) fn slow_path(device: &Device, request: &Request, result: &Result<Taken>) {
    #[cfg(feature = "tracing")]
    if result.is_ok() {
        tracing::debug!(
            target: "vramalloc",
            device = device.driver.device(),
            requested = request.requested,
            reserved = device.reserved(),
            "a request was not served from the cache"
        );
    }
    #[cfg(feature = "nvtx")]
    crate::nvtx::mark("reserved bytes", device.reserved());
}

/// A request cannot be served.
#[cfg_attr(not(feature = "tracing"), expect(unused_variables))]
pub(crate) fn out_of_memory(report: &OutOfMemory) {
    #[cfg(feature = "tracing")]
    tracing::warn!(
        target: "vramalloc",
        device = report.device,
        requested = report.requested,
        allocated = report.allocated,
        reserved = report.reserved,
        cause = %report.cause,
        "out of memory"
    );
    #[cfg(feature = "nvtx")]
    crate::nvtx::mark("out of memory, bytes requested", report.requested);
}

/// The cache was emptied on request.
#[cfg_attr(not(any(feature = "tracing", feature = "nvtx")), expect(unused_variables))]
pub(crate) fn emptied(device: &Device, freed: u64) {
    #[cfg(feature = "tracing")]
    tracing::debug!(
        target: "vramalloc",
        device = device.driver.device(),
        freed,
        reserved = device.reserved(),
        "the cache was emptied"
    );
    #[cfg(feature = "nvtx")]
    crate::nvtx::mark("reserved bytes", device.reserved());
}

/// The allocator is dropped with memory in use.
#[cfg(feature = "tracing")]
pub(crate) fn leak(report: &crate::LeakReport) {
    tracing::warn!(
        target: "vramalloc",
        device = report.device,
        allocations = report.allocations.len(),
        bytes = report.bytes(),
        "the allocator is dropped while memory of it is in use"
    );
}
