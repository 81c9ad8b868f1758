//! Makes the C header of the sources, in the build's own folder; a test compares it with `include/vramalloc.h`.

use std::path::{Path, PathBuf};

fn main() {
    println!("cargo::rerun-if-changed=src");
    println!("cargo::rerun-if-changed=cbindgen.toml");
    let root = PathBuf::from(std::env::var_os("CARGO_MANIFEST_DIR").expect("cargo sets it"));
    let out = PathBuf::from(std::env::var_os("OUT_DIR").expect("cargo sets it")).join("vramalloc.h");
    let config = cbindgen::Config::from_file(root.join("cbindgen.toml")).expect("cbindgen.toml can be read");
    let mut sources = sources(&root.join("src"));
    sources.sort();
    let builder = sources.iter().fold(cbindgen::Builder::new().with_config(config), cbindgen::Builder::with_src);
    match builder.generate() {
        Ok(bindings) => {
            bindings.write_to_file(out);
        }
        // The compiler says it better.
        Err(error) => println!("cargo::warning=no C header: {error}"),
    }
}

fn sources(folder: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(folder).expect("the sources can be listed");
    let paths = entries.map(|entry| entry.expect("the sources can be listed").path());
    paths.filter(|path| path.extension().is_some_and(|extension| extension == "rs")).collect()
}
