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

from model.config import ConfigError, ModelConfig, load_config
from model.decoder import Decoder
from model.kv_cache import KVCache
from model.kv_cost import (
    DTYPE_ALIASES,
    DTYPE_BYTES,
    SCALE_BYTES,
    KVLayout,
    capacity_tokens,
    layout_for,
)
from model.memory import available_bytes, resident_bytes, rss_bytes
from model.ops.interface import Ops
from model.weights import load_decoder
from server.engine.accelerator import Accelerator, run_filler, taken_by
from server.engine.backend import (
    best_device,
    dtype_of,
    operations,
    refuse_quantization,
    refuse_unserved,
    with_attention_of,
)
from server.engine.core import Engine
from server.engine.cuda import cuda_accelerator
from server.engine.decode_graphs import DecodeGraphs, graph_sizes
from server.engine.facts import EngineConfig, EngineInfo
from server.engine.grammar import Grammars
from server.engine.last_tokens import LastTokens
from server.engine.messages import Progress
from server.engine.page_tables import PageTables
from server.engine.pool_size import (
    DEVICE_RESERVE,
    Room,
    graphs_reserve,
    limits_of,
    num_pages,
    widest_logits,
    widest_prompts,
    within_pool,
    workspace_bytes,
)
from server.engine.runner import ModelRunner
from server.engine.scheduler import Limits, Scheduler
from server.engine.stream import HostStream
from server.engine.warm_up import try_every_path, warm_up

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
    backend: str
    dtype: str
    limits: Limits
    workspace: int
    kv: KVCache
    warnings: tuple[str, ...]
    accelerator: Accelerator | None = None
    graphs: DecodeGraphs | None = None
    graph_seconds: float = 0.0
    graph_bytes: int = 0

    def engine(self, info: EngineInfo) -> Engine:
        """An engine with empty books on this machine."""
        config, limits = self.config, self.limits
        tables = PageTables(
            self.kv.layout, self.kv.num_pages, limits.max_num_batched_tokens, config.prefix_caching, time.monotonic_ns()
        )
        grammars = Grammars(Path(config.model), self.model.vocab_size)
        return Engine(
            Scheduler(limits, tables),
            self._runner(),
            info,
            kv_resident=lambda: kv_resident_bytes(self.kv),
            grammars=grammars,
        )

    def _runner(self) -> ModelRunner:
        """Where there is an accelerator, steps overlap."""
        fixed = self.decoder, self.kv, self.ops, self.model.vocab_size
        if self.accelerator is None:
            return ModelRunner(*fixed, HostStream())
        last = self._last_tokens() if self.graphs is None else self.graphs.last
        return ModelRunner(*fixed, self.accelerator.stream, last, self.graphs)

    def _last_tokens(self) -> LastTokens:
        return LastTokens(self.limits.max_num_seqs, self.model.vocab_size, self.device)

    def recorded(self) -> Machine:
        """With its decode steps recorded, where that can be done."""
        if self.accelerator is None or self.accelerator.capture is None:
            return self
        free, started = self.accelerator.meter.free(), time.monotonic()
        limits, stream = self.limits, self.accelerator.stream
        sizes = graph_sizes(limits.max_num_seqs)
        graphs = DecodeGraphs(self.decoder, self.kv, stream, self._last_tokens(), sizes, limits.max_model_len)
        graphs.record(self.accelerator.capture)
        taken = free - self.accelerator.meter.free()
        return replace(self, graphs=graphs, graph_seconds=time.monotonic() - started, graph_bytes=taken)

    def info(self, phases: Phases) -> EngineInfo:
        layout, limits = self.kv.layout, self.limits
        return EngineInfo(
            vocab_size=self.model.vocab_size,
            max_model_len=limits.max_model_len,
            device=str(self.device),
            dtype=self.dtype,
            kv_dtype=layout.groups[0].dtype,
            quantization=self.config.quantization,
            backend=self.backend,
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
            graphs=0 if self.graphs is None else len(self.graphs),
            graph_seconds=self.graph_seconds,
            graph_bytes=self.graph_bytes,
        )


def build_engine(
    config: EngineConfig, report: Report = lambda progress: None, accelerator: Accelerator | None = None
) -> Engine:
    """Load a canonical folder and return a warm engine. accelerator takes the place of the device's own.

    Raises ConfigError or WeightsError for a folder that cannot be served, MemoryError where memory does not suffice.
    """
    phases = Phases(report)
    machine = _assemble(config, phases, accelerator)
    with phases.phase("warm_up"):
        machine = _warm(machine, phases)
    return machine.engine(machine.info(phases))


def _warm(machine: Machine, phases: Phases) -> Machine:
    if machine.accelerator is None:
        chunk = warm_up(machine.engine(machine.info(phases)))
        return replace(machine, limits=replace(machine.limits, mixed_chunk=chunk))
    machine = machine.recorded()
    try_every_path(machine.engine(machine.info(phases)))
    return machine


def _assemble(config: EngineConfig, phases: Phases, accelerator: Accelerator | None) -> Machine:
    refuse_unserved(config)
    device = torch.device(best_device() if config.device == "auto" else config.device)
    folder = Path(config.model)
    with phases.phase("kernels"):
        ops = operations(config, device)
    if device.type == "cuda" and accelerator is None:
        accelerator = cuda_accelerator(device, can_record=ops.name != "reference")
    model = load_config(folder)
    dtype = dtype_of(config, model, ops, device)
    refuse_quantization(config, ops, device, getattr(torch, dtype))
    limits = limits_of(config, model, is_wide=accelerator is not None)
    layout = _layout(config, model, dtype)
    ops, backend = with_attention_of(config, ops, device, model, layout, getattr(torch, dtype))

    def progress(done: int, layers: int) -> None:
        phases.report(Progress("load", f"{done} of {layers} layers"))

    with phases.phase("load", config.model):
        decoder = load_decoder(
            folder, model, ops, device, getattr(torch, dtype), config.quantization, progress, limits.max_model_len
        )
    room = _room(decoder, layout, limits, accelerator)
    counts = num_pages(config.kv_cache_memory, layout, limits, room)
    with phases.phase("allocate", f"{layout.pool_bytes(counts)} bytes of KV cache"):
        kv = KVCache(layout, counts, device)
    assert kv.nbytes == layout.pool_bytes(counts), (kv.nbytes, layout.pool_bytes(counts))
    limits, warnings = within_pool(limits, layout, counts)
    warnings = decoder.warnings + warnings
    return Machine(config, model, decoder, ops, device, backend, dtype, limits, room.step, kv, warnings, accelerator)


def _room(decoder: Decoder, layout: KVLayout, limits: Limits, accelerator: Accelerator | None) -> Room:
    """What is free, and the widest step: by arithmetic on a CPU, measured on an accelerator."""
    if accelerator is None:
        return Room(available_bytes(), workspace_bytes(decoder.config, limits))
    meter, device = accelerator.meter, accelerator.stream.device
    rows, rest = graph_sizes(limits.max_num_seqs)[-1], DEVICE_RESERVE
    widest = widest_prompts(limits)
    step = taken_by(meter, lambda: run_filler(decoder, layout, widest, widest_logits(limits), device))
    if accelerator.capture is not None:
        decode = taken_by(meter, lambda: run_filler(decoder, layout, [1] * rows, rows, device))
        rest += graphs_reserve(decode, 4 * rows * decoder.config.vocab_size, len(graph_sizes(limits.max_num_seqs)))
    meter.trim()
    return Room(meter.free(), step, rest, is_shared=False)


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


def kv_resident_bytes(kv: KVCache) -> int:
    """Bytes of the pool that the system has committed: all of it on a GPU, what was touched on a CPU.

    The system counts whole pages of its own, of which the last one is not all the pool's.
    """
    if kv.storages[0].device.type != "cpu":
        return kv.nbytes
    sizes = [(storage.data_ptr(), storage.untyped_storage().nbytes()) for storage in kv.storages]
    return sum(min(size, resident_bytes(address, size)) for address, size in sizes)
