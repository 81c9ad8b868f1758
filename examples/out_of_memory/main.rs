//! Runs out of memory in four ways, reads each report, and does what it advises until the same work succeeds.
//!
//! `cargo run --release --example out_of_memory`

#![allow(unreachable_pub)] // a program exports nothing; `pub` means: for the other modules here

#[path = "../tensor/mod.rs"]
mod tensor;

use std::process::ExitCode;
use std::rc::Rc;
use std::sync::{Arc, Mutex, PoisonError};
use tensor::{Adam, DType, Device, Gpt, GptShape, Machine, Options, Result, Tensor, Text, out_of_memory};
use vramalloc::driver::sim::SimDriver;
use vramalloc::size::human_bytes;
use vramalloc::{Cause, Config, Limit, OutOfMemory, Segments};

fn main() -> ExitCode {
    let numbers = [("limit", "MiB that the allocator may reserve [simulated: 1024, GPU: 8192]")];
    tensor::main_of("out_of_memory", &numbers, run)
}

fn run(options: &Options) -> Result<()> {
    let device = Device::open(options.device, SimDriver::builder().capacity(16 << 30))?;
    device.print();
    let limit = options.number("limit", if device.is_simulated() { 1024 } else { 8192 }) << 20;
    // Below, pages are larger than the pieces; above, there is no room to raise the limit.
    let limits = 1024 << 20..=device.driver.capabilities().total_bytes / 2;
    if !limits.contains(&limit) {
        let [least, most] = [limits.start(), limits.end()].map(|bytes| bytes >> 20);
        return Err(format!("--limit {}: must be from {least} to {most} on this device", limit >> 20).into());
    }
    println!("limit       {}", human_bytes(limit));
    large_pieces(&device, limit)?;
    small_pieces(&device, limit)?;
    too_low_a_limit(&device, limit)?;
    // The host computes what a simulated device does: a smaller model, in less memory.
    too_large_a_batch(&device, if device.is_simulated() { 16 << 20 } else { 1 << 30 })?;
    device.assert_clean();
    Ok(())
}

fn config(segments: Segments, limit: u64) -> Config {
    Config::default().segments(segments).limit(Limit::Bytes(limit))
}

/// A tensor of so many bytes.
fn tensor(machine: &Machine, bytes: u64) -> Result<Tensor> {
    machine.empty(&[(bytes / 4) as usize], DType::F32)
}

/// A tensor of one `of`th of the limit.
fn part(machine: &Machine, limit: u64, of: u64) -> Result<Tensor> {
    tensor(machine, limit / of)
}

/// The report in an error that must be one.
fn report(error: &(dyn std::error::Error + 'static)) -> Result<OutOfMemory> {
    let report = out_of_memory(error).ok_or_else(|| format!("another error: {error}"))?;
    println!("\n{report}");
    Ok(report.clone())
}

/// Whether the report advises that.
fn advises(report: &OutOfMemory, words: &str) {
    let advice = report.advice();
    assert!(advice.iter().any(|advice| advice.contains(words)), "advice with '{words}': {advice:?}");
}

/// So many pieces of so many bytes are made and every second goes; then a quarter of the limit is wanted in one. Returns
/// how many pieces stayed.
fn holes(device: &Device, machine: &Machine, limit: u64, pieces: u64, bytes: u64) -> Result<usize> {
    let pieces: Vec<Tensor> = (0..pieces).map(|_| tensor(machine, bytes)).collect::<Result<_>>()?;
    let kept: Vec<Tensor> = pieces.into_iter().step_by(2).collect();
    let large = part(machine, limit, 4)?;
    machine.print_memory(device);
    drop(large);
    Ok(kept.len())
}

/// The report of a run that must end with half of the memory free in pieces.
fn fragmentation(run: Result<usize>) -> Result<OutOfMemory> {
    let Err(error) = run else { return Err("a quarter in one piece should not have been found".into()) };
    let report = report(&*error)?;
    assert_eq!(report.cause, Cause::Fragmentation);
    assert!(report.cached() >= report.requested, "enough is cached");
    Ok(report)
}

/// Two large tensors take the whole limit and go; sixteen smaller ones take their places.
fn large_pieces(device: &Device, limit: u64) -> Result<()> {
    println!("\n== 1. half is free, in pieces");
    let run = |segments| {
        let machine = Machine::cached(device, config(segments, limit))?;
        drop((part(&machine, limit, 2)?, part(&machine, limit, 2)?));
        holes(device, &machine, limit, 16, limit / 16)
    };
    advises(&fragmentation(run(Segments::Fixed))?, "segments:expandable");
    let pieces = run(Segments::Expandable)?;
    println!("done as advised: with segments:expandable the piece is found beside the same {pieces} others");
    Ok(())
}

/// So many small pieces would fill the limit.
const PIECES: u64 = 512;

/// Pieces that are smaller than the pages which expandable segments move.
fn small_pieces(device: &Device, limit: u64) -> Result<()> {
    println!("\n== 2. half is free, in pieces of pages");
    let run = |config| {
        let machine = Machine::cached(device, config)?;
        holes(device, &machine, limit, PIECES * 9 / 10, limit / PIECES)
    };
    let config = config(Segments::Expandable, limit);
    let report = fragmentation(run(config.clone()))?;
    assert!(report.largest_page > limit / PIECES, "pages are larger than the pieces");
    advises(&report, "slack:1.0");
    let pieces = run(config.slack(1.0))?;
    println!("done as advised: with slack:1.0 the piece is found beside the same {pieces} others");
    Ok(())
}

fn too_low_a_limit(device: &Device, limit: u64) -> Result<()> {
    println!("\n== 3. the limit is too low");
    let machine = Machine::cached(device, config(Segments::Auto, limit))?;
    let seen = Arc::new(Mutex::new(Vec::new()));
    let observer = Arc::clone(&seen);
    machine.allocator().on_out_of_memory(move |report| {
        observer.lock().unwrap_or_else(PoisonError::into_inner).push(report.requested);
    });
    let held = (part(&machine, limit, 2)?, part(&machine, limit, 3)?);
    let Err(error) = part(&machine, limit, 2) else { return Err("the limit should have stopped this".into()) };
    let report = report(&*error)?;
    assert_eq!(report.cause, Cause::Limit);
    advises(&report, "raise the limit");
    assert_eq!(*seen.lock().unwrap_or_else(PoisonError::into_inner), [report.requested], "the observer was told");
    let needed = report.allocated + report.segment;
    machine.allocator().set_limit(Limit::Bytes(needed.max(2 * limit)))?;
    part(&machine, limit, 2)?;
    println!("done as advised: with a limit of {} it succeeds", human_bytes(needed.max(2 * limit)));
    drop(held);
    Ok(())
}

fn too_large_a_batch(device: &Device, limit: u64) -> Result<()> {
    println!("\n== 4. the batch is too large");
    let machine = Rc::new(Machine::cached(device, config(Segments::Auto, limit))?);
    let text = Text::load();
    let (length, width) = if device.is_simulated() { (16, 32) } else { (128, 512) };
    let mut gpt = Gpt::new(&machine, GptShape { words: text.words(), length, width, heads: 2, layers: 4 }, 1)?;
    let mut adam = Adam::new(1e-3);
    let mut batch = 512;
    loop {
        let (ids, targets) = text.batch(0, batch, length);
        let step = machine.ids(&ids).and_then(|ids| {
            let targets = machine.ids(&targets)?;
            gpt.train(&machine, &mut adam, (&ids, &targets))
        });
        let error = match step {
            Ok(losses) => {
                let losses = machine.to_vec(&losses)?;
                let loss = losses.iter().sum::<f32>() / losses.len() as f32;
                println!("done as advised: {batch} sequences fit (loss {loss:.3})");
                break;
            }
            Err(error) => error,
        };
        if batch == 512 {
            advises(&report(&*error)?, "make the batch smaller");
        } else if out_of_memory(&*error).is_none() {
            return Err(error);
        }
        println!("{batch} sequences do not fit");
        batch /= 2;
    }
    assert!(batch < 512, "the first batch is meant to be too large");
    Ok(())
}
