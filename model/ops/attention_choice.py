"""Which attention serves a GPU: Triton's, or that of a package that is installed, suits, and agrees with ours.

Knows no page layout. A package is tried at the start against our own attention, on the shapes that will be served and
with NaN wherever a sequence must not look; it is not used where it differs.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec

import torch
from torch import Tensor

from model.ops.attention_backends import Attention, load_flash_attention, load_flashinfer
from model.ops.interface import AttentionTables, LayerKV

TOLERANCE = 2e-2
"""Of outputs that are about 1: two roundings to bf16."""
TRIAL_LENS = (5, 150, 65)
AUTOMATIC = "flash-attn"
"""Taken unasked where it can be used: FlashInfer waits for the host in every step, so it wants to be asked for."""


@dataclass(frozen=True, slots=True)
class Served:
    """What attention will be asked for."""

    dtype: torch.dtype
    kv_dtype: torch.dtype
    heads: int
    kv_heads: int
    head_dim: int
    page_size: int
    windows: tuple[int | None, ...]


@dataclass(frozen=True, slots=True)
class Package:
    """chips: capabilities from the first on, below the second."""

    label: str
    module: str
    load: Callable[[torch.device], Attention]
    chips: tuple[tuple[int, int], tuple[int, int]]
    head_dims: range | tuple[int, ...]


PACKAGES = {
    "flash-attn": Package(
        "flash-attn 3", "flash_attn_interface", load_flash_attention, ((8, 0), (10, 0)), range(8, 257, 8)
    ),
    "flashinfer": Package("FlashInfer", "flashinfer", load_flashinfer, ((8, 0), (13, 0)), (64, 128, 256)),
}


def obstacle(package: Package, served: Served, capability: tuple[int, int], batch_invariant: bool) -> str | None:
    """Why a package cannot serve this; None if it can."""
    if batch_invariant:
        return "it cuts keys as the batch goes, which --batch-invariant excludes"
    if served.dtype not in (torch.float16, torch.bfloat16) or served.kv_dtype != served.dtype:
        return f"it takes fp16 and bf16 with a cache of the same, not {served.dtype} with {served.kv_dtype}"
    if served.head_dim not in package.head_dims:
        return f"it has no heads of {served.head_dim} channels"
    if not package.chips[0] <= capability < package.chips[1]:
        return f"it does not run on sm_{capability[0]}{capability[1]}"
    return None


def try_out(theirs: Attention, ours: Attention, served: Served, device: torch.device) -> str | None:
    """Both on a decode and on a mixed batch, under every window that is served: how theirs goes wrong, if it does."""
    for window, asked in itertools.product(dict.fromkeys(served.windows), ((1, 1, 1), (1, 40, 7))):
        q, kv, tables = trial(served, asked, window, device)
        want = ours(q, kv, tables, served.head_dim**-0.5, window).float()
        try:
            got = theirs(q, kv, tables, served.head_dim**-0.5, window).float()
        except Exception as error:  # whatever a foreign package raises, it is not fit to serve
            return f"it fails: {' '.join(str(error).split())[:200] or type(error).__name__}"
        apart = float((got - want).abs().max().nan_to_num(nan=float("inf")))
        if apart > TOLERANCE:
            return f"it differs from our own attention by {apart:.2g} (window {window}, new tokens {asked})"
    return None


def trial(
    served: Served, asked: tuple[int, ...], window: int | None, device: torch.device
) -> tuple[Tensor, LayerKV, AttentionTables]:
    """Sequences on pages in a random order; NaN behind their ends, in scratch, and in pages that left the window."""
    size, generator = served.page_size, torch.Generator().manual_seed(0)
    width = -(-max(TRIAL_LENS) // size)
    table = (torch.randperm(len(asked) * width, generator=generator) + 1).view(-1, width).int()
    shape = (2, len(asked) * width + 1, served.kv_heads, size, served.head_dim)
    rows = torch.randn(shape, generator=generator)
    rows[:, 0] = torch.nan
    for pages, length, new in zip(table, TRIAL_LENS, asked, strict=True):
        first = 0 if window is None else max(0, length - new - window + 1)
        for index, page in enumerate(pages.tolist()):
            rows[:, page, :, max(0, length - index * size) :] = torch.nan
            if (index + 1) * size <= first:
                pages[index] = 0
    k, v = (part.to(device, served.kv_dtype) for part in rows)
    q = torch.randn(sum(asked), served.heads, served.head_dim, generator=generator).to(device, served.dtype)
    starts = torch.tensor([0, *itertools.accumulate(asked)], dtype=torch.int32, device=device)
    lens = torch.tensor(TRIAL_LENS, dtype=torch.int32, device=device)
    return q, LayerKV(k, v), AttentionTables(table.to(device), lens, starts, max(asked), max(TRIAL_LENS))


def usable(
    name: str, ours: Attention, served: Served, device: torch.device, capability: tuple[int, int], batch_invariant: bool
) -> Attention | str:
    """A package's attention, or why it cannot be used."""
    package = PACKAGES[name]
    if find_spec(package.module) is None:
        return f"the module {package.module} is not installed"
    if reason := obstacle(package, served, capability, batch_invariant):
        return reason
    try:
        theirs = package.load(device)
    except (ImportError, OSError, AttributeError) as error:
        return f"it cannot be loaded: {error}"
    return try_out(theirs, ours, served, device) or theirs


def chosen(
    name: str, ours: Attention, served: Served, device: torch.device, capability: tuple[int, int], batch_invariant: bool
) -> tuple[Attention, str]:
    """The attention for --attention-backend, and a word for the start line. ValueError where it cannot be had."""
    if name == "triton" or (name == "auto" and find_spec(PACKAGES[AUTOMATIC].module) is None):
        return ours, "attention by Triton"
    wanted = AUTOMATIC if name == "auto" else name
    found, label = usable(wanted, ours, served, device, capability, batch_invariant), PACKAGES[wanted].label
    if not isinstance(found, str):
        return found, f"attention by {label}"
    if name != "auto":
        raise ValueError(f"{label} cannot be used here: {found}; leave --attention-backend out, or use triton")
    return ours, f"attention by Triton, not by {label}: {found}"
