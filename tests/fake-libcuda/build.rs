//! Gives the library the name that the driver's has, so that `dlopen("libcuda.so.1")` finds it once it is loaded.

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    if std::env::var("CARGO_CFG_TARGET_OS").is_ok_and(|os| os == "linux") {
        println!("cargo::rustc-cdylib-link-arg=-Wl,-soname,libcuda.so.1");
    }
}
