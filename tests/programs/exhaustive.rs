//! Every program of five operations over two sizes and two streams, on a device that two large blocks fill.

use crate::machine::Machine;
use crate::program::{Op, Setup};
use crate::{Check, MIB};

const LENGTH: usize = 5;
const SMALL: u64 = 600 << 10;
const LARGE: u64 = 11 * MIB;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Step {
    Alloc {
        bytes: u64,
        slot: u8,
    },
    FreeOldest,
    FreeNewest,
    /// Uses the newest on the other stream, and frees it.
    UseAndFree,
    Complete {
        slot: u8,
    },
    EmptyCache,
}

const STEPS: [Step; 10] = [
    Step::Alloc { bytes: SMALL, slot: 1 },
    Step::Alloc { bytes: SMALL, slot: 2 },
    Step::Alloc { bytes: LARGE, slot: 1 },
    Step::Alloc { bytes: LARGE, slot: 2 },
    Step::FreeOldest,
    Step::FreeNewest,
    Step::UseAndFree,
    Step::Complete { slot: 1 },
    Step::Complete { slot: 2 },
    Step::EmptyCache,
];

/// Runs a step; `live` holds the streams of what is live, oldest first.
fn run_step(machine: &mut Machine, live: &mut Vec<u8>, step: Step) -> Check {
    if live.is_empty() && matches!(step, Step::FreeOldest | Step::FreeNewest | Step::UseAndFree) {
        return Ok(()); // an allocation was refused
    }
    match step {
        Step::Alloc { bytes, slot } => {
            let before = machine.addresses.len();
            machine.step(&Op::Alloc { bytes, slot })?;
            if machine.addresses.len() > before {
                live.push(slot);
            }
            Ok(())
        }
        Step::FreeOldest => {
            live.remove(0);
            machine.step(&Op::Free { index: 0, raw: false })
        }
        Step::FreeNewest => {
            live.pop();
            machine.step(&Op::Free { index: live.len() as u8, raw: true })
        }
        Step::UseAndFree => {
            let slot = 3 - live.pop().unwrap_or(1);
            machine.step(&Op::Use { index: live.len() as u8, slot })?;
            machine.step(&Op::Free { index: live.len() as u8, raw: false })
        }
        Step::Complete { slot } => machine.step(&Op::Complete { slot }),
        Step::EmptyCache => machine.step(&Op::EmptyCache),
    }
}

fn run(setup: &Setup, steps: &[Step]) -> Check {
    let mut machine = Machine::new(setup);
    let mut live = Vec::new();
    for &step in steps {
        run_step(&mut machine, &mut live, step)?;
    }
    machine.finish(false)
}

/// Extends a program in every way that does something; runs those of full length, whose beginnings are the rest.
fn extend(setup: &Setup, steps: &mut Vec<Step>, count: &mut u64) {
    if steps.len() == LENGTH {
        *count += 1;
        run(setup, steps).unwrap_or_else(|why| panic!("{}: {steps:?}: {why}", setup.name));
        return;
    }
    let allocs = steps.iter().filter(|step| matches!(step, Step::Alloc { .. })).count();
    let frees =
        steps.iter().filter(|step| matches!(step, Step::FreeOldest | Step::FreeNewest | Step::UseAndFree)).count();
    for step in STEPS {
        let has_effect = match step {
            // The streams are alike, so the first one used is number 1.
            Step::Alloc { slot, .. } => allocs > 0 || slot == 1,
            Step::FreeNewest | Step::UseAndFree => allocs > frees,
            Step::FreeOldest => allocs > frees + 1,
            Step::Complete { .. } => allocs > 0 && steps.last() != Some(&step),
            Step::EmptyCache => frees > 0 && steps.last() != Some(&step),
        };
        if has_effect {
            steps.push(step);
            extend(setup, steps, count);
            steps.pop();
        }
    }
}

fn every_program(name: &'static str, config: &'static str) {
    let setup = Setup { name, config, capacity: 24 * MIB, largest: LARGE };
    let mut count = 0;
    extend(&setup, &mut Vec::new(), &mut count);
    assert!(count > 5_000, "{count} programs are not all");
}

#[test]
fn fixed_segments() {
    every_program("fixed", "");
}

#[test]
fn expandable_segments() {
    every_program("expandable", "segments:expandable");
}
