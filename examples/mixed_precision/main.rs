//! The same model in single precision, and with half-precision storage, weights in single precision and dynamic loss
//! scaling: the memory by kind, and that it learns as well.
//!
//! `cargo run --release --example mixed_precision`

#![allow(unreachable_pub)] // a program exports nothing; `pub` means: for the other modules here

mod scaler;
#[path = "../tensor/mod.rs"]
mod tensor;

use scaler::Scaler;
use std::process::ExitCode;
use std::rc::Rc;
use tensor::{Adam, DType, Device, Gpt, GptShape, How, Kind, Machine, Options, Result, Text};
use vramalloc::Config;
use vramalloc::driver::sim::SimDriver;
use vramalloc::size::human_bytes;

fn main() -> ExitCode {
    let numbers = [
        ("steps", "training steps [simulated: 60, GPU: 100]"),
        ("width", "numbers for each position [32, 512]"),
        ("length", "characters in a sequence [32, 128]"),
        ("batch", "sequences [8, 32]"),
        ("layers", "[2, 6]"),
    ];
    tensor::main_of("mixed_precision", &numbers, run)
}

/// What one training took.
struct Outcome {
    peaks: [u64; 5],
    allocated: u64,
    first: f32,
    last: f32,
}

fn run(options: &Options) -> Result<()> {
    let device = Device::open(options.device, SimDriver::builder().capacity(1 << 30))?;
    device.print();
    let pick = options.sizes_on(&device);
    let text = Text::load();
    let (length, width, layers) = (pick("length", 32, 128), pick("width", 32, 512), pick("layers", 2, 6));
    let shape = GptShape { words: text.words(), length, width, heads: (width / 64).max(2), layers };
    let (steps, batch) = (pick("steps", 60, 100), pick("batch", 8, 32));
    println!("model       {layers} layers of width {width}, {batch} sequences of {length}, {steps} steps\n");
    let kinds = [DType::F32, DType::F16, DType::BF16];
    let outcomes: Vec<Outcome> =
        kinds.iter().map(|&storage| train(&device, &text, shape, storage, steps, batch)).collect::<Result<_>>()?;

    println!("\n{:18}{:>14}{:>14}{:>14}{:>10}{:>10}", "peak of", "F32", "F16", "BF16", "F16/F32", "BF16/F32");
    let row = |name: &str, of: &dyn Fn(&Outcome) -> u64| {
        let [single, half, brain] = [0, 1, 2].map(|index: usize| of(&outcomes[index]));
        let ratio = |bytes: u64| bytes as f64 / single as f64;
        println!(
            "{name:18}{:>14}{:>14}{:>14}{:>10.2}{:>10.2}",
            human_bytes(single),
            human_bytes(half),
            human_bytes(brain),
            ratio(half),
            ratio(brain)
        );
        ratio(half).max(ratio(brain))
    };
    let ratios = Kind::ALL.map(|kind| (kind, row(kind.name(), &|outcome| outcome.peaks[kind as usize])));
    row("all allocated", &|outcome| outcome.allocated);
    println!("{:18}{:>14.3}{:>14.3}{:>14.3}", "loss", outcomes[0].last, outcomes[1].last, outcomes[2].last);
    for (kind, ratio) in ratios {
        match kind {
            // But for norms' statistics, losses, and a gradient that is made single to be used.
            Kind::Activations | Kind::Gradients | Kind::Workspace => {
                assert!(ratio < 0.56, "{} must halve: {ratio}", kind.name());
            }
            Kind::Parameters => assert!(ratio <= 1.5, "a half-precision copy at most beside the weights: {ratio}"),
            Kind::OptimizerState => assert!(ratio == 1.0, "the optimizer's state stays single: {ratio}"),
        }
    }
    for outcome in &outcomes[1..] {
        let gap = (outcome.last - outcomes[0].last).abs();
        assert!(gap < 0.1, "half precision must learn as well: {gap} apart");
        assert!(outcome.last < outcome.first - 0.3, "the loss falls: {} to {}", outcome.first, outcome.last);
    }
    device.assert_clean();
    Ok(())
}

fn train(
    device: &Device,
    text: &Text,
    shape: GptShape,
    storage: DType,
    steps: usize,
    batch: usize,
) -> Result<Outcome> {
    let machine = Rc::new(Machine::cached(device, Config::from_env()?)?);
    let mut gpt = Gpt::new(&machine, shape, 1)?;
    let mut adam = Adam::new(3e-3);
    // Only half precision's range is so narrow that gradients must be scaled; it begins too high, and finds down.
    let mut scaler = if storage == DType::F16 { Scaler::new(2.0_f32.powi(24)) } else { Scaler::off() };
    let (mut first, mut last) = (0.0, 0.0);
    for step in 0..steps {
        let (ids, targets) = text.batch(step as u64, batch, shape.length);
        let batch = (machine.ids(&ids)?, machine.ids(&targets)?);
        let how = How { storage, segment: 0, factor: scaler.factor() };
        let (losses, grads) = gpt.gradients(&machine, (&batch.0, &batch.1), how)?;
        if scaler.accepts(&machine, &grads)? {
            adam.begin();
            for (param, grad) in gpt.params.iter_mut().zip(&grads) {
                adam.update(&machine, param, grad, 1.0 / how.factor)?;
            }
        }
        let losses = machine.to_vec(&losses)?;
        last = losses.iter().sum::<f32>() / losses.len() as f32;
        if step == 0 {
            first = last;
        }
    }
    if storage == DType::F16 {
        println!(
            "loss scale  from 2^24 to 2^{}: {} steps skipped, of {steps}",
            scaler.factor().log2(),
            scaler.skipped()
        );
        assert!(scaler.skipped() > 0, "the first scale is meant to be too high");
        assert!(scaler.skipped() < steps / 2, "the scale must find its place");
    }
    let peaks = Kind::ALL.map(|kind| machine.meter.peak(kind));
    Ok(Outcome { peaks, allocated: machine.allocator().max_memory_allocated(), first, last })
}
