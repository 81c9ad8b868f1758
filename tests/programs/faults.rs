//! Programs in which one driver call fails: every call of the program in turn, in every way.
//!
//! Whatever fails, the invariants hold, the statistics are right, and the call that failed succeeds when repeated.
//! At the end nothing is left, but for what the failing call was to give back at a moment when nobody could repeat it.

use crate::machine::Machine;
use crate::program::{Op, Setup};
use crate::{Check, MIB};
use vramalloc::DriverErrorKind;
use vramalloc::driver::sim::Fault;

const KINDS: [DriverErrorKind; 3] =
    [DriverErrorKind::OutOfMemory, DriverErrorKind::Other(719), DriverErrorKind::DeviceLost];

const fn alloc(mib: u64, slot: u8) -> Op {
    Op::Alloc { bytes: mib * MIB, slot }
}

const fn free(index: u8) -> Op {
    Op::Free { index, raw: false }
}

/// Programs that walk every slow path on a device of 64 MiB.
fn all_programs() -> Vec<(&'static str, Vec<Op>)> {
    vec![
        (
            "grow and give back",
            vec![alloc(1, 0), alloc(5, 1), alloc(12, 0), free(0), free(0), Op::EmptyCache, free(0)],
        ),
        (
            "deferred frees",
            vec![
                alloc(12, 1),
                Op::Use { index: 0, slot: 2 },
                free(0),
                Op::Poll,
                alloc(12, 1),
                Op::Complete { slot: 2 },
                Op::Poll,
                alloc(12, 1),
                free(0),
                Op::EmptyCache,
            ],
        ),
        (
            "wait for other streams when the device is full",
            vec![
                alloc(30, 1),
                alloc(30, 2),
                Op::Use { index: 0, slot: 2 },
                Op::Use { index: 1, slot: 1 },
                free(0),
                free(0),
                alloc(28, 1),
                alloc(26, 2),
                free(0),
            ],
        ),
        (
            "release segments of another stream",
            vec![alloc(20, 1), alloc(20, 2), alloc(20, 2), free(1), free(1), alloc(50, 1), free(0), alloc(40, 1)],
        ),
        (
            "destroyed streams",
            vec![
                alloc(8, 1),
                Op::Use { index: 0, slot: 2 },
                Op::Replace { slot: 2 },
                free(0),
                alloc(8, 2),
                Op::Replace { slot: 1 },
                Op::EmptyCache,
                alloc(8, 1),
            ],
        ),
        ("refused", vec![alloc(60, 1), alloc(30, 2), Op::Huge { bytes: 1 << 40, slot: 0 }, free(0), alloc(30, 2)]),
    ]
}

/// Runs a program with its `n`th driver call failing; false if it makes fewer.
fn run(setup: &Setup, ops: &[Op], n: u64, kind: DriverErrorKind) -> Check<bool> {
    let mut machine = Machine::new(setup);
    machine.planned = Some(kind);
    machine.sim.fail(Fault::nth_any(n, kind));
    for op in ops {
        machine.step(op).map_err(|why| format!("{op:?}: {why}"))?;
    }
    let has_struck = machine.has_struck();
    machine.finish_after_fault()?;
    Ok(has_struck)
}

fn sweep(config: &'static str) {
    let setup = Setup { name: "faults", config, capacity: 64 * MIB, largest: 40 * MIB };
    for (name, ops) in all_programs() {
        for kind in KINDS {
            let mut n = 1;
            while run(&setup, &ops, n, kind)
                .unwrap_or_else(|why| panic!("{config:?}, {name:?}, call {n} fails with {kind:?}: {why}"))
            {
                n += 1;
            }
            assert!(n > 5, "{name:?} makes {n} driver calls");
        }
    }
}

#[test]
fn every_call_fails_once() {
    sweep("");
}

#[test]
fn every_call_fails_once_under_a_limit() {
    sweep("limit:62MiB,garbage_collection_threshold:0.5");
}

#[test]
fn every_call_fails_once_with_expandable_segments() {
    sweep("segments:expandable");
}
