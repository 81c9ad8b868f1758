//! Forks: a child process must not touch the parent's device.

use crate::sync::{AtomicU64, Ordering};
use std::sync::Once;

// A plain atomic also under the model checker: it is set by a fork, which no model has.
static FORKS: std::sync::atomic::AtomicU64 = std::sync::atomic::AtomicU64::new(0);
static WATCH: Once = Once::new();

/// How often this process image was forked off since [`watch_forks`] was first called. One load.
#[inline]
pub(crate) fn forks() -> u64 {
    FORKS.load(std::sync::atomic::Ordering::Relaxed)
}

/// Starts counting, and returns the count.
pub(crate) fn watch_forks() -> u64 {
    WATCH.call_once(|| {
        #[cfg(unix)]
        {
            extern "C" fn in_child() {
                FORKS.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
            }
            // SAFETY: the handler is a function of this crate that only adds to an atomic, which is allowed in a
            // forked child.
            unsafe { libc::pthread_atfork(None, None, Some(in_child)) };
        }
    });
    forks()
}

/// In which process image a device can be used, if in any: one number, to be compared with [`forks`].
#[derive(Debug)]
pub(crate) struct Usable(AtomicU64);

impl Usable {
    /// In this one.
    pub(crate) fn new() -> Self {
        Self(AtomicU64::new(watch_forks()))
    }

    #[inline]
    pub(crate) fn at(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }

    /// Nowhere, for good.
    pub(crate) fn end(&self) {
        self.0.store(u64::MAX, Ordering::Relaxed);
    }
}

/// A fact that, once true, stays true.
#[derive(Debug)]
pub(crate) struct Latch(AtomicU64);

impl Latch {
    pub(crate) fn new() -> Self {
        Self(AtomicU64::new(0))
    }

    #[inline]
    pub(crate) fn is_set(&self) -> bool {
        self.0.load(Ordering::Relaxed) != 0
    }

    pub(crate) fn set(&self) {
        self.0.store(1, Ordering::Relaxed);
    }
}
