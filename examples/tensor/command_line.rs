//! The examples' command lines: `--device` and numbers.

use super::{Device, Result};
use std::process::ExitCode;
use vramalloc::DeviceChoice;

/// What the command line asks for.
pub struct Options {
    pub device: DeviceChoice,
    numbers: Vec<(&'static str, Option<u64>)>,
}

impl Options {
    /// The number of that name, or another.
    ///
    /// # Panics
    /// If the program has no such option.
    pub fn number(&self, name: &str, or: u64) -> u64 {
        let found = self.numbers.iter().find(|(option, _)| *option == name);
        found.expect("an option of the program").1.unwrap_or(or)
    }

    pub fn size(&self, name: &str, or: usize) -> usize {
        self.number(name, or as u64) as usize
    }

    /// Sizes with one default for the simulated device and one for GPUs.
    pub fn sizes_on<'a>(&'a self, device: &Device) -> impl Fn(&str, usize, usize) -> usize + use<'a> {
        let is_sim = device.is_simulated();
        move |name, sim, gpu| self.size(name, if is_sim { sim } else { gpu })
    }
}

/// Reads the command line, runs, and says what went wrong. `numbers`: names of options and what they are.
pub fn main_of(
    program: &str,
    numbers: &[(&'static str, &str)],
    run: impl FnOnce(&Options) -> Result<()>,
) -> ExitCode {
    let mut usage = format!("usage: {program} [--device auto|cuda:N|sim]");
    numbers.iter().for_each(|(name, _)| usage += &format!(" [--{name} N]"));
    usage += "\n\n  --device    the first GPU if there is one, that GPU, or the simulated device [auto]";
    numbers.iter().for_each(|(name, about)| usage += &format!("\n  --{name:<10}{about}"));
    match parse(std::env::args().skip(1), numbers) {
        Ok(None) => {
            println!("{usage}");
            ExitCode::SUCCESS
        }
        Ok(Some(options)) => match run(&options) {
            Ok(()) => ExitCode::SUCCESS,
            Err(error) => {
                eprintln!("error: {error}");
                ExitCode::FAILURE
            }
        },
        Err(error) => {
            eprintln!("error: {error}\n\n{usage}");
            ExitCode::from(2)
        }
    }
}

/// `None`: help is asked for.
fn parse(
    mut words: impl Iterator<Item = String>,
    numbers: &[(&'static str, &str)],
) -> std::result::Result<Option<Options>, String> {
    let numbers = numbers.iter().map(|(name, _)| (*name, None)).collect();
    let mut options = Options { device: DeviceChoice::Auto, numbers };
    while let Some(word) = words.next() {
        // Both `--steps 10` and `--steps=10` are common; take either.
        let (name, value) = match word.split_once('=') {
            Some((name, value)) => (name.to_owned(), Some(value.to_owned())),
            None => (word, None),
        };
        if name == "-h" || name == "--help" {
            return Ok(None);
        }
        let value = || value.or_else(|| words.next()).ok_or(format!("{name} needs a value"));
        if name == "--device" {
            options.device = value()?.parse().map_err(|error| format!("--device: {error}"))?;
            continue;
        }
        let of_name = |(option, _): &&mut (&str, Option<u64>)| name.strip_prefix("--") == Some(option);
        let option = options.numbers.iter_mut().find(of_name).ok_or(format!("unknown option '{name}'"))?;
        let value = value()?;
        let number = value.parse().ok().filter(|&number| (1..=1_000_000).contains(&number));
        option.1 = Some(number.ok_or(format!("{name} {value}: must be a number from 1 to 1000000"))?);
    }
    Ok(Some(options))
}
