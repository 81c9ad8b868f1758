"""Four programs that allocate as real ones do: each is a function that yields one number a step (a loss, a checksum).

They depend on nothing but PyTorch, and on the seed for all that is random, so two runs can be compared number by number.
`tiny` makes them small enough for a CPU.
"""

import random

import torch
from torch import nn
from torch.nn import functional as F


class Bottleneck(nn.Module):
    def __init__(self, inputs, width, stride):
        super().__init__()
        outputs = 4 * width
        self.body = nn.Sequential(
            nn.Conv2d(inputs, width, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True),
            nn.Conv2d(width, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True),
            nn.Conv2d(width, outputs, 1, bias=False), nn.BatchNorm2d(outputs),
        )
        same = stride == 1 and inputs == outputs
        self.skip = nn.Identity() if same else nn.Sequential(
            nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x):
        return F.relu(self.body(x) + self.skip(x))


def resnet(depths, classes=1000):
    """ResNet-50 for depths (3, 4, 6, 3)."""
    layers = [nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)]
    inputs = 64
    for stage, depth in enumerate(depths):
        width = 64 << stage
        for block in range(depth):
            layers.append(Bottleneck(inputs, width, 2 if stage and not block else 1))
            inputs = 4 * width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, classes))


def resnet50(device, steps, tiny=False):
    model = resnet((1, 1, 1, 1) if tiny else (3, 4, 6, 3)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
    batch, side = (4, 32) if tiny else (96, 224)
    for step in range(steps):
        # The last batch of an epoch is smaller.
        count = batch if step % 5 < 4 else batch * 5 // 8
        images = torch.randn(count, 3, side, side, device=device)
        labels = torch.randint(0, 1000, (count,), device=device)
        optimizer.zero_grad(set_to_none=True)
        loss = F.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        yield loss.item()


class Block(nn.Module):
    """A transformer's block. The attention is written out, as in older code: it makes the scores, which are large."""

    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def forward(self, x):
        batch, length, dim = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        scores = q @ k.transpose(-2, -1) / (dim // self.heads) ** 0.5
        mask = torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1)
        weights = scores.masked_fill(mask, float("-inf")).softmax(-1).to(v.dtype)
        x = x + self.out((weights @ v).transpose(1, 2).reshape(batch, length, dim))
        return x + self.mlp(self.norm2(x))


class Gpt(nn.Module):
    def __init__(self, layers, dim, heads, vocabulary, length):
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, dim), nn.Embedding(length, dim)
        self.blocks = nn.Sequential(*(Block(dim, heads) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, vocabulary, bias=False)

    def forward(self, ids):
        places = torch.arange(ids.shape[1], device=ids.device)
        return self.head(self.norm(self.blocks(self.tokens(ids) + self.places(places))))


def gpt2_amp(device, steps, tiny=False):
    """GPT-2 of 124 M, in bfloat16 by autocast, batches of varying length."""
    layers, dim, heads, vocabulary, length, batch = (2, 64, 4, 500, 64, 2) if tiny else (12, 768, 12, 50304, 1024, 8)
    model = Gpt(layers, dim, heads, vocabulary, length).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    lengths = random.Random(1)
    for _ in range(steps):
        ids = torch.randint(0, vocabulary, (batch, lengths.randint(length // 8, length)), device=device)
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(torch.device(device).type, dtype=torch.bfloat16):
            logits = model(ids[:, :-1])
        loss = F.cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        yield loss.item()


class LlamaLayer(nn.Module):
    def __init__(self, dim, heads, groups, hidden):
        super().__init__()
        self.heads, self.groups = heads, groups
        self.norm1, self.norm2 = nn.RMSNorm(dim), nn.RMSNorm(dim)
        self.q, self.o = nn.Linear(dim, dim, bias=False), nn.Linear(dim, dim, bias=False)
        self.k = nn.Linear(dim, dim * groups // heads, bias=False)
        self.v = nn.Linear(dim, dim * groups // heads, bias=False)
        self.gate, self.up = nn.Linear(dim, hidden, bias=False), nn.Linear(dim, hidden, bias=False)
        self.down = nn.Linear(hidden, dim, bias=False)

    def forward(self, x, rotation, cache):
        batch, length, dim = x.shape
        normed = self.norm1(x)
        q = rotate(self.q(normed).view(batch, length, self.heads, -1), rotation).transpose(1, 2)
        k = rotate(self.k(normed).view(batch, length, self.groups, -1), rotation).transpose(1, 2)
        v = self.v(normed).view(batch, length, self.groups, -1).transpose(1, 2)
        if cache is not None:  # a cache that grows by concatenation: new memory each token
            k, v = torch.cat((cache[0], k), 2), torch.cat((cache[1], v), 2)
        times = self.heads // self.groups
        wide_k, wide_v = k.repeat_interleave(times, 1), v.repeat_interleave(times, 1)
        scores = q @ wide_k.transpose(-2, -1) / (dim // self.heads) ** 0.5
        if length > 1:
            mask = torch.ones(length, k.shape[2], dtype=torch.bool, device=x.device).triu(1 + k.shape[2] - length)
            scores = scores.masked_fill(mask, float("-inf"))
        mixed = scores.float().softmax(-1).to(x.dtype) @ wide_v
        x = x + self.o(mixed.transpose(1, 2).reshape(batch, length, dim))
        normed = self.norm2(x)
        return x + self.down(F.silu(self.gate(normed)) * self.up(normed)), (k, v)


def rotate(x, rotation):
    cos, sin = rotation
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


@torch.no_grad()
def llama_generate(device, steps, tiny=False):
    """Generation with a model shaped as a 1 B Llama: prompts of varying length, several at once. A step is a request."""
    layers, dim, heads, groups, hidden, vocabulary, new, batch = (
        (2, 64, 4, 2, 128, 500, 6, 2) if tiny else (16, 2048, 32, 8, 8192, 32000, 96, 16))
    dtype = torch.float32 if tiny else torch.bfloat16
    with torch.device(device):
        stack = nn.ModuleList(LlamaLayer(dim, heads, groups, hidden) for _ in range(layers)).to(dtype)
        embedding = nn.Embedding(vocabulary, dim).to(dtype)
        norm, head = nn.RMSNorm(dim).to(dtype), nn.Linear(dim, vocabulary, bias=False).to(dtype)
    half = dim // heads // 2
    frequencies = 10000.0 ** (-torch.arange(half, device=device) / half)
    lengths = random.Random(2)
    for _ in range(steps):
        prompt = lengths.randint(4, 16) if tiny else lengths.randint(64, 1024)
        ids = torch.randint(0, vocabulary, (batch, prompt), device=device)
        caches, place, total = [None] * layers, 0, 0
        for _ in range(new):
            places = torch.arange(place, place + ids.shape[1], device=device)
            angles = (places[:, None] * frequencies)[:, None, :]
            rotation = angles.cos().to(dtype), angles.sin().to(dtype)
            x = embedding(ids)
            for index, layer in enumerate(stack):
                x, caches[index] = layer(x, rotation, caches[index])
            place += ids.shape[1]
            ids = head(norm(x[:, -1:])).float().argmax(-1)
            total = total + ids.sum()
        yield float(total.item())


class Unet(nn.Module):
    def __init__(self, width, depth):
        super().__init__()
        sizes = [width << level for level in range(depth + 1)]
        self.first = double(3, width)
        self.down = nn.ModuleList(double(a, b) for a, b in zip(sizes, sizes[1:]))
        self.up = nn.ModuleList(nn.ConvTranspose2d(b, a, 2, 2) for a, b in zip(sizes, sizes[1:]))
        self.join = nn.ModuleList(double(2 * a, a) for a in sizes[:-1])
        self.last = nn.Conv2d(width, 2, 1)

    def forward(self, x):
        kept = [self.first(x)]
        for down in self.down:
            kept.append(down(F.max_pool2d(kept[-1], 2)))
        x = kept.pop()
        for up, join in zip(reversed(self.up), reversed(self.join)):
            x = join(torch.cat((kept.pop(), up(x)), 1))
        return self.last(x)


def double(inputs, outputs):
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, 1, 1), nn.GroupNorm(8, outputs), nn.SiLU(),
        nn.Conv2d(outputs, outputs, 3, 1, 1), nn.GroupNorm(8, outputs), nn.SiLU())


def unet_multires(device, steps, tiny=False):
    """A U-Net on images of varying resolution."""
    width, depth, batch, unit = (8, 2, 1, 8) if tiny else (64, 4, 6, 32)
    model = Unet(width, depth).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
    sides = random.Random(3)
    for _ in range(steps):
        height, breadth = (unit * sides.randint(4, 12) for _ in range(2))
        images = torch.randn(batch, 3, height, breadth, device=device)
        target = torch.randint(0, 2, (batch, height, breadth), device=device)
        optimizer.zero_grad(set_to_none=True)
        loss = F.cross_entropy(model(images), target)
        loss.backward()
        optimizer.step()
        yield loss.item()


# Each with the steps that a run of a few seconds has; the first ones are not timed.
ALL = {"resnet50": (resnet50, 20), "gpt2_amp": (gpt2_amp, 40), "llama_generate": (llama_generate, 8),
       "unet_multires": (unet_multires, 40)}
WARMUP = {"resnet50": 5, "gpt2_amp": 10, "llama_generate": 2, "unet_multires": 10}
