//! `vramalloc view`.

use crate::setup::{Setup, failed};
use crate::{Failure, input};
use clap::Args as ClapArgs;
use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::PathBuf;
use vramalloc::DeviceChoice;
use vramalloc::pytorch::Snapshot;
use vramalloc::replay::Replay;
use vramalloc::trace::Trace;

#[derive(ClapArgs)]
pub(crate) struct Args {
    /// A memory snapshot of PyTorch or of this program (pickle or JSON), or a trace, which is replayed on the simulated
    /// device up to its end or to where it runs out of memory; gzipped or not.
    #[arg(value_name = "FILE")]
    file: PathBuf,
    /// The HTML page to write.
    #[arg(short, long, value_name = "FILE")]
    output: PathBuf,
    #[command(flatten)]
    setup: Setup,
}

pub(crate) fn run(args: &Args) -> Result<(), Failure> {
    let snapshot = match input::open(&args.file)? {
        input::Kind::Snapshot(_) if args.setup.is_given() => {
            return Err(Failure::Usage(format!(
                "{}: --segments, --capacity and --config are for traces, and this is a snapshot; to see what its run \
                 would do under other settings, give it to `vramalloc replay --snapshot` first",
                args.file.display()
            )));
        }
        input::Kind::Snapshot(snapshot) => snapshot,
        input::Kind::Trace(trace) => replayed(args, &trace)?,
    };
    let write = || {
        let mut to = BufWriter::new(File::create(&args.output)?);
        snapshot.write_page(&input::name_of(&args.file), &mut to)?;
        to.flush()
    };
    write().map_err(|error: std::io::Error| Failure::Run(format!("{}: {error}", args.output.display())))
}

/// What a run leaves at its end; one that fails is told of, and shown up to there.
fn replayed(args: &Args, trace: &Trace) -> Result<Snapshot, Failure> {
    let opened = args.setup.open(DeviceChoice::Sim, args.setup.config()?, trace, 1)?;
    let mut replay =
        Replay::new(&opened.allocator, trace, &opened.streams).map_err(|error| failed(trace, &error))?;
    let mut snapshot = Snapshot::default();
    let result = replay.pass_then(|allocator| snapshot = allocator.pytorch_snapshot());
    if let Err(error) = result {
        eprintln!("vramalloc: {}: {error}\nThe page shows the run up to there.", trace.name);
    }
    Ok(snapshot)
}
