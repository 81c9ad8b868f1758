#!/usr/bin/env python3
"""Four models under PyTorch's allocator, its expandable segments, and vramalloc: same losses? memory? speed?

    python3 examples/python/bench.py [MODEL...]          # prints a table; --json FILE keeps the figures

Each run is a process of its own, with the same seeds and deterministic kernels, so that step N is the same work in each.
Allocators take turns, `--repeat` times, back and forth, while `--budget` seconds last. A step's time is the least of its
repetitions, since what disturbs it only adds; the first steps are not timed. `--device cpu` only shows that the models run.
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

ALLOCATORS = {
    "native": {},
    "expandable": {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"},
    "vramalloc": {"VRAMALLOC_CONF": "segments:expandable"},
}


def child(model, allocator, device, steps, tiny):
    """One run, in this process; prints its figures as the last line."""
    import torch

    import models
    import vramalloc

    if allocator == "vramalloc" and device != "cpu":
        vramalloc.use_with_torch()
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
        for key in ("allocated", "reserved", "requested"):
            result[key] = stats[f"{key}_bytes.all.peak"]
        result["retries"], result["driver_calls"] = stats["num_alloc_retries"], stats["num_device_alloc"]
        if allocator == "vramalloc":
            vramalloc.validate()
    print(json.dumps(result))


def start(model, allocator, args):
    env = {name: value for name, value in os.environ.items() if name not in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")}
    env.update(ALLOCATORS[allocator], CUBLAS_WORKSPACE_CONFIG=":4096:8", PYTHONWARNINGS="ignore",
               PYTHONHASHSEED="0")
    command = [sys.executable, __file__, "--run", allocator, "--device", args.device, "--steps", str(args.steps), model]
    command += ["--tiny"] if args.tiny else []
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    lines = done.stdout.strip().splitlines()
    if done.returncode or not lines:
        print(f"{model} under {allocator} failed ({done.returncode}):\n{done.stdout}\n{done.stderr}", file=sys.stderr)
        return None
    if "vramalloc:" in done.stderr:
        print(done.stderr, file=sys.stderr)
    return json.loads(lines[-1])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*")
    parser.add_argument("--run", choices=ALLOCATORS, help=argparse.SUPPRESS)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--steps", type=int, default=0)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--budget", type=float, default=270.0, help="seconds after which nothing is repeated")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--json", type=pathlib.Path)
    args = parser.parse_args()
    if args.run:
        child(args.models[0], args.run, args.device, args.steps, args.tiny)
        return 0
    names = args.models or ["resnet50", "gpt2_amp", "llama_generate", "unet_multires"]
    began = time.monotonic()
    runs = {(model, allocator): [] for model in names for allocator in ALLOCATORS}
    failed = False
    # All models once, then all again: what the budget cuts are repetitions.
    for turn in range(args.repeat):
        for model in names:
            spent = time.monotonic() - began
            if turn and spent + spent / (turn * len(names) + names.index(model)) > args.budget:
                print(f"{model}: only {turn} of {args.repeat} repetitions: {args.budget:.0f} s are nearly over")
                continue
            for allocator in list(ALLOCATORS)[:: -1 if turn % 2 else 1]:
                result = start(model, allocator, args)
                failed |= result is None
                runs[model, allocator] += [result] if result else []
        if args.json:
            args.json.write_text(json.dumps([result for results in runs.values() for result in results]))
    merged = {model: {allocator: merge(runs[model, allocator]) for allocator in ALLOCATORS if runs[model, allocator]}
              for model in names}
    table(merged)
    wrong = verdicts(merged) if args.device != "cpu" else []
    same = all(same_losses(best) and len(best) == len(ALLOCATORS) for best in merged.values())
    print("losses: the same everywhere" if same else "losses: DIFFERENT, or a run is missing")
    for text in wrong:
        print(f"not met: {text}")
    print(f"{time.monotonic() - began:.0f} s in all")
    return int(failed or not same or bool(wrong))


def merge(results):
    """Several runs of the same as one: of each step the least time; of memory the most; the losses of all."""
    merged = dict(results[0], runs=len(results), losses=[result["losses"] for result in results])
    for key in ("seconds", "gpu_seconds"):
        merged[key] = [min(times) for times in zip(*(result[key] for result in results))]
    for key in ("allocated", "reserved", "requested", "retries", "first"):
        if key in merged:
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
    """What was asked of vramalloc and is not so: least memory of the three, at most 1.05 of what is allocated; speed
    within 2 % of native's."""
    wrong = []
    for model, best in merged.items():
        ours, native = best.get("vramalloc"), best.get("native")
        if not ours or not native:
            continue
        if reserved_ratio(ours) > 1.05:
            wrong.append(f"{model}: reserved is {reserved_ratio(ours):.4f} of allocated, not 1.05 or less")
        for name, other in best.items():
            if other["reserved"] < ours["reserved"]:
                wrong.append(f"{model}: reserved {ours['reserved']} bytes, {name} only {other['reserved']}")
        slower = ratio_to(native, ours, "seconds")
        if slower > 1.02:
            wrong.append(f"{model}: {slower:.4f} of native's time a step, not 1.02 or less")
    return wrong


def table(merged):
    gib = 1 << 30
    row = "{:<15}{:<11}{:>5}{:>10}{:>10}{:>8}{:>10}{:>11}{:>10}{:>11}{:>8}{:>9}  {}".format
    print(row("model", "allocator", "runs", "alloc GiB", "resv GiB", "ratio", "s a step", "median s", "to native",
              "by events", "1st s", "retries", "losses"))

    def shown(value, form):
        return "-" if value is None else format(value, form)

    for model, best in merged.items():
        base = best.get("native")
        for allocator, result in best.items():
            same = base and same_losses({"native": base, allocator: result})
            ratio = reserved_ratio(result) if "allocated" in result else None
            print(row(model, allocator, result["runs"], f"{result.get('allocated', 0) / gib:.3f}",
                      f"{result.get('reserved', 0) / gib:.3f}", shown(ratio, ".4f"),
                      f"{statistics.mean(result['seconds']):.5f}", f"{statistics.median(result['seconds']):.5f}",
                      shown(ratio_to(base, result, "seconds"), ".4f"), shown(ratio_to(base, result, "gpu_seconds"), ".4f"),
                      f"{result['first']:.2f}", result.get("retries", "-"),
                      f"{'equal' if same else 'DIFFERENT'}, last {result['losses'][0][-1]:.6g}"))


if __name__ == "__main__":
    sys.exit(main())
