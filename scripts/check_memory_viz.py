"""Compares what torch.cuda._memory_viz made of our pickles with our own statistics; see check-memory-viz.sh.

The module's commands print sizes with one decimal. So its functions are called once more here with sizes printed as bytes,
after checking that the commands printed the same text but for that.
"""

import base64
import bisect
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


class Ranges:
    """Ranges of addresses with the stream that each is mapped for; neighbours of one stream are one."""

    def __init__(self):
        self.all = []  # start, end, stream; by start

    def within(self, start, end):
        """The indexes of those that overlap a range."""
        first = bisect.bisect_right(self.all, (start, sys.maxsize, 0))
        first -= bool(first and self.all[first - 1][1] > start)
        last = bisect.bisect_left(self.all, (end,))
        return first, max(first, last)

    def has(self, start, end, stream):
        first, last = self.within(start, end)
        return last - first == 1 and self.all[first][0] <= start and end <= self.all[first][1] and self.all[first][2] == stream

    def add(self, start, end, stream):
        first, last = self.within(start, end)
        if first != last:
            return False
        if last < len(self.all) and self.all[last][0] == end and self.all[last][2] == stream:
            end, last = self.all[last][1], last + 1
        if first and self.all[first - 1][1] == start and self.all[first - 1][2] == stream:
            start, first = self.all[first - 1][0], first - 1
        self.all[first:last] = [(start, end, stream)]
        return True

    def remove(self, start, end):
        """Whosever it is; but all of it must be there."""
        first, last = self.within(start, end)
        parts = self.all[first:last]
        if not parts or parts[0][0] > start or parts[-1][1] < end or any(a[1] != b[0] for a, b in zip(parts, parts[1:])):
            return False
        rest = [(parts[0][0], start, parts[0][2]), (end, parts[-1][1], parts[-1][2])]
        self.all[first:last] = [part for part in rest if part[0] < part[1]]
        return True


class Replayed:
    """What the events alone say: what is mapped for which stream, which blocks are live, what was held at most."""

    def __init__(self, trace):
        self.mapped, self.live, self.faults = Ranges(), {}, []
        allocated = reserved = 0
        self.allocated_peak = self.reserved_peak = 0
        for number, event in enumerate(trace):
            action, addr, size, stream = event["action"], event.get("addr"), event["size"], event["stream"]
            where = f"event {number}: {action} of {size} bytes at {addr}, stream {stream}"
            if action in ("segment_alloc", "segment_map"):
                if not self.mapped.add(addr, addr + size, stream):
                    self.faults.append(f"{where}: is mapped already")
                reserved += size
                self.reserved_peak = max(self.reserved_peak, reserved)
            elif action in ("segment_free", "segment_unmap"):
                # The stream is the one that needs the pages, not the one that has them.
                if not self.mapped.remove(addr, addr + size):
                    self.faults.append(f"{where}: is not mapped")
                reserved -= size
            elif action == "alloc":
                if not self.mapped.has(addr, addr + event["block_size"], stream):
                    self.faults.append(f"{where}: the stream has no memory there")
                if addr in self.live:
                    self.faults.append(f"{where}: is allocated already")
                self.live[addr] = event["block_size"], size
                allocated += event["block_size"]
                self.allocated_peak = max(self.allocated_peak, allocated)
            elif action == "free_requested":
                allocated -= event["block_size"]
            elif action == "free_completed":
                if self.live.pop(addr, None) != (event["block_size"], size):
                    self.faults.append(f"{where}: is not allocated so")


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
    check(name, "stats: segments", int(re.search(r"^segments: (\d+)", text, re.MULTILINE).group(1)),
          stats["segment.all.current"] if "fixed" in name else len(snapshot["segments"]))

    # trace
    with open(base + ".trace.txt") as file:
        check(name, "the command's text (trace)", file.read().strip(), viz.trace(snapshot).strip())
    lines = exact(viz.trace, snapshot).splitlines()
    count = lambda pattern: sum(1 for line in lines if re.search(pattern, line))
    check(name, "trace: allocations", count(r"^\w+ = \w+\["), stats["allocation.all.allocated"])
    check(name, "trace: frees", count(r"^del "), stats["allocation.all.freed"])
    check(name, "trace: completed", count(r"^# free completed"), stats["active.all.freed"])
    # They know the segments that were allocated as such, and of those at the end as much as is allocated in them.
    known = [(segment["address"], segment["address"] + segment["allocated_size"]) for segment in snapshot["segments"]]
    elsewhere = sum(event["action"] == "alloc" and not any(start <= event["addr"] < end for start, end in known)
                    for event in snapshot["device_traces"][0])
    check(name, "trace: in no segment", count(r"^\w+ = MEM\["), 0 if "fixed" in name else elsewhere)
    check(name, "trace: cudaMalloc", count(r" = cudaMalloc\("), stats["segment.all.allocated"])
    check(name, "trace: cudaFree", count(r"^cudaFree\("), stats["segment.all.freed"])
    sizes = [int(size) for line in lines for size in re.findall(r"^\w+ = \w+\[\d+:(\d+)B\]", line)]
    check(name, "trace: bytes requested", sum(sizes), stats["requested_bytes.all.allocated"])
    balance = 0
    for trace in snapshot["device_traces"]:
        for event in trace:
            balance += event["size"] * {"segment_alloc": 1, "segment_map": 1, "segment_free": -1, "segment_unmap": -1}.get(event["action"], 0)
    check(name, "trace: reserved at the end", balance, stats["reserved_bytes.all.current"])

    # What the events say is what the segments say, and the statistics.
    (trace,) = snapshot["device_traces"]
    replayed = Replayed(trace)
    check(name, "events that contradict each other", replayed.faults[:5], [])
    segments = Ranges()
    for segment in snapshot["segments"]:
        segments.add(segment["address"], segment["address"] + segment["total_size"], segment["stream"])
    check(name, "mapped at the end", replayed.mapped.all, segments.all)
    live = {block["address"]: (block["size"], block["requested_size"]) for segment in snapshot["segments"]
            for block in segment["blocks"] if block["state"] == "active_allocated"}
    check(name, "blocks at the end", replayed.live == live, True)
    check(name, "peak allocated", replayed.allocated_peak, stats["allocated_bytes.all.peak"])
    check(name, "peak reserved", replayed.reserved_peak, stats["reserved_bytes.all.peak"])

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
expected = int(sys.argv[2])
if len(rows) != expected:
    sys.exit(f"{len(rows)} snapshots were checked, not {expected}")
print(f"{len(rows)} snapshots: " + ("what is printed differs from our statistics" if failures else "every figure is the same to the byte"))
sys.exit(1 if failures else 0)
