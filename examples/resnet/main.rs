//! ResNet-50, forward and backward on synthetic images, in its real layer shapes: what its memory is for, by kind, against
//! what the shapes say.
//!
//! `cargo run --release --example resnet`. On the simulated device images are 32 by 32, so that the host can do it; layers
//! and channels are the real ones.

#![allow(unreachable_pub)] // a program exports nothing; `pub` means: for the other modules here

mod model;
#[path = "../tensor/mod.rs"]
mod tensor;

use model::{Block, CLASSES, ResNet};
use std::process::ExitCode;
use std::rc::Rc;
use std::time::Instant;
use tensor::{DType, Device, Kind, Machine, Options, Random, Result, Sgd, Tape};
use vramalloc::driver::sim::SimDriver;
use vramalloc::size::human_bytes;
use vramalloc::{Config, Segments};

/// Numbers that ResNet-50 learns, with 1000 classes.
const PARAMETERS: usize = 25_557_032;

fn main() -> ExitCode {
    let numbers = [
        ("batch", "images [simulated: 2, GPU: 32]"),
        ("image", "pixels of a side [32, 224]"),
        ("steps", "[2, 10]"),
    ];
    tensor::main_of("resnet", &numbers, run)
}

fn run(options: &Options) -> Result<()> {
    let device = Device::open(options.device, SimDriver::builder().capacity(4 << 30))?;
    device.print();
    let pick = options.sizes_on(&device);
    let (batch, side, steps) = (pick("batch", 2, 32), pick("image", 32, 224), pick("steps", 2, 10));
    let is_set = std::env::var_os("VRAMALLOC_CONF").is_some();
    let config = if is_set { Config::from_env()? } else { Config::default().segments(Segments::Auto) };
    let machine = Rc::new(Machine::cached(&device, config)?);
    let mut net = ResNet::new(&machine, 1)?;
    println!("model       {} parameters; {batch} images of {side} by {side}", net.len());
    assert_eq!(net.len(), PARAMETERS, "parameters of ResNet-50");

    let mut random = Random(2);
    let pixels = random.normals(batch * side * side * 3, 1.0);
    let images = machine.tensor(&pixels, &[batch, side, side, 3], DType::F32)?;
    let labels: Vec<u32> = (0..batch).map(|_| random.below(CLASSES) as u32).collect();
    let labels = machine.ids(&labels)?;
    let inputs = images.bytes() + labels.bytes();

    let sgd = Sgd { rate: 0.01, momentum: 0.9 };
    let mut losses = Vec::new();
    let mut best = f64::INFINITY;
    for step in 1..=steps {
        let begin = Instant::now();
        let tape = Tape::new(&machine);
        let leaves = net.leaves(&tape);
        let loss = net.loss(&tape, &leaves, &images, &labels)?;
        let activations = machine.meter.now(Kind::Activations) - inputs;
        let value = loss.value.clone();
        let mut grads = tape.backward_of_loss(&loss)?;
        let gradients = machine.meter.now(Kind::Gradients);
        for (param, leaf) in net.params.iter_mut().zip(&leaves) {
            let grad = grads.take(leaf).ok_or("a parameter without a gradient")?;
            sgd.step(&machine, param, &grad, 1.0)?;
        }
        drop((grads, loss));
        let values = machine.to_vec(&value)?;
        losses.push(values.iter().sum::<f32>() / values.len() as f32);
        best = best.min(begin.elapsed().as_secs_f64());
        if step == 1 {
            table(&machine, batch, side, activations, gradients);
        }
    }
    println!(
        "\nloss        {:.3} to {:.3}; {:.1} images a second",
        losses[0],
        losses[steps - 1],
        batch as f64 / best
    );
    machine.print_memory(&device);
    let allocator = machine.allocator();
    let ratio = allocator.max_memory_reserved() as f64 / allocator.max_memory_allocated() as f64;
    println!("ratio       reserved / allocated, peaks: {ratio:.3}");
    assert!(steps < 2 || losses[steps - 1] < losses[0], "the loss must fall: {losses:?}");
    assert!(!allocator.is_expandable() || ratio < 1.05, "reserved must stay within 5 % of allocated: {ratio}");
    drop((net, images, labels));
    assert_eq!(allocator.memory_allocated(), 0, "all is freed");
    device.assert_clean();
    Ok(())
}

/// Prints what was measured beside what the shapes say, and fails if they differ.
fn table(machine: &Machine, batch: usize, side: usize, activations: u64, gradients: u64) {
    let theory = Block::theory(batch, side);
    let numbers = 4 * PARAMETERS as u64;
    let rows = [
        ("parameters", machine.meter.peak(Kind::Parameters), numbers),
        ("gradients of parameters", gradients, numbers),
        ("optimizer state", machine.meter.peak(Kind::OptimizerState), numbers),
        ("activations kept", activations, theory.activations),
        ("workspace, peak", machine.meter.peak(Kind::Workspace), theory.workspace),
    ];
    println!("\n{:26}{:>16}{:>16}{:>16}", "kind", "measured", "by the shapes", "bytes");
    for (name, measured, expected) in rows {
        println!("{name:26}{:>16}{:>16}{measured:>16}", human_bytes(measured), human_bytes(expected));
    }
    for (name, measured, expected) in rows {
        assert_eq!(measured, expected, "{name}");
    }
}
