//! What is still allocated when the process ends, for those who asked to be told (`VRAMALLOC_LOG`).

use crate::registry;
use crate::status::guarded;
use vramalloc::CachingAllocator;

/// Tells of it at the end, if anybody listens. To be called once.
pub(crate) fn watch() {
    // Nobody asked: then nothing of ours runs at the end.
    if !log::log_enabled!(log::Level::Warn) {
        return;
    }
    extern "C" fn at_exit() {
        let _ = guarded(|| {
            tell();
            Ok(())
        });
    }
    // SAFETY: the handler is a function of this library, from which nothing unwinds.
    #[cfg(unix)]
    unsafe {
        libc::atexit(at_exit);
    }
    #[cfg(not(unix))]
    let _ = at_exit;
}

/// An allocator that was made and not destroyed is the program's; what PyTorch and CuPy hold at the end of Python is not
/// worth a warning.
fn tell() {
    for (handle, devices) in registry::all() {
        let level = if registry::is_own(handle) { log::Level::Info } else { log::Level::Warn };
        if !log::log_enabled!(level) {
            continue;
        }
        for report in devices.used().map(|device| &device.allocator).map(CachingAllocator::leak_report) {
            if !report.allocations.is_empty() {
                log::log!(level, "still in use as the process ends, of allocator {handle:#x}\n{report}");
            }
        }
    }
}
