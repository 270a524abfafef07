"""Which operations serve a device.

Knows no model: one decision, made once per process, never per batch.
"""

from __future__ import annotations

from functools import cache

import torch

from model.ops import scaled_linear
from model.ops.attention_backends import Attention
from model.ops.attention_choice import Served, chosen
from model.ops.cpu.build import UnavailableError, find_library
from model.ops.cpu.native import NATIVE, CpuOps
from model.ops.cpu.packed import QUANTIZED
from model.ops.interface import Ops
from model.ops.reference import ReferenceOps


def ops_for(device: torch.device | str, batch_invariant: bool = False) -> Ops:
    """The operations for a device; the reference ones run wherever torch does, but keep no promise on a GPU.

    batch_invariant: a row's result must not depend on the others (always so on a CPU).
    """
    return _cpu()[0] if torch.device(device).type == "cpu" else _gpu(batch_invariant)[0]


def why(device: torch.device | str) -> str:
    """What ops_for chose, and the reason where a faster choice was not to be had; one line for logs and /version."""
    return _cpu()[1] if torch.device(device).type == "cpu" else _gpu(batch_invariant=False)[1]


def quantization_obstacle(
    kind: str, ops: Ops, device: torch.device, dtype: torch.dtype, batch_invariant: bool
) -> str | None:
    """Why weights cannot be rounded so on a device, and what to do; None if they can."""
    if ops.name == "triton":
        capability = torch.cuda.get_device_capability(device)
        return scaled_linear.obstacle(kind, batch_invariant, capability)
    if ops.name == "reference":
        needed = "native CPU kernels" if device.type == "cpu" else "Triton kernels"
        return f"needs the {needed}; here are {why(device)}"
    if kind not in QUANTIZED:
        return f"a CPU rounds weights to {' or '.join(QUANTIZED)}; {kind} is for a GPU"
    return None if dtype in NATIVE else "needs --dtype bfloat16 or float32, not float16"


def with_attention(ops: Ops, name: str, served: Served, device: torch.device, batch_invariant: bool) -> tuple[Ops, str]:
    """The operations with the attention that --attention-backend asks for, and a word on it for logs and /version.

    Raises ValueError, with the reason, where that cannot be had.
    """
    if ops.name != "triton":
        if name != "auto":
            raise ValueError(f"only Triton kernels on a GPU leave a choice; here are {why(device)}; leave it out")
        return ops, ""
    capability = torch.cuda.get_device_capability(device)
    attention, word = chosen(name, ops.attention, served, device, capability, batch_invariant)
    return (ops if attention == ops.attention else _gpu_with(attention, batch_invariant)), f"; {word}"


def _gpu_with(attention: Attention, batch_invariant: bool) -> Ops:
    from model.ops.triton.ops import TritonOps  # Triton is an extra

    return TritonOps(batch_invariant, attention=attention)


@cache
def _cpu() -> tuple[Ops, str]:
    try:
        ops = CpuOps(find_library())
    except (UnavailableError, OSError) as reason:  # OSError: a library that cannot be loaded
        return ReferenceOps(), f"torch operations: {reason}"
    return ops, ops.description


@cache
def _gpu(batch_invariant: bool) -> tuple[Ops, str]:
    try:
        from model.ops.triton.ops import TritonOps  # Triton is an extra
    except ImportError as reason:
        return ReferenceOps(), f"torch operations: {reason}; pip install 'ropeway[gpu]'"
    return TritonOps(batch_invariant), "Triton kernels"
