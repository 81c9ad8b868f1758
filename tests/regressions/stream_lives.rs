//! Streams that end: before, while and after they are used.

use crate::bench::{Bench, MIB, each_kind};
use std::sync::{Arc, mpsc};
use vramalloc::driver::sim::{SimDriver, Work};
use vramalloc::driver::{Call, Driver};
use vramalloc::{Segments, StreamHandle};

#[test]
fn a_retired_stream_gets_neither_cached_nor_new_memory() {
    // A retired stream was refused new memory, but still served from its cache.
    each_kind(|segments| {
        let bench = Bench::new(1024, segments, "");
        let stream = bench.stream();
        let held = bench.alloc(512, &stream);
        bench.allocator.retire_stream(&stream).unwrap();
        for bytes in [512, 20 * MIB] {
            let got = bench.allocator.alloc(bytes, &stream);
            assert!(got.is_err(), "{got:?}");
        }
        drop(held);
        bench.end([stream]);
    });
}

#[test]
fn retiring_a_stream_while_it_asks_the_driver_is_no_panic() {
    // The pool went away under an allocation that had already gone to the driver, which then panicked.
    each_kind(|segments| {
        let calls = match segments {
            Segments::Fixed => vec![Call::Alloc],
            _ => vec![Call::ReserveAddresses, Call::CreatePages, Call::Map, Call::SetAccess],
        };
        for call in calls {
            let (driver, bench) = Bench::hooked(64, segments);
            let stream = bench.stream();
            let (retires, retired) = (bench.allocator.clone(), stream.clone());
            let (answer, answers) = mpsc::channel();
            let (start, started) = mpsc::channel();
            driver.once_in(call, move || {
                std::thread::spawn(move || {
                    start.send(()).unwrap();
                    let done = retires.retire_stream(&retired);
                    drop((retires, retired));
                    answer.send(done).unwrap();
                });
                started.recv().unwrap();
            });
            let block = bench.allocator.alloc(MIB, &stream);
            driver.unhook();
            answers.recv().unwrap_or_else(|_| panic!("{call} was not made")).unwrap();
            bench.check();
            // It came before the retirement or after it; the books know which.
            assert_eq!(bench.allocator.memory_allocated(), block.as_ref().map_or(0, |block| block.bytes()));
            drop((block, driver));
            bench.end([stream]);
        }
    });
}

#[test]
fn streams_that_come_and_go_leave_nothing() {
    // Every stream that ever was left its pool in the allocator's lists, and every event it had used.
    each_kind(|segments| {
        let bench = Bench::light(64, segments, "");
        for _ in 0..2_000 {
            let handle = bench.sim.create_stream();
            let stream = bench.allocator.stream(handle).unwrap();
            let block = bench.allocator.alloc(40 * MIB, &stream).unwrap();
            bench.launch(&stream, &block);
            drop(block);
            bench.sim.complete(handle);
            bench.allocator.retire_stream(&stream).unwrap();
            bench.sim.destroy_stream(handle).unwrap();
        }
        let events = bench.sim.calls().get(Call::EventCreate).calls;
        assert!(events < 16, "{events} events for streams that were never there together");
        assert!(bench.allocator.snapshot().segments.len() <= 1);
        bench.end([]);
    });
}

#[test]
fn a_live_allocation_keeps_its_streams_owner() {
    // The owner of a stream went with the last `Stream`, and destroyed it under memory that was still live.
    struct Owner(Arc<SimDriver>, StreamHandle);
    impl Drop for Owner {
        fn drop(&mut self) {
            self.0.destroy_stream(self.1).expect("nobody else destroys it");
        }
    }
    each_kind(|segments| {
        let bench = Bench::new(64, segments, "");
        let handle = bench.sim.create_stream();
        let owner = Arc::new(Owner(bench.sim.clone(), handle));
        let stream = bench.allocator.stream(handle).unwrap().keeping(owner);
        let block = bench.alloc(MIB, &stream);
        drop(stream);
        let work = Work::writing(block.ptr(), 512);
        bench.sim.launch(block.stream().key(), work).expect("the stream is still there");
    });
}
