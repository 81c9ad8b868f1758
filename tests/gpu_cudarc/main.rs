//! Buffers in a real program on a GPU: cuBLAS, cuRAND, kernels compiled by NVRTC, copies on a second stream.
//!
//! Where a GPU or one of those libraries is missing each test skips with a line on stderr; with `VRAMALLOC_REQUIRE_GPU`
//! set they fail instead.
#![cfg(feature = "cuda")]

mod loader;
mod step;

use cudarc::driver::CudaContext;
use libloading::Library;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// The first GPU, for one test at a time.
struct Gpu {
    context: Arc<CudaContext>,
    _turn: MutexGuard<'static, ()>,
}

/// The first GPU if it and all `libraries` are there, or `None` with the reason on stderr.
fn gpu(test: &str, libraries: &[&str]) -> Option<Gpu> {
    static TURN: Mutex<()> = Mutex::new(());
    let turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    let missing = vramalloc::why_no_gpu().map(|error| error.to_string());
    match missing.or_else(|| libraries.iter().find_map(|library| missing_library(library))) {
        Some(why) if std::env::var_os("VRAMALLOC_REQUIRE_GPU").is_some() => panic!("{test}: {why}"),
        Some(why) => {
            eprintln!("SKIPPED: {test}: {why}");
            None
        }
        None => Some(Gpu { context: CudaContext::new(0).expect("context"), _turn: turn }),
    }
}

/// Why cudarc would not find a library, which would be a panic there.
fn missing_library(name: &str) -> Option<String> {
    let names: Vec<String> = std::iter::once(format!("lib{name}.so"))
        .chain((9..=13).map(|version| format!("lib{name}.so.{version}")))
        .collect();
    // SAFETY: NVIDIA's libraries are made to be loaded this way.
    let is_there = names.iter().any(|name| unsafe { Library::new(name) }.is_ok());
    (!is_there).then(|| format!("none of {names:?} is there; name their folder in LD_LIBRARY_PATH"))
}
