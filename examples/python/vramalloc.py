"""vramalloc under PyTorch and CuPy, without a build step: the library is loaded through ctypes.

    import vramalloc
    vramalloc.use_with_torch()       # before anything is allocated on a GPU
    ...                              # train as ever
    print(vramalloc.summary())

The library is looked for at VRAMALLOC_LIBRARY, beside this file, and where cargo puts it. VRAMALLOC_CONF configures it
(`segments:expandable`), VRAMALLOC_LOG says what it does (`info`, `debug`). `docs/pytorch.md` tells the routes and limits.
In a process that was forked from one which used the library everything raises `Error`.
"""

import ctypes
import json
import os
import pathlib
import pickle
import tempfile
import warnings

ABI_VERSION = 1
_NAME = "libvramalloc_c.so"


class Error(RuntimeError):
    """What the library answered; `status` is its number."""

    def __init__(self, status, text):
        super().__init__(text)
        self.status = status


class OutOfMemoryError(Error, MemoryError):
    """Everything was tried; the text is the report."""


_OUT_OF_MEMORY = 5


def _find():
    named = os.environ.get("VRAMALLOC_LIBRARY")
    if named:
        return named
    here = pathlib.Path(__file__).resolve().parent
    root = here.parent.parent
    target = pathlib.Path(os.environ.get("CARGO_TARGET_DIR", root / "target"))
    places = [here / _NAME, target / "release" / _NAME, target / "debug" / _NAME]
    for place in places:
        if place.exists():
            return str(place)
    tried = ", ".join(str(place) for place in places)
    raise ImportError(
        f"{_NAME} is not there (looked at {tried}); build it with `cargo build --release -p vramalloc-capi`, "
        "or name it in VRAMALLOC_LIBRARY"
    )


class _Library:
    """The library, loaded when it is first needed."""

    def __init__(self):
        self._lib = None

    @property
    def path(self):
        self.load()
        return self._path

    def load(self):
        if self._lib is None:
            path = _find()
            lib = ctypes.CDLL(path)
            version = lib.vram_abi_version()
            if version != ABI_VERSION:
                raise ImportError(f"{path} has version {version} of the interface, this file is for {ABI_VERSION}")
            self._declare(lib, path)
            self._path, self._lib = path, lib
        return self._lib

    @staticmethod
    def _declare(lib, path):
        u64, size, pointer, device = ctypes.c_uint64, ctypes.c_size_t, ctypes.c_void_p, ctypes.c_int
        text = [u64, device, pointer, size, ctypes.POINTER(size)]
        signatures = {
            "vram_process_allocator": [ctypes.POINTER(u64)],
            "vram_alloc": [u64, u64, device, pointer, ctypes.POINTER(pointer)],
            "vram_free": [u64, pointer, u64, device, pointer],
            "vram_record_stream": [u64, pointer, device, pointer],
            "vram_retire_stream": [u64, device, pointer],
            "vram_empty_cache": [u64, device, ctypes.POINTER(u64)],
            "vram_grant_access": [u64, device, device],
            "vram_set_memory_fraction": [u64, device, ctypes.c_double],
            "vram_stats_json": text,
            "vram_driver_calls_json": text,
            "vram_memory_summary": text,
            "vram_memory_summary_abbreviated": text,
            "vram_record_history": [u64, device, u64, ctypes.c_uint32],
            "vram_stop_history": [u64, device],
            "vram_snapshot": [u64, device, ctypes.c_char_p],
            "vram_reset_peak_stats": [u64, device],
            "vram_reset_accumulated_stats": [u64, device],
            "vram_validate": [u64, device],
        }
        for name, types in signatures.items():
            try:
                getattr(lib, name).argtypes = types
            except AttributeError:
                raise ImportError(f"{path} is older than this file: it has no {name}; build it again") from None
        lib.vram_cupy_free.argtypes, lib.vram_cupy_free.restype = [pointer, pointer, device], None
        lib.vram_last_error.restype = ctypes.c_char_p

    def call(self, name, *args):
        status = getattr(self.load(), name)(*args)
        if status:
            text = self._lib.vram_last_error().decode(errors="replace")
            raise (OutOfMemoryError if status == _OUT_OF_MEMORY else Error)(status, f"{name}: {text}")

    def address(self, name):
        return ctypes.cast(getattr(self.load(), name), ctypes.c_void_p).value

    def allocator(self):
        """The handle of the process's allocator, which PyTorch and CuPy use."""
        handle = ctypes.c_uint64()
        self.call("vram_process_allocator", ctypes.byref(handle))
        return handle

    def text(self, name, device):
        handle, needed = self.allocator(), ctypes.c_size_t()
        self.call(name, handle, device, None, 0, ctypes.byref(needed))
        while True:
            # Another thread may make it longer in between.
            capacity = needed.value + 256
            buffer = ctypes.create_string_buffer(capacity)
            try:
                self.call(name, handle, device, buffer, capacity, ctypes.byref(needed))
            except Error:
                if needed.value > capacity:
                    continue
                raise
            return buffer.value.decode()


_library = _Library()

# What PyTorch's allocator object can be given beyond alloc and free: its setter, and our function.
_TORCH_HOOKS = {
    "set_record_stream_fn": "vram_torch_record_stream",
    "set_reset_fn": "vram_torch_empty_cache",
    "set_memory_fraction_fn": "vram_torch_set_memory_fraction",
    "set_begin_allocate_to_pool": "vram_torch_begin_allocate_to_pool",
    "set_end_allocate_to_pool_fn": "vram_torch_end_allocate_to_pool",
    "set_release_pool": "vram_torch_release_pool",
}

_kept = []


def use_with_torch(statistics=True):
    """Makes vramalloc PyTorch's allocator, for the whole process; to be called before the first use of a GPU.

    With `statistics`, torch.cuda.memory_stats and what is made of it (memory_allocated, max_memory_reserved,
    memory_summary, reset_peak_memory_stats, ...) report vramalloc's figures instead of raising, and
    torch.cuda.memory._record_memory_history and ._dump_snapshot use vramalloc's history (which has no Python stacks).
    """
    import torch

    allocator = torch.cuda.memory.CUDAPluggableAllocator(_library.path, "vram_torch_alloc", "vram_torch_free")
    inner = allocator.allocator()
    missing = [setter for setter in _TORCH_HOOKS if not hasattr(inner, setter)]
    if "set_record_stream_fn" in missing:
        raise Error(0, f"PyTorch {torch.__version__} takes no record_stream: memory would be reused while it is in use")
    if missing:
        # Without those of pools a captured graph's memory would be handed to others.
        warnings.warn(f"PyTorch {torch.__version__} has no {', '.join(missing)}: what these are for does not work", stacklevel=2)
    for setter, function in _TORCH_HOOKS.items():
        if setter not in missing:
            getattr(inner, setter)(_library.address(function))
    torch.cuda.memory.change_current_allocator(allocator)
    _kept.append(allocator)
    if statistics:
        _replace_statistics(torch)
    return allocator


def _replace_statistics(torch):
    def ordinal(device):
        return torch.cuda._utils._get_device_index(device, optional=True)

    def memory_stats(device=None):
        return stats(ordinal(device))

    def reset_peak(device=None):
        reset_peak_stats(ordinal(device))

    def reset_accumulated(device=None):
        _library.call("vram_reset_accumulated_stats", _library.allocator(), ordinal(device))

    def memory_summary(device=None, abbreviated=False):
        return summary(ordinal(device), abbreviated)

    def record_memory_history(enabled="all", context="all", stacks="all", max_entries=None, device=None, *args, **options):
        # How stacks are taken is of no account: those of Python are PyTorch's own business.
        which = -1 if device is None else ordinal(device)
        if enabled is None or enabled is False:
            return stop_history(which)
        # An older way to call it has truth values there, and numbers at other places.
        events = min(max_entries, 2**62) if type(max_entries) is int else 1_000_000
        return record_history(which, 0 if enabled == "state" else events)

    def whole_snapshot(*args, **options):
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "snapshot.pickle")
            snapshot(path)
            with open(path, "rb") as file:
                return pickle.load(file)

    def memory_snapshot(mempool_id=None, *args, **options):
        segments = whole_snapshot()["segments"]
        # (0, 0) stands for all, as in PyTorch's own allocator.
        pool = tuple(mempool_id or (0, 0))
        return segments if pool == (0, 0) else [segment for segment in segments if segment["segment_pool_id"] == pool]

    replaced = {
        "memory_stats": memory_stats,
        "reset_peak_memory_stats": reset_peak,
        "reset_max_memory_allocated": reset_peak,
        "reset_max_memory_cached": reset_peak,
        "reset_accumulated_memory_stats": reset_accumulated,
        "memory_summary": memory_summary,
        "_record_memory_history": record_memory_history,
        "_snapshot": whole_snapshot,
        "memory_snapshot": memory_snapshot,
    }
    for name, function in replaced.items():
        for module in (torch.cuda.memory, torch.cuda):
            if hasattr(module, name):
                setattr(module, name, function)


def use_as_mempool():
    """A torch.cuda.MemPool whose segments come from vramalloc, for `with torch.cuda.use_mem_pool(pool):`.

    PyTorch's own cache stays in charge of what is in them: its statistics, OutOfMemoryError and graphs work as ever.
    Keep the pool for as long as its tensors.
    """
    import torch

    names = "vram_torch_segment_alloc", "vram_torch_segment_free"
    allocator = torch.cuda.memory.CUDAPluggableAllocator(_library.path, *names)
    _kept.append(allocator)
    return torch.cuda.MemPool(allocator.allocator())


def use_with_cupy(c_functions=False, stream=0):
    """Makes vramalloc CuPy's allocator, in every thread.

    Each array is allocated for the stream that is current in CuPy, and running out of memory raises
    cupy.cuda.memory.OutOfMemoryError. With `c_functions`, CuPy calls the library without Python in between: faster, but
    every array is allocated for `stream` (a handle), and running out of memory gives an array without memory.
    """
    import cupy

    if c_functions:
        functions = _library.address("vram_cupy_malloc"), _library.address("vram_cupy_free")
        allocator = cupy.cuda.CFunctionAllocator(stream, *functions, _library)
    else:
        allocator = cupy.cuda.PythonFunctionAllocator(_cupy_malloc(cupy), _cupy_free())
    _kept.append(allocator)
    cupy.cuda.set_allocator(allocator.malloc)
    return allocator


def _cupy_malloc(cupy):
    handle = _library.allocator()
    alloc = _library.load().vram_alloc
    streams = {}

    def malloc(size, device):
        ptr, stream = ctypes.c_void_p(), cupy.cuda.get_current_stream()
        # CuPy destroys a stream with its Python object, without a word: it must live while memory is cached for it.
        streams.setdefault(stream.ptr, stream)
        status = alloc(handle, size, device, stream.ptr, ctypes.byref(ptr))
        if status == _OUT_OF_MEMORY:
            figures = stats(device)
            total = figures["allocated_bytes.all.current"]
            raise cupy.cuda.memory.OutOfMemoryError(size, total)
        if status:
            raise Error(status, _library.load().vram_last_error().decode(errors="replace"))
        return ptr.value or 0

    return malloc


def _cupy_free():
    free, nowhere = _library.load().vram_cupy_free, ctypes.c_void_p(0)

    def deallocate(ptr, device):
        free(nowhere, ctypes.c_void_p(ptr), device)

    return deallocate


def stats(device=0):
    """The statistics of a device, with PyTorch's keys (`allocated_bytes.all.peak`)."""
    return json.loads(_library.text("vram_stats_json", device))


def summary(device=0, abbreviated=False):
    """The statistics as a table for people; abbreviated, without the rows by size class."""
    return _library.text("vram_memory_summary_abbreviated" if abbreviated else "vram_memory_summary", device)


def driver_calls(device=0):
    """How often each function of the driver was called, and the seconds that took, since the device was first used."""
    return json.loads(_library.text("vram_driver_calls_json", device))


def reset_peak_stats(device=0):
    """Starts the peaks anew, from what is current."""
    _library.call("vram_reset_peak_stats", _library.allocator(), device)


def empty_cache(device=-1):
    """Gives cached memory back, of a device or of all; returns the bytes."""
    freed = ctypes.c_uint64()
    _library.call("vram_empty_cache", _library.allocator(), device, ctypes.byref(freed))
    return freed.value


def record_history(device=-1, events=1_000_000):
    """Starts recording what the allocator does, on a device or all: the newest `events` are in its snapshots then.

    `VRAMALLOC_CONF=history:1000000` records from the very start.
    """
    if events < 0:
        raise ValueError(f"{events} events cannot be kept")
    _library.call("vram_record_history", _library.allocator(), device, events, 0)


def stop_history(device=-1):
    """Stops recording, and forgets what was recorded: take a snapshot first."""
    _library.call("vram_stop_history", _library.allocator(), device)


def snapshot(path, device=-1):
    """Writes every segment and block of a device, or of all, to a file; and the events of a history (`record_history`).

    It is a pickle as torch.cuda.memory._dump_snapshot makes it, or JSON if the name ends in `.json`; pytorch.org/memory_viz
    opens both.
    """
    _library.call("vram_snapshot", _library.allocator(), device, os.fsencode(path))


def retire_stream(stream, device=0):
    """To be called before a stream (by handle) is destroyed that memory was allocated for."""
    _library.call("vram_retire_stream", _library.allocator(), device, stream)


def grant_access(device, peer):
    """Lets GPU `peer` use the memory of GPU `device` (expandable segments): for copies between the two."""
    _library.call("vram_grant_access", _library.allocator(), device, peer)


def validate(device=0):
    """Checks that the allocator is sound; raises if it is not."""
    _library.call("vram_validate", _library.allocator(), device)
