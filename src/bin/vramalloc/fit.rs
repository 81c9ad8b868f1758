//! `vramalloc fit`.

use crate::replay::print;
use crate::setup::{Format, config_of, parse_capacity};
use crate::{Failure, input, input::Input};
use clap::Args as ClapArgs;
use comfy_table::{CellAlignment, Table, presets::UTF8_FULL_CONDENSED};
use serde::Serialize;
use std::path::PathBuf;
use vramalloc::driver::sim::SimDriver;
use vramalloc::replay::Replay;
use vramalloc::size::{SEGMENT_STEP_BYTES, human_bytes};
use vramalloc::trace::Trace;
use vramalloc::{CachingAllocator, Config, Error, OutOfMemory, Segments, StreamHandle};

#[derive(ClapArgs)]
pub(crate) struct Args {
    /// Recorded runs: traces, or memory snapshots of PyTorch or of this program (pickle or JSON); gzipped or not.
    #[arg(required = true, value_name = "FILE")]
    files: Vec<PathBuf>,
    /// Does it fit in so many bytes (24GiB)? Without: the least that it fits in. This is memory for the allocator: a
    /// CUDA context and libraries need some of the card, too.
    #[arg(long, value_name = "BYTES", value_parser = parse_capacity)]
    capacity: Option<u64>,
    /// The allocator's configuration, as in VRAMALLOC_CONF, which it replaces; both kinds of segments are tried.
    #[arg(long, value_name = "STRING")]
    config: Option<String>,
    /// A table for people, or a JSON object a line and run.
    #[arg(long, value_enum, default_value_t = Format::Table)]
    format: Format,
}

/// What a run needs under one kind of segments.
#[derive(Serialize)]
struct Need {
    segments: &'static str,
    /// With a capacity: whether it fits.
    #[serde(skip_serializing_if = "Option::is_none")]
    fits: Option<bool>,
    /// Without: the least that it fits in.
    #[serde(skip_serializing_if = "Option::is_none")]
    smallest: Option<u64>,
    /// The highest reserved bytes, in that memory.
    peak_reserved: u64,
    #[serde(skip)]
    out_of_memory: Option<Box<OutOfMemory>>,
}

/// One run's answer.
#[derive(Serialize)]
struct Answer<'a> {
    run: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    capacity: Option<u64>,
    peak_requested: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    recorded_peak_reserved: Option<u64>,
    needs: Vec<Need>,
}

pub(crate) fn run(args: &Args) -> Result<(), Failure> {
    let config = config_of(args.config.as_deref())?;
    let mut runs = Vec::new();
    for file in &args.files {
        runs.extend(input::read(file)?);
    }
    let mut misfits = Vec::new();
    for run in &runs {
        let answer = answer(args, &config, run)?;
        if args.capacity.is_some() && answer.needs.iter().all(|need| need.fits == Some(false)) {
            misfits.push(run.trace.name.clone());
        }
        print(&match args.format {
            Format::Json => serde_json::to_string(&answer).unwrap_or_default(),
            Format::Table => table(&answer),
        })?;
    }
    match (args.capacity, misfits.is_empty()) {
        (Some(capacity), false) => {
            Err(Failure::Run(format!("{} does not fit in {}", misfits.join(", "), human_bytes(capacity))))
        }
        _ => Ok(()),
    }
}

fn answer<'a>(args: &Args, config: &Config, run: &'a Input) -> Result<Answer<'a>, Failure> {
    let kinds = [("fixed", Segments::Fixed), ("expandable", Segments::Expandable)];
    let needs = kinds.map(|(name, segments)| {
        let config = config.clone().segments(segments);
        match args.capacity {
            Some(capacity) => try_in(&config, &run.trace, capacity).map(|outcome| Need {
                segments: name,
                fits: Some(outcome.out_of_memory.is_none()),
                smallest: None,
                peak_reserved: outcome.peak_reserved,
                out_of_memory: outcome.out_of_memory,
            }),
            None => smallest(&config, &run.trace).map(|(smallest, peak_reserved)| Need {
                segments: name,
                fits: None,
                smallest: Some(smallest),
                peak_reserved,
                out_of_memory: None,
            }),
        }
    });
    Ok(Answer {
        run: &run.trace.name,
        capacity: args.capacity,
        peak_requested: run.trace.peak_requested,
        recorded_peak_reserved: run.recorded.map(|usage| usage.reserved),
        needs: needs.into_iter().collect::<Result<_, _>>()?,
    })
}

struct Outcome {
    peak_reserved: u64,
    out_of_memory: Option<Box<OutOfMemory>>,
}

/// Replays the run once on a device of `capacity` bytes.
fn try_in(config: &Config, trace: &Trace, capacity: u64) -> Result<Outcome, Failure> {
    let failed = |error: Error| Failure::Run(format!("{}: {error}", trace.name));
    let sim = SimDriver::builder().backing(false).log(false).capacity(capacity).build();
    let allocator = CachingAllocator::new(sim.clone(), config.clone()).map_err(|error| match error {
        Error::InvalidConfig(_) => Failure::Usage(error.to_string()),
        error => failed(error),
    })?;
    let streams: Vec<_> = trace
        .streams
        .iter()
        .map(|number| if *number == 0 { StreamHandle::DEFAULT } else { sim.create_stream() })
        .collect();
    let mut replay = Replay::new(&allocator, trace, &streams).map_err(failed)?;
    let out_of_memory = match replay.pass() {
        Ok(_) => None,
        Err(Error::OutOfMemory(report)) => Some(report),
        Err(error) => return Err(failed(error)),
    };
    Ok(Outcome { peak_reserved: allocator.max_memory_reserved(), out_of_memory })
}

/// The smallest capacity that the run survives, in steps of 2 MiB, and what was reserved there at most. Bisected: with
/// one step less it does not survive.
fn smallest(config: &Config, trace: &Trace) -> Result<(u64, u64), Failure> {
    let steps = |bytes: u64| bytes.div_ceil(SEGMENT_STEP_BYTES);
    let unlimited = try_in(config, trace, 1 << 50)?;
    if let Some(report) = unlimited.out_of_memory {
        return Err(Failure::Run(format!("{}: fits nowhere: {report}", trace.name)));
    }
    // Survives at `fits`, does not at `too_small`.
    let (mut too_small, mut fits) = (0, steps(unlimited.peak_reserved).max(1));
    let mut reserved = unlimited.peak_reserved;
    let mut first = Some(steps(trace.peak_requested).max(1));
    while fits - too_small > 1 {
        // The live peak itself is the best guess, and often the answer.
        let middle = match first.take() {
            Some(guess) if guess < fits => guess,
            _ => too_small + (fits - too_small) / 2,
        };
        let outcome = try_in(config, trace, middle * SEGMENT_STEP_BYTES)?;
        if outcome.out_of_memory.is_none() {
            (fits, reserved) = (middle, outcome.peak_reserved);
        } else {
            too_small = middle;
        }
    }
    Ok((fits * SEGMENT_STEP_BYTES, reserved))
}

fn table(answer: &Answer<'_>) -> String {
    let bytes = |bytes: u64| format!("{} ({bytes} bytes)", human_bytes(bytes));
    let mut table = Table::new();
    table.load_preset(UTF8_FULL_CONDENSED);
    table.set_header([
        answer.run.to_owned(),
        answer.capacity.map_or(String::new(), |capacity| format!("in {}", bytes(capacity))),
    ]);
    table.add_row(["live at the peak".to_owned(), bytes(answer.peak_requested)]);
    if let Some(reserved) = answer.recorded_peak_reserved {
        table.add_row(["reserved when it was recorded".to_owned(), bytes(reserved)]);
    }
    for need in &answer.needs {
        if let Some(smallest) = need.smallest {
            table.add_row([format!("{} segments need", need.segments), bytes(smallest)]);
        } else if let Some(report) = &need.out_of_memory {
            let text = format!(
                "no: {} more with {} allocated, {} reserved",
                human_bytes(report.requested),
                human_bytes(report.allocated),
                human_bytes(report.reserved)
            );
            table.add_row([format!("fits with {} segments", need.segments), text]);
        } else {
            let text = format!("yes, reserving {}", bytes(need.peak_reserved));
            table.add_row([format!("fits with {} segments", need.segments), text]);
        }
    }
    if let Some(column) = table.column_mut(1) {
        column.set_cell_alignment(CellAlignment::Right);
    }
    table.to_string()
}
