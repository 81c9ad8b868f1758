//! The CUDA driver and cudarc's traits, on the fake `libcuda.so.1`: no GPU is needed.
//!
//! The tests take turns, as they share the devices and count calls. They skip, with a line on stderr, where there is a
//! real driver.
#![cfg(all(feature = "cuda", target_os = "linux"))]

#[path = "../support/fake.rs"]
mod fake;

mod bench;
mod captures;
mod costs;
mod errors;
mod forks;
mod lent;
mod pinned;
mod retired;
mod slices;
mod streams;
mod threads;
mod traits;
