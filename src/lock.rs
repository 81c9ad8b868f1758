//! The lock of a pool: one atomic instruction to take, a plain store to let go.
//!
//! An ordinary mutex lets go by an atomic exchange, which tells it whether somebody sleeps. Where a lock is held for some
//! tens of nanoseconds and is nearly always free, that exchange is a third of the time. Here sleepers announce
//! themselves in a word of their own, which is read before the store (after it the lock may not exist any more). That may
//! miss a sleeper that has just seen the lock held; so sleepers wake by themselves after [`NAP`] and look again. That costs
//! a sleeper time, never its turn; who may enter is settled by the one atomic instruction alone.
//!
//! Threads that meet wait in a loop first, with growing pauses: most of what they wait for is over before a thread could
//! be put to sleep.

use crate::sync::{AtomicBool, AtomicU32, Ordering, sleep_while, spin_loop, wake, yield_now};
use parking_lot::lock_api::{GuardNoSend, Mutex, MutexGuard, RawMutex};
use std::time::Duration;

/// The longest that a wake-up can be missed.
const NAP: Duration = Duration::from_millis(1);
/// Pauses double up to two to this power, before a thread goes to sleep. Under the model checker, where a holder is as
/// likely as not to let go with each look, threads would hardly ever sleep.
const SPIN_ROUNDS: u32 = if cfg!(vramalloc_shuttle) { 1 } else { 7 };
/// Then it offers its processor to others so many times.
const YIELDS: u32 = if cfg!(vramalloc_shuttle) { 1 } else { 8 };

/// See the module's text.
pub(crate) struct PoolLock {
    held: AtomicBool,
    sleepers: AtomicU32,
}

/// A value behind such a lock.
pub(crate) type PoolMutex<T> = Mutex<PoolLock, T>;
/// The right to use it.
pub(crate) type PoolGuard<'a, T> = MutexGuard<'a, PoolLock, T>;

// SAFETY: `try_lock` returns true to one caller only until `unlock` is called, which only the holder may: the exchange
// that sets `held` succeeds only where it was not set. The exchange acquires what the store of the last holder released.
unsafe impl RawMutex for PoolLock {
    #[allow(clippy::declare_interior_mutable_const)]
    const INIT: Self = Self { held: AtomicBool::new(false), sleepers: AtomicU32::new(0) };

    type GuardMarker = GuardNoSend;

    #[inline(always)]
    fn lock(&self) {
        if !self.try_lock() {
            self.wait();
        }
    }

    #[inline(always)]
    fn try_lock(&self) -> bool {
        self.held.compare_exchange(false, true, Ordering::Acquire, Ordering::Relaxed).is_ok()
    }

    #[inline(always)]
    unsafe fn unlock(&self) {
        // Looked at before, since the lock may be gone after: another thread can take it, end what it guards and free it.
        let sleepers = self.sleepers.load(Ordering::Relaxed);
        let address = &raw const self.held as usize;
        self.held.store(false, Ordering::Release);
        if sleepers != 0 {
            wake(address);
        }
    }
}

impl PoolLock {
    #[cold]
    #[inline(never)]
    fn wait(&self) {
        let free = || !self.held.load(Ordering::Relaxed) && self.try_lock();
        for round in 0..SPIN_ROUNDS {
            for _ in 0..1 << round {
                spin_loop();
            }
            if free() {
                return;
            }
        }
        for _ in 0..YIELDS {
            yield_now();
            if free() {
                return;
            }
        }
        self.sleepers.fetch_add(1, Ordering::SeqCst);
        while !self.try_lock() {
            sleep_while(&self.held, NAP);
        }
        self.sleepers.fetch_sub(1, Ordering::SeqCst);
    }
}

#[cfg(all(test, not(vramalloc_shuttle)))]
mod tests {
    use super::*;

    #[test]
    fn one_at_a_time() {
        let counter = PoolMutex::new(0u64);
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for _ in 0..20_000 {
                        let mut counter = counter.lock();
                        let seen = *counter;
                        std::hint::black_box(&mut counter);
                        *counter = seen + 1;
                    }
                });
            }
        });
        assert_eq!(*counter.lock(), 80_000);
        // SAFETY: nobody holds it.
        assert_eq!(unsafe { counter.raw() }.sleepers.load(Ordering::Relaxed), 0);
    }

    #[test]
    fn a_sleeper_is_woken() {
        let lock = PoolMutex::new(());
        std::thread::scope(|scope| {
            let held = lock.lock();
            scope.spawn(|| drop(lock.lock()));
            // SAFETY: only looked at.
            while unsafe { lock.raw() }.sleepers.load(Ordering::SeqCst) == 0 {
                std::thread::yield_now();
            }
            assert!(lock.try_lock().is_none());
            drop(held);
        });
        assert!(lock.try_lock().is_some());
    }
}
