//! What `src/lock.rs` is made of, under the model checker: words that notice a use after their end, and a place to sleep
//! that knows no time. A nap may end at any step, or there are none.

use shuttle::rand::{Rng, thread_rng};
use shuttle::sync::atomic as words;
use shuttle::sync::{Mutex, MutexGuard};
use shuttle::thread::{self, Thread};
use std::mem::ManuallyDrop;
use std::sync::Arc;
use std::time::Duration;

pub(crate) use shuttle::hint::spin_loop;
pub(crate) use shuttle::thread::yield_now;
pub(crate) use words::Ordering;

/// The steps that a nap may last if nobody wakes the sleeper, each as many steps of the others as the scheduler likes.
const NAP_STEPS: u32 = 3;

/// A word whose owner may leave the memory alone after its end, so that a late use finds it, and is found.
pub(crate) struct Word<A> {
    word: ManuallyDrop<A>,
    gone: std::sync::atomic::AtomicBool,
}

impl<A> Word<A> {
    const fn of(word: A) -> Self {
        Self { word: ManuallyDrop::new(word), gone: std::sync::atomic::AtomicBool::new(false) }
    }

    fn used<T>(&self, operation: impl FnOnce(&A) -> T) -> T {
        // Others take their steps before the operation, not after it: now it is known whether it came too late.
        let result = operation(&self.word);
        assert!(!self.gone.load(Ordering::Relaxed), "a word was used after its end");
        result
    }
}

impl<A> Drop for Word<A> {
    fn drop(&mut self) {
        self.gone.store(true, Ordering::Relaxed);
    }
}

pub(crate) type AtomicBool = Word<words::AtomicBool>;
pub(crate) type AtomicU32 = Word<words::AtomicU32>;

impl AtomicBool {
    pub(crate) const fn new(value: bool) -> Self {
        Self::of(words::AtomicBool::new(value))
    }

    pub(crate) fn load(&self, order: Ordering) -> bool {
        self.used(|word| word.load(order))
    }

    pub(crate) fn store(&self, value: bool, order: Ordering) {
        self.used(|word| word.store(value, order));
    }

    pub(crate) fn compare_exchange(
        &self,
        current: bool,
        new: bool,
        success: Ordering,
        failure: Ordering,
    ) -> Result<bool, bool> {
        self.used(|word| word.compare_exchange(current, new, success, failure))
    }
}

impl AtomicU32 {
    pub(crate) const fn new(value: u32) -> Self {
        Self::of(words::AtomicU32::new(value))
    }

    pub(crate) fn load(&self, order: Ordering) -> u32 {
        self.used(|word| word.load(order))
    }

    /// As the lock has it, this announces sleepers.
    pub(crate) fn fetch_add(&self, value: u32, order: Ordering) -> u32 {
        let before = self.used(|word| word.fetch_add(value, order));
        ANNOUNCED.fetch_add(value, Ordering::Relaxed);
        before
    }

    pub(crate) fn fetch_sub(&self, value: u32, order: Ordering) -> u32 {
        self.used(|word| word.fetch_sub(value, order))
    }
}

struct Sleeper {
    at: usize,
    woken: Arc<words::AtomicBool>,
    thread: Thread,
}

struct Dormitory {
    /// In the order of their coming.
    sleepers: Vec<Sleeper>,
    /// Whether sleepers wake by themselves.
    naps: bool,
    calls: usize,
}

shuttle::lazy_static! {
    static ref DORMITORY: Mutex<Dormitory> = Mutex::new(Dormitory { sleepers: Vec::new(), naps: true, calls: 0 });
    static ref ANNOUNCED: std::sync::atomic::AtomicU32 = std::sync::atomic::AtomicU32::new(0);
}

fn dormitory() -> MutexGuard<'static, Dormitory> {
    DORMITORY.lock().unwrap()
}

pub(crate) fn sleep_while(held: &AtomicBool, _longest: Duration) {
    let woken = Arc::new(words::AtomicBool::new(false));
    let naps = {
        let mut dormitory = dormitory();
        if !held.load(Ordering::SeqCst) {
            return;
        }
        let at = &raw const *held as usize;
        dormitory.sleepers.push(Sleeper { at, woken: Arc::clone(&woken), thread: thread::current() });
        dormitory.naps
    };
    if !naps {
        while !woken.load(Ordering::SeqCst) {
            thread::park();
        }
        return;
    }
    for _ in 0..thread_rng().gen_range(0..=NAP_STEPS) {
        if woken.load(Ordering::SeqCst) {
            return;
        }
        yield_now();
    }
    dormitory().sleepers.retain(|sleeper| !Arc::ptr_eq(&sleeper.woken, &woken));
}

pub(crate) fn wake(address: usize) {
    let mut dormitory = dormitory();
    dormitory.calls += 1;
    if let Some(first) = dormitory.sleepers.iter().position(|sleeper| sleeper.at == address) {
        let sleeper = dormitory.sleepers.remove(first);
        sleeper.woken.store(true, Ordering::SeqCst);
        sleeper.thread.unpark();
    }
}

/// From here on nobody wakes by himself.
pub(crate) fn no_naps() {
    dormitory().naps = false;
}

/// How often [`wake`] was called.
pub(crate) fn calls() -> usize {
    dormitory().calls
}

/// Lets others go on until so many sleepers were announced.
pub(crate) fn until_announced(sleepers: u32) {
    while ANNOUNCED.load(Ordering::Relaxed) < sleepers {
        yield_now();
    }
}
