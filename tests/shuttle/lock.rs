//! The lock of a pool: the file of the crate itself, on the words and the sleep of the model's [`sync`](crate::sync).

use crate::explore;
use crate::pool_lock::PoolMutex;
use crate::sync::{calls, no_naps, until_announced};
use shuttle::thread;
use std::sync::Arc;

/// Adds one; another thread that is let in meanwhile takes a number away.
fn count(number: &mut u32) {
    let seen = *number;
    thread::yield_now();
    *number = seen + 1;
}

fn join(threads: impl IntoIterator<Item = thread::JoinHandle<()>>) {
    threads.into_iter().for_each(|thread| thread.join().unwrap());
}

#[test]
fn one_at_a_time_and_everyone_in_the_end() {
    explore(|| {
        let lock = Arc::new(PoolMutex::new(0));
        let spawn = |_| {
            let lock = Arc::clone(&lock);
            thread::spawn(move || (0..2).for_each(|_| count(&mut lock.lock())))
        };
        join([0; 3].map(spawn));
        let woken = calls();
        let number = lock.try_lock().expect("nobody holds it");
        assert_eq!(*number, 6);
        drop(number);
        assert_eq!(calls(), woken, "nobody sleeps");
    });
}

#[test]
fn who_does_not_wait_gets_in_or_is_told() {
    explore(|| {
        let lock = Arc::new(PoolMutex::new(0));
        let waits = |_| {
            let lock = Arc::clone(&lock);
            thread::spawn(move || {
                let mut number = lock.lock();
                assert!(lock.try_lock().is_none());
                count(&mut number);
            })
        };
        let tries = |_| {
            let lock = Arc::clone(&lock);
            thread::spawn(move || match lock.try_lock() {
                Some(mut number) => {
                    count(&mut number);
                    1
                }
                None => 0,
            })
        };
        let (waiting, trying) = ([0; 2].map(waits), [0; 2].map(tries));
        let got_in: u32 = trying.into_iter().map(|thread| thread.join().unwrap()).sum();
        join(waiting);
        assert_eq!(*lock.try_lock().expect("nobody holds it"), 2 + got_in);
    });
}

#[test]
fn sleepers_that_the_holder_can_see_are_woken() {
    explore(|| {
        no_naps();
        let lock = Arc::new(PoolMutex::new(0));
        let mut number = lock.lock();
        let spawn = |_| {
            let lock = Arc::clone(&lock);
            thread::spawn(move || count(&mut lock.lock()))
        };
        let threads = [0; 2].map(spawn);
        until_announced(2);
        count(&mut number);
        drop(number);
        join(threads);
        assert_eq!(*lock.lock(), 3);
    });
}

// What the naps are for, and that the model can see a sleeper that nobody wakes.
#[test]
#[should_panic(expected = "deadlock")]
fn a_sleeper_that_comes_too_late_to_be_seen_needs_its_nap() {
    explore(|| {
        no_naps();
        let lock = Arc::new(PoolMutex::new(0));
        let spawn = |_| {
            let lock = Arc::clone(&lock);
            thread::spawn(move || count(&mut lock.lock()))
        };
        join([0; 2].map(spawn));
    });
}

/// A lock whose memory stays after its end, so that a late use finds the words that say so.
#[derive(Clone, Copy)]
struct Raw(*mut PoolMutex<u32>);

// SAFETY: it goes to threads as a reference would; ending it is the caller's to answer for.
unsafe impl Send for Raw {}

impl Raw {
    fn new(value: u32) -> Self {
        Self(Box::into_raw(Box::new(PoolMutex::new(value))))
    }

    fn lock(&self) -> &PoolMutex<u32> {
        // SAFETY: the memory stays.
        unsafe { &*self.0 }
    }

    /// # Safety
    /// Nobody may use the lock from here on.
    unsafe fn end(self) {
        // SAFETY: as the caller says.
        unsafe { self.0.drop_in_place() };
    }
}

#[test]
fn the_last_one_may_end_it_while_another_lets_go() {
    explore(|| {
        let raw = Raw::new(2);
        let spawn = |_| {
            thread::spawn(move || {
                let mut left = raw.lock().lock();
                *left -= 1;
                let last = *left == 0;
                drop(left);
                if last {
                    // SAFETY: the other thread has counted itself down, so it has only to let go, if that; which is what is
                    // tried here.
                    unsafe { raw.end() };
                }
            })
        };
        join([0; 2].map(spawn));
    });
}
