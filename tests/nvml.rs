//! Used memory by process. Skipped, with a line on stderr, where there is no GPU; `VRAMALLOC_REQUIRE_GPU` forces it.
#![cfg(feature = "nvml")]

use vramalloc::driver::cuda::CudaDriver;
use vramalloc::nvml::{DeviceProcesses, compare};
use vramalloc::{CachingAllocator, Config, Driver};

const MIB: u64 = 1 << 20;

#[test]
fn what_is_reserved_is_part_of_what_nvidia_smi_shows() {
    let driver = match CudaDriver::open(0) {
        Ok(driver) => driver,
        Err(error) if std::env::var_os("VRAMALLOC_REQUIRE_GPU").is_none() => {
            eprintln!("skipped: no GPU ({error})");
            return;
        }
        Err(error) => panic!("{error}"),
    };
    let before = DeviceProcesses::of(&driver).unwrap();
    println!("{before}");
    assert!(before.total >= driver.capabilities().total_bytes, "{before:?}");
    assert!(before.used + before.free <= before.total, "{before:?}");
    let allocator = CachingAllocator::new(driver.clone(), Config::default()).unwrap();
    let stream = allocator.default_stream().unwrap();
    let block = allocator.alloc(1024 * MIB, &stream).unwrap();
    let after = DeviceProcesses::of(&driver).unwrap();
    let line = compare(&allocator, &after);
    println!("{line}");
    // Others may come and go, but hardly that much.
    assert!(after.used >= before.used + 900 * MIB, "{before:?} {after:?}");
    match after.own().and_then(|own| own.bytes) {
        Some(own) => {
            assert!(own >= allocator.memory_reserved(), "{after:?}");
            assert_eq!(after.beside(&allocator), Some(own - allocator.memory_reserved()));
            assert!(line.contains("1.00 GiB of it reserved"), "{line}");
        }
        None => assert!(line.contains("another number outside"), "{line}"),
    }
    drop(block);
}
