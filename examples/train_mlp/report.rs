//! What the example prints: the allocator's figures, in columns.

use crate::ops::Machine;
use std::cell::Cell;
use vramalloc::DeviceChoice;
use vramalloc::size::human_bytes;

const LABEL: usize = 34;

/// Prints the allocator's figures in rows, each with the driver calls since the one before.
pub struct Report<'a> {
    machine: &'a Machine,
    calls: Cell<u64>,
}

impl<'a> Report<'a> {
    pub fn new(machine: &'a Machine) -> Self {
        Self { machine, calls: Cell::new(driver_calls(machine)) }
    }

    /// A new table: its title (or the names of the columns that its labels are made of) and the figures' names.
    pub fn heading(title: &str) {
        println!("\n{title:LABEL$}{:>12}{:>12}{:>12}{:>14}", "allocated", "highest", "reserved", "driver calls");
    }

    pub fn row(&self, label: &str) {
        let allocator = &self.machine.allocator;
        let (calls, bytes) = (driver_calls(self.machine), human_bytes);
        println!(
            "{label:LABEL$}{:>12}{:>12}{:>12}{:>14}",
            bytes(allocator.memory_allocated()),
            bytes(allocator.max_memory_allocated()),
            bytes(allocator.memory_reserved()),
            calls - self.calls.replace(calls)
        );
    }
}

/// The calls that the allocator has made so far. Kernels and copies are the program's own and do not count.
pub fn driver_calls(machine: &Machine) -> u64 {
    machine.allocator.driver().calls().total().calls
}

/// Which device it is and why.
pub fn device(machine: &Machine, choice: DeviceChoice) {
    let driver = machine.allocator.driver();
    let total = human_bytes(driver.capabilities().total_bytes);
    line("device", &format!("{} ({}, {total})", driver.label(), driver.name()));
    let why = match (machine.why_simulated(choice), choice) {
        (Some(error), _) => format!("no GPU can be used: {error}"),
        (None, DeviceChoice::Auto) => "it is the first GPU".to_owned(),
        (None, _) => format!("--device {choice} asks for it"),
    };
    line("because", &why);
}

pub fn line(label: &str, text: &str) {
    println!("{label:<12}{text}");
}

/// The driver calls since the start by name, most frequent first.
pub fn calls_by_name(machine: &Machine) -> String {
    let counts = machine.allocator.driver().calls();
    let mut calls: Vec<_> = counts.iter().map(|(call, count)| (count.calls, call)).collect();
    calls.sort_by_key(|&(count, _)| std::cmp::Reverse(count));
    let names: Vec<String> = calls.iter().map(|(count, call)| format!("{count} {call}")).collect();
    names.join(", ")
}
