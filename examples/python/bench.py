#!/usr/bin/env python3
"""Four models under PyTorch's allocator, its expandable segments, and vramalloc: same losses? memory? speed?

    python3 examples/python/bench.py [MODEL...]          # prints a table; --json FILE keeps the figures

Each run is a process of its own, with the same seeds and deterministic kernels. `--repeat N` runs each N times, in turn,
and takes the fastest: clocks vary. `--device cpu` only shows that the models run.
"""

import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys
import time

HERE = pathlib.Path(__file__).resolve().parent
ALLOCATORS = {
    "native": {},
    "expandable": {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"},
    "vramalloc": {"VRAMALLOC_CONF": "segments:expandable"},
}


def child(model, allocator, device, steps, tiny):
    """One run, in this process; prints its figures as the last line."""
    sys.path.insert(0, str(HERE))
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
    synchronize = torch.cuda.synchronize if device != "cpu" else lambda: None
    losses, seconds = [], []
    run = function(device, steps, tiny)
    for _ in range(steps):
        synchronize()
        start = time.perf_counter()
        losses.append(next(run))
        synchronize()
        seconds.append(time.perf_counter() - start)
    timed = seconds[warmup:]
    result = {"model": model, "allocator": allocator, "losses": losses, "seconds": sum(timed) / len(timed),
              "median": statistics.median(timed), "first": sum(seconds[:warmup])}
    if device != "cpu":
        stats = torch.cuda.memory_stats()
        for key in ("allocated", "reserved", "requested"):
            result[key] = stats[f"{key}_bytes.all.peak"]
        result["retries"], result["driver_calls"] = stats["num_alloc_retries"], stats["num_device_alloc"]
        if allocator == "vramalloc":
            vramalloc.validate()
    print(json.dumps(result))


def start(model, allocator, args):
    env = {name: value for name, value in os.environ.items() if name not in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")}
    env.update(ALLOCATORS[allocator], CUBLAS_WORKSPACE_CONFIG=":4096:8", PYTHONWARNINGS="ignore")
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
    parser.add_argument("--repeat", type=int, default=1)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--json", type=pathlib.Path)
    args = parser.parse_args()
    if args.run:
        child(args.models[0], args.run, args.device, args.steps, args.tiny)
        return 0
    names = args.models or ["resnet50", "gpt2_amp", "llama_generate", "unet_multires"]
    results, failed = [], False
    for model in names:
        best = {}
        for _ in range(args.repeat):
            for allocator in ALLOCATORS:
                result = start(model, allocator, args)
                failed |= result is None
                if result and (allocator not in best or result["median"] < best[allocator]["median"]):
                    best[allocator] = result
        results.append((model, best))
        if args.json:
            args.json.write_text(json.dumps([best for _, best in results]))
    table(results)
    same = all(len({tuple(result["losses"]) for result in best.values()}) == 1 for _, best in results)
    print("losses: the same" if same else "losses: DIFFERENT")
    return int(failed or not same)


def table(results):
    gib = 1 << 30
    row = "{:<15}{:<11}{:>9}{:>9}{:>8}{:>11}{:>10}{:>9}{:>9}  {}".format
    print(row("model", "allocator", "alloc GiB", "resv GiB", "ratio", "ms a step", "to native", "1st s", "retries", "last loss"))
    for model, best in results:
        base = best.get("native", {}).get("median")
        for allocator, result in best.items():
            allocated, reserved = result.get("allocated", 0), result.get("reserved", 0)
            speed = f"{result['median'] / base:.3f}" if base else "-"
            ratio = f"{reserved / allocated:.4f}" if allocated else "-"
            print(row(model, allocator, f"{allocated / gib:.3f}", f"{reserved / gib:.3f}", ratio,
                      f"{1e3 * result['median']:.2f}", speed, f"{result['first']:.2f}", result.get("retries", "-"),
                      f"{result['losses'][-1]:.6g}"))


if __name__ == "__main__":
    sys.exit(main())
