//! The command line program: replays recorded runs, tells whether they would fit, and shows them.

mod convert;
mod fit;
mod input;
mod replay;
mod setup;
mod view;

use clap::{Parser, Subcommand};
use std::process::ExitCode;

/// A caching allocator for GPU memory: tools.
#[derive(Parser)]
#[command(version = env!("VRAMALLOC_VERSION"), about, arg_required_else_help = true)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Replays recorded allocation traces and prints what they needed and what the driver cost.
    ///
    /// Exit status: 0; 1 if a trace ran out of memory or the device failed; 2 if the input or an option is wrong.
    Replay(replay::Args),
    /// Tells whether recorded runs would fit in a given memory, or how much they need, under each kind of segment.
    ///
    /// Exit status: 0; 1 if a run fits under neither kind; 2 if the input or an option is wrong.
    Fit(fit::Args),
    /// Writes a memory snapshot in another format, or as a timeline for trace viewers.
    ///
    /// Exit status: 0; 1 if the output cannot be written; 2 if the input or an option is wrong.
    Convert(convert::Args),
    /// Writes one HTML page that shows what memory did, for any browser and without a network.
    ///
    /// Exit status: 0; 1 if the page cannot be written or the device failed; 2 if the input or an option is wrong.
    View(view::Args),
}

/// How the program ends when it does not end well.
enum Failure {
    /// The input or an option is wrong: status 2.
    Usage(String),
    /// The work itself failed: status 1.
    Run(String),
}

fn main() -> ExitCode {
    let result = match Cli::parse().command {
        Command::Replay(args) => replay::run(&args),
        Command::Fit(args) => fit::run(&args),
        Command::Convert(args) => convert::run(&args),
        Command::View(args) => view::run(&args),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(Failure::Usage(text)) => {
            eprintln!("vramalloc: {text}");
            ExitCode::from(2)
        }
        Err(Failure::Run(text)) => {
            eprintln!("vramalloc: {text}");
            ExitCode::from(1)
        }
    }
}
