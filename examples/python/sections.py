"""What `sweep.py` runs: each function takes torch (or cupy), gives its results to `out`, and knows whose allocator it has.

Beside results, which must equal native's, `out` takes figures: seen ones are printed, bounded ones must not exceed native's.
"""

import collections
import gc
import json
import os
import pathlib
import pickle
import tempfile
import threading

MIB = 1 << 20


class Cannot(Exception):
    """What is known not to work, with the reason."""


class Results(dict):
    """What a section gives: values, which must equal native's; figures that are printed; and bounded ones."""

    def __init__(self):
        super().__init__()
        self.seen, self.bounded = {}, {}

    def see(self, name, figure):
        """Printed beside native's, not judged."""
        self.seen[name] = figure

    def at_most_natives(self, name, figure, slack=0):
        """Fails if it exceeds native's by more than `slack`. Printed, too."""
        self.bounded[name] = figure, slack


# ---------------------------------------------------------------- memory that stays

def settle(torch):
    """Everything done, what nobody refers to collected, and the cache given back."""
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()


def current(torch, what):
    return torch.cuda.memory_stats()[f"{what}_bytes.all.current"]


def drop_workspaces(torch):
    """PyTorch keeps a workspace for each cuBLAS handle and stream that multiplied (32 MiB and 1 MiB here), whatever the
    allocator, and never gives one back by itself: not a leak, but it hides one. They are made anew when they are needed."""
    torch.cuda.synchronize()
    torch._C._cuda_clearCublasWorkspaces()


def live_blocks(torch, ours):
    """The sizes of what is allocated, the most bytes first: `18 of 33554432, ...`."""
    if ours:
        import vramalloc

        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder) / "snapshot.json"
            vramalloc.snapshot(path)
            segments = json.loads(path.read_text())["segments"]
    else:
        segments = torch.cuda.memory_snapshot()
    sizes = collections.Counter(block["requested_size"] for segment in segments for block in segment["blocks"]
                                if block["state"] == "active_allocated")
    most = sorted(sizes.items(), key=lambda pair: -pair[0] * pair[1])
    return ", ".join(f"{count} of {size}" for size, count in most[:8]) + (", ..." if len(most) > 8 else "")


def python_bytes(torch):
    """Bytes of the GPU's tensors that Python can reach."""
    storages = {}
    for thing in gc.get_objects():
        if issubclass(type(thing), torch.Tensor) and thing.is_cuda and thing.layout == torch.strided:
            storage = thing.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def account(torch, out, ours):
    """Everything dropped that can be: what is still held, by whom, and no more of it than native holds."""
    settle(torch)
    out.see("allocated, workspaces included", current(torch, "requested"))
    out.see("reserved for that", current(torch, "reserved"))
    out.see("live, workspaces included", live_blocks(torch, ours))
    drop_workspaces(torch)
    settle(torch)
    allocated = current(torch, "requested")
    out.see("tensors that Python reaches", python_bytes(torch))
    out.see("live without workspaces", live_blocks(torch, ours))
    out.at_most_natives("allocated without workspaces", allocated)
    # A live block keeps the pages around it: at most one handle, which is 64 MiB at most.
    out.at_most_natives("reserved without workspaces", current(torch, "reserved"), slack=64 * MIB if allocated else 0)


# ---------------------------------------------------------------- PyTorch

def operators(torch, out, ours):
    """Operators over shapes and types."""
    generator = torch.Generator(device="cuda").manual_seed(1)

    def make(shape, dtype):
        if dtype == torch.bool:
            return torch.rand(shape, device="cuda", generator=generator) > 0.5
        if dtype.is_floating_point or dtype.is_complex:
            wide = torch.complex64 if dtype.is_complex else torch.float32
            return torch.randn(shape, device="cuda", generator=generator, dtype=wide).to(dtype)
        return torch.randint(-50, 50, shape, device="cuda", generator=generator, dtype=dtype)

    every = {
        "add": lambda x: x + x, "cat": lambda x: torch.cat((x, x)), "stack": lambda x: torch.stack((x, x), -1),
        "flip": lambda x: x.flip(0), "roll": lambda x: x.roll(3, 0), "clone": lambda x: x.t().contiguous(),
        "where": lambda x: torch.where(x == x, x, x * 0), "index": lambda x: x[torch.arange(0, x.shape[0], 2, device="cuda")],
        "expand": lambda x: x[:, None].expand(-1, 3, -1).reshape(-1), "tril": lambda x: x.tril(), "nonzero": lambda x: x.nonzero(),
        "masked": lambda x: x[x == x], "pad": lambda x: torch.nn.functional.pad(x, (1, 2)), "repeat": lambda x: x.repeat(2, 1),
        "eq": lambda x: x == x.roll(1, 1), "to double": lambda x: x.to(torch.complex128 if x.is_complex() else torch.float64),
    }
    ordered = {
        "sort": lambda x: x.sort(-1)[0], "topk": lambda x: x.topk(1)[0], "max": lambda x: x.amax(0), "clamp": lambda x: x.clamp(-1, 1),
        "argmin": lambda x: x.argmin(-1), "unique": lambda x: x.unique(), "cumsum": lambda x: x.cumsum(1), "sum": lambda x: x.sum(),
        "sign": lambda x: x.sign(), "mul": lambda x: x * 3, "scatter": lambda x: torch.zeros_like(x).scatter_(0, x.argsort(0), x),
        "searchsorted": lambda x: torch.searchsorted(x.sort(-1)[0], x), "median": lambda x: x.median(),
    }
    real = {
        "exp": lambda x: x.exp(), "softmax": lambda x: x.softmax(-1), "layer_norm": lambda x: torch.nn.functional.layer_norm(x, x.shape[-1:]),
        "matmul": lambda x: x @ x.t(), "gelu": lambda x: torch.nn.functional.gelu(x), "var": lambda x: x.var(0), "norm": lambda x: x.norm(),
        "einsum": lambda x: torch.einsum("ij,kj->ik", x, x), "dropout": lambda x: torch.nn.functional.dropout(x, 0.0),
        "conv1d": lambda x: torch.nn.functional.conv1d(x[None], x[:, :3].contiguous()[None].repeat(2, 1, 1), padding=2) if x.shape[1] > 3 else x,
        "pool": lambda x: torch.nn.functional.avg_pool1d(x[None], 2), "logsumexp": lambda x: x.logsumexp(0),
        "interpolate": lambda x: torch.nn.functional.interpolate(x[None], scale_factor=2), "outer": lambda x: torch.outer(x[0], x[0]),
        "cosine": lambda x: torch.nn.functional.cosine_similarity(x, x.roll(1, 0)), "lerp": lambda x: x.lerp(x.roll(1, 0), 0.25),
    }
    exact = {
        "fft": lambda x: torch.fft.fft(x).abs(), "inverse": lambda x: torch.linalg.inv(x @ x.t() + 50 * torch.eye(x.shape[0], device="cuda", dtype=x.dtype)),
        "cholesky": lambda x: torch.linalg.cholesky(x @ x.t() + 50 * torch.eye(x.shape[0], device="cuda", dtype=x.dtype)),
        "qr": lambda x: torch.linalg.qr(x)[1].abs(), "svd": lambda x: torch.linalg.svdvals(x[:64]), "cdist": lambda x: torch.cdist(x, x),
        "sparse": lambda x: torch.sparse.mm((x.t() @ x).relu().to_sparse(), x.t()), "lstm": lambda x: lstm(torch, x), "quantile": lambda x: x[:8].quantile(0.5, 1),
    }
    types = [torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.int32, torch.int64, torch.uint8, torch.bool, torch.complex64]
    for dtype in types:
        for shape in ((2, 4), (37, 129), (515, 2049)):
            x = make(shape, dtype if dtype != torch.uint8 else torch.int32)
            x = x.abs().to(dtype) if dtype == torch.uint8 else x
            chosen = dict(every)
            if dtype not in (torch.bool, torch.complex64):
                chosen.update(ordered)
            if dtype.is_floating_point:
                chosen.update(real)
            if dtype in (torch.float32, torch.float64):
                chosen.update(exact)
            for name, operator in chosen.items():
                key = f"{name} {dtype} {shape}"
                try:
                    out[key] = operator(x)
                except Exception as error:  # the same on both sides, or it shows
                    out[key] = f"{type(error).__name__}: {str(error).splitlines()[0]}"


def lstm(torch, x):
    torch.manual_seed(7)
    return torch.nn.LSTM(x.shape[1], 32, 2).to("cuda", x.dtype)(x[None].transpose(0, 1))[0]


def streams(torch, out, ours):
    """Blocks used on several streams: a value is written, read elsewhere later, and the memory freed meanwhile."""
    made, used = [[torch.cuda.Stream() for _ in range(4)] for _ in range(2)]
    bounds = torch.zeros(400, 2, device="cuda")
    slow = torch.randn(1024, 1024, device="cuda")
    torch.cuda.synchronize()
    for step in range(400):
        producer, consumer = made[step % 4], used[(step // 3) % 4]
        with torch.cuda.stream(producer):
            x = torch.full(((1 + step % 7) * 300_000,), float(step), device="cuda")
        consumer.wait_stream(producer)
        with torch.cuda.stream(consumer):
            if step % 5 == 0:
                for _ in range(10):
                    slow @ slow  # the reader is late
            bounds[step] = torch.stack(x.aminmax())
        x.record_stream(consumer)
        del x  # reused by the next step's producer, but not before the reader is done
    torch.cuda.synchronize()
    out["bounds"] = bounds
    wrong = (bounds.cpu() != torch.arange(400.0)[:, None]).any(1).nonzero().flatten().tolist()
    if wrong:
        found = bounds[wrong[:10]].tolist()
        raise AssertionError(f"memory was reused while another stream read it, in steps {wrong[:10]}: {found}")

    late_reader(torch, True, 1)  # loads the kernels
    cycles, reused = 1 << 28, {}
    for record in (True, False):
        for _ in range(4):
            reused[record], read = late_reader(torch, record, cycles)
            if record and read != [1.0, 1.0]:
                raise AssertionError(f"with record_stream the late reader found {read} instead of 1")
            if reused[record] is not None:
                break
            cycles *= 4
    out.see("late reader slept cycles", cycles)
    out["reused before it was read, with record_stream"] = reused[True]
    out.see("reused before it was read, without record_stream", reused[False])
    if reused[True] is not False:
        raise AssertionError(f"with record_stream, memory that is still to be read was given away: {reused[True]}")
    if not ours and reused[False] is not True:
        raise AssertionError(f"the test cannot fail: without record_stream nothing was reused early: {reused[False]}")


def late_reader(torch, record, cycles):
    """A block is freed while a stream that sleeps has still to read it. Whether the next request gets its memory before
    that (None: the reader woke up too early to tell), and what the reader found."""
    producer, consumer = torch.cuda.Stream(), torch.cuda.Stream()
    with torch.cuda.stream(producer):
        cached = [torch.full((5_000_000,), 0.0, device="cuda") for _ in range(2)]
    with torch.cuda.stream(consumer):
        torch.stack(torch.full((5_000_000,), 0.0, device="cuda").aminmax())
    torch.cuda.synchronize()
    del cached  # from here on the cache has all that is asked for: no call that could wait for the sleeper
    with torch.cuda.stream(producer):
        x = torch.full((5_000_000,), 1.0, device="cuda")
    consumer.wait_stream(producer)
    awake = torch.cuda.Event()
    with torch.cuda.stream(consumer):
        torch.cuda._sleep(cycles)
        awake.record()
        read = torch.stack(x.aminmax())
    if record:
        x.record_stream(consumer)
    address = x.data_ptr()
    del x
    with torch.cuda.stream(producer):
        y = torch.full((5_000_000,), -1.0, device="cuda")
    same, asleep = y.data_ptr() == address, not awake.query()
    torch.cuda.synchronize()
    return (same if asleep else None), read.tolist()


def autograd(torch, out, ours):
    """Gradients: checkpoints, second order, several threads' backward, mixed precision."""
    from torch.utils.checkpoint import checkpoint

    torch.manual_seed(3)
    net = torch.nn.Sequential(*(torch.nn.Sequential(torch.nn.Linear(512, 512), torch.nn.Tanh()) for _ in range(8))).cuda()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cuda")
    for step in range(20):
        x = torch.randn(64 + 32 * (step % 3), 512, device="cuda")
        with torch.autocast("cuda", dtype=torch.float16):
            for layer in net:
                x = checkpoint(layer, x, use_reentrant=False)
            loss = x.float().pow(2).mean()
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        out[f"loss {step}"] = loss
    x = torch.randn(100, 512, device="cuda", requires_grad=True)
    (gradient,) = torch.autograd.grad(net(x).pow(3).sum(), x, create_graph=True)
    gradient.pow(2).sum().backward()
    out["second order"] = x.grad
    copies = [torch.nn.Linear(256, 256).cuda() for _ in range(4)]
    inputs = [torch.randn(128, 256, device="cuda") for _ in range(4)]

    def train(model, x):
        for _ in range(10):
            model(x).square().mean().backward()

    threads = [threading.Thread(target=train, args=pair) for pair in zip(copies, inputs)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    for index, model in enumerate(copies):
        out[f"thread {index}"] = model.weight.grad


def graphs(torch, out, ours):
    """Captured graphs: replayed among other work, sharing a pool, forked to a side stream, made and dropped many times."""
    torch.manual_seed(5)
    net = torch.nn.Sequential(torch.nn.Linear(256, 1024), torch.nn.GELU(), torch.nn.Linear(1024, 256)).cuda()
    static = torch.zeros(128, 256, device="cuda")

    def capture(function, pool=None):
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side), torch.no_grad():
            for _ in range(3):
                function()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.no_grad(), torch.cuda.graph(graph, pool=pool):
            result = function()
        return graph, result

    def churn(seed):
        """Memory of all sizes, overwritten: what a graph uses must not be among it."""
        for index in range(20):
            torch.full((1 + (seed * 7919 + index * 104729) % (8 * MIB),), float("nan"), device="cuda")

    def branched():
        main, side = torch.cuda.current_stream(), branch
        side.wait_stream(main)
        with torch.cuda.stream(side):
            other = static.sin() * 2
        ours_ = net(static)
        main.wait_stream(side)
        return ours_ + other

    branch = torch.cuda.Stream()
    pool = torch.cuda.graph_pool_handle()
    captured = [capture(lambda: net(net(static)).softmax(-1)), capture(lambda: net(static) * 2, pool),
                capture(lambda: net(static).cumsum(0), pool), capture(branched)]
    for step in range(10):
        static.copy_(torch.randn(128, 256, device="cuda"))
        for index, (graph, result) in enumerate(captured):
            churn(step)
            graph.replay()
            churn(step + 1)
            out[f"replay {step} of {index}"] = result.clone()
        with torch.no_grad():
            eager = net(net(static)).softmax(-1)
        torch.testing.assert_close(captured[0][1], eager)
        if step == 5:
            torch.cuda.empty_cache()
    model = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.ReLU(), torch.nn.Linear(256, 8)).cuda()
    graphed = torch.cuda.make_graphed_callables(model, (torch.randn(32, 256, device="cuda"),))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(5):
        optimizer.zero_grad(set_to_none=True)
        loss = graphed(torch.randn(32, 256, device="cuda")).square().mean()
        loss.backward()
        optimizer.step()
        churn(step)
        out[f"graphed loss {step}"] = loss
    del captured, graphed, model, optimizer, loss, graph, result, eager
    account(torch, out, ours)
    allocated, reserved = [], []
    for _ in range(12):
        graph, result = capture(lambda: net(static).exp())
        graph.replay()
        torch.cuda.synchronize()
        del graph, result
        # The warm-up's stream and the capture's have workspaces, the latter in the graph's pool.
        drop_workspaces(torch)
        settle(torch)
        allocated.append(current(torch, "requested"))
        reserved.append(current(torch, "reserved"))
    out.see("allocated after each capture", allocated)
    out.see("reserved after each capture", reserved)
    out.at_most_natives("allocated more after 9 captures", allocated[-1] - allocated[2])
    out.at_most_natives("reserved more after 9 captures", reserved[-1] - reserved[2], slack=4 * MIB)
    if max(allocated[-1] - allocated[2], reserved[-1] - reserved[2]) > 4 * MIB:
        live = live_blocks(torch, ours)
        raise AssertionError(f"graphs leave memory behind: allocated {allocated}, reserved {reserved}, live {live}")


def loader(torch, out, ours):
    """A data loader with forked workers and pinned memory, copies that do not wait."""
    from torch.utils.data import DataLoader, Dataset

    class Numbers(Dataset):
        def __len__(self):
            return 256

        def __getitem__(self, index):
            return torch.full((3, 64, 64), float(index)), index

    torch.ones(1, device="cuda")  # before the workers are forked
    total = torch.zeros((), dtype=torch.float64, device="cuda")
    for epoch in range(2):
        for images, labels in DataLoader(Numbers(), batch_size=24, num_workers=2, pin_memory=True, multiprocessing_context="fork"):
            images, labels = images.cuda(non_blocking=True), labels.cuda(non_blocking=True)
            total += images.double().sum() + labels.sum()
    out["total"] = total


def out_of_memory(torch, out, ours):
    """More than there is is asked for; the program goes on."""
    kept = torch.arange(1_000_000, device="cuda")
    for _ in range(3):
        if ours:  # PyTorch does not check for null: look before the memory is used
            huge = torch.empty(1 << 44, dtype=torch.uint8, device="cuda")
            if huge.data_ptr() != 0:
                raise AssertionError("17 TB were allocated")
            del huge
        else:
            try:
                torch.empty(1 << 44, dtype=torch.uint8, device="cuda")
                raise AssertionError("17 TB were allocated")
            except torch.cuda.OutOfMemoryError:
                pass
        out["after"] = kept * 2 + torch.ones_like(kept)
    torch.cuda.set_per_process_memory_fraction(0.02)
    if ours:
        refused = torch.empty(8 << 30, dtype=torch.uint8, device="cuda").data_ptr() == 0
    else:
        try:
            refused = torch.empty(8 << 30, dtype=torch.uint8, device="cuda") is None
        except torch.cuda.OutOfMemoryError:
            refused = True
    torch.cuda.set_per_process_memory_fraction(1.0)
    out["fraction refuses"] = refused
    out["fraction lifted"] = torch.ones(8 << 30, dtype=torch.uint8, device="cuda").sum()


def threads(torch, out, ours):
    """Inference in eight threads, each on a stream of its own."""
    torch.manual_seed(11)
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 32, 3, padding=1), torch.nn.ReLU(), torch.nn.Conv2d(32, 32, 3, padding=1),
                                torch.nn.AdaptiveAvgPool2d(4), torch.nn.Flatten(), torch.nn.Linear(512, 10)).cuda().eval()
    inputs = [[torch.randn(1 + (7 * t + i) % 5, 3, 64 + 16 * (i % 3), 64, device="cuda") for i in range(30)] for t in range(8)]
    torch.cuda.synchronize()
    results, errors = [None] * 8, []

    def serve(number):
        try:
            with torch.no_grad(), torch.cuda.stream(torch.cuda.Stream()):
                results[number] = torch.cat([model(x) for x in inputs[number]])
                torch.cuda.current_stream().synchronize()
        except Exception as error:
            errors.append(error)

    workers = [threading.Thread(target=serve, args=(number,)) for number in range(8)]
    [worker.start() for worker in workers]
    [worker.join() for worker in workers]
    if errors:
        raise errors[0]
    for number, result in enumerate(results):
        out[f"thread {number}"] = result


def fork(torch, out, ours):
    """A forked child that drops the parent's tensors and ends: neither it nor the parent is hurt."""
    x = torch.arange(1_000_000, device="cuda")
    y = [torch.full((MIB,), float(i), device="cuda") for i in range(8)]
    torch.cuda.synchronize()
    child = os.fork()
    if child == 0:
        y.clear()
        del x
        os._exit(0)
    _, status = os.waitpid(child, 0)
    out["child"] = status
    out["parent"] = x + sum(v.sum() for v in y)


def cleanup(torch, out, ours):
    """Everything dropped: nothing stays allocated but what PyTorch's libraries hold, and that does not grow."""
    def round_():
        x = [torch.randn(100 + 997 * i, 33, device="cuda") for i in range(200)]
        total = sum(v.sum() for v in x) + (x[7][:64] @ x[7][:64].t()).sum()
        return float(total) is not None

    levels = []
    for _ in range(5):
        round_()
        settle(torch)
        levels.append(current(torch, "requested"))
    out["does not grow"] = levels[-1] <= levels[0]
    account(torch, out, ours)


def mempool(torch, out, ours):
    """Behind torch.cuda.MemPool: PyTorch's cache over our segments; OutOfMemoryError works there."""
    torch.manual_seed(13)
    torch.ones(8, 8, device="cuda") @ torch.ones(8, 8, device="cuda")  # cuBLAS keeps a workspace for good: not in the pool
    settle(torch)
    before = current(torch, "reserved")
    if ours:
        import vramalloc

        pool = vramalloc.use_as_mempool()
    else:
        pool = torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(pool):
        weights = [torch.randn(1000, 1000, device="cuda") for _ in range(10)]
        x = torch.randn(300, 1000, device="cuda")
        for index in range(len(weights)):
            x = (x @ weights[index]).softmax(-1)
        out["product"] = x.cpu()
        try:
            torch.empty(1 << 44, dtype=torch.uint8, device="cuda")
            out["out of memory"] = "nothing raised"
        except torch.cuda.OutOfMemoryError:
            out["out of memory"] = "OutOfMemoryError"
        out["after"] = (x * 2).cpu()
        if ours and vramalloc.stats()["allocated_bytes.all.current"] < 40 * MIB:
            raise AssertionError("the pool did not take its segments from vramalloc")
    kept = weights[-1]
    del weights, x
    # Tensors first, then the pool, which gives its segments back when it goes; that of a tensor which outlives it goes with
    # the next empty_cache.
    del pool
    gc.collect()
    out.see("reserved for a tensor that outlives the pool", current(torch, "reserved") - before)
    out["outlives the pool"] = kept.cpu()
    del kept
    settle(torch)
    left = current(torch, "reserved") - before
    out.at_most_natives("reserved when all is gone", left)
    if ours:
        held = vramalloc.stats()["allocated_bytes.all.current"]
        if held > left:
            raise AssertionError(f"PyTorch keeps {left} bytes of segments, vramalloc {held}: {live_blocks(torch, ours)}")
        vramalloc.validate()


def history(torch, out, ours):
    """A history of events by PyTorch's functions: what was allocated and freed, and a file that can be read again."""
    torch.cuda.memory._record_memory_history(max_entries=1000)
    for count in (12345, 7_000_001):
        x = torch.ones(count, device="cuda")
        del x
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "snapshot.pickle"
        torch.cuda.memory._dump_snapshot(str(path))
        snapshot = pickle.loads(path.read_bytes())
    torch.cuda.memory._record_memory_history(enabled=None)
    wanted = ("alloc", "free_requested", "free_completed")
    out["events"] = [(entry["action"], entry["size"]) for entry in snapshot["device_traces"][0] if entry["action"] in wanted]
    out["keys"] = sorted({"segments", "device_traces"} - set(snapshot))


def cannot(torch, out, ours):
    """What PyTorch does not offer with a foreign allocator: what it says."""
    def benchmark():
        torch.backends.cudnn.benchmark = True
        try:
            torch.nn.functional.conv2d(torch.randn(8, 3, 64, 64, device="cuda"), torch.randn(8, 3, 3, 3, device="cuda"))
        finally:
            torch.backends.cudnn.benchmark = False

    tried = {
        "cudnn.benchmark": benchmark,
        "torch.cuda.MemPool beside it": lambda: torch.cuda.MemPool(),
        "sharing a tensor with a process": lambda: torch.ones(8, device="cuda").untyped_storage()._share_cuda_(),
        "out of memory as an exception": lambda: torch.empty(1 << 44, dtype=torch.uint8, device="cuda"),
    }
    said = {}
    for name, function in tried.items():
        try:
            function()
            said[name] = "works"
        except Exception as error:
            said[name] = f"{type(error).__name__}: {str(error).splitlines()[0][:150]}"
    if ours and said["out of memory as an exception"] == "works":
        said["out of memory as an exception"] = "PyTorch does not check for null: the tensor's data_ptr() is 0 (a report is on standard error)"
    raise Cannot(json.dumps(said))


# ---------------------------------------------------------------- CuPy

def cupy_arrays(cupy, out, ours):
    """CuPy: arithmetic, reductions, linear algebra, FFT, sorting, kernels of one's own, streams, out of memory."""
    import numpy

    numpy.random.seed(1)
    for dtype in ("float32", "float64", "int32", "int64", "uint8", "complex64", "bool"):
        for shape in ((5,), (37, 129), (512, 1025)):
            host = (numpy.random.randn(*shape) * 20).astype(dtype)
            x = cupy.asarray(host)
            key = f"{dtype} {shape}"
            out[key + " add"] = x + x
            out[key + " where"] = cupy.where(x != 0, x, x)
            out[key + " concatenate"] = cupy.concatenate((x, x))
            out[key + " T"] = cupy.ascontiguousarray(x.T)
            if dtype != "bool":
                out[key + " sum"] = x.sum(axis=0)
            if dtype not in ("bool", "complex64"):
                out[key + " sort"] = cupy.sort(x, axis=-1)
                out[key + " argsort"] = cupy.take_along_axis(x, cupy.argsort(x, axis=-1), -1)
                out[key + " cumsum"] = cupy.cumsum(x)
                out[key + " unique"] = cupy.unique(x)
            if dtype in ("float32", "float64") and len(shape) == 2:
                out[key + " matmul"] = x @ x.T
                out[key + " fft"] = cupy.abs(cupy.fft.fft(x))
                out[key + " solve"] = cupy.linalg.solve(x @ x.T + 500 * cupy.eye(shape[0], dtype=dtype), x)
    kernel = cupy.ElementwiseKernel("float32 a, float32 b", "float32 c", "c = a * b + 1", "multiply_add")
    out["kernel"] = kernel(cupy.arange(100000, dtype="f"), cupy.float32(3))
    some = [cupy.cuda.Stream(non_blocking=True) for _ in range(3)]
    if ours != "c":  # there every array is the default stream's
        means = []
        for step in range(200):
            with some[step % 3]:
                x = cupy.full((100_000 + step % 5 * 70_000,), step, dtype="float64")
                means.append(float(x.mean()))
                del x
        out["streams"] = cupy.asarray(means)
    if ours != "c":  # there it is an array without memory
        try:
            cupy.empty(1 << 44, dtype="uint8")
            out["out of memory"] = "nothing raised"
        except cupy.cuda.memory.OutOfMemoryError:
            out["out of memory"] = "OutOfMemoryError"
    out["after"] = cupy.arange(1000) * 2
    cupy.cuda.Device().synchronize()


TORCH = [operators, streams, autograd, graphs, loader, out_of_memory, threads, fork, cleanup, history, mempool, cannot]
CUPY = [cupy_arrays]
