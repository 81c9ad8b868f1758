//! `vramalloc replay`.

use crate::setup::{Format, Opened, Setup, failed};
use crate::{Failure, input};
use clap::Args as ClapArgs;
use comfy_table::{CellAlignment, Table, presets::UTF8_FULL_CONDENSED};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use serde::Serialize;
use std::io::{IsTerminal, Write};
use std::path::PathBuf;
use vramalloc::driver::Call;
use vramalloc::replay::{Replay, Report};
use vramalloc::size::human_bytes;
use vramalloc::trace::Trace;
use vramalloc::{CachingAllocator, Config, DeviceChoice, Error};

#[derive(ClapArgs)]
pub(crate) struct Args {
    /// Traces: files of lines a,ID,BYTES,STREAM and f,ID, or memory snapshots of PyTorch or of this program (pickle or
    /// JSON); gzipped or not.
    #[arg(required = true, value_name = "FILE")]
    files: Vec<PathBuf>,
    #[command(flatten)]
    setup: Setup,
    /// How often each trace is replayed in the same allocator [default: 2; 1 with --snapshot].
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..))]
    passes: Option<u32>,
    /// auto (a GPU if there is one), cuda:N or sim.
    #[arg(long, default_value = "auto")]
    device: DeviceChoice,
    /// Writes a memory snapshot in PyTorch's schema, with all events, as it is at the end of the trace (or where it ran
    /// out of memory): a pickle, or JSON if the name ends in .json. One trace only.
    #[arg(long, value_name = "FILE")]
    snapshot: Option<PathBuf>,
    /// By bare addresses, as a caller of the C interface does, instead of handles.
    #[arg(long)]
    by_address: bool,
    /// Writes the statistics at the same moment, under the keys of torch.cuda.memory_stats(), as JSON. One trace only.
    #[arg(long, value_name = "FILE")]
    stats: Option<PathBuf>,
    /// A table for people, or a JSON object a line and trace.
    #[arg(long, value_enum, default_value_t = Format::Table)]
    format: Format,
}

/// One line of `--format json`.
#[derive(Serialize)]
struct Json<'a> {
    trace: &'a str,
    segments: &'a str,
    device: &'a str,
    events: usize,
    peak_requested: u64,
    peak_allocated: u64,
    peak_reserved: u64,
    ratio: f64,
    passes: usize,
    driver_calls: Vec<u64>,
    driver_us: Vec<f64>,
    ns_per_event: Vec<f64>,
    retries: u64,
    ooms: u64,
    #[serde(flatten)]
    pages: Option<Pages>,
}

/// What expandable segments did with pages, pass by pass.
#[derive(Serialize)]
struct Pages {
    maps: Vec<u64>,
    unmaps: Vec<u64>,
    creates: Vec<u64>,
    releases: Vec<u64>,
}

impl Pages {
    fn new(report: &Report) -> Self {
        let calls = |call| report.passes.iter().map(|pass| pass.driver.get(call).calls).collect();
        Self {
            maps: calls(Call::Map),
            unmaps: calls(Call::Unmap),
            creates: calls(Call::CreatePages),
            releases: calls(Call::ReleasePages),
        }
    }
}

/// One trace's result, ready to print.
struct Outcome {
    trace: String,
    expandable: bool,
    device: String,
    report: Report,
}

impl Outcome {
    fn segments(&self) -> &'static str {
        if self.expandable { "expandable" } else { "fixed" }
    }
}

impl Args {
    fn passes(&self) -> u32 {
        self.passes.unwrap_or(if self.snapshot.is_some() { 1 } else { 2 })
    }

    /// Whether something is written that is one run's.
    fn is_of_one_run(&self) -> bool {
        self.snapshot.is_some() || self.stats.is_some()
    }

    /// Writes what was asked for, as it is now.
    fn write(&self, allocator: &CachingAllocator) -> Result<(), Failure> {
        let failed = |path: &PathBuf, error: std::io::Error| Failure::Run(format!("{}: {error}", path.display()));
        if let Some(path) = &self.snapshot {
            allocator.pytorch_snapshot().save(path).map_err(|error| failed(path, error))?;
        }
        if let Some(path) = &self.stats {
            let text = serde_json::to_string_pretty(&allocator.memory_stats().to_map()).unwrap_or_default();
            std::fs::write(path, text + "\n").map_err(|error| failed(path, error))?;
        }
        Ok(())
    }
}

pub(crate) fn run(args: &Args) -> Result<(), Failure> {
    let config = args.setup.config()?;
    if args.is_of_one_run() && args.files.len() > 1 {
        return Err(Failure::Usage("--snapshot and --stats take one trace at a time".to_owned()));
    }
    // All input is read before anything is printed.
    let mut traces = Vec::new();
    for file in &args.files {
        traces.extend(input::read(file)?.into_iter().map(|input| input.trace));
    }
    if args.is_of_one_run() && traces.len() > 1 {
        return Err(Failure::Usage("--snapshot and --stats take a run of one device".to_owned()));
    }
    let progress = progress(traces.len() as u64 * u64::from(args.passes()));
    for trace in &traces {
        progress.set_message(trace.name.clone());
        let outcome = replay(args, &config, trace, &progress);
        let outcome = outcome.inspect_err(|_| progress.finish_and_clear())?;
        let text = match args.format {
            Format::Json => json(&outcome),
            Format::Table => table(&outcome),
        };
        progress.suspend(|| print(&text))?;
    }
    progress.finish_and_clear();
    Ok(())
}

/// Prints to standard output; a reader that went away ends the program quietly.
pub(crate) fn print(text: &str) -> Result<(), Failure> {
    match writeln!(std::io::stdout().lock(), "{text}") {
        Err(error) if error.kind() == std::io::ErrorKind::BrokenPipe => std::process::exit(0),
        result => result.map_err(|error| Failure::Run(format!("standard output: {error}"))),
    }
}

fn progress(length: u64) -> ProgressBar {
    if !std::io::stderr().is_terminal() {
        return ProgressBar::hidden();
    }
    let style = ProgressStyle::with_template("{bar:40} {pos}/{len} passes  {msg}");
    let bar = ProgressBar::with_draw_target(Some(length), ProgressDrawTarget::stderr());
    bar.with_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()))
}

/// Replays one trace in an allocator of its own.
fn replay(args: &Args, config: &Config, trace: &Trace, progress: &ProgressBar) -> Result<Outcome, Failure> {
    let passes_kept = if args.snapshot.is_some() { args.passes() } else { 0 };
    let Opened { allocator, streams } = args.setup.open(args.device, config.clone(), trace, passes_kept)?;
    let failed = |error: Error| failed(trace, &error);
    let mut replay = Replay::new(&allocator, trace, &streams).map_err(failed)?;
    if args.by_address {
        replay = replay.by_address();
    }
    for pass in 1..=args.passes() {
        let mut written = Ok(());
        let result = replay.pass_then(|allocator| {
            let is_last = pass == args.passes() || allocator.memory_stats().num_ooms > 0;
            if is_last {
                written = args.write(allocator);
            }
        });
        result.map_err(failed).map(drop).and(written)?;
        progress.inc(1);
    }
    Ok(Outcome {
        trace: trace.name.clone(),
        expandable: allocator.is_expandable(),
        device: allocator.driver().label(),
        report: replay.report(),
    })
}

#[allow(clippy::cast_precision_loss)]
fn ns_per_event(report: &Report) -> Vec<f64> {
    report.passes.iter().map(|pass| pass.elapsed.as_nanos() as f64 / report.events as f64).collect()
}

#[allow(clippy::cast_precision_loss)]
fn driver_us(report: &Report) -> Vec<f64> {
    report.passes.iter().map(|pass| pass.driver.total().nanos as f64 / 1000.0).collect()
}

fn json(outcome: &Outcome) -> String {
    let report = &outcome.report;
    let line = Json {
        trace: &outcome.trace,
        segments: outcome.segments(),
        device: &outcome.device,
        events: report.events,
        peak_requested: report.peak_requested,
        peak_allocated: report.peak_allocated,
        peak_reserved: report.peak_reserved,
        ratio: report.ratio(),
        passes: report.passes.len(),
        driver_calls: report.passes.iter().map(|pass| pass.driver.total().calls).collect(),
        driver_us: driver_us(report),
        ns_per_event: ns_per_event(report),
        retries: report.retries,
        ooms: report.ooms,
        pages: outcome.expandable.then(|| Pages::new(report)),
    };
    serde_json::to_string(&line).unwrap_or_default()
}

fn table(outcome: &Outcome) -> String {
    let report = &outcome.report;
    let bytes = |bytes: u64| format!("{} ({bytes} bytes)", human_bytes(bytes));
    let mut table = Table::new();
    table.load_preset(UTF8_FULL_CONDENSED);
    table.set_header([outcome.trace.clone(), format!("{} segments on {}", outcome.segments(), outcome.device)]);
    table.add_row(["events".to_owned(), report.events.to_string()]);
    table.add_row(["peak requested".to_owned(), bytes(report.peak_requested)]);
    table.add_row(["peak allocated".to_owned(), bytes(report.peak_allocated)]);
    table.add_row(["peak reserved".to_owned(), bytes(report.peak_reserved)]);
    table.add_row(["ratio (reserved / requested)".to_owned(), format!("{:.4}", report.ratio())]);
    let modelled = if outcome.device == "sim" { "modelled" } else { "measured" };
    let passes = report.passes.iter().zip(driver_us(report)).zip(ns_per_event(report));
    for (number, ((pass, us), ns)) in passes.enumerate() {
        let text = format!(
            "{} driver calls, {:.2} ms {modelled}, {ns:.1} ns/event",
            pass.driver.total().calls,
            us / 1000.0
        );
        table.add_row([format!("pass {}", number + 1), text]);
    }
    // What else the machine does only adds.
    let steady = ns_per_event(report).into_iter().skip(1).fold(f64::INFINITY, f64::min);
    if report.passes.len() > 2 {
        table.add_row(["least from pass 2 on".to_owned(), format!("{steady:.1} ns/event")]);
    }
    if outcome.expandable {
        let pages = Pages::new(report);
        let kinds = [
            ("maps", pages.maps),
            ("unmaps", pages.unmaps),
            ("creates", pages.creates),
            ("releases", pages.releases),
        ];
        for (name, counts) in kinds {
            let counts: Vec<_> = counts.iter().map(u64::to_string).collect();
            table.add_row([format!("{name} a pass"), counts.join(", ")]);
        }
    }
    table.add_row(["retries".to_owned(), report.retries.to_string()]);
    if let Some(column) = table.column_mut(1) {
        column.set_cell_alignment(CellAlignment::Right);
    }
    table.to_string()
}
