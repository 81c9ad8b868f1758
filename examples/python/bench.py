#!/usr/bin/env python3
"""Four models under PyTorch's allocator, its expandable segments, and vramalloc: same losses? memory? speed?

    python3 examples/python/bench.py                     # prints tables; --json FILE keeps the figures
    python3 examples/python/bench.py --models gpt2_amp,llama_generate \\
        --ours segments:expandable --ours segments:expandable,slack:1.0 --ours segments:expandable,on_pending:wait

Each run is a process of its own, with the same seeds and deterministic kernels, so that step N is the same work in each.
Allocators take turns, `--repeat` times, back and forth, while `--budget` seconds last. A step's time is the least of its
repetitions, since what disturbs it only adds; the first steps are not timed. `--device cpu` only shows that the models run.

Each `--ours` is a configuration of vramalloc's, with a row of its own; a second table says what its reserved memory is made
of. `--explain` adds a run of each with a history, which is not timed, and says what was held when most was reserved. What is
asked of vramalloc, and decides about the exit status, is asked of the first.
"""

import argparse
import gc
import json
import os
import pathlib
import statistics
import subprocess
import sys
import time

PYTORCH = {
    "native": {},
    "expandable": {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"},
}
OURS = "vramalloc"
DEFAULT_CONF = "segments:expandable,on_pending:wait"
DEFAULT_SLACK = 1.014
MIB, GIB = 1 << 20, 1 << 30
EVENTS = 4_000_000


def named(confs):
    """The allocators by name, with the environment of each; ours are vramalloc, vramalloc-2, ..."""
    ours = {OURS if not index else f"{OURS}-{index + 1}": {"VRAMALLOC_CONF": conf} for index, conf in enumerate(confs)}
    return {**PYTORCH, **ours}


def child(model, allocator, device, steps, tiny, explain):
    """One run, in this process; prints its figures as the last line."""
    import torch

    import models
    import vramalloc

    ours = allocator.startswith(OURS) and device != "cpu"
    if ours:
        vramalloc.use_with_torch()
        if explain:
            vramalloc.record_history(events=EVENTS)
    torch.manual_seed(0)
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # that would cost every allocation a kernel
    torch.backends.cudnn.benchmark = False
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    function, default_steps = models.ALL[model]
    steps = steps or default_steps
    warmup = min(models.WARMUP[model], steps - 1)
    on_gpu = device != "cpu"
    synchronize = torch.cuda.synchronize if on_gpu else lambda: None
    losses, seconds, gpu_seconds = [], [], []
    run = function(device, steps, tiny)
    for step in range(steps):
        if step == warmup:
            gc.collect()
            gc.freeze()
        events = [torch.cuda.Event(enable_timing=True) for _ in range(2)] if on_gpu else None
        synchronize()
        start = time.perf_counter()
        if on_gpu:
            events[0].record()
        losses.append(next(run))
        if on_gpu:
            events[1].record()
        synchronize()
        seconds.append(time.perf_counter() - start)
        if on_gpu:
            gpu_seconds.append(events[0].elapsed_time(events[1]) / 1e3)
    result = {"model": model, "allocator": allocator, "losses": losses, "seconds": seconds[warmup:],
              "gpu_seconds": gpu_seconds[warmup:], "first": sum(seconds[:warmup])}
    if on_gpu:
        stats = torch.cuda.memory_stats()
        for key in ("allocated", "reserved", "requested", "active"):
            result[key] = stats[f"{key}_bytes.all.peak"]
        for pool in ("large", "small"):
            result[f"{pool}_allocated"], result[f"{pool}_reserved"] = (
                stats[f"{key}_bytes.{pool}_pool.peak"] for key in ("allocated", "reserved"))
        result["retries"], result["waits"] = stats["num_alloc_retries"], stats.get("num_sync_all_streams", 0)
    if ours:
        vramalloc.validate()
        result["calls"] = vramalloc.driver_calls()
        if explain:
            result["at_peak"] = at_peak(torch.cuda.memory._snapshot()["device_traces"][torch.cuda.current_device()],
                                        stats["reserved_bytes.all.peak"])
    print(json.dumps(result))


def at_peak(entries, reserved_peak):
    """What was held when most was reserved, by the events of the whole run; None if they do not reach that peak."""
    allocated = pending = reserved = 0
    most = {"reserved": 0, "allocated": 0, "pending": 0, "event": 0, "events": len(entries)}
    is_new = False
    for number, entry in enumerate(entries):
        action, size = entry["action"], entry.get("block_size", entry["size"])
        if action == "alloc":
            allocated += size
            if is_new:  # this is what the memory was taken for
                most.update(allocated=allocated, pending=pending, event=number)
                is_new = False
        elif action == "free_requested":
            allocated, pending = allocated - size, pending + size
        elif action == "free_completed":
            pending -= size
        elif action in ("segment_map", "segment_alloc"):
            reserved += size
            if reserved > most["reserved"]:
                most = {"reserved": reserved, "allocated": allocated, "pending": pending, "event": number, "events": len(entries)}
                is_new = True
        elif action in ("segment_unmap", "segment_free"):
            reserved -= size
    return most if most["reserved"] == reserved_peak else None


def start(model, allocator, env, args, explain=False):
    dropped = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "VRAMALLOC_CONF")
    env = {**{name: value for name, value in os.environ.items() if name not in dropped}, **env,
           "CUBLAS_WORKSPACE_CONFIG": ":4096:8", "PYTHONWARNINGS": "ignore", "PYTHONHASHSEED": "0"}
    command = [sys.executable, __file__, "--run", allocator, "--device", args.device, "--steps", str(args.steps)]
    command += ["--models", model] + ["--tiny"] * args.tiny + ["--explain"] * explain
    began = time.monotonic()
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    lines = done.stdout.strip().splitlines()
    what = " (explained)" if explain else ""
    print(f"{model}, {allocator}{what}: {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
    if done.returncode or not lines:
        print(f"{model} under {allocator} failed ({done.returncode}):\n{done.stdout}\n{done.stderr}", file=sys.stderr)
        return None
    if "vramalloc:" in done.stderr:
        print(done.stderr, file=sys.stderr)
    return json.loads(lines[-1])


def models_of(text):
    """For --models: names without importing PyTorch, which only the runs need."""
    names = text.split(",")
    for name in names:
        if name not in MODELS:
            raise argparse.ArgumentTypeError(f"there is no model {name!r}, but {', '.join(MODELS)}")
    return names


MODELS = ["resnet50", "gpt2_amp", "llama_generate", "unet_multires"]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=models_of, default=MODELS, metavar="A,B", help=f"of {', '.join(MODELS)}")
    parser.add_argument("--ours", action="append", metavar="CONF", help=f"as in VRAMALLOC_CONF; default: {DEFAULT_CONF}")
    parser.add_argument("--explain", action="store_true", help="what was held at the peak of reserved memory")
    parser.add_argument("--run", help=argparse.SUPPRESS)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--steps", type=int, default=0)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--budget", type=float, default=270.0, help="seconds after which nothing is repeated")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--json", type=pathlib.Path)
    args = parser.parse_args()
    if args.run:
        child(args.models[0], args.run, args.device, args.steps, args.tiny, args.explain)
        return 0
    confs = args.ours or [DEFAULT_CONF]
    allocators, names = named(confs), args.models
    began = time.monotonic()
    runs = {(model, allocator): [] for model in names for allocator in allocators}
    failed, explained = False, {}
    # All models once, then all again: what the budget cuts are repetitions.
    for turn in range(args.repeat):
        for model in names:
            spent = time.monotonic() - began
            if turn and spent + spent / (turn * len(names) + names.index(model)) > args.budget:
                print(f"{model}: only {turn} of {args.repeat} repetitions: {args.budget:.0f} s are nearly over")
                continue
            for allocator in list(allocators)[:: -1 if turn % 2 else 1]:
                result = start(model, allocator, allocators[allocator], args)
                failed |= result is None
                runs[model, allocator] += [result] if result else []
            if args.explain and not turn:
                for allocator in list(allocators)[len(PYTORCH):]:
                    result = start(model, allocator, allocators[allocator], args, explain=True)
                    failed |= result is None
                    explained[model, allocator] = result and result.get("at_peak")
        if args.json:
            args.json.write_text(json.dumps([result for results in runs.values() for result in results]))
    merged = {model: {allocator: merge(runs[model, allocator]) for allocator in allocators if runs[model, allocator]}
              for model in names}
    table(merged)
    for allocator, conf in zip(list(allocators)[len(PYTORCH):], confs):
        print(f"{allocator} is {conf}")
    on_gpu = args.device != "cpu"
    if on_gpu:
        print()
        composition(merged, allocators)
        for (model, allocator), peak in explained.items():
            print(f"{model}, {allocator}: " + (told(peak) if peak else "the history does not reach the peak"))
        print()
    wrong = verdicts(merged) if on_gpu else {}
    same = all(same_losses(best) and len(best) == len(allocators) for best in merged.values())
    print("losses: the same everywhere" if same else "losses: DIFFERENT, or a run is missing")
    for allocator, texts in wrong.items():
        for text in texts:
            print(f"not met by {allocator}: {text}")
        if not texts:
            print(f"all is met by {allocator}")
    print(f"{time.monotonic() - began:.0f} s in all")
    return int(failed or not same or bool(wrong.get(OURS)))


def merge(results):
    """Several runs of the same as one: of each step the least time; of memory the most; the losses of all."""
    merged = dict(results[0], runs=len(results), losses=[result["losses"] for result in results])
    for key in ("seconds", "gpu_seconds"):
        merged[key] = [min(times) for times in zip(*(result[key] for result in results))]
    for key, value in merged.items():
        if isinstance(value, (int, float)) and key != "runs":
            merged[key] = max(result[key] for result in results)
    return merged


def same_losses(best):
    return len({tuple(losses) for result in best.values() for losses in result["losses"]}) == 1


def ratio_to(base, result, key):
    """How long all steps took, native being 1; None if there is nothing to compare."""
    return sum(result[key]) / sum(base[key]) if base and base[key] and result[key] else None


def reserved_ratio(result):
    return result["reserved"] / result["allocated"]


def verdicts(merged):
    """What was asked of vramalloc and is not so, by configuration: less memory than both of PyTorch's, at most 1.05 of what
    is allocated; speed within 2 % of native's."""
    wrong = {}
    for model, best in merged.items():
        native = best.get("native")
        for name, ours in best.items():
            if name in PYTORCH or not native:
                continue
            texts = wrong.setdefault(name, [])
            if reserved_ratio(ours) > 1.05:
                texts.append(f"{model}: reserved is {reserved_ratio(ours):.4f} of allocated, not 1.05 or less")
            for other in PYTORCH:
                if other in best and best[other]["reserved"] < ours["reserved"]:
                    texts.append(f"{model}: reserved {ours['reserved']} bytes, {other} only {best[other]['reserved']}")
            slower = ratio_to(native, ours, "seconds")
            if slower > 1.02:
                texts.append(f"{model}: {slower:.4f} of native's time a step, not 1.02 or less")
    return wrong


def slack_of(conf):
    """How much may be reserved for what is allocated before memory is moved."""
    keys = dict(part.split(":", 1) for part in conf.replace(" ", "").split(",") if part.count(":") == 1)
    return float(keys.get("slack", DEFAULT_SLACK))


def composition(merged, allocators):
    """What the peak of reserved memory is made of, MiB, and what the driver was asked to do. Peaks of parts need not have
    been at the same time."""
    row = "{:<15}{:<13}{:>10}{:>10}{:>9}{:>9}{:>9}{:>9}{:>9}{:>9}{:>9}{:>9}{:>8}{:>8}{:>8}{:>8}{:>9}".format
    print(row("peaks, MiB", "", "to native", "to native", "rounding", "pending", "allowed", "beyond", "large", "small",
              "large", "small", "creates", "maps", "moves", "waits", "driver s"))
    print(row("", "", "alloc", "resv", "", "", "slack", "slack", "alloc", "alloc", "resv", "resv", "", "", "", "", ""))

    def mib(value):
        return f"{value / MIB:.1f}"

    for model, best in merged.items():
        native = best.get("native")
        for name, result in best.items():
            calls = result.get("calls", {})
            count = lambda call: calls.get(call, {}).get("calls", 0)
            slack, counters = ["-"] * 2, ["-"] * 5
            if name not in PYTORCH:
                allowed = (slack_of(allocators[name]["VRAMALLOC_CONF"]) - 1) * result["allocated"]
                slack = [mib(allowed), mib(result["reserved"] - result["allocated"] - allowed)]
                creates, maps = count("cuMemCreate"), count("cuMemMap")
                # What is mapped without being created was somewhere else before.
                counters = [creates, maps, max(0, maps - creates), result["waits"],
                            f"{sum(call['seconds'] for call in calls.values()):.3f}"]
            differs = [mib(result[key] - native[key]) if native else "-" for key in ("allocated", "reserved")]
            parts = [result["allocated"] - result["requested"], result["active"] - result["allocated"]]
            pools = [result[f"{pool}_{key}"] for key in ("allocated", "reserved") for pool in ("large", "small")]
            print(row(model, name, *differs, *map(mib, parts), *slack, *map(mib, pools), *counters))


def told(peak):
    free = peak["reserved"] - peak["allocated"] - peak["pending"]
    return (f"at the peak of reserved ({peak['reserved'] / MIB:.1f} MiB, event {peak['event']} of {peak['events']}): "
            f"{peak['allocated'] / MIB:.1f} MiB allocated, {peak['pending'] / MIB:.1f} pending, {free / MIB:.1f} free")


def table(merged):
    row = "{:<15}{:<13}{:>5}{:>10}{:>10}{:>8}{:>10}{:>11}{:>10}{:>11}{:>8}{:>9}  {}".format
    print(row("model", "allocator", "runs", "alloc GiB", "resv GiB", "ratio", "s a step", "median s", "to native",
              "by events", "1st s", "retries", "losses"))

    def shown(value, form):
        return "-" if value is None else format(value, form)

    for model, best in merged.items():
        base = best.get("native")
        for allocator, result in best.items():
            same = base and same_losses({"native": base, allocator: result})
            ratio = reserved_ratio(result) if "allocated" in result else None
            print(row(model, allocator, result["runs"], f"{result.get('allocated', 0) / GIB:.3f}",
                      f"{result.get('reserved', 0) / GIB:.3f}", shown(ratio, ".4f"),
                      f"{statistics.mean(result['seconds']):.5f}", f"{statistics.median(result['seconds']):.5f}",
                      shown(ratio_to(base, result, "seconds"), ".4f"), shown(ratio_to(base, result, "gpu_seconds"), ".4f"),
                      f"{result['first']:.2f}", result.get("retries", "-"),
                      f"{'equal' if same else 'DIFFERENT'}, last {result['losses'][0][-1]:.6g}"))


if __name__ == "__main__":
    sys.exit(main())
