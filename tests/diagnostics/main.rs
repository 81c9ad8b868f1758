//! The history, snapshots, and the reports drawn from them.

mod history;
mod viewer;
