//! The statistics as a table for people, with the rows and the layout of PyTorch's `memory_summary`.

use crate::stats::{MemoryStats, Stat, StatArray};
use std::fmt::Write;

const WIDTH: usize = 75;

enum Unit {
    Bytes,
    Count,
}

/// The table; `abbreviated` leaves out the rows by size class.
pub(crate) fn table(stats: &MemoryStats, device: u32, abbreviated: bool) -> String {
    let mut text = String::new();
    let mut line = |content: &str| {
        let _ = writeln!(text, "|{content:<WIDTH$}|");
    };
    let (heavy, light) = ("=".repeat(WIDTH), "-".repeat(WIDTH));
    line(&heavy);
    line(&format!("{:^WIDTH$}", format!("vramalloc CUDA memory summary, device ID {device}")));
    line(&light);
    line(&format!(
        "  {:9}CUDA OOMs: {:<12}|      cudaMalloc retries: {:<8}  ",
        "", stats.num_ooms, stats.num_alloc_retries
    ));
    line(&heavy);
    line("        Metric         | Cur Usage  | Peak Usage | Tot Alloc  | Tot Freed  ");
    for (label, array, unit) in [
        ("Allocated memory", &stats.allocated_bytes, Unit::Bytes),
        ("Active memory", &stats.active_bytes, Unit::Bytes),
        ("Requested memory", &stats.requested_bytes, Unit::Bytes),
        ("GPU reserved memory", &stats.reserved_bytes, Unit::Bytes),
        ("Non-releasable memory", &stats.inactive_split_bytes, Unit::Bytes),
        ("Allocations", &stats.allocation, Unit::Count),
        ("Active allocs", &stats.active, Unit::Count),
        ("GPU reserved segments", &stats.segment, Unit::Count),
        ("Non-releasable allocs", &stats.inactive_split, Unit::Count),
    ] {
        line(&light);
        for row in rows(label, array, &unit, abbreviated) {
            line(&row);
        }
    }
    for (label, stat) in
        [("Oversize allocations", stats.oversize_allocations), ("Oversize GPU segments", stats.oversize_segments)]
    {
        line(&light);
        line(&row(label, &stat, &stat, &Unit::Count));
    }
    line(&heavy);
    text
}

fn rows(label: &str, array: &StatArray, unit: &Unit, abbreviated: bool) -> Vec<String> {
    let mut rows = vec![row(label, &array.all, &array.all, unit)];
    if !abbreviated {
        rows.push(row("      from large pool", &array.large_pool, &array.all, unit));
        rows.push(row("      from small pool", &array.small_pool, &array.all, unit));
    }
    rows
}

/// One row; units are chosen by the row over all pools, so that the three rows of a figure compare.
fn row(label: &str, stat: &Stat, all: &Stat, unit: &Unit) -> String {
    let cell = |value: u64, reference: u64| match unit {
        Unit::Bytes => bytes_cell(value, reference),
        Unit::Count => count_cell(value, reference),
    };
    format!(
        " {label:<21} | {} | {} | {} | {} ",
        cell(stat.current, all.current),
        cell(stat.peak, all.peak),
        cell(stat.allocated, all.allocated),
        cell(stat.freed, all.freed)
    )
}

/// A count with its noun.
pub(crate) fn counted(count: usize, noun: &str) -> String {
    format!("{count} {noun}{}", if count == 1 { "" } else { "s" })
}

fn bytes_cell(mut value: u64, mut reference: u64) -> String {
    const UNITS: [&str; 6] = ["B  ", "KiB", "MiB", "GiB", "TiB", "PiB"];
    let mut unit = 0;
    while reference >= 768 * 1024 && unit + 1 < UNITS.len() {
        reference /= 1024;
        value /= 1024;
        unit += 1;
    }
    format!("{value:>6} {}", UNITS[unit])
}

fn count_cell(mut value: u64, mut reference: u64) -> String {
    const UNITS: [&str; 3] = [" ", "K", "M"];
    let mut unit = 0;
    while reference >= 750_000 && unit + 1 < UNITS.len() {
        reference /= 1000;
        value /= 1000;
        unit += 1;
    }
    format!("{value:>7} {} ", UNITS[unit])
}
