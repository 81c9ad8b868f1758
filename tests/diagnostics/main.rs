//! The history, snapshots, and the reports drawn from them.

mod breakdown;
mod chrome;
#[cfg(feature = "replay")]
mod files;
mod fragmentation;
mod history;
mod leaks;
mod private;
mod viewer;
