//! vramalloc's C interface, and the functions that PyTorch and CuPy load.
//!
//! The header is `capi/include/vramalloc.h`, the guide `docs/c-interface.md`. Rules that every function follows:
//!
//! * It passes `status::guarded` first: in a forked child it fails there, before any lock or call of the driver.
//! * Nothing unwinds out of it. A failure is a [`Status`] and a text, by thread: [`vram_last_error`].
//! * A handle is a number that is looked up: a stale, foreign or null one is [`Status::InvalidHandle`].
//! * A pointer to an argument or a result is checked for null; otherwise it must be what the function says.
//! * A device address is looked up, never followed.
//! * A failed call to allocate, free or record changes nothing.

mod allocator;
mod cupy;
mod devices;
mod exit;
mod forks;
mod guest;
mod history;
mod logging;
mod registry;
mod report;
mod routes;
mod status;
mod streams;
#[cfg(test)]
mod tests;
mod torch;

pub use allocator::*;
pub use cupy::*;
pub use history::*;
pub use report::*;
pub use status::{Status, vram_last_error};
pub use torch::*;

/// The version of this interface. It changes when a function changes its signature or its meaning; what is only added
/// does not count.
pub const VRAM_ABI_VERSION: u32 = 1;

/// The version of the interface that the library has: compare with `VRAM_ABI_VERSION` of the header.
#[unsafe(no_mangle)]
pub extern "C" fn vram_abi_version() -> u32 {
    VRAM_ABI_VERSION
}
