//! Gradient checkpointing: a model of n layers keeps activations of the order of √n instead of n, and computes the rest
//! again; the gradients are the same. Plots the peak against n.
//!
//! `cargo run --release --example checkpointing [-- --plot 1]`

#![allow(unreachable_pub)] // a program exports nothing; `pub` means: for the other modules here

mod plot;
#[path = "../tensor/mod.rs"]
mod tensor;

use std::process::ExitCode;
use std::rc::Rc;
use tensor::{DType, Device, Gpt, GptShape, How, Kind, Machine, Options, Result, Text};
use vramalloc::Config;
use vramalloc::driver::sim::SimDriver;
use vramalloc::size::human_bytes;

fn main() -> ExitCode {
    let numbers = [
        ("layers", "the deepest model, doubled from 4 on [simulated: 64, GPU: 64]"),
        ("width", "numbers for each position [16, 256]"),
        ("length", "characters in a sequence [16, 128]"),
        ("batch", "sequences [2, 16]"),
        ("plot", "1: draw docs/examples/checkpointing.svg"),
    ];
    tensor::main_of("checkpointing", &numbers, run)
}

/// What one depth took.
struct Row {
    layers: usize,
    /// Bytes of activations at the peak.
    plain: u64,
    checkpointed: u64,
}

fn run(options: &Options) -> Result<()> {
    let device = Device::open(options.device, SimDriver::builder().capacity(4 << 30))?;
    device.print();
    let pick = options.sizes_on(&device);
    let text = Text::load();
    let (width, length, batch) = (pick("width", 16, 256), pick("length", 16, 128), pick("batch", 2, 16));
    println!("model       layers of width {width}, {batch} sequences of {length}\n");
    println!(
        "{:>7}{:>10}{:>16}{:>16}{:>8}{:>26}",
        "layers", "segment", "plain peak", "checkpointed", "ratio", "peak allocated, both"
    );
    let mut rows = Vec::new();
    let mut layers = 4;
    while layers <= pick("layers", 64, 64) {
        let shape = GptShape { words: text.words(), length, width, heads: 2, layers };
        let segment = (layers as f64).sqrt().round() as usize;
        let (plain, plain_allocated, gradients) = measure(&device, shape, &text, batch, 0)?;
        let (checkpointed, allocated, again) = measure(&device, shape, &text, batch, segment)?;
        same(&gradients, &again, device.is_simulated());
        println!(
            "{layers:>7}{segment:>10}{:>16}{:>16}{:>8.2}{:>26}",
            human_bytes(plain),
            human_bytes(checkpointed),
            plain as f64 / checkpointed as f64,
            format!("{}, {}", human_bytes(plain_allocated), human_bytes(allocated))
        );
        rows.push(Row { layers, plain, checkpointed });
        layers *= 2;
    }
    println!("\ngradients   the same with and without");
    check(&rows);
    if options.number("plot", 0) == 1 {
        plot::draw("docs/examples/checkpointing.svg", &rows)?;
        println!("plot        docs/examples/checkpointing.svg");
    }
    device.assert_clean();
    Ok(())
}

/// The peak of the activations, that of all memory, and the gradients of one step.
fn measure(
    device: &Device,
    shape: GptShape,
    text: &Text,
    batch: usize,
    segment: usize,
) -> Result<(u64, u64, Vec<f32>)> {
    let machine = Rc::new(Machine::cached(device, Config::from_env()?)?);
    let gpt = Gpt::new(&machine, shape, 1)?;
    let (ids, targets) = text.batch(0, batch, shape.length);
    let batch = (machine.ids(&ids)?, machine.ids(&targets)?);
    let how = How { storage: DType::F32, segment, factor: 1.0 };
    let (_, grads) = gpt.gradients(&machine, (&batch.0, &batch.1), how)?;
    let mut values = Vec::new();
    for grad in &grads {
        values.extend(machine.to_vec(grad)?);
    }
    Ok((machine.meter.peak(Kind::Activations), machine.allocator().max_memory_allocated(), values))
}

fn same(plain: &[f32], checkpointed: &[f32], exactly: bool) {
    let largest = plain.iter().fold(0.0_f32, |most, value| most.max(value.abs()));
    let error = plain.iter().zip(checkpointed).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
    let bound = if exactly { 0.0 } else { largest * 1e-4 }; // a GPU's library may choose another order of sums
    assert!(largest > 0.0 && error <= bound, "the gradients differ by {error} of {largest}");
}

/// From n to 4 n layers the plain peak becomes about four times as high, the other about twice.
fn check(rows: &[Row]) {
    for pair in rows.windows(3) {
        let (few, many) = (&pair[0], &pair[2]);
        let plain = many.plain as f64 / few.plain as f64;
        let checkpointed = many.checkpointed as f64 / few.checkpointed as f64;
        println!(
            "{:>2} to {:>3} layers: plain {plain:.2} times, checkpointed {checkpointed:.2} times",
            few.layers, many.layers
        );
        assert!(plain > 3.0, "the plain peak must grow with n: {plain}");
        assert!(checkpointed < 2.3, "the peak with checkpoints must grow with the root of n: {checkpointed}");
    }
}
