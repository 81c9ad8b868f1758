//! The command line, read by hand: three options are not worth a dependency.

use crate::data::TRAIN_ROWS;
use std::str::FromStr;
use vramalloc::DeviceChoice;

pub const USAGE: &str = "\
usage: train_mlp [--device auto|cuda:N|sim] [--steps N] [--batch N]

  --device   where to train: the first GPU if there is one, that GPU, or the simulated device [auto]
  --steps    training steps, 1 to 100000 [120]
  --batch    examples in a step, 16 to 5000 [512]";

#[derive(Clone, Copy)]
pub struct Options {
    pub device: DeviceChoice,
    pub steps: u32,
    pub batch: u32,
}

/// What the command line asks for.
pub enum Request {
    Train(Options),
    Help,
}

pub fn parse(mut words: impl Iterator<Item = String>) -> Result<Request, String> {
    let mut options = Options { device: DeviceChoice::Auto, steps: 120, batch: 512 };
    while let Some(word) = words.next() {
        // Both `--steps 10` and `--steps=10` are common; take either.
        let (name, value) = match word.split_once('=') {
            Some((name, value)) => (name.to_owned(), Some(value.to_owned())),
            None => (word, None),
        };
        let mut value = || value.clone().or_else(|| words.next()).ok_or(format!("{name} needs a value"));
        match name.as_str() {
            "-h" | "--help" => return Ok(Request::Help),
            "--device" => options.device = read(&name, &value()?)?,
            "--steps" => options.steps = within(&name, read(&name, &value()?)?, 1, 100_000)?,
            "--batch" => options.batch = within(&name, read(&name, &value()?)?, 16, TRAIN_ROWS)?,
            _ => return Err(format!("unknown option '{name}'")),
        }
    }
    Ok(Request::Train(options))
}

fn read<T: FromStr<Err: std::fmt::Display>>(name: &str, text: &str) -> Result<T, String> {
    text.parse().map_err(|error| format!("{name} {text}: {error}"))
}

fn within(name: &str, value: u32, least: u32, most: u32) -> Result<u32, String> {
    let fits = (least..=most).contains(&value);
    if fits { Ok(value) } else { Err(format!("{name} {value}: must be {least} to {most}")) }
}
