"""Ten jobs of five families of models, for what is predicted of memory: language models, a mixture of experts, ResNets, U-Nets
and vision transformers, in float32, in bfloat16 and with autocast, eager and with compiled blocks.

They were chosen before the rules of `highwater advise` for modules and batches were written, and stay as they are.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any, Callable

import torch
from torch import nn
from torch.nn import functional

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
VOCABULARY = 50_257


class Attention(nn.Module):
    def __init__(self, width: int, is_causal: bool) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.heads, self.is_causal = max(1, width // 64), is_causal

    def forward(self, x: Any) -> Any:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        return self.out(functional.scaled_dot_product_attention(q, k, v, is_causal=self.is_causal).transpose(1, 2).flatten(-2))


class Feed(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.act, self.down = nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)

    def forward(self, x: Any) -> Any:
        return self.down(self.act(self.up(x)))


class Experts(nn.Module):
    """Each token goes to two of eight experts."""

    def __init__(self, width: int, count: int = 8) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(width, count), nn.ModuleList(Feed(width) for _ in range(count))

    def forward(self, x: Any) -> Any:
        flat = x.flatten(0, -2)
        weights, chosen = self.gate(flat).softmax(-1).topk(2, -1)
        out = torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            token, place = (chosen == number).nonzero(as_tuple=True)
            out = out.index_add(0, token, (expert(flat[token]) * weights[token, place, None]).to(out.dtype))
        return out.view_as(x)


class Block(nn.Module):
    def __init__(self, width: int, is_causal: bool, feed: Callable[[int], nn.Module] = Feed) -> None:
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(width), Attention(width, is_causal)
        self.norm2, self.feed = nn.LayerNorm(width), feed(width)

    def forward(self, x: Any) -> Any:
        x = x + self.attention(self.norm1(x))
        return x + self.feed(self.norm2(x))


class Gpt(nn.Module):
    def __init__(self, width: int, blocks: int, length: int, feed: Callable[[int], nn.Module] = Feed) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, True, feed) for _ in range(blocks))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, x: Any) -> Any:
        x = self.tokens(x) + self.places(torch.arange(x.shape[1], device=x.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Vit(nn.Module):
    def __init__(self, width: int, blocks: int, size: int = 224, patch: int = 16) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, patch, patch)
        self.places = nn.Parameter(torch.zeros(1, (size // patch) ** 2, width))
        self.encoder = nn.Sequential(*[Block(width, False) for _ in range(blocks)])
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 1000)

    def forward(self, x: Any) -> Any:
        x = self.patches(x).flatten(2).transpose(1, 2) + self.places
        return self.head(self.norm(self.encoder(x)).mean(1))


class Bottleneck(nn.Module):
    def __init__(self, entering: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(entering, width, 1, bias=False), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = nn.Conv2d(width, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width)
        self.conv3, self.bn3 = nn.Conv2d(width, 4 * width, 1, bias=False), nn.BatchNorm2d(4 * width)
        self.relu = nn.ReLU(inplace=True)
        self.around = None
        if stride > 1 or entering != 4 * width:
            self.around = nn.Sequential(nn.Conv2d(entering, 4 * width, 1, stride, bias=False), nn.BatchNorm2d(4 * width))

    def forward(self, x: Any) -> Any:
        around = x if self.around is None else self.around(x)
        x = self.relu(self.bn1(self.conv1(x)))
        x = self.relu(self.bn2(self.conv2(x)))
        return self.relu(self.bn3(self.conv3(x)) + around)


class Resnet(nn.Module):
    def __init__(self, counts: tuple[int, ...]) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1))
        stages, entering = [], 64
        for number, count in enumerate(counts):
            width, blocks = 64 << number, []
            for nth in range(count):
                blocks.append(Bottleneck(entering, width, 2 if number and not nth else 1))
                entering = 4 * width
            stages.append(nn.Sequential(*blocks))
        self.stages, self.head = nn.Sequential(*stages), nn.Linear(entering, 1000)

    def forward(self, x: Any) -> Any:
        return self.head(self.stages(self.stem(x)).mean((2, 3)))


class Twice(nn.Sequential):
    def __init__(self, entering: int, width: int) -> None:
        super().__init__(
            nn.Conv2d(entering, width, 3, padding=1), nn.GroupNorm(8, width), nn.SiLU(),
            nn.Conv2d(width, width, 3, padding=1), nn.GroupNorm(8, width), nn.SiLU(),
        )


class Unet(nn.Module):
    def __init__(self, widths: tuple[int, ...]) -> None:
        super().__init__()
        self.down = nn.ModuleList(Twice(entering, width) for entering, width in zip((3, *widths), widths))
        self.up = nn.ModuleList(nn.ConvTranspose2d(2 * width, width, 2, 2) for width in reversed(widths[:-1]))
        self.join = nn.ModuleList(Twice(2 * width, width) for width in reversed(widths[:-1]))
        self.out = nn.Conv2d(widths[0], 3, 1)

    def forward(self, x: Any) -> Any:
        kept = []
        for nth, down in enumerate(self.down):
            x = down(functional.max_pool2d(x, 2) if nth else x)
            kept.append(x)
        kept.pop()
        for up, join in zip(self.up, self.join):
            x = join(torch.cat([up(x), kept.pop()], 1))
        return self.out(x)


@dataclass(frozen=True)
class Job:
    """A job: its model, a batch of it, and what it trains with."""

    make: Callable[[], nn.Module]
    batch: Callable[[int], tuple[Any, Any]]
    loss: Callable[[Any, Any], Any]
    optimizer: Callable[[Any], Any]
    # Its usual number of samples, and those from which the largest batch that fits is predicted.
    samples: int
    sizes: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    is_autocast: bool = False
    are_blocks_compiled: bool = False

    def model(self) -> nn.Module:
        torch.manual_seed(0)
        model = self.make().to(DEVICE, None if self.is_autocast else self.dtype)
        if self.are_blocks_compiled:
            blocks = model.blocks if hasattr(model, "blocks") else model.encoder
            for nth, block in enumerate(blocks):
                blocks[nth] = torch.compile(block)
        return model

    def of(self, samples: int) -> tuple[Any, Any]:
        x, y = self.batch(samples)
        narrow = self.dtype if not self.is_autocast and x.is_floating_point() else None
        return x.to(DEVICE, narrow), y.to(DEVICE)

    def step(self, model: Any, optimizer: Any, batch: tuple[Any, Any]) -> Any:
        """One step, as most loops are written: the loss is outside the module."""
        inside = torch.autocast(DEVICE, self.dtype) if self.is_autocast else contextlib.nullcontext()
        with inside:
            loss = self.loss(model(batch[0]), batch[1])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()


def tokens(length: int) -> Callable[[int], tuple[Any, Any]]:
    def batch(samples: int) -> tuple[Any, Any]:
        x = torch.randint(0, VOCABULARY, (samples, length + 1))
        return x[:, :-1].contiguous(), x[:, 1:].contiguous()

    return batch


def pictures(size: int) -> Callable[[int], tuple[Any, Any]]:
    return lambda samples: (torch.rand(samples, 3, size, size), torch.randint(0, 1000, (samples,)))


def noise(size: int) -> Callable[[int], tuple[Any, Any]]:
    return lambda samples: (torch.rand(samples, 3, size, size), torch.rand(samples, 3, size, size))


def language_loss(out: Any, y: Any) -> Any:
    return functional.cross_entropy(out.float().flatten(0, 1), y.flatten())


def class_loss(out: Any, y: Any) -> Any:
    return functional.cross_entropy(out.float(), y)


def picture_loss(out: Any, y: Any) -> Any:
    return functional.mse_loss(out.float(), y)


def adamw(parameters: Any) -> Any:
    return torch.optim.AdamW(parameters, lr=1e-4)


def sgd(parameters: Any) -> Any:
    return torch.optim.SGD(parameters, lr=0.01, momentum=0.9)


def jobs(is_small: bool = False) -> dict[str, Job]:
    """By name. `is_small` is for trying the programs on a CPU."""
    bf16 = torch.bfloat16
    length, sizes = (16, (1, 2, 3)) if is_small else (1024, (4, 8, 12, 16))
    picture, many = (32, (1, 2, 3)) if is_small else (224, (16, 32, 48, 64))

    def gpt(width: int, blocks: int, feed: Callable[[int], nn.Module] = Feed) -> Callable[[], nn.Module]:
        return lambda: Gpt(64, 2, length, feed) if is_small else Gpt(width, blocks, length, feed)

    def vit(width: int, blocks: int) -> Callable[[], nn.Module]:
        return lambda: Vit(64, 2, picture) if is_small else Vit(width, blocks)

    def resnet(*counts: int) -> Callable[[], nn.Module]:
        return lambda: Resnet((1, 1)) if is_small else Resnet(counts)

    def unet(*widths: int) -> Callable[[], nn.Module]:
        return lambda: Unet((8, 16)) if is_small else Unet(widths)

    few = sizes[1]
    return {
        "gpt-float32": Job(gpt(768, 12), tokens(length), language_loss, adamw, few, sizes),
        "gpt-autocast": Job(gpt(768, 12), tokens(length), language_loss, adamw, few, sizes, bf16, True),
        "gpt-bfloat16": Job(gpt(1024, 24), tokens(length), language_loss, adamw, few, sizes, bf16),
        "gpt-compiled": Job(gpt(768, 12), tokens(length), language_loss, adamw, few, sizes, bf16, True, True),
        "experts-autocast": Job(gpt(512, 8, Experts), tokens(length), language_loss, adamw, few, sizes, bf16, True),
        "resnet50-float32": Job(resnet(3, 4, 6, 3), pictures(picture), class_loss, sgd, many[1], many),
        "resnet101-autocast": Job(resnet(3, 4, 23, 3), pictures(picture), class_loss, sgd, many[1], many, bf16, True),
        "unet-float32": Job(unet(64, 128, 256, 512), noise(128 if not is_small else picture), picture_loss, adamw, many[1], many),
        "vit-autocast": Job(vit(768, 12), pictures(picture), class_loss, adamw, many[1], many, bf16, True),
        "vit-compiled": Job(vit(1024, 24), pictures(picture), class_loss, adamw, many[1], many, bf16, True, True),
    }
