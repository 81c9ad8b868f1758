//! The hot path: pairs of alloc and free by size, churn, threads; on a GPU beside the raw driver calls.

mod common;

use common::{Churn, MIB, allocator, device, threads};
use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use std::hint::black_box;
use vramalloc::CachingAllocator;
#[cfg(feature = "cuda")]
use vramalloc::{OpenDevice, StreamHandle};

const SIZES: [u64; 7] = [512, 64 << 10, MIB, 8 * MIB, 64 * MIB, 256 * MIB, 512 * MIB];

/// A benchmark of cached blocks is one only if the driver was not called.
fn without_driver_calls(allocator: &CachingAllocator, run: impl FnOnce()) {
    let before = allocator.driver().calls();
    run();
    let calls = allocator.driver().calls().since(&before).total().calls;
    assert_eq!(calls, 0, "the cache was not hit");
}

fn pairs(c: &mut Criterion) {
    let device = device();
    let allocator = allocator(&device);
    let stream = allocator.default_stream().expect("the default stream");
    let mut group = c.benchmark_group("pair");
    for bytes in SIZES {
        drop(allocator.alloc(bytes, &stream).expect("room"));
        group.bench_function(BenchmarkId::new("handle", bytes), |b| {
            without_driver_calls(&allocator, || {
                b.iter(|| drop(black_box(allocator.alloc(black_box(bytes), &stream).expect("a cached block"))));
            });
        });
        group.bench_function(BenchmarkId::new("pointer", bytes), |b| {
            without_driver_calls(&allocator, || {
                b.iter(|| {
                    let ptr = allocator.alloc_raw(black_box(bytes), &stream).expect("a cached block");
                    allocator.free_raw(black_box(ptr)).expect("a live pointer");
                });
            });
        });
    }
    group.finish();
    allocator.validate().expect("valid");

    #[cfg(feature = "cuda")]
    if let OpenDevice::Cuda(cuda) = &device {
        use vramalloc::Driver;
        let mut group = c.benchmark_group("pair_driver");
        group.sample_size(10);
        cuda.set_default_pool_release_threshold(u64::MAX).expect("the default pool");
        for bytes in SIZES {
            group.bench_function(BenchmarkId::new("cuMemAlloc", bytes), |b| {
                b.iter(|| cuda.free(cuda.alloc(bytes).expect("room")).expect("freed"));
            });
            group.bench_function(BenchmarkId::new("cuMemAllocAsync", bytes), |b| {
                b.iter(|| {
                    let ptr = cuda.alloc_async(bytes, StreamHandle::DEFAULT).expect("room");
                    cuda.free_async(ptr, StreamHandle::DEFAULT).expect("freed");
                });
            });
        }
        group.finish();
    }
}

fn churn(c: &mut Criterion) {
    let device = device();
    let mut group = c.benchmark_group("churn");
    for blocks in [1_000, 100_000] {
        let allocator = allocator(&device);
        let stream = allocator.default_stream().expect("the default stream");
        let mut churn = Churn::new(&allocator, &stream, blocks);
        group.bench_function(BenchmarkId::from_parameter(blocks), |b| b.iter(|| churn.step()));
        allocator.validate().expect("valid");
    }
    group.finish();
}

fn contention(c: &mut Criterion) {
    let device = device();
    let allocator = allocator(&device);
    let mut group = c.benchmark_group("threads");
    group.sample_size(10);
    for count in [1, 2, 4, 8, 16] {
        let own: Vec<_> = (0..count)
            .map(|_| allocator.stream(device.create_stream().expect("a stream")).expect("its pool"))
            .collect();
        let one = vec![own[0].clone(); count];
        group.throughput(Throughput::Elements(1));
        group.bench_function(BenchmarkId::new("own_stream", count), |b| {
            b.iter_custom(|pairs| threads(&allocator, &own, pairs));
        });
        group.bench_function(BenchmarkId::new("one_stream", count), |b| {
            b.iter_custom(|pairs| threads(&allocator, &one, pairs));
        });
    }
    group.finish();
    assert_eq!(allocator.memory_allocated(), 0, "every block was freed");
    allocator.validate().expect("valid");
}

criterion_group!(benches, pairs, churn, contention);
criterion_main!(benches);
