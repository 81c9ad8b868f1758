//! Makes the C header of the sources, in the build's own folder; a test compares it with `include/vramalloc.h`.

use std::path::PathBuf;

fn main() {
    // Never unloaded: the ends of threads and of the process call what is registered here (thread-local values, `exit.rs`), and
    // what is allocated stays in use.
    if std::env::var("CARGO_CFG_TARGET_OS").is_ok_and(|os| os == "linux") {
        println!("cargo::rustc-cdylib-link-arg=-Wl,-z,nodelete");
    }
    println!("cargo::rerun-if-changed=src");
    println!("cargo::rerun-if-changed=cbindgen.toml");
    let root = PathBuf::from(std::env::var_os("CARGO_MANIFEST_DIR").expect("cargo sets it"));
    let out = PathBuf::from(std::env::var_os("OUT_DIR").expect("cargo sets it")).join("vramalloc.h");
    let config = cbindgen::Config::from_file(root.join("cbindgen.toml")).expect("cbindgen.toml can be read");
    // It finds the modules by itself; named here, too, each would be declared twice.
    let builder = cbindgen::Builder::new().with_config(config).with_src(root.join("src/lib.rs"));
    // One of an earlier build would pass for this one's.
    let _ = std::fs::remove_file(&out);
    match builder.generate() {
        Ok(bindings) => {
            bindings.write_to_file(out);
        }
        // The compiler says it better; if it has nothing to say, the test of the header fails.
        Err(error) => {
            println!("cargo::warning=no C header: {error}");
            std::fs::write(out.with_extension("error"), error.to_string()).expect("OUT_DIR can be written");
        }
    }
}
