//! Trains a small network with every tensor in the allocator's memory, and shows what the allocator does meanwhile.
//!
//! `cargo run --release --example train_mlp` trains on the first GPU if there is one, else on the simulated device,
//! where the host does the arithmetic on the bytes of the simulated memory. What it claims, it asserts.

#![allow(unreachable_pub)] // a program exports nothing; `pub` means: for the other modules here

mod data;
#[cfg(feature = "cuda")]
mod gpu;
mod host;
mod net;
mod ops;
mod options;
mod report;

use data::{Batch, Examples, TEST_ROWS, TRAIN_ROWS};
use net::Mlp;
use ops::{Machine, Result, Tensor};
use options::{Options, Request};
use report::{Report, driver_calls, line};
use std::process::ExitCode;
use std::time::Instant;
use vramalloc::OpenDevice;
use vramalloc::size::human_bytes;

/// From so many steps and passes over the data on, the network must be good, and the run fails if it is not.
const ENOUGH_STEPS: u32 = 100;
const ENOUGH_EPOCHS: u32 = 8;
const LEAST_ACCURACY: f32 = 0.85;

fn main() -> ExitCode {
    let options = match options::parse(std::env::args().skip(1)) {
        Ok(Request::Train(options)) => options,
        Ok(Request::Help) => {
            println!("{}", options::USAGE);
            return ExitCode::SUCCESS;
        }
        Err(error) => {
            eprintln!("error: {error}\n\n{}", options::USAGE);
            return ExitCode::from(2);
        }
    };
    match run(options) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run(options: Options) -> Result<()> {
    let machine = Machine::open(options.device)?;
    let (examples, held_out) = data::make();
    report::device(&machine, options.device);
    line(
        "data",
        &format!("{TRAIN_ROWS} examples to train on, {TEST_ROWS} held out; batches of {}", options.batch),
    );

    let report = Report::new(&machine);
    Report::heading("Start");
    report.row("before");
    let mut mlp = Mlp::new(&machine)?;
    report.row(&format!("network {} made", mlp.shape()));

    let losses = train(&machine, &report, &mut mlp, &examples, options)?;
    let accuracy = evaluate(&machine, &mlp, &held_out, options.batch)?;
    check_learning(losses, accuracy, options);
    clean_up(&machine, &report, mlp)
}

/// Trains, and gives the losses of the first step and the last.
fn train(
    machine: &Machine,
    report: &Report<'_>,
    mlp: &mut Mlp,
    examples: &Examples,
    options: Options,
) -> Result<(f32, f32)> {
    let start = Instant::now();
    let epoch = TRAIN_ROWS.div_ceil(options.batch);
    let mut steady = None;
    let mut losses = Vec::new();
    for (step, batch) in (1..=options.steps).zip(examples.batches(options.batch).cycle()) {
        let rows = batch.rows;
        let score = if step == 1 {
            train_in_close_up(machine, report, mlp, batch)?
        } else {
            train_one(machine, mlp, batch, &mut |_| ())?
        };
        if is_shown(step, options.steps) {
            // Reading makes the host wait for the GPU, so it is not done in every step.
            let (loss, accuracy) = mean(&machine.download(&score)?);
            losses.push(loss);
            report.row(&format!("{step:>6}{rows:>8}{loss:>10.4}{:>7.1} %", accuracy * 100.0));
        }
        drop(score);
        if step == epoch.max(2) {
            steady = Some(Steady::begin(machine, step));
        }
    }
    println!();
    line("time", &format!("{:.2} s for {} steps", start.elapsed().as_secs_f64(), options.steps));
    Steady::check(steady, machine, options.steps);
    Ok((losses[0], losses[losses.len() - 1]))
}

fn train_one(
    machine: &Machine,
    mlp: &mut Mlp,
    batch: Batch,
    note: &mut dyn FnMut(&'static str),
) -> Result<Tensor> {
    let (x, labels) = upload(machine, &batch)?;
    mlp.train(machine, x, labels, note)
}

/// The first step, in which the allocator fetches its memory: figures after each phase.
fn train_in_close_up(machine: &Machine, report: &Report<'_>, mlp: &mut Mlp, batch: Batch) -> Result<Tensor> {
    Report::heading("Inside step 1");
    let score = train_one(machine, mlp, batch, &mut |phase| report.row(phase))?;
    Report::heading("  step    rows      loss  correct");
    Ok(score)
}

fn upload(machine: &Machine, batch: &Batch) -> Result<(Tensor, Tensor)> {
    let x = machine.upload(&batch.features, batch.rows, data::FEATURES)?;
    let labels = machine.upload(&batch.labels, batch.rows, 1)?;
    Ok((x, labels))
}

/// The first steps, the last, and about ten between.
fn is_shown(step: u32, steps: u32) -> bool {
    step <= 3 || step == steps || step.is_multiple_of(steps.div_ceil(10))
}

/// Mean loss and part of hits.
fn mean(score: &[f32]) -> (f32, f32) {
    let sum = |column: usize| score.iter().skip(column).step_by(2).sum::<f32>();
    let rows = (score.len() / 2) as f32;
    (sum(0) / rows, sum(1) / rows)
}

/// The state in which the cache serves everything: every size was asked for before.
struct Steady {
    after: u32,
    driver_calls: u64,
    allocations: u64,
    reserved: u64,
}

impl Steady {
    /// By now the smaller last batch of the data came by as well, and the velocities are made.
    fn begin(machine: &Machine, after: u32) -> Self {
        let allocations = machine.allocator.memory_stats().allocation.all.allocated;
        let reserved = machine.allocator.memory_reserved();
        Self { after, driver_calls: driver_calls(machine), allocations, reserved }
    }

    /// Fails if the driver was called since the steady state began.
    fn check(begin: Option<Self>, machine: &Machine, steps: u32) {
        let Some(begin) = begin.filter(|begin| begin.after < steps) else {
            line("steady", "not checked: it begins after one pass over the data, and after step 2");
            return;
        };
        let end = Self::begin(machine, steps);
        let allocations = end.allocations - begin.allocations;
        let calls = end.driver_calls - begin.driver_calls;
        let first = begin.after + 1;
        line("steady", &format!("steps {first} to {steps}: {allocations} allocations, {calls} driver calls"));
        assert_eq!(calls, 0, "driver calls in the steady state");
        assert_eq!(end.reserved, begin.reserved, "reserved bytes in the steady state");
    }
}

/// The part of the held-out examples that the network gets right.
fn evaluate(machine: &Machine, mlp: &Mlp, held_out: &Examples, batch: u32) -> Result<f32> {
    let mut hits = 0.0;
    for batch in held_out.batches(batch) {
        let (x, labels) = upload(machine, &batch)?;
        let score = mlp.score(machine, x, labels)?;
        hits += mean(&machine.download(&score)?).1 * batch.rows as f32;
    }
    let accuracy = hits / TEST_ROWS as f32;
    line("held out", &format!("{:.1} % correct", accuracy * 100.0));
    Ok(accuracy)
}

fn check_learning((first, last): (f32, f32), accuracy: f32, options: Options) {
    let enough_examples = ENOUGH_EPOCHS * TRAIN_ROWS;
    if options.steps < ENOUGH_STEPS || options.steps.saturating_mul(options.batch) < enough_examples {
        line("learning", &format!("not checked: needs {ENOUGH_STEPS} steps and {enough_examples} examples"));
        return;
    }
    line("learning", &format!("the loss fell from {first:.2} to {last:.2}"));
    assert!(last < first / 2.0, "the loss must fall by half: {first} to {last}");
    assert!(accuracy > LEAST_ACCURACY, "the network must get {LEAST_ACCURACY} right, not {accuracy}");
}

/// Frees everything, gives the memory back, and shows where the figures end.
fn clean_up(machine: &Machine, report: &Report<'_>, mlp: Mlp) -> Result<()> {
    let allocator = &machine.allocator;
    Report::heading("End");
    report.row("after training");
    drop(mlp);
    report.row("network dropped (Python's del)");
    assert_eq!(allocator.memory_allocated(), 0, "allocated after the drops");
    let given_back = allocator.empty_cache()?;
    report.row(&format!("empty_cache gave back {}", human_bytes(given_back)));
    assert_eq!(allocator.memory_reserved(), 0, "reserved after empty_cache");
    if let OpenDevice::Sim(driver) = &machine.device {
        driver.assert_clean(); // it has watched every access and every driver call
    }

    println!("\nall driver calls: {}\n", report::calls_by_name(machine));
    print!("{}", allocator.memory_summary());
    Ok(())
}
