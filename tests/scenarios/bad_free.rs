//! A second free of the same address hands memory back to the driver that the cache still lists, or ends in an
//! unrelated driver error; an error path leaves the allocator's mutex locked and the next call hangs. Reported as
//! NVIDIA/cub #329 (fix: PR 328) and pytorch/pytorch #150098. The raw interface is what is tested: with the owning
//! handle a double free does not compile.

use crate::dsl::{Gpu, MIB, each_config, no_deadlock};
use std::sync::Arc;
use vramalloc::Error;
use vramalloc::driver::DevicePtr;

#[track_caller]
fn raw(gpu: &Gpu, bytes: u64) -> DevicePtr {
    let ptr = gpu.allocator.alloc_raw(bytes, &gpu.s0).expect("there is room");
    gpu.check();
    ptr
}

/// Frees an address; that must be refused, and must change nothing and call nobody.
#[track_caller]
fn refused(gpu: &Gpu, ptr: DevicePtr) -> Error {
    gpu.sim.clear_log();
    let (stats, snapshot) = (gpu.stats(), gpu.allocator.snapshot());
    let error = gpu.allocator.free_raw(ptr).expect_err("this address must not be accepted");
    assert_eq!(gpu.stats(), stats, "freeing {ptr} changed a figure");
    assert_eq!(gpu.allocator.snapshot(), snapshot, "freeing {ptr} changed a block");
    assert!(gpu.sim.log().is_empty(), "freeing {ptr} called the driver: {:?}", gpu.sim.log());
    gpu.check();
    error
}

#[track_caller]
fn assert_not_live(error: &Error, at: DevicePtr) {
    assert!(matches!(error, Error::NotLive { ptr, .. } if *ptr == at), "{at} was freed before, but: {error}");
}

#[track_caller]
fn assert_unknown(error: &Error, at: DevicePtr, base: Option<DevicePtr>) {
    let is_right = matches!(error, Error::UnknownPointer { ptr, inside, .. } if *ptr == at && *inside == base);
    assert!(is_right, "{at} is unknown (inside {base:?}), but: {error:?}");
}

#[test]
fn bad_addresses_are_told_apart_and_change_nothing() {
    each_config(|config| {
        let gpu = Arc::new(Gpu::new(64, config));
        let a = raw(&gpu, 512);
        gpu.allocator.free_raw(a).expect("the first free is right");
        assert_not_live(&refused(&gpu, a), a);

        let [b, c] = [(); 2].map(|()| raw(&gpu, 512));
        assert_ne!(b, c, "the double free put one block into the cache twice");
        assert_unknown(&refused(&gpu, DevicePtr(0xDEAD_0000)), DevicePtr(0xDEAD_0000), None);
        let inside = DevicePtr(b.0 + 256);
        assert_unknown(&refused(&gpu, inside), inside, Some(b));
        let stats = gpu.stats();
        gpu.allocator.free_raw(DevicePtr::NULL).expect("null is legal");
        assert_eq!(gpu.stats(), stats, "freeing null changed a figure");

        gpu.allocator.free_raw(b).expect("b is live");
        gpu.allocator.free_raw(c).expect("c is live");
        let other = Arc::clone(&gpu);
        no_deadlock(move || {
            let _ = raw(&other, 512);
        });
        gpu.check();
    });
}

#[test]
fn large_blocks_alike() {
    each_config(|config| {
        let gpu = Gpu::new(128, config);
        let [a, b] = [12 * MIB, 30 * MIB].map(|bytes| raw(&gpu, bytes));
        let inside = DevicePtr(b.0 + 17 * MIB);
        assert_unknown(&refused(&gpu, inside), inside, Some(b));
        gpu.allocator.free_raw(a).expect("a is live");
        assert_not_live(&refused(&gpu, a), a);
        assert_eq!(gpu.givings(), 0);
        gpu.allocator.free_raw(b).expect("b is live");
        gpu.empty_cache();
        assert_eq!(gpu.reserved(), 0, "a bad free left something behind");
        // The segment is gone: the allocator knows nothing of the address any more, and must still refuse it.
        refused(&gpu, a);
    });
}

#[test]
fn a_block_that_waits_for_work_is_not_live() {
    each_config(|config| {
        let gpu = Gpu::new(64, config);
        let a = gpu.alloc(4 * MIB, &gpu.s0);
        gpu.use_on(&gpu.s1, &a);
        let a = gpu.allocator.into_raw(a);
        gpu.allocator.free_raw(a).expect("the first free is right");
        assert!(gpu.pending() > 0, "the block must wait for its work");
        assert_not_live(&refused(&gpu, a), a);
        gpu.complete(&gpu.s1);
        assert_eq!(gpu.poll(), 1, "the double free spoilt the pending one");
        assert_not_live(&refused(&gpu, a), a);
    });
}

#[test]
fn an_address_that_merged_into_a_neighbour_is_not_live() {
    each_config(|config| {
        let gpu = Gpu::new(64, config);
        let [a, b, c] = [(); 3].map(|()| raw(&gpu, 512));
        for ptr in [a, b, c] {
            gpu.allocator.free_raw(ptr).expect("each is live");
        }
        for ptr in [a, b, c] {
            assert_not_live(&refused(&gpu, ptr), ptr);
        }
    });
}

#[test]
fn an_address_that_no_block_can_have_was_never_freed() {
    each_config(|config| {
        let gpu = Gpu::new(64, config);
        let a = raw(&gpu, 512);
        gpu.allocator.free_raw(a).expect("a is live");
        // Blocks start at multiples of 512: "it was freed before" would be a lie.
        for off in [1, 256, 511, 513] {
            let ptr = DevicePtr(a.0 + off);
            assert_unknown(&refused(&gpu, ptr), ptr, None);
        }
    });
}

#[test]
fn what_a_handle_owns_cannot_be_freed_by_address() {
    each_config(|config| {
        let gpu = Gpu::new(64, config);
        let a = gpu.alloc(4096, &gpu.s0);
        assert_unknown(&refused(&gpu, a.ptr()), a.ptr(), Some(a.ptr()));
        assert!(gpu.allocator.from_raw(a.ptr()).is_err(), "two owners of {a:?}");
        assert!(gpu.allocator.record_stream_raw(a.ptr(), &gpu.s1).is_err());
        gpu.free(a);
        assert_eq!(gpu.allocated(), 0);
    });
}

#[test]
fn an_address_of_another_allocator_is_unknown() {
    each_config(|config| {
        let (here, there) = (Gpu::new(64, config.clone()), Gpu::new(64, config.clone()));
        let _other = here.alloc(512, &here.s0);
        let foreign = there.sim.as_ref();
        let ptr = vramalloc::Driver::alloc(foreign, 2 * MIB).expect("there is room");
        let theirs = DevicePtr(ptr.0 + 100 * MIB);
        assert_unknown(&refused(&here, theirs), theirs, None);
        vramalloc::Driver::free(foreign, ptr).expect("it is allocated");
    });
}

#[test]
fn of_two_threads_that_free_the_same_address_one_succeeds() {
    each_config(|config| {
        let gpu = Gpu::new(64, config);
        for round in 0..200 {
            let ptr = raw(&gpu, 4096);
            let results = std::thread::scope(|scope| {
                let threads = [(); 2].map(|()| scope.spawn(|| gpu.allocator.free_raw(ptr)));
                threads.map(|thread| thread.join().expect("freeing does not panic"))
            });
            let freed = results.iter().filter(|result| result.is_ok()).count();
            assert_eq!(freed, 1, "round {round}: {results:?}");
            gpu.check();
        }
        assert_eq!(gpu.allocated(), 0);
    });
}

#[test]
fn a_reused_address_is_live_again_and_can_be_freed_once() {
    each_config(|config| {
        let gpu = Gpu::new(64, config);
        let a = raw(&gpu, 2048);
        gpu.allocator.free_raw(a).expect("a is live");
        let b = raw(&gpu, 2048);
        assert_eq!(a, b, "the cached block must serve again");
        gpu.allocator.free_raw(b).expect("b is live");
        assert_not_live(&refused(&gpu, b), b);
    });
}
