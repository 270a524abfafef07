"""Which device, operations and dtype serve a configuration; a setting that cannot be honoured is refused clearly.

Knows no files and no memory. Everything here raises ConfigError, before anything is loaded.
"""

from __future__ import annotations

import torch

from model.config import ConfigError, ModelConfig, served_dtype
from model.kv_cost import KVLayout
from model.ops.attention_choice import Served
from model.ops.interface import Ops
from model.ops.select import ops_for, quantization_obstacle, why, with_attention
from server.engine.facts import EngineConfig


def refuse_unserved(config: EngineConfig) -> None:
    """Settings that this version or this machine cannot honour, before anything is compiled or loaded."""
    if config.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            "--device cuda: torch sees no CUDA device; install a CUDA build of torch, or use --device cpu"
        )
    if config.tensor_parallel_size != 1:
        raise ConfigError(f"--tensor-parallel-size {config.tensor_parallel_size}: a model is served by 1 device so far")


def best_device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def operations(config: EngineConfig, device: torch.device) -> Ops:
    ops = ops_for(device, config.batch_invariant)
    if config.batch_invariant and device.type != "cpu" and ops.name == "reference":
        raise ConfigError("--batch-invariant: torch's own operations are not, on a GPU; install triton (ropeway[gpu])")
    return ops


def dtype_of(config: EngineConfig, model: ModelConfig, ops: Ops, device: torch.device) -> str:
    """auto on a CPU: bfloat16 where there are kernels of our own, else float32. Elsewhere it follows the checkpoint."""
    if config.dtype == "auto" and device.type == "cpu":
        return "float32" if ops.name == "reference" else "bfloat16"
    if config.dtype == "auto":
        return served_dtype(model.dtype)
    if config.dtype not in ("float32", "bfloat16", "float16"):
        raise ConfigError(f"dtype {config.dtype!r} is unknown: use auto, float32, bfloat16 or float16")
    return config.dtype


def refuse_quantization(config: EngineConfig, ops: Ops, device: torch.device, dtype: torch.dtype) -> None:
    """Weights that this device cannot round so."""
    kind = config.quantization
    if kind and (reason := quantization_obstacle(kind, ops, device, dtype, config.batch_invariant)):
        raise ConfigError(f"--quantization {kind}: {reason}")


def with_attention_of(
    config: EngineConfig, ops: Ops, device: torch.device, model: ModelConfig, layout: KVLayout, dtype: torch.dtype
) -> tuple[Ops, str]:
    """The operations with the attention that was asked for, and what logs and /version say of them."""
    group, windows = layout.groups[0], tuple(group.window for group in layout.groups)
    served = Served(
        dtype, getattr(torch, group.dtype), model.num_heads, group.kv_heads, group.head_dim, layout.page_size, windows
    )
    try:
        ops, word = with_attention(ops, config.attention_backend, served, device, config.batch_invariant)
    except ValueError as error:
        raise ConfigError(f"--attention-backend {config.attention_backend}: {error}") from None
    return ops, why(device) + word
