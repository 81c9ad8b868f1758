//! The locks and atomics of the crate: `parking_lot`, a pool's own and `std`, or the shuttle model checker's under
//! `--cfg vramalloc_shuttle`, so that tests can explore every order of two threads' steps.

#[cfg(not(vramalloc_shuttle))]
pub(crate) use crate::lock::{PoolGuard, PoolMutex};
#[cfg(not(vramalloc_shuttle))]
pub(crate) use parking_lot::{Mutex, RwLock};
#[cfg(not(vramalloc_shuttle))]
pub(crate) use std::sync::atomic::{AtomicU64, Ordering};

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
