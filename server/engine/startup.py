"""From an EngineConfig to an engine that can serve: load, size and allocate the cache, warm up.

The one place that knows every part; holds no state of its own.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from model.config import ConfigError, ModelConfig, load_config, served_dtype
from model.decoder import Decoder
from model.kv_cache import KVCache
from model.kv_cost import (
    DTYPE_ALIASES,
    DTYPE_BYTES,
    SCALE_BYTES,
    SCRATCH_PAGES,
    KVLayout,
    capacity_tokens,
    layout_for,
    pages_for_sequences,
    pages_in_budget,
)
from model.memory import available_bytes, default_pool_bytes, resident_bytes, rss_bytes
from model.ops.interface import Ops
from model.ops.select import ops_for, why
from model.weights import load_decoder
from server.engine.core import Engine
from server.engine.grammar import Grammars
from server.engine.last_tokens import LastTokens
from server.engine.messages import EngineConfig, EngineInfo, Progress
from server.engine.page_tables import PageTables
from server.engine.runner import ModelRunner
from server.engine.scheduler import Limits, Scheduler
from server.engine.stream import HostStream
from server.engine.warm_up import warm_up

SAMPLING_ARRAYS = 6
"""fp32 arrays as large as the logits that sampling holds at its worst: copy, log-softmax, sorted values, ids twice."""
Report = Callable[[Progress], None]


@dataclass
class Phases:
    """Seconds of each phase of the start, announced as they begin."""

    report: Report
    seconds: list[tuple[str, float]] = field(default_factory=list)

    @contextmanager
    def phase(self, name: str, detail: str = "") -> Iterator[None]:
        self.report(Progress(name, detail))
        started = time.monotonic()
        yield
        self.seconds.append((name, time.monotonic() - started))


@dataclass(frozen=True)
class Machine:
    """A loaded model with its cache: all that engines are made of."""

    config: EngineConfig
    model: ModelConfig
    decoder: Decoder
    ops: Ops
    device: torch.device
    dtype: str
    limits: Limits
    workspace: int
    kv: KVCache
    warnings: tuple[str, ...]

    @property
    def overlaps(self) -> bool:
        return self.device.type != "cpu"

    def engine(self, info: EngineInfo) -> Engine:
        """An engine with empty books on this machine."""
        config, limits = self.config, self.limits
        tables = PageTables(
            self.kv.layout, self.kv.num_pages, limits.max_num_batched_tokens, config.prefix_caching, time.monotonic_ns()
        )
        last = LastTokens(limits.max_num_seqs, self.model.vocab_size, self.device) if self.overlaps else None
        runner = ModelRunner(self.decoder, self.kv, self.ops, self.model.vocab_size, HostStream(), last)
        grammars = Grammars(Path(config.model), self.model.vocab_size)
        scheduler = Scheduler(limits, tables)
        return Engine(scheduler, runner, info, kv_resident=lambda: kv_resident_bytes(self.kv), grammars=grammars)

    def info(self, phases: Phases) -> EngineInfo:
        layout, limits = self.kv.layout, self.limits
        return EngineInfo(
            vocab_size=self.model.vocab_size,
            max_model_len=limits.max_model_len,
            device=str(self.device),
            dtype=self.dtype,
            kv_dtype=layout.groups[0].dtype,
            backend=why(self.device, layout.groups[0].dtype),
            threads=torch.get_num_threads(),
            batch_invariant=self.device.type == "cpu" or self.config.batch_invariant,
            page_size=layout.page_size,
            num_pages=self.kv.num_pages,
            page_bytes=tuple(layout.page_bytes(group) for group in range(len(layout.groups))),
            kv_bytes_predicted=layout.pool_bytes(self.kv.num_pages),
            kv_bytes_allocated=self.kv.nbytes,
            kv_bytes_resident=kv_resident_bytes(self.kv),
            weights_bytes=self.decoder.weights_nbytes,
            workspace_bytes=self.workspace,
            rss_bytes=rss_bytes(),
            max_num_seqs=limits.max_num_seqs,
            max_num_batched_tokens=limits.max_num_batched_tokens,
            prefix_caching=self.config.prefix_caching,
            pid=os.getpid(),
            mixed_chunk=limits.mixed_chunk,
            phases=tuple(phases.seconds),
            warnings=self.warnings,
            capacity_tokens=capacity_tokens(layout, self.kv.num_pages),
            token_bytes=layout.token_bytes,
        )


def build_engine(config: EngineConfig, report: Report = lambda progress: None) -> Engine:
    """Load a canonical folder and return a warm engine.

    Raises ConfigError or WeightsError for a folder that cannot be served, MemoryError where memory does not suffice.
    """
    phases = Phases(report)
    machine = _assemble(config, phases)
    with phases.phase("warm_up"):
        chunk = warm_up(machine.engine(machine.info(phases)))
    if not machine.overlaps:  # the times of an overlapped step say little about it
        machine = replace(machine, limits=replace(machine.limits, mixed_chunk=chunk))
    return machine.engine(machine.info(phases))


def _refuse_unserved(config: EngineConfig) -> None:
    """Settings that this version or this machine cannot honour, before anything is compiled or loaded."""
    if config.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            "--device cuda: torch sees no CUDA device; install a CUDA build of torch, or use --device cpu"
        )
    if config.tensor_parallel_size != 1:
        raise ConfigError(f"--tensor-parallel-size {config.tensor_parallel_size}: a model is served by 1 device so far")
    if config.quantization is not None:
        raise ConfigError(f"--quantization {config.quantization}: weights are served unquantised so far; leave it out")


def _assemble(config: EngineConfig, phases: Phases) -> Machine:
    _refuse_unserved(config)
    device = torch.device(_best_device() if config.device == "auto" else config.device)
    folder, ops = Path(config.model), ops_for(device)
    model = load_config(folder)
    dtype = _dtype(config, model, ops, device)
    limits = _limits(config, model)
    layout = _layout(config, model, dtype)

    def progress(done: int, layers: int) -> None:
        phases.report(Progress("load", f"{done} of {layers} layers"))

    with phases.phase("load", config.model):
        decoder = load_decoder(
            folder, model, ops, device, getattr(torch, dtype), config.quantization, progress, limits.max_model_len
        )
    workspace = workspace_bytes(model, limits)
    num_pages = _num_pages(config, layout, limits, device, _free_bytes(device) - workspace)
    with phases.phase("allocate", f"{layout.pool_bytes(num_pages)} bytes of KV cache"):
        kv = KVCache(layout, num_pages, device)
    assert kv.nbytes == layout.pool_bytes(num_pages), (kv.nbytes, layout.pool_bytes(num_pages))
    limits, warnings = _within_pool(limits, layout, num_pages)
    return Machine(config, model, decoder, ops, device, dtype, limits, workspace, kv, decoder.warnings + warnings)


def _best_device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def _dtype(config: EngineConfig, model: ModelConfig, ops: Ops, device: torch.device) -> str:
    """auto on a CPU: bfloat16 where there are kernels of our own, else float32. Elsewhere it follows the checkpoint."""
    if config.dtype == "auto" and device.type == "cpu":
        return "float32" if ops.name == "reference" else "bfloat16"
    if config.dtype == "auto":
        return served_dtype(model.dtype)
    if config.dtype not in ("float32", "bfloat16", "float16"):
        raise ConfigError(f"dtype {config.dtype!r} is unknown: use auto, float32, bfloat16 or float16")
    return config.dtype


def _layout(config: EngineConfig, model: ModelConfig, dtype: str) -> KVLayout:
    name = dtype if config.kv_cache_dtype == "auto" else config.kv_cache_dtype
    kv_dtype = DTYPE_ALIASES.get(name, name)
    if kv_dtype not in DTYPE_BYTES:
        raise ConfigError(f"--kv-cache-dtype {name}: use auto, {', '.join((*DTYPE_BYTES, *DTYPE_ALIASES))}")
    values = config.page_size * model.head_dim
    if kv_dtype in SCALE_BYTES and values % SCALE_BYTES[kv_dtype]:
        raise ConfigError(
            f"--page-size {config.page_size}: a page of {kv_dtype} has {config.page_size} * {model.head_dim} bytes of "
            f"values and then fp32 scales, so that must be a multiple of 4; use an even page size"
        )
    return layout_for(model, config.page_size, kv_dtype)


def _limits(config: EngineConfig, model: ModelConfig) -> Limits:
    longest = model.longest_context
    wanted = model.max_position_embeddings if config.max_model_len is None else config.max_model_len
    if not 2 <= wanted <= longest:
        raise ConfigError(f"max_model_len is {wanted}: this model takes 2 to {longest} tokens (--max-model-len)")
    if config.max_num_batched_tokens < config.max_num_seqs:
        raise ConfigError(
            f"max_num_batched_tokens is {config.max_num_batched_tokens}: a step must have room for one token of each "
            f"of max_num_seqs = {config.max_num_seqs} sequences"
        )
    return Limits(wanted, config.max_num_seqs, config.max_num_batched_tokens)


def workspace_bytes(model: ModelConfig, limits: Limits) -> int:
    """Memory of the widest step: fp32 logits of every row that may want them, and the widest layer's activations."""
    rows = limits.max_num_seqs + limits.prompt_logits
    heads = (model.num_heads + 2 * model.num_kv_heads) * model.head_dim
    activations = 3 * model.intermediate_size + 2 * heads + 6 * model.hidden_size
    return 4 * (rows * model.vocab_size * SAMPLING_ARRAYS + limits.max_num_batched_tokens * activations)


def _free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return available_bytes()


def _num_pages(
    config: EngineConfig, layout: KVLayout, limits: Limits, device: torch.device, available: int
) -> tuple[int, ...]:
    """Pages of each group: as asked for, else by the device's rule. `available` leaves out the widest step."""
    chunk = limits.max_num_batched_tokens
    full = layout.pool_bytes(pages_for_sequences(layout, limits.max_num_seqs, limits.max_model_len, chunk))
    by_rule = min(available, full) if device.type == "cuda" else default_pool_bytes(available, full)
    budget = by_rule if config.kv_cache_memory is None else config.kv_cache_memory
    if budget > available:
        raise MemoryError(
            f"a KV cache of {budget} bytes does not fit: {max(0, available)} bytes are available beside the weights "
            f"and the widest step (--kv-cache-memory)"
        )
    counts = pages_in_budget(layout, budget, limits.max_model_len, chunk)
    if min(counts) <= SCRATCH_PAGES:
        least = layout.pool_bytes((1 + SCRATCH_PAGES,) * len(counts))
        raise MemoryError(
            f"a KV cache of {budget} bytes leaves no page to give out: one page and scratch take {least} bytes "
            f"(raise --kv-cache-memory or lower --page-size)"
        )
    return counts


def _within_pool(limits: Limits, layout: KVLayout, num_pages: tuple[int, ...]) -> tuple[Limits, tuple[str, ...]]:
    """Lower max_model_len to what the pool holds."""
    capacity = PageTables(layout, num_pages, limits.max_num_batched_tokens).capacity()
    if capacity >= limits.max_model_len:
        return limits, ()
    if capacity < 2:
        raise MemoryError("the KV cache holds less than two tokens: give it more (--kv-cache-memory)")
    warning = f"max_model_len is lowered from {limits.max_model_len} to {capacity} tokens: the KV cache holds no more"
    return replace(limits, max_model_len=capacity), (warning,)


def kv_resident_bytes(kv: KVCache) -> int:
    """Bytes of the pool that the system has committed: all of it on a GPU, what was touched on a CPU."""
    if kv.storages[0].device.type != "cpu":
        return kv.nbytes
    return sum(resident_bytes(storage.data_ptr(), storage.untyped_storage().nbytes()) for storage in kv.storages)
