//! The locks and atomics of the crate: `parking_lot`, a pool's own and `std`, or the shuttle model checker's under
//! `--cfg vramalloc_shuttle`, so that tests can explore every order of two threads' steps. `lock.rs` is no part
//! of that build: its own models, in `tests/shuttle/lock.rs`, take the file as it is and give it another `sync`.

#[cfg(not(vramalloc_shuttle))]
pub(crate) use crate::lock::{PoolGuard, PoolMutex};
#[cfg(not(vramalloc_shuttle))]
pub(crate) use parking_lot::{Mutex, RwLock};
#[cfg(not(vramalloc_shuttle))]
use parking_lot_core::{DEFAULT_PARK_TOKEN, DEFAULT_UNPARK_TOKEN};
#[cfg(not(vramalloc_shuttle))]
pub(crate) use std::hint::spin_loop;
#[cfg(not(vramalloc_shuttle))]
pub(crate) use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
#[cfg(not(vramalloc_shuttle))]
pub(crate) use std::thread::yield_now;

#[cfg(vramalloc_shuttle)]
pub(crate) use model::{Mutex, Mutex as PoolMutex, MutexGuard as PoolGuard, RwLock};
#[cfg(vramalloc_shuttle)]
pub(crate) use shuttle::sync::atomic::{AtomicU64, Ordering};

/// A small number of the calling thread's, the same all along; threads' numbers differ as long as there are few.
#[cfg(not(vramalloc_shuttle))]
#[inline]
pub(crate) fn thread_number() -> usize {
    use std::cell::Cell;
    static NEXT: AtomicU64 = AtomicU64::new(1);
    thread_local! {
        static NUMBER: Cell<usize> = const { Cell::new(0) };
    }
    NUMBER.with(|number| {
        if number.get() == 0 {
            number.set(NEXT.fetch_add(1, Ordering::Relaxed) as usize);
        }
        number.get()
    })
}

/// Sleeps until it is [woken](wake), for `longest` at most; not at all if `held` is false by the time at which it could be.
#[cfg(not(vramalloc_shuttle))]
#[inline(always)]
pub(crate) fn sleep_while(held: &AtomicBool, longest: std::time::Duration) {
    let until = std::time::Instant::now() + longest;
    let (address, is_held) = (&raw const *held as usize, || held.load(Ordering::SeqCst));
    // SAFETY: nobody else parks at the address of what the lock lends; the closures neither panic nor call into the
    // parking lot.
    unsafe { parking_lot_core::park(address, is_held, || {}, |_, _| {}, DEFAULT_PARK_TOKEN, Some(until)) };
}

/// Wakes a thread that sleeps while what is at `address` is true, if there is one. The address is not read.
#[cfg(not(vramalloc_shuttle))]
#[cold]
#[inline(never)]
pub(crate) fn wake(address: usize) {
    // SAFETY: as above.
    unsafe { parking_lot_core::unpark_one(address, |_| DEFAULT_UNPARK_TOKEN) };
}

#[cfg(vramalloc_shuttle)]
pub(crate) fn thread_number() -> usize {
    usize::from(shuttle::thread::current().id())
}

#[cfg(vramalloc_shuttle)]
mod model {
    //! parking_lot's shape (no poisoning) over shuttle's locks.

    pub(crate) use shuttle::sync::MutexGuard;
    use shuttle::sync::{RwLockReadGuard, RwLockWriteGuard};

    #[derive(Debug, Default)]
    pub(crate) struct Mutex<T>(shuttle::sync::Mutex<T>);

    impl<T> Mutex<T> {
        pub(crate) fn new(value: T) -> Self {
            Self(shuttle::sync::Mutex::new(value))
        }

        pub(crate) fn lock(&self) -> MutexGuard<'_, T> {
            self.0.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
        }

        pub(crate) fn get_mut(&mut self) -> &mut T {
            self.0.get_mut().unwrap_or_else(|poisoned| poisoned.into_inner())
        }

        pub(crate) fn try_lock(&self) -> Option<MutexGuard<'_, T>> {
            self.0.try_lock().ok()
        }
    }

    #[derive(Debug)]
    pub(crate) struct RwLock<T>(shuttle::sync::RwLock<T>);

    impl<T> RwLock<T> {
        pub(crate) fn new(value: T) -> Self {
            Self(shuttle::sync::RwLock::new(value))
        }

        pub(crate) fn read(&self) -> RwLockReadGuard<'_, T> {
            self.0.read().unwrap_or_else(|poisoned| poisoned.into_inner())
        }

        pub(crate) fn write(&self) -> RwLockWriteGuard<'_, T> {
            self.0.write().unwrap_or_else(|poisoned| poisoned.into_inner())
        }
    }
}
