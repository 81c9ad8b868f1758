//! Mistakes that were found in this crate once and must not come back: each test opens with what used to go wrong.

mod bench;
#[path = "../scenarios/hooked.rs"]
#[allow(dead_code, reason = "it is another test's")]
mod hooked;

mod bookkeeping;
mod out_of_memory;
mod soak;
mod stream_lives;
mod threads;
