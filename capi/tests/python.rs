//! `examples/python/vramalloc.py` on a simulated device, and on a PyTorch without a GPU if there is one.

#![cfg(unix)]

use std::path::Path;
use std::process::Command;

/// Runs a script that can import `vramalloc`; `VRAMALLOC_PYTHON` names the interpreter.
fn python(script: &str) -> String {
    let folder = std::env::current_exe().expect("the test program has a path");
    let library = folder.parent().expect("it is in a folder").join("libvramalloc_c.so");
    let interpreter = std::env::var("VRAMALLOC_PYTHON").unwrap_or_else(|_| "python3".to_owned());
    let output = Command::new(&interpreter)
        .args(["-B", "-c", script])
        .env("PYTHONPATH", Path::new(env!("CARGO_MANIFEST_DIR")).join("../examples/python"))
        .env("VRAMALLOC_LIBRARY", library)
        .env("VRAMALLOC_DEVICE", "sim:1GiB")
        .env("VRAMALLOC_CONF", "segments:expandable")
        .env("VRAMALLOC_LOG", "debug")
        .output()
        .unwrap_or_else(|error| panic!("Python is needed, as `{interpreter}` (or VRAMALLOC_PYTHON): {error}"));
    let text = String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{text}");
    text
}

#[test]
fn statistics_summary_and_snapshot_come_through() {
    let text = python(
        r#"
import ctypes, json, os, tempfile, vramalloc
library, handle, ptr = vramalloc._library, vramalloc._library.allocator(), ctypes.c_void_p()
library.call("vram_alloc", handle, 1000, 0, None, ctypes.byref(ptr))
assert vramalloc.stats()["requested_bytes.all.current"] == 1000
assert "GPU reserved memory" in vramalloc.summary()
with tempfile.TemporaryDirectory() as folder:
    path = os.path.join(folder, "snapshot.json")
    vramalloc.snapshot(path)
    (segment,) = json.load(open(path))["segments"]
    assert segment["blocks"][0]["requested_size"] == 1000, segment
vramalloc.validate()
try:
    library.call("vram_alloc", handle, 1 << 40, 0, None, ctypes.byref(ptr))
except MemoryError as error:
    print(error)
library.call("vram_free", handle, ptr, 1000, 0, None)
assert vramalloc.empty_cache() == 2 << 20
vramalloc.reset_peak_stats()
assert vramalloc.stats()["allocated_bytes.all.peak"] == 0
try:
    vramalloc.stats(device=3)
except vramalloc.Error as error:
    print(error)
"#,
    );
    for said in ["out of memory on device 0: 1.00 TiB requested", "no allocator for that device"] {
        assert!(text.contains(said), "'{said}' is missing in:\n{text}");
    }
}

/// What PyTorch passes by value, and what it calls, as far as that goes without a GPU.
#[test]
fn pytorch_calls_the_functions_that_it_was_given() {
    let text = python(
        r#"
try:
    import torch
except ImportError:
    print("SKIPPED: no PyTorch here")
    raise SystemExit
import vramalloc
vramalloc.use_with_torch()
torch._C._cuda_beginAllocateCurrentThreadToPool(0, (3, 2**40 + 7))
torch._C._cuda_endAllocateToPool(0, (3, 2**40 + 7))
torch._C._cuda_releasePool(0, (3, 2**40 + 7))
torch._C._cuda_releasePool(0, (3, 9))
torch._C._cuda_emptyCache()
torch._C._cuda_setMemoryFraction(0.5, 0)
assert torch.cuda.memory_stats(0) == vramalloc.stats()
"#,
    );
    if text.contains("SKIPPED") {
        eprintln!("{text}");
        return;
    }
    for said in [
        "capture into pool (3, 1099511627783) begins",
        "capture into pool (3, 1099511627783) ends",
        "pool (3, 1099511627783): released",
        "releasing a pool failed: there is no pool (3, 9) to release",
        "bytes given back",
    ] {
        assert!(text.contains(said), "'{said}' is missing in:\n{text}");
    }
}
