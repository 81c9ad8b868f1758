//! `vramalloc convert`.

use crate::Failure;
use clap::{Args as ClapArgs, ValueEnum};
use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::PathBuf;
use vramalloc::pytorch::Snapshot;

#[derive(ClapArgs)]
pub(crate) struct Args {
    /// A memory snapshot of PyTorch or of this program: a pickle or JSON, gzipped or not.
    #[arg(value_name = "FILE")]
    file: PathBuf,
    /// What to write.
    #[arg(short, long, value_name = "FILE")]
    output: PathBuf,
    /// The format.
    #[arg(long, value_enum)]
    to: Format,
}

#[derive(Clone, Copy, ValueEnum)]
enum Format {
    /// A snapshot for torch.cuda._memory_viz and pytorch.org/memory_viz.
    Pickle,
    /// The same as JSON, for pytorch.org/memory_viz and scripts.
    Json,
    /// A timeline for Perfetto, chrome://tracing and TensorBoard's trace viewer.
    Chrome,
}

pub(crate) fn run(args: &Args) -> Result<(), Failure> {
    let snapshot = Snapshot::read(&args.file).map_err(|error| Failure::Usage(error.to_string()))?;
    if matches!(args.to, Format::Json) {
        // Before there is a file.
        snapshot.check_json().map_err(|error| Failure::Run(format!("{}: {error}", args.file.display())))?;
    }
    let write = || {
        let mut to = BufWriter::new(File::create(&args.output)?);
        match args.to {
            Format::Pickle => snapshot.write_pickle(&mut to)?,
            Format::Json => snapshot.write_json(&mut to)?,
            Format::Chrome => snapshot.write_chrome_trace(&mut to)?,
        }
        to.flush()
    };
    write().map_err(|error: std::io::Error| Failure::Run(format!("{}: {error}", args.output.display())))
}
