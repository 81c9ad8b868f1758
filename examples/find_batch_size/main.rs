//! The largest batch that fits: doubles until the memory does not suffice, catches the error, recovers and bisects. The two
//! largest peaks so far predict the next one, so that a batch that cannot fit is known before it fails.
//!
//! `cargo run --release --example find_batch_size`

#![allow(unreachable_pub)] // a program exports nothing; `pub` means: for the other modules here

#[path = "../tensor/mod.rs"]
mod tensor;

use std::process::ExitCode;
use std::rc::Rc;
use tensor::{Adam, Device, Gpt, GptShape, Machine, Options, Result, Text, out_of_memory};
use vramalloc::driver::sim::SimDriver;
use vramalloc::size::human_bytes;
use vramalloc::{Config, Limit, Segments};

fn main() -> ExitCode {
    let numbers = [
        ("limit", "MiB that the allocator may reserve [simulated: 24, GPU: 8192]"),
        ("width", "numbers for each position [32, 512]"),
        ("length", "characters in a sequence [16, 128]"),
        ("layers", "[2, 8]"),
    ];
    tensor::main_of("find_batch_size", &numbers, run)
}

/// How far a prediction may be off, as a part; where it is more than an eighth of the limit, as blocks that are not split
/// for a small rest count for much below.
const TOLERANCE: f64 = 0.03;
/// How much more may be reserved than is allocated, as a part.
const RESERVED: f64 = 0.05;
/// What may be reserved and not used: a page of 2 MiB partly so in each of the pools for small and large requests.
const PAGES: f64 = (4 << 20) as f64;

fn run(options: &Options) -> Result<()> {
    let device = Device::open(options.device, SimDriver::builder().capacity(1 << 30))?;
    device.print();
    let pick = options.sizes_on(&device);
    let limit = (pick("limit", 24, 8192) as u64) << 20;
    let text = Text::load();
    let (width, length, layers) = (pick("width", 32, 512), pick("length", 16, 128), pick("layers", 2, 8));
    let shape = GptShape { words: text.words(), length, width, heads: 2, layers };
    let config = Config::default().segments(Segments::Auto).limit(Limit::Bytes(limit));
    let mut search = Search::new(&device, config, shape, &text)?;
    println!("limit       {}; the model and Adam's state hold {}\n", human_bytes(limit), human_bytes(search.base));
    println!("{:>7}{:>16}{:>16}{:>10}  result", "batch", "predicted", "peak", "off by");

    let (mut fits, mut fails) = (0, 4);
    while search.fits(fails, limit)? {
        (fits, fails) = (fails, 2 * fails);
    }
    while fails - fits > 1 {
        let middle = usize::midpoint(fits, fails);
        if search.fits(middle, limit)? {
            fits = middle;
        } else {
            fails = middle;
        }
    }
    let each = search.per_sample().ok_or("two batches must fit")?;
    println!("\nlargest     {fits} sequences; {} for each more", human_bytes(each as u64));
    // What ran out of memory has left nothing behind: the largest batch runs again.
    assert!(search.fits(fits, limit)?, "the largest batch fits after all failures");
    search.machine.print_memory(&device);
    drop(search);
    device.assert_clean();
    Ok(())
}

struct Search<'a> {
    machine: Rc<Machine>,
    gpt: Gpt,
    adam: Adam,
    text: &'a Text,
    /// Held between steps.
    base: u64,
    /// Batches that fitted, and their peaks.
    peaks: Vec<(usize, u64)>,
}

impl<'a> Search<'a> {
    fn new(device: &Device, config: Config, shape: GptShape, text: &'a Text) -> Result<Self> {
        let machine = Rc::new(Machine::cached(device, config)?);
        let gpt = Gpt::new(&machine, shape, 1)?;
        let mut search = Self { machine, gpt, adam: Adam::new(1e-4), text, base: 0, peaks: Vec::new() };
        search.step(1)?; // makes the optimizer's state
        search.base = search.machine.allocator().memory_allocated();
        Ok(search)
    }

    fn step(&mut self, batch: usize) -> Result<()> {
        let (ids, targets) = self.text.batch(0, batch, self.gpt.shape.length);
        let batch = (self.machine.ids(&ids)?, self.machine.ids(&targets)?);
        self.gpt.train(&self.machine, &mut self.adam, (&batch.0, &batch.1))?;
        Ok(())
    }

    /// Trains on such a batch, and says whether that was possible.
    fn fits(&mut self, batch: usize, limit: u64) -> Result<bool> {
        let machine = Rc::clone(&self.machine);
        let allocator = machine.allocator();
        allocator.empty_cache()?; // what other sizes left in the cache is not to decide
        allocator.reset_peak_memory_stats();
        let predicted = self.predict(batch);
        let shown = predicted.map_or("-".to_owned(), human_bytes);
        let result = self.step(batch);
        assert_eq!(allocator.memory_allocated(), self.base, "a step leaves nothing behind, a failed one neither");
        let error = match result {
            Ok(()) => {
                let peak = allocator.max_memory_allocated();
                let off = predicted.map(|predicted| predicted as f64 / peak as f64 - 1.0);
                let shown_off = off.map_or("-".to_owned(), |off| format!("{:+.2} %", off * 100.0));
                println!("{batch:>7}{shown:>16}{:>16}{shown_off:>10}  fits", human_bytes(peak));
                let is_large = peak > limit / 8;
                assert!(off.is_none_or(|off| !is_large || off.abs() < TOLERANCE), "the peak must be as predicted");
                if self.peaks.last().is_none_or(|&(largest, _)| largest < batch) {
                    self.peaks.push((batch, peak));
                }
                return Ok(true);
            }
            Err(error) => error,
        };
        // Only being out of memory is an answer; all else is a failure.
        let Some(report) = out_of_memory(&*error) else { return Err(error) };
        println!(
            "{batch:>7}{shown:>16}{:>16}{:>10}  {} more were refused: {}",
            "-",
            "-",
            human_bytes(report.requested),
            report.cause
        );
        if let Some(predicted) = predicted {
            assert!(
                predicted as f64 > limit as f64 * (1.0 - RESERVED) - PAGES,
                "{predicted} bytes were predicted: this batch should have fitted"
            );
        }
        Ok(false)
    }

    /// Bytes for each sequence more, by the two largest batches that fitted.
    fn per_sample(&self) -> Option<f64> {
        let [.., (few, low), (many, high)] = self.peaks[..] else { return None };
        Some((high - low) as f64 / (many - few) as f64)
    }

    fn predict(&self, batch: usize) -> Option<u64> {
        let (few, low) = *self.peaks.last()?;
        Some((low as f64 + self.per_sample()? * (batch as f64 - few as f64)) as u64)
    }
}
