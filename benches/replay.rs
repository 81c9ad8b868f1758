//! Replay of the recorded traces in the steady state: the passes after the first.

mod common;

use common::{allocator, device};
use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use vramalloc::StreamHandle;
use vramalloc::replay::Replay;
use vramalloc::trace::Trace;

const TRACES: [&str; 6] = ["resnet50", "gpt2_amp", "gnn", "llama_generate", "unet_multires", "serving_streams"];

fn replay(c: &mut Criterion) {
    let device = device();
    let mut group = c.benchmark_group("replay");
    group.sample_size(10);
    for name in TRACES {
        let path = format!("{}/benches/traces/{name}.csv.gz", env!("CARGO_MANIFEST_DIR"));
        let path = std::env::var("VRAMALLOC_TRACES").map_or(path, |folder| format!("{folder}/{name}.csv.gz"));
        let trace = Trace::read(path).expect("a trace");
        let allocator = allocator(&device);
        let streams: Vec<StreamHandle> =
            trace.streams.iter().map(|_| device.create_stream().expect("a stream")).collect();
        let mut replay = Replay::new(&allocator, &trace, &streams).expect("streams");
        for _ in 0..3 {
            replay.pass().expect("room");
        }
        let reserved = allocator.memory_reserved();
        group.throughput(Throughput::Elements(trace.events.len() as u64));
        group.bench_function(BenchmarkId::from_parameter(name), |b| {
            b.iter_custom(|passes| (0..passes).map(|_| replay.pass().expect("room").elapsed).sum());
        });
        assert_eq!(allocator.memory_allocated(), 0, "every block was freed");
        assert_eq!(allocator.memory_reserved(), reserved, "the steady state does not grow");
        allocator.validate().expect("valid");
    }
    group.finish();
}

criterion_group!(benches, replay);
criterion_main!(benches);
