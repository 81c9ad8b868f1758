//! Trains a small transformer on a text, with every tensor in the allocator's memory; then the same training with the
//! driver's own calls for every tensor, in turns, and what that costs.
//!
//! `cargo run --release --example train`

#![allow(unreachable_pub)] // a program exports nothing; `pub` means: for the other modules here

#[path = "../tensor/mod.rs"]
mod tensor;

use std::process::ExitCode;
use std::rc::Rc;
use std::time::Instant;
use tensor::{
    Adam, Alloc, Cached, Device, DriverAlloc, Gpt, GptShape, Machine, Options, OrderedAlloc, Result, Text,
};
use vramalloc::driver::sim::SimDriver;
use vramalloc::size::human_bytes;
use vramalloc::{Config, Segments};

fn main() -> ExitCode {
    let numbers = [
        ("steps", "training steps [simulated: 40, GPU: 300]"),
        ("batch", "sequences in a step [8]"),
        ("width", "numbers for each position [32, 256]"),
        ("length", "characters in a sequence [32, 128]"),
        ("layers", "[2, 6]"),
        ("rounds", "turns of each allocator in the comparison [3, 5]"),
    ];
    tensor::main_of("train", &numbers, run)
}

/// By how much two measurements of the same may differ, as a part.
const NOISE: f64 = 0.02;

/// What is trained, and how long.
struct Plan {
    shape: GptShape,
    batch: usize,
    steps: usize,
    rounds: usize,
    steps_in_round: usize,
}

fn run(options: &Options) -> Result<()> {
    let device = Device::open(options.device, SimDriver::builder().capacity(1 << 30))?;
    device.print();
    let text = Text::load();
    let pick = options.sizes_on(&device);
    let width = pick("width", 32, 256);
    let shape = GptShape {
        words: text.words(),
        length: pick("length", 32, 128),
        width,
        heads: (width / 32).max(2),
        layers: pick("layers", 2, 6),
    };
    let plan = Plan {
        shape,
        batch: options.size("batch", 8),
        steps: pick("steps", 40, 300),
        rounds: pick("rounds", 3, 5),
        steps_in_round: if device.is_simulated() { 2 } else { 20 },
    };
    println!("text        {} characters, {} different ones", text.len(), text.words());
    learn(&device, &text, &plan)?;
    compare(&device, &text, &plan)
}

/// The configuration of the environment, with expandable segments unless it says otherwise.
fn config() -> Result<Config> {
    let is_set = std::env::var_os("VRAMALLOC_CONF").is_some();
    Ok(if is_set { Config::from_env()? } else { Config::default().segments(Segments::Auto) })
}

/// A model in training.
struct Run {
    machine: Rc<Machine>,
    gpt: Gpt,
    adam: Adam,
    step: u64,
}

impl Run {
    fn new(device: &Device, alloc: Rc<dyn Alloc>, plan: &Plan) -> Result<Self> {
        let machine = Rc::new(Machine::new(device, alloc));
        let gpt = Gpt::new(&machine, plan.shape, 1)?;
        Ok(Self { machine, gpt, adam: Adam::new(3e-3), step: 0 })
    }

    /// One step; gives the losses, still on the device.
    fn step(&mut self, text: &Text, plan: &Plan) -> Result<tensor::Tensor> {
        let (ids, targets) = text.batch(self.step, plan.batch, plan.shape.length);
        self.step += 1;
        let batch = (self.machine.ids(&ids)?, self.machine.ids(&targets)?);
        self.gpt.train(&self.machine, &mut self.adam, (&batch.0, &batch.1))
    }
}

/// Trains, with figures.
fn learn(device: &Device, text: &Text, plan: &Plan) -> Result<()> {
    let mut run = Run::new(device, Rc::new(Cached::new(device, config()?)?), plan)?;
    let GptShape { length, width, heads, layers, .. } = plan.shape;
    println!(
        "model       {} parameters: {layers} layers of width {width}, {heads} heads, {} sequences of {length} a step\n",
        run.gpt.len(),
        plan.batch
    );
    println!(
        "{:>6}{:>9}{:>13}{:>12}{:>12}{:>14}",
        "step", "loss", "allocated", "peak", "reserved", "driver calls"
    );
    let mut losses = Vec::new();
    let mut steady = 0;
    let begin = Instant::now();
    for step in 1..=plan.steps {
        let loss = run.step(text, plan)?;
        if step <= 2 || step == plan.steps || step.is_multiple_of(plan.steps.div_ceil(8)) {
            let loss = run.machine.to_vec(&loss)?;
            losses.push(loss.iter().sum::<f32>() / loss.len() as f32);
            let allocator = run.machine.allocator();
            println!(
                "{step:>6}{:>9.3}{:>13}{:>12}{:>12}{:>14}",
                losses[losses.len() - 1],
                human_bytes(allocator.memory_allocated()),
                human_bytes(allocator.max_memory_allocated()),
                human_bytes(allocator.memory_reserved()),
                device.calls().calls
            );
        }
        if step == 3 {
            steady = device.calls().calls;
        }
    }
    run.machine.backend.wait()?;
    let each = begin.elapsed().as_secs_f64() * 1e3 / plan.steps as f64;
    let allocator = run.machine.allocator();
    let (allocated, reserved) = (allocator.max_memory_allocated(), allocator.max_memory_reserved());
    let ratio = reserved as f64 / allocated as f64;
    println!("\n{each:.2} ms a step; peak reserved / peak allocated {ratio:.3}");
    let (first, last) = (losses[0], losses[losses.len() - 1]);
    if plan.steps >= 40 {
        assert!(last < first - 0.5, "the loss must fall by a half at least: {first} to {last}");
    }
    if plan.steps > 3 {
        assert_eq!(device.calls().calls, steady, "driver calls after the third step");
    }
    if allocator.is_expandable() && allocated > 100 << 20 {
        assert!(ratio < 1.05, "reserved must stay within 5 % of allocated: {ratio}");
    } else {
        println!("(the 5 % that expandable segments promise are checked from 100 MiB on: a page is 2 MiB)");
    }
    drop(run);
    device.assert_clean();
    Ok(())
}

/// What one allocator's turns took.
struct Entrant {
    alloc: Rc<dyn Alloc>,
    best: f64,
    calls: u64,
    nanos: u64,
    loss: f32,
}

/// The same training by each allocator in turns: the least time of a step counts, so that what else the machine does
/// meanwhile counts for none.
fn compare(device: &Device, text: &Text, plan: &Plan) -> Result<()> {
    let mut allocs: Vec<Rc<dyn Alloc>> = vec![
        Rc::new(Cached::new(device, config()?)?),
        Rc::new(DriverAlloc(std::sync::Arc::clone(&device.driver))),
    ];
    if let Some(ordered) = OrderedAlloc::new(device, true)? {
        allocs.push(Rc::new(ordered));
    }
    let entrant = |alloc| Entrant { alloc, best: f64::INFINITY, calls: 0, nanos: 0, loss: 0.0 };
    let mut entrants: Vec<Entrant> = allocs.into_iter().map(entrant).collect();
    for _ in 0..plan.rounds {
        for entrant in &mut entrants {
            let mut run = Run::new(device, Rc::clone(&entrant.alloc), plan)?;
            for _ in 0..2 {
                run.step(text, plan)?; // the first step makes the optimizer's state, and fills the cache
            }
            run.machine.backend.wait()?;
            let (begin, before) = (Instant::now(), device.calls());
            let mut loss = run.step(text, plan)?;
            for _ in 1..plan.steps_in_round {
                loss = run.step(text, plan)?;
            }
            run.machine.backend.wait()?;
            let steps = plan.steps_in_round as f64;
            entrant.best = entrant.best.min(begin.elapsed().as_secs_f64() * 1e3 / steps);
            let after = device.calls();
            entrant.calls = (after.calls - before.calls) / plan.steps_in_round as u64;
            entrant.nanos = (after.nanos - before.nanos) / plan.steps_in_round as u64;
            let losses = run.machine.to_vec(&loss)?;
            entrant.loss = losses.iter().sum::<f32>() / losses.len() as f32;
        }
    }
    print(device, &entrants)
}

fn print(device: &Device, entrants: &[Entrant]) -> Result<()> {
    // On the simulated device the host computes, and the driver's calls take virtual time: it is added.
    let is_sim = device.is_simulated();
    let step = |entrant: &Entrant| entrant.best + if is_sim { entrant.nanos as f64 / 1e6 } else { 0.0 };
    println!(
        "\n{:26}{:>13}{:>13}{:>20}{:>13}",
        "memory by", "ms a step", "steps a s", "driver calls a step", "vramalloc is"
    );
    for entrant in entrants {
        let ratio = step(entrant) / step(&entrants[0]);
        let calls = if entrant.alloc.name().contains("Async") {
            "not counted".to_owned() // they are not the allocator's interface to the driver
        } else {
            entrant.calls.to_string()
        };
        println!(
            "{:26}{:>13.3}{:>13.1}{calls:>20}{:>13}",
            entrant.alloc.name(),
            step(entrant),
            1e3 / step(entrant),
            format!("{ratio:.2} x")
        );
    }
    for entrant in entrants {
        let (ours, theirs) = (entrants[0].loss, entrant.loss);
        assert!(ours.to_bits() == theirs.to_bits(), "the same training: {ours} and {theirs}");
    }
    assert_eq!(entrants[0].calls, 0, "a cache that is warm makes no driver call");
    assert!(entrants[1].calls > 100, "two calls for every tensor");
    if is_sim {
        println!("(the arithmetic is the host's, the driver's calls as long as on an H200)");
        return Ok(());
    }
    let ratio = |index: usize| step(&entrants[index]) / step(&entrants[0]);
    assert!(ratio(1) >= 1.3, "1.3 times the steps of cuMemAlloc: {}", ratio(1));
    assert!(entrants.len() < 3 || ratio(2) >= 1.0 - NOISE, "not slower than cuMemAllocAsync: {}", ratio(2));
    Ok(())
}
