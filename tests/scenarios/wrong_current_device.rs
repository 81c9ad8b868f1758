//! Several GPUs in one process: emptying the cache while another GPU is current waits for the wrong one and takes
//! memory away from under queued kernels; events are created on the wrong GPU; freeing on a fresh thread opens a
//! context on GPU 0. Reported as pytorch/pytorch #196258, RMM PR 1333, FBGEMM PR 530, AMDMIGraphX PR 3910.

use crate::dsl::{Gpu, Kind as _, MIB, each_config};
use vramalloc::driver::sim::{SimDriver, SimMachine};
use vramalloc::driver::{Call, DevicePtr};
use vramalloc::{CachingAllocator, Config, Error};

fn two_devices() -> SimMachine {
    SimMachine::new(2, &SimDriver::builder().capacity(64 * MIB))
}

fn gpu(machine: &SimMachine, ordinal: u32, config: Config) -> Gpu {
    let sim = machine.device(ordinal);
    Gpu::over(&sim, sim.clone(), config)
}

#[test]
fn emptying_the_cache_waits_for_its_own_device() {
    each_config(|config| {
        let machine = two_devices();
        let (d0, d1) = (gpu(&machine, 0, config.clone()), gpu(&machine, 1, config.clone()));
        let a = d0.alloc(20 * MIB, &d0.s0);
        let b = d1.alloc(20 * MIB, &d1.s0);
        d0.launch(&d0.s0, &a);
        d1.launch(&d1.s0, &b);
        d0.free(a);
        machine.set_current_device(1);
        d1.sim.clear_log();
        d0.sim.clear_log();
        d0.empty_cache();
        if config.is_expandable() {
            // Unmapping waits for nobody, so what queued work uses stays until that work is known to be done.
            assert_eq!((d0.reserved(), d0.sim.unfinished(), d0.givings()), (20 * MIB, 1, 0));
            assert_eq!(d0.host_waits(), 0, "it waited");
            d0.complete(&d0.s0);
            assert_eq!(d0.empty_cache(), 20 * MIB);
        }
        assert_eq!(
            (d0.reserved(), d0.sim.unfinished()),
            (0, 0),
            "device 0's work must end before its memory goes"
        );
        assert!(d1.sim.log().is_empty(), "device 1 was called: {:?}", d1.sim.log());
        assert_eq!(
            (d1.sim.unfinished(), machine.current_device()),
            (1, 1),
            "device 1 must be left alone, and current"
        );
        d0.check();
        d1.check();
        d1.free(b);
    });
}

#[test]
fn events_are_made_on_the_blocks_device() {
    each_config(|config| {
        let machine = two_devices();
        machine.set_current_device(0);
        let d1 = gpu(&machine, 1, config);
        let x = d1.alloc(4 * MIB, &d1.s0);
        d1.use_on(&d1.s1, &x);
        d1.free(x);
        assert_eq!(d1.poll(), 0, "its work is unfinished");
        assert_eq!((d1.count(Call::EventCreate), d1.count(Call::EventRecord)), (1, 1), "{:?}", d1.sim.log());
        d1.complete(&d1.s1);
        assert_eq!(d1.poll(), 1);
        assert!(machine.device(0).log().is_empty(), "device 0 was called: {:?}", machine.device(0).log());
        assert_eq!((machine.contexts_created(0), machine.current_device()), (0, 0));
    });
}

#[test]
fn a_fresh_thread_opens_no_context_on_device_0() {
    each_config(|config| {
        let machine = two_devices();
        let d1 = gpu(&machine, 1, config);
        let x = d1.alloc(4 * MIB, &d1.s0);
        d1.use_on(&d1.s1, &x);
        let y = d1.alloc(12 * MIB, &d1.s0);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                d1.free(x);
                d1.free(y);
                d1.sim.complete_all();
                d1.empty_cache();
                let again = d1.alloc(30 * MIB, &d1.s0);
                d1.free(again);
            });
        });
        assert_eq!(machine.contexts_created(0), 0, "a context was opened on device 0");
        d1.empty_cache();
        drop(d1);
        assert_eq!(machine.contexts_created(0), 0, "a context was opened on device 0");
        assert!(machine.device(1).leaks().is_empty(), "{:?}", machine.device(1).leaks());
    });
}

#[track_caller]
fn assert_wrong_device<T: std::fmt::Debug>(result: Result<T, Error>, here: u32, there: u32) {
    let is_right =
        matches!(result, Err(Error::WrongDevice { theirs, ours, .. }) if (theirs, ours) == (there, here));
    assert!(is_right, "device {there}'s stream on device {here}: {result:?}");
}

#[test]
fn streams_and_blocks_of_another_device_are_refused() {
    each_config(|config| {
        let machine = two_devices();
        let (d0, d1) = (gpu(&machine, 0, config.clone()), gpu(&machine, 1, config));
        let x = d1.alloc(4 * MIB, &d1.s0);
        for gpu in [&d0, &d1] {
            gpu.sim.clear_log();
        }
        for bytes in [0, 512, 4 * MIB] {
            assert_wrong_device(d0.allocator.alloc(bytes, &d1.s0), 0, 1);
        }
        assert_wrong_device(d0.allocator.alloc_aligned(512, 4096, &d1.s0), 0, 1);
        assert_wrong_device(d0.allocator.alloc_raw(512, &d1.s0), 0, 1);
        assert_wrong_device(d0.allocator.retire_stream(&d1.s0), 0, 1);
        assert_wrong_device(x.record_stream(&d0.s1), 1, 0);
        assert_wrong_device(d0.allocator.record_stream_raw(DevicePtr::NULL, &d1.s0), 0, 1);

        let x = d1.allocator.into_raw(x);
        assert_wrong_device(d1.allocator.record_stream_raw(x, &d0.s1), 1, 0);
        for result in [d0.allocator.free_raw(x), d0.allocator.record_stream_raw(x, &d0.s1)] {
            let is_right =
                matches!(result, Err(Error::UnknownPointer { ptr, device: 0, inside: None }) if ptr == x);
            assert!(is_right, "device 1's address given to device 0's allocator: {result:?}");
        }
        for gpu in [&d0, &d1] {
            gpu.check();
            assert!(gpu.sim.log().is_empty(), "a refusal called the driver: {:?}", gpu.sim.log());
        }
        d1.allocator.free_raw(x).expect("it is live there");
        d1.check();
    });
}

#[test]
fn two_allocators_of_one_device_do_not_mix_either() {
    each_config(|config| {
        let gpu = Gpu::new(64, config.clone());
        let other = CachingAllocator::new(gpu.sim.clone(), config.clone()).expect("a second one is legal");
        let theirs = other.stream(gpu.s0.key().handle).expect("the stream exists");
        assert_wrong_device(gpu.allocator.alloc(512, &theirs), 0, 0);
        let a = gpu.alloc(512, &gpu.s0);
        assert_wrong_device(a.record_stream(&theirs), 0, 0);
        let message = a.record_stream(&theirs).expect_err("still refused").to_string();
        assert!(message.contains("another allocator"), "the message must say what is wrong: {message}");
    });
}

#[test]
fn waiting_for_pending_work_looks_at_its_own_device() {
    each_config(|config| {
        let machine = two_devices();
        let (d0, d1) = (gpu(&machine, 0, config.clone()), gpu(&machine, 1, config));
        let hostage = d1.alloc(4 * MIB, &d1.s0);
        d1.launch(&d1.s0, &hostage);
        let a = d0.alloc(64 * MIB, &d0.s0);
        d0.use_on(&d0.s1, &a);
        d0.free(a);
        machine.set_current_device(1);
        d1.sim.clear_log();
        let b = d0.alloc(64 * MIB, &d0.s0);
        d0.launch(&d0.s0, &b);
        assert_eq!(d1.sim.unfinished(), 1, "device 1's work was waited for");
        assert!(d1.sim.log().is_empty(), "device 1 was called: {:?}", d1.sim.log());
        assert_eq!(machine.current_device(), 1);
    });
}

#[test]
fn the_front_routes_by_the_stream_and_names_unknown_devices() {
    use vramalloc::{Allocators, Error, StreamHandle, driver::Driver};
    let machine = vramalloc::driver::sim::SimMachine::new(3, &vramalloc::driver::sim::SimDriver::builder());
    let driver = |ordinal| machine.device(ordinal) as std::sync::Arc<dyn Driver>;
    let allocators = Allocators::new([driver(0), driver(2)], &Config::default()).unwrap();
    machine.set_current_device(0);
    let stream = allocators.stream(2, StreamHandle::DEFAULT).unwrap();
    let block = allocators.alloc(4 * MIB, &stream).unwrap();
    let raw = allocators.alloc_raw(MIB, &stream).unwrap();
    assert_eq!(allocators.get(2).unwrap().memory_allocated(), 5 * MIB);
    assert_eq!(allocators.get(0).unwrap().memory_reserved(), 0);
    assert_eq!(machine.current_device(), 0);
    let unknown = allocators.free_raw(1, raw).unwrap_err();
    assert_eq!(unknown, Error::UnknownDevice { device: 1, known: vec![0, 2] });
    assert!(matches!(allocators.free_raw(0, raw), Err(Error::UnknownPointer { .. })), "the other device's");
    allocators.free_raw(2, raw).unwrap();
    drop(block);
    assert_eq!(allocators.empty_cache().unwrap(), 22 * MIB);
    assert!(Allocators::new([driver(1), driver(1)], &Config::default()).is_err());
}
