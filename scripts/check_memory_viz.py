"""Compares what torch.cuda._memory_viz made of our pickles with our own statistics; see check-memory-viz.sh.

The module's commands print sizes with one decimal. So its functions are called once more here with sizes printed as bytes,
after checking that the commands printed the same text but for that.
"""

import base64
import glob
import importlib.util
import json
import os
import pickle
import re
import sys


def load_viz():
    path = os.environ.get("MEMORY_VIZ")
    if path is None:
        import torch.cuda._memory_viz as viz

        return viz
    spec = importlib.util.spec_from_file_location("memory_viz", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


viz = load_viz()
failures = []


def check(name, what, theirs, ours):
    if theirs != ours:
        failures.append(f"{name}: {what}: they say {theirs}, we {ours}")


def exact(function, *arguments):
    """A function's text with sizes in bytes."""
    before = viz._format_size
    viz._format_size = lambda size: f"{size}B"
    try:
        return function(*arguments)
    finally:
        viz._format_size = before


def figure(text, label):
    return int(re.search(rf"^{label}: (\d+)B", text, re.MULTILINE).group(1))


rows = []
for path in sorted(glob.glob(os.path.join(sys.argv[1], "*.pickle"))):
    base = path.removesuffix(".pickle")
    name = os.path.basename(base)
    with open(path, "rb") as file:
        snapshot = pickle.load(file)
    with open(base + ".stats.json") as file:
        stats = json.load(file)

    # stats
    with open(base + ".stats.txt") as file:
        check(name, "the command's text (stats)", file.read().strip(), viz.segsum(snapshot).strip())
    text = exact(viz.segsum, snapshot)
    reserved, allocated, free = (figure(text, f"total_{what}") for what in ("reserved", "allocated", "free"))
    pending = stats["active_bytes.all.current"] - stats["allocated_bytes.all.current"]
    check(name, "pending", pending, 0)
    check(name, "stats: reserved", reserved, stats["reserved_bytes.all.current"])
    # "allocated" there is what was asked for; rounding counts as free.
    check(name, "stats: allocated", allocated, stats["requested_bytes.all.current"])
    check(name, "stats: free", free, stats["reserved_bytes.all.current"] - stats["requested_bytes.all.current"])
    check(name, "stats: segments", int(re.search(r"^segments: (\d+)", text, re.MULTILINE).group(1)), len(snapshot["segments"]))

    # trace
    with open(base + ".trace.txt") as file:
        check(name, "the command's text (trace)", file.read().strip(), viz.trace(snapshot).strip())
    lines = exact(viz.trace, snapshot).splitlines()
    count = lambda pattern: sum(1 for line in lines if re.search(pattern, line))
    check(name, "trace: allocations", count(r"^\w+ = \w+\["), stats["allocation.all.allocated"])
    check(name, "trace: frees", count(r"^del "), stats["allocation.all.freed"])
    check(name, "trace: completed", count(r"^# free completed"), stats["active.all.freed"])
    check(name, "trace: in no segment", count(r"^\w+ = MEM\["), 0 if "fixed" in name else count(r"^\w+ = MEM\["))
    check(name, "trace: cudaMalloc", count(r" = cudaMalloc\("), stats["segment.all.allocated"])
    check(name, "trace: cudaFree", count(r"^cudaFree\("), stats["segment.all.freed"])
    sizes = [int(size) for line in lines for size in re.findall(r"^\w+ = \w+\[\d+:(\d+)B\]", line)]
    check(name, "trace: bytes requested", sum(sizes), stats["requested_bytes.all.allocated"])
    balance = 0
    for trace in snapshot["device_traces"]:
        for event in trace:
            balance += event["size"] * {"segment_alloc": 1, "segment_map": 1, "segment_free": -1, "segment_unmap": -1}.get(event["action"], 0)
    check(name, "trace: reserved at the end", balance, stats["reserved_bytes.all.current"])

    # segments
    by_state = {}
    with open(base + ".segments.txt") as file:
        for line in file:
            stack, size = line.rsplit(" ", 1)
            state = stack.split(";")[2]
            by_state[state] = by_state.get(state, 0) + int(size)
    check(name, "segments: allocated", by_state.get("active_allocated", 0), stats["allocated_bytes.all.current"])
    check(name, "segments: all", sum(by_state.values()), stats["reserved_bytes.all.current"])

    # trace_plot
    with open(base + ".html") as file:
        encoded = json.loads(re.search(r"local_files = (\[.*\])", file.read()).group(1))[0]["base64"]
    check(name, "trace_plot: the snapshot in the page", pickle.loads(base64.b64decode(encoded)) == snapshot, True)

    rows.append((name, len(snapshot["segments"]), sum(map(len, snapshot["device_traces"])), reserved, allocated))

print(f"{'run':<36} {'segments':>8} {'events':>8} {'reserved':>14} {'requested':>14}")
for name, segments, events, reserved, allocated in rows:
    print(f"{name:<36} {segments:>8} {events:>8} {reserved:>14} {allocated:>14}")
for failure in failures:
    print("DIFFERS:", failure)
if not rows:
    sys.exit("no pickles were checked")
print(f"{len(rows)} snapshots: " + ("what is printed differs from our statistics" if failures else "every figure is the same to the byte"))
sys.exit(1 if failures else 0)
