//! What the recorded traces cost, on the simulated device with an H200's costs: the figures that the documentation names.
#![cfg(feature = "replay")]

use vramalloc::driver::StreamHandle;
use vramalloc::driver::sim::SimDriver;
use vramalloc::replay::Replay;
use vramalloc::trace::Trace;
use vramalloc::{CachingAllocator, Config};

const TRACES: [&str; 6] = ["resnet50", "gpt2_amp", "gnn", "llama_generate", "unet_multires", "serving_streams"];

/// Two passes over each trace: reserved / allocated, and the driver's milliseconds in each pass.
struct Outcome {
    ratios: Vec<f64>,
    ms: [f64; 2],
}

impl Outcome {
    fn of(config: &str) -> Self {
        let (mut ratios, mut ms) = (Vec::new(), [0.0; 2]);
        for name in TRACES {
            let path = format!("{}/benches/traces/{name}.csv.gz", env!("CARGO_MANIFEST_DIR"));
            let trace = Trace::read(path).expect("a trace");
            let driver = SimDriver::builder().backing(false).log(false).build();
            let streams: Vec<StreamHandle> = trace.streams.iter().map(|_| driver.create_stream()).collect();
            let config: Config = config.parse().expect("a configuration");
            let allocator = CachingAllocator::new(driver, config).expect("an allocator");
            let mut replay = Replay::new(&allocator, &trace, &streams).expect("streams");
            for ms in &mut ms {
                *ms += replay.pass().expect("it fits").driver.total().nanos as f64 / 1e6;
            }
            ratios.push(replay.report().ratio());
        }
        let outcome = Self { ratios, ms };
        println!("{config}: mean {:.4}, worst {:.4}, {:.1?} ms", outcome.mean(), outcome.worst(), outcome.ms);
        outcome
    }

    fn mean(&self) -> f64 {
        (self.ratios.iter().map(|ratio| ratio.ln()).sum::<f64>() / self.ratios.len() as f64).exp()
    }

    fn worst(&self) -> f64 {
        self.ratios.iter().fold(0.0, |worst, &ratio| worst.max(ratio))
    }
}

#[test]
fn expandable_segments_hold_little_more_than_is_allocated() {
    let outcome = Outcome::of("segments:expandable");
    assert!(outcome.mean() <= 1.03 && outcome.worst() <= 1.06, "{:?}", outcome.ratios);
    assert!(outcome.ms[0] <= 125.0 && outcome.ms[1] <= 25.0, "{:?} ms", outcome.ms);
}

#[test]
fn who_waits_holds_no_more() {
    let outcome = Outcome::of("segments:expandable,on_pending:wait");
    assert!(outcome.mean() <= 1.03 && outcome.worst() <= 1.06, "{:?}", outcome.ratios);
    assert!(outcome.ms[0] <= 125.0 && outcome.ms[1] <= 25.0, "{:?} ms", outcome.ms);
}

#[test]
fn without_slack_they_hold_hardly_any_more() {
    let outcome = Outcome::of("segments:expandable,slack:1.0");
    assert!(outcome.mean() <= 1.01 && outcome.worst() <= 1.02, "{:?}", outcome.ratios);
    assert!(outcome.ms[0] <= 600.0, "{:?} ms", outcome.ms);
}

#[test]
fn fixed_segments_hold_what_pytorch_holds() {
    let outcome = Outcome::of("segments:fixed");
    for (ratio, pytorch) in outcome.ratios.iter().zip([1.50, 1.65, 3.36, 1.06, 1.59, 4.63]) {
        assert!((ratio - pytorch).abs() < 0.0055, "{ratio} where PyTorch has {pytorch}");
    }
    assert!(outcome.ms[1] == 0.0, "the second pass makes no driver call: {:?} ms", outcome.ms);
}
