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
import ctypes, json, os, pickle, tempfile, vramalloc
library, handle, ptr = vramalloc._library, vramalloc._library.allocator(), ctypes.c_void_p()
library.call("vram_alloc", handle, 1000, 0, None, ctypes.byref(ptr))
assert vramalloc.stats()["requested_bytes.all.current"] == 1000
assert "GPU reserved memory" in vramalloc.summary() and "from small pool" in vramalloc.summary()
assert "GPU reserved" in vramalloc.summary(abbreviated=True) and "from small pool" not in vramalloc.summary(abbreviated=True)
assert vramalloc.driver_calls()["cuMemMap"]["calls"] == 1
with tempfile.TemporaryDirectory() as folder:
    path = os.path.join(folder, "snapshot.json")
    vramalloc.snapshot(path)
    (segment,) = json.load(open(path))["segments"]
    assert segment["blocks"][0]["requested_size"] == 1000, segment
    # What was recorded is in the snapshot, of all devices or one, as a pickle, too.
    vramalloc.record_history(events=100)
    other = ctypes.c_void_p()
    library.call("vram_alloc", handle, 5000, 0, None, ctypes.byref(other))
    library.call("vram_free", handle, other, 5000, 0, None)
    path = os.path.join(folder, "snapshot.pickle")
    for device in -1, 0:
        vramalloc.snapshot(path, device)
        (trace,) = pickle.load(open(path, "rb"))["device_traces"]
        assert [(entry["action"], entry["size"]) for entry in trace] == [
            ("alloc", 5000), ("free_requested", 5000), ("free_completed", 5000)], trace
    vramalloc.stop_history()
    vramalloc.snapshot(path)
    assert pickle.load(open(path, "rb"))["device_traces"] == [[]]
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

/// What would be PyTorch's functions uses the history as well; PyTorch itself need not be here for that.
#[test]
fn the_history_serves_pytorchs_functions_too() {
    python(
        r#"
import ctypes, pathlib, pickle, types, vramalloc
torch = types.SimpleNamespace()
torch.cuda = types.SimpleNamespace(_utils=types.SimpleNamespace(_get_device_index=lambda device, optional: device or 0))
names = "memory_stats", "_record_memory_history", "_snapshot", "memory_summary", "memory_snapshot"
torch.cuda.memory = types.SimpleNamespace(**{name: None for name in names})
vramalloc._replace_statistics(torch)
memory = torch.cuda.memory
library, handle, ptr = vramalloc._library, vramalloc._library.allocator(), ctypes.c_void_p()
memory._record_memory_history(max_entries=2**63 - 1)
library.call("vram_alloc", handle, 1000, 0, None, ctypes.byref(ptr))
whole = memory._snapshot()
assert any(entry["action"] == "alloc" for entry in whole["device_traces"][0]), whole
assert memory.memory_snapshot() == memory.memory_snapshot((0, 0)) == whole["segments"]
assert memory.memory_snapshot(mempool_id=(5, 0)) == []
assert "from small pool" not in memory.memory_summary(None, True)
memory._record_memory_history("state")
assert memory._snapshot()["device_traces"] == [[]]
memory._record_memory_history(enabled=None)
# Private pools' segments, which a simulated device has during captures only.
segments = [{"segment_pool_id": pool} for pool in ((0, 0), (5, 0), (0, 5))]
vramalloc.snapshot = lambda path: pathlib.Path(path).write_bytes(pickle.dumps({"segments": segments}))
assert memory.memory_snapshot() == segments
assert memory.memory_snapshot(mempool_id=(5, 0)) == memory.memory_snapshot([5, 0], False) == segments[1:2]
"#,
    );
}

/// What the benchmark says of a run needs no GPU to be right.
#[test]
fn the_benchmark_explains_the_peak() {
    let text = python(
        r#"
import ctypes, json, os, pickle, tempfile, bench, vramalloc
library, handle = vramalloc._library, vramalloc._library.allocator()
vramalloc.record_history()
def alloc(mib):
    ptr = ctypes.c_void_p()
    library.call("vram_alloc", handle, mib << 20, 0, None, ctypes.byref(ptr))
    return ptr
def free(ptr):
    library.call("vram_free", handle, ptr, 0, 0, None)
a, b = alloc(30), alloc(20)
free(b)
c = alloc(24)
d = alloc(11)
free(c), free(d)
stats = vramalloc.stats()
with tempfile.TemporaryDirectory() as folder:
    path = os.path.join(folder, "snapshot.pickle")
    vramalloc.snapshot(path)
    (entries,) = pickle.load(open(path, "rb"))["device_traces"]
peak = bench.at_peak(entries, stats["reserved_bytes.all.peak"])
assert (peak["allocated"], peak["pending"]) == (65 << 20, 0), peak
assert bench.told(bench.at_peak([], 0)).endswith("0.0 MiB allocated, 0.0 pending, 0.0 free")
assert bench.at_peak(entries[20:], stats["reserved_bytes.all.peak"]) is None
print(bench.told(peak))
print(bench.slack_of("segments:expandable, slack:1.05"), bench.slack_of("segments:expandable"))

def run(allocated, reserved, seconds, **more):
    return dict(allocated=allocated << 20, reserved=reserved << 20, requested=allocated << 20, active=allocated << 20,
                large_allocated=allocated << 20, small_allocated=0, large_reserved=reserved << 20, small_reserved=0,
                seconds=[seconds], gpu_seconds=[seconds], first=1.0, retries=0, waits=2, losses=[1.0], **more)
confs = ["segments:expandable", "segments:expandable,slack:1.0"]
allocators = bench.named(confs)
calls = vramalloc.driver_calls()
merged = {"gpt2_amp": {name: bench.merge([run(*figures)]) for name, figures in {
    "native": (1001, 1200, 1.0), "expandable": (1000, 1060, 1.0)}.items()}}
merged["gpt2_amp"]["vramalloc"] = bench.merge([run(1000, 1070, 1.0, calls=calls)])
merged["gpt2_amp"]["vramalloc-2"] = bench.merge([run(1000, 1010, 1.01, calls=calls), run(1000, 1012, 0.99, calls=calls)])
bench.table(merged)
bench.composition(merged, allocators)
wrong = bench.verdicts(merged)
assert len(wrong["vramalloc"]) == 2 and not wrong["vramalloc-2"], wrong
assert merged["gpt2_amp"]["vramalloc-2"]["reserved"] == 1012 << 20
"#,
    );
    for said in ["65.0 MiB allocated, 0.0 pending", "1.05 1.014", "vramalloc-2"] {
        assert!(text.contains(said), "'{said}' is missing in:\n{text}");
    }
    println!("{text}");
}

#[test]
fn a_forked_child_raises() {
    let text = python(
        r#"
import os, vramalloc
vramalloc.stats()
pid = os.fork()
if pid == 0:
    try:
        vramalloc.stats()
    except vramalloc.Error as error:
        print(error, flush=True)
        os._exit(0 if error.status == 13 else 1)
    os._exit(2)
assert os.waitpid(pid, 0)[1] == 0
vramalloc.stats()
"#,
    );
    assert!(text.contains("forked from one that used vramalloc"), "{text}");
}

#[test]
fn an_older_library_is_refused_by_name() {
    let text = python(
        r#"
import types, vramalloc
class Older:
    def __getattr__(self, name):
        if name == "vram_record_history":
            raise AttributeError(name)
        return types.SimpleNamespace()
try:
    vramalloc._Library._declare(Older(), "libold.so")
except ImportError as error:
    print(error)
"#,
    );
    assert!(text.contains("libold.so is older than this file: it has no vram_record_history"), "{text}");
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
