#!/usr/bin/env python3
"""A broad sweep of PyTorch and CuPy on vramalloc, each result compared with the same run on their own allocators.

    python3 examples/python/sweep.py [SECTION...]        # prints a table; --list names the sections

Every run is a process of its own. What cannot work under a foreign allocator is tried, too, and listed with what PyTorch
says about it. `sections.py` has the sections. Below the table are figures of memory that stays, native's beside ours.
"""

import argparse
import hashlib
import json
import os
import pathlib
import pickle
import subprocess
import sys
import tempfile
import time
import traceback
import typing

from sections import CUPY, TORCH, Cannot, Results

HERE = pathlib.Path(__file__).resolve().parent
CHILD_SECONDS = 300


def digest(flat):
    """Some of the elements, and a hash of all."""
    step = max(1, flat.size // 50_000)
    return flat[::step].copy(), hashlib.sha256(flat.tobytes()).hexdigest()


def plain(value):
    """A result as bytes that compare: a tensor's own, whatever the type."""
    if hasattr(value, "detach"):
        value = value.detach()
        if value.layout.__str__() != "torch.strided":
            value = value.to_dense()
        import torch

        shape, dtype = tuple(value.shape), str(value.dtype)
        flat = value.contiguous().reshape(-1).cpu()
        flat = torch.view_as_real(flat).reshape(-1) if flat.is_complex() else flat
        wide = flat.double().numpy()
        return "tensor", shape, dtype, *digest(wide)
    if hasattr(value, "get"):
        value = value.get()
        return "tensor", value.shape, str(value.dtype), *digest(value.reshape(-1))
    return "value", value


class Section(typing.NamedTuple):
    """How a section went, in one process."""

    values: dict
    seen: dict
    bounded: dict
    error: typing.Optional[tuple]
    seconds: float


def child(names, mode, path):
    """Runs sections in this process and pickles what they gave."""
    results = {}
    is_cupy = names[0] in {function.__name__ for function in CUPY}
    ours = mode != "native"
    if is_cupy:
        import cupy as module

        if ours:
            import vramalloc

            vramalloc.use_with_cupy(c_functions=mode == "c")
        ours = mode if ours else False
    else:
        import torch as module

        if mode == "vramalloc" and names != ["mempool"]:
            import vramalloc

            vramalloc.use_with_torch()
        module.use_deterministic_algorithms(True, warn_only=True)
        module.utils.deterministic.fill_uninitialized_memory = False
    functions = {function.__name__: function for function in TORCH + CUPY}
    for name in names:
        out, error, start = Results(), None, time.perf_counter()
        if not is_cupy:
            module.manual_seed(0)
        try:
            functions[name](module, out, ours)
            if ours and name != "mempool":
                vramalloc.validate()
        except Cannot as reasons:
            error = ("cannot", str(reasons))
        except BaseException:
            error = ("error", traceback.format_exc())
        try:
            values = {key: plain(value) for key, value in out.items()}
        except Exception:
            error = error or ("error", traceback.format_exc())
            values = {}
        results[name] = Section(values, out.seen, out.bounded, error, time.perf_counter() - start)
        del out  # the next section's memory is its own
        with open(path, "wb") as file:
            pickle.dump(results, file)


def start(names, mode):
    env = dict(os.environ, CUBLAS_WORKSPACE_CONFIG=":4096:8", PYTHONWARNINGS="ignore", CUPY_TF32="0")
    env.setdefault("VRAMALLOC_CONF", "segments:expandable")
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "results"
        command = [sys.executable, __file__, "--run", mode, "--results", str(path), *names]
        log = pathlib.Path(folder) / "log"
        with open(log, "w") as file:
            try:
                code = subprocess.run(command, env=env, stdout=file, stderr=file, timeout=CHILD_SECONDS).returncode
                ended = f"the process ended with {code}"
            except subprocess.TimeoutExpired:
                ended = f"the process had not ended after {CHILD_SECONDS} s"
        said = log.read_text(errors="replace")
        results = pickle.loads(path.read_bytes()) if path.exists() else {}
    for name in names:
        if name not in results:
            results[name] = Section({}, {}, {}, ("error", f"{ended}:\n{said[-3000:]}"), 0.0)
    return results, said


# Where running out of memory is provoked, which is reported on standard error. Elsewhere a word of ours there is a failure.
LOUD = {"out_of_memory", "cannot"}


def exceeded(native, ours):
    """Which bounded figures are above native's."""
    different = []
    for key, (figure, slack) in ours.items():
        if key in native and figure > native[key][0] + slack:
            different.append(f"{key}: native {native[key][0]}, vramalloc {figure}, which is more than {slack} above")
    return different


def figures(native, ours):
    """Seen and bounded figures, native's beside ours."""
    def both(section):
        return {**section.seen, **{key: figure for key, (figure, _) in section.bounded.items()}}

    a, b = both(native), both(ours)
    return [f"  {key}:\n    native    {a.get(key, '-')}\n    vramalloc {b.get(key, '-')}" for key in {**a, **b}]


# What CuPy's C functions cannot do: they know no stream, and cannot raise.
NOT_FROM_C = {"streams", "out of memory"}


def compare(native, ours, mode):
    """How many results are equal, close, and which differ or are missing."""
    import numpy

    equal, close, different = 0, 0, []
    for key in sorted(native.keys() | ours.keys()):
        if key not in native or key not in ours:
            if mode != "c" or key not in NOT_FROM_C:
                different.append(f"{key}: missing")
            continue
        a, b = native[key], ours[key]
        if a[0] == "value" or b[0] == "value":
            same = a[0] == b[0] and a[1] == b[1]
            equal += same
            different += [] if same else [f"{key}: {a[1:]} / {b[1:]}"]
            continue
        if a[1:3] == b[1:3] and a[4] == b[4]:
            equal += 1
        elif a[1:3] == b[1:3] and numpy.allclose(a[3], b[3], rtol=1e-3, atol=1e-4, equal_nan=True):
            close += 1
        else:
            different.append(f"{key}: {a[1:3]} / {b[1:3]}")
    return equal, close, different


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sections", nargs="*")
    parser.add_argument("--run", help=argparse.SUPPRESS)
    parser.add_argument("--results", help=argparse.SUPPRESS)
    parser.add_argument("--list", action="store_true")
    args = parser.parse_args()
    if args.run:
        child(args.sections, args.run, args.results)
        return 0
    torch_names, cupy_names = [f.__name__ for f in TORCH], [f.__name__ for f in CUPY]
    if args.list:
        print("\n".join(f"{f.__name__:<15}{f.__doc__}" for f in TORCH + CUPY))
        return 0
    wanted = args.sections or torch_names + cupy_names
    alone = {"mempool", "cannot", "fork", "history", "out_of_memory", "graphs"}  # a process each: what goes wrong there stays there
    together = [name for name in torch_names if name in wanted and name not in alone]
    groups = [(group, ("vramalloc",)) for group in [together, *([name] for name in torch_names if name in alone and name in wanted)] if group]
    groups += [([name], ("vramalloc", "c")) for name in cupy_names if name in wanted]
    rows, failed, cannots, details, memory = [], False, {}, [], []
    for names, modes in groups:
        native, _ = start(names, "native")
        for mode in modes:
            mine, said = start(names, mode)
            for name in names:
                a, b = native[name], mine[name]
                verdict = "the same"
                memory += [f"memory that stays, {name}:", *figures(a, b)] if a.seen or b.seen else []
                if b.error and b.error[0] == "cannot":
                    theirs = json.loads(a.error[1])
                    cannots = {key: (theirs.get(key), words) for key, words in json.loads(b.error[1]).items()}
                    rows.append((name, mode, "see below", "", "", a.seconds, b.seconds))
                    continue
                equal, close, different = compare(a.values, b.values, mode)
                different += exceeded(a.bounded, b.bounded)
                if b.error or a.error or different or not equal:
                    verdict, failed = "FAILED", True
                    details += [f"--- {name} ({mode})"]
                    details += [f"{who}: {went.error[1]}" for who, went in (("native", a), (mode, b)) if went.error]
                    details += different[:10]
                    details += [said[-1500:]] if b.error else []
                rows.append((name, mode, verdict, equal, close, a.seconds, b.seconds))
            complaints = [line for line in said.splitlines() if line.startswith("vramalloc:")]
            if complaints and not LOUD & set(names):
                failed = True
                details += [f"--- vramalloc complained in {', '.join(names)} ({mode})", *complaints[:10]]
    print("\n".join(details))
    print(f"{'section':<15}{'allocator':<12}{'verdict':<11}{'equal':>7}{'close':>7}{'native s':>10}{'ours s':>9}")
    for name, mode, verdict, equal, close, time_a, time_b in rows:
        print(f"{name:<15}{mode:<12}{verdict:<11}{equal:>7}{close:>7}{time_a:>10.2f}{time_b:>9.2f}")
    print("\n".join(memory))
    if cannots:
        print("what cannot work with a foreign allocator in PyTorch:")
        for key, (theirs, words) in cannots.items():
            print(f"  {key}: {words}" + (f" (native: {theirs})" if theirs != "works" else ""))
    print("sweep: " + ("FAILED" if failed else "every result is the same"))
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
