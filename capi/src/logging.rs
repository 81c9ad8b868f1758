//! `VRAMALLOC_LOG`: what is said on standard error.

use std::sync::Once;

/// The environment variable: `error` (default), `warn`, `info`, `debug`, `trace` or `off`.
const VARIABLE: &str = "VRAMALLOC_LOG";

/// Starts logging, once; called before anything is done that is worth a word.
pub(crate) fn start() {
    static START: Once = Once::new();
    START.call_once(|| {
        let env = env_logger::Env::new().filter_or(VARIABLE, "error");
        // Another logger may be there if this is linked into a Rust program: then that one is told.
        let _ = env_logger::Builder::from_env(env).try_init();
        crate::exit::watch();
    });
}
