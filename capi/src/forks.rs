//! Forks. A child process has the parent's memory and none of its threads: a lock that one of them held is held for good
//! there, and the device is the parent's. So nothing is done in the child of a process that used the library.

use crate::status::{Failure, Result};
use std::sync::atomic::{AtomicU8, Ordering};

/// Nothing was called so far: a child may be the first to use the library.
const UNUSED: u8 = 0;
const USED: u8 = 1;
const FORKED: u8 = 2;

static STATE: AtomicU8 = AtomicU8::new(UNUSED);

/// Fails in a forked child. Takes no lock; one load but for the first time.
#[inline]
pub(crate) fn check() -> Result<()> {
    match STATE.load(Ordering::Relaxed) {
        USED => Ok(()),
        UNUSED => first(),
        _ => Err(Failure::Forked),
    }
}

#[cold]
fn first() -> Result<()> {
    // Before any lock is taken, so that no child can find one taken and this not said.
    match STATE.compare_exchange(UNUSED, USED, Ordering::SeqCst, Ordering::SeqCst) {
        Err(FORKED) => Err(Failure::Forked),
        _ => Ok(()),
    }
}

/// Registered as the library is loaded, when there is no other thread of it yet: a registration at the first call could
/// be cut in half by the fork that it is for.
#[cfg(unix)]
// SAFETY: the section holds pointers to functions that the loader calls once, and this is one; it relies on nothing that
// Rust's runtime would have to set up.
#[cfg_attr(target_vendor = "apple", unsafe(link_section = "__DATA,__mod_init_func"))]
#[cfg_attr(not(target_vendor = "apple"), unsafe(link_section = ".init_array"))]
#[used]
static WATCH: extern "C" fn() = watch;

#[cfg(unix)]
extern "C" fn watch() {
    extern "C" fn in_child() {
        let _ = STATE.compare_exchange(USED, FORKED, Ordering::SeqCst, Ordering::SeqCst);
    }
    // SAFETY: the handler is a function of this library, and only changes an atomic, which is allowed in a forked child.
    unsafe { libc::pthread_atfork(None, None, Some(in_child)) };
}
