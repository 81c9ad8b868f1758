//! The layers of a model split over devices, each with its own allocator: a batch goes through in small parts, whose
//! activations and gradients are handed from device to device. The result is that of one device.
//!
//! `cargo run --release --example pipeline`

#![allow(unreachable_pub)] // a program exports nothing; `pub` means: for the other modules here

mod stage;
#[path = "../tensor/mod.rs"]
mod tensor;

use stage::{Passed, Stage};
use std::process::ExitCode;
use std::rc::Rc;
use std::time::Instant;
use tensor::{Device, Gpt, GptShape, How, Machine, Options, Result, Sgd, Text};
use vramalloc::driver::sim::{SimDriver, SimMachine};
use vramalloc::size::human_bytes;
use vramalloc::{Config, DeviceChoice};

fn main() -> ExitCode {
    let numbers = [
        ("stages", "parts of the model [2]"),
        ("parts", "parts of a batch [4]"),
        ("steps", "training steps [simulated: 8, GPU: 30]"),
        ("batch", "sequences in a part [2, 8]"),
        ("width", "numbers for each position [32, 512]"),
        ("length", "characters in a sequence [16, 128]"),
        ("layers", "[4, 8]"),
    ];
    tensor::main_of("pipeline", &numbers, run)
}

struct Plan {
    shape: GptShape,
    parts: usize,
    batch: usize,
    steps: usize,
}

const SGD: Sgd = Sgd { rate: 0.01, momentum: 0.9 };

fn run(options: &Options) -> Result<()> {
    let first = Device::open(options.device, SimDriver::builder().capacity(1 << 30))?;
    first.print();
    let pick = options.sizes_on(&first);
    let (width, length, layers) = (pick("width", 32, 512), pick("length", 16, 128), pick("layers", 4, 8));
    let shape = GptShape { words: Text::load().words(), length, width, heads: (width / 64).max(2), layers };
    let plan =
        Plan { shape, parts: options.size("parts", 4), batch: pick("batch", 2, 8), steps: pick("steps", 8, 30) };
    let stages = options.size("stages", 2).min(layers);
    let devices = devices(&first, stages)?;
    let (losses, params) = in_stages(&devices, &plan)?;
    let (alone, params_alone, peak) = on_one(&first, &plan)?;
    let furthest = |a: &[f32], b: &[f32]| a.iter().zip(b).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
    let (loss, param) = (furthest(&losses, &alone), furthest(&params, &params_alone));
    println!("one device  peak allocated {}", human_bytes(peak));
    println!("compared    losses differ by {loss:.1e} at most, parameters by {param:.1e}");
    println!("loss        {:.4} to {:.4}", losses[0], losses[losses.len() - 1]);
    assert_eq!(params.len(), params_alone.len(), "all parameters are in one stage");
    assert!(loss < 1e-3 && param < 1e-3, "the stages must agree with one device but for rounding");
    assert!(plan.steps < 8 || losses[losses.len() - 1] < losses[0], "the loss must fall");
    devices.iter().chain([&first]).for_each(Device::assert_clean);
    Ok(())
}

/// A device for each stage.
fn devices(first: &Device, stages: usize) -> Result<Vec<Device>> {
    if first.is_simulated() {
        println!("stages      on {stages} simulated devices; GPUs would do it, too");
        let machine = SimMachine::new(u32::try_from(stages)?, &SimDriver::builder().capacity(1 << 30));
        let device = |ordinal| Device::simulated(machine.device(ordinal), "of several".to_owned());
        return Ok((0..stages as u32).map(device).collect());
    }
    let count = gpus();
    if count < stages {
        println!("stages      {stages}, on {count} GPUs in turn, each with an allocator and a stream of its own");
    } else {
        println!("stages      on {stages} GPUs");
    }
    let open = |stage: usize| {
        let ordinal = u32::try_from(stage % count)?;
        Device::open(DeviceChoice::Cuda(ordinal), SimDriver::builder())
    };
    (0..stages).map(open).collect()
}

fn gpus() -> usize {
    #[cfg(feature = "cuda")]
    if let Ok(count) = vramalloc::driver::cuda::CudaDriver::device_count() {
        return count as usize;
    }
    1
}

/// Trains in stages; gives the losses and all parameters.
fn in_stages(devices: &[Device], plan: &Plan) -> Result<(Vec<f32>, Vec<f32>)> {
    let text = Text::load();
    plan.shape.check()?;
    let initial = Gpt::initial(plan.shape, 1);
    let mut stages: Vec<Stage> = Vec::new();
    for (index, device) in devices.iter().enumerate() {
        stages.push(Stage::new(device, plan.shape, &initial, (index, devices.len()))?);
    }
    let rows = plan.batch * plan.shape.length;
    let mut losses = Vec::new();
    let begin = Instant::now();
    for step in 0..plan.steps {
        let (ids, targets) = text.batch(step as u64, plan.batch * plan.parts, plan.shape.length);
        let mut loss = 0.0;
        // All parts forward, then all backward, the last first: what a part keeps is freed by its way back.
        for (ids, targets) in ids.chunks(rows).zip(targets.chunks(rows)) {
            let mut passed = Passed::Ids(ids.to_vec());
            for stage in &mut stages {
                passed = stage.forward(&passed, targets, 1.0 / plan.parts as f32)?;
            }
            let Passed::Values(values) = passed else { unreachable!("losses come last") };
            loss += values.iter().sum::<f32>() / (rows * plan.parts) as f32;
        }
        for _ in 0..plan.parts {
            let mut grad = None;
            for stage in stages.iter_mut().rev() {
                grad = stage.backward(grad)?;
            }
        }
        stages.iter_mut().try_for_each(|stage| stage.learn(&SGD))?;
        losses.push(loss);
    }
    let each = begin.elapsed().as_secs_f64() * 1e3 / plan.steps as f64;
    println!("pipeline    {} parts of {} sequences, {each:.1} ms a step", plan.parts, plan.batch);
    let mut params = Vec::new();
    for (index, stage) in stages.iter().enumerate() {
        let allocator = stage.machine.allocator();
        println!(
            "stage {index}     {} layers, {} parameters: peak allocated {}, reserved {}",
            stage.layers(),
            stage.len(),
            human_bytes(allocator.max_memory_allocated()),
            human_bytes(allocator.max_memory_reserved())
        );
        params.extend(stage.params()?);
    }
    Ok((losses, params))
}

/// The same on one device, with the whole batch at once; also its peak.
fn on_one(device: &Device, plan: &Plan) -> Result<(Vec<f32>, Vec<f32>, u64)> {
    let machine = Rc::new(Machine::cached(device, Config::from_env()?)?);
    let text = Text::load();
    let mut gpt = Gpt::new(&machine, plan.shape, 1)?;
    let mut losses = Vec::new();
    for step in 0..plan.steps {
        let (ids, targets) = text.batch(step as u64, plan.batch * plan.parts, plan.shape.length);
        let batch = (machine.ids(&ids)?, machine.ids(&targets)?);
        let (loss, grads) = gpt.gradients(&machine, (&batch.0, &batch.1), How::PLAIN)?;
        for (param, grad) in gpt.params.iter_mut().zip(&grads) {
            SGD.step(&machine, param, grad, 1.0)?;
        }
        let loss = machine.to_vec(&loss)?;
        losses.push(loss.iter().sum::<f32>() / loss.len() as f32);
    }
    let mut params = Vec::new();
    for param in &gpt.params {
        params.extend(machine.to_vec(&param.value)?);
    }
    Ok((losses, params, machine.allocator().max_memory_allocated()))
}
