"""A real engine in this process: a tiny checkpoint, the reference operations, page size 4."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import torch

from model.config import load_config
from model.decoder import Decoder
from model.kv_cache import KVCache
from model.kv_cost import layout_for
from model.ops.interface import Ops
from model.ops.reference import ReferenceOps
from model.ops.select import ops_for
from model.weights import load_decoder
from server.engine.core import Engine
from server.engine.decode_graphs import DecodeGraphs, graph_sizes
from server.engine.grammar import Grammars
from server.engine.last_tokens import LastTokens
from server.engine.messages import Row, Submit
from server.engine.page_tables import PageTables
from server.engine.runner import Model, ModelRunner
from server.engine.scheduler import Limits, Scheduler
from server.engine.stream import HostStream, StagedStream, Stream
from tests.fake_device import info

CPU = torch.device("cpu")


@cache
def decoder_of(
    folder: Path, reference: bool = False, dtype: str = "float32", quantization: str | None = None
) -> Decoder:
    ops = ReferenceOps() if reference else ops_for(CPU)
    return load_decoder(folder, load_config(folder), ops, CPU, getattr(torch, dtype), quantization)


@dataclass(frozen=True)
class Setup:
    """pages leaves out the scratch page. reference: plain torch, also where there are kernels.

    graphs: overlapping steps as on a GPU, with staged copies and recorded decodes; a recording here is the function.
    """

    pages: int = 400
    page_size: int = 4
    budget: int = 256
    max_num_seqs: int = 32
    prefix_caching: bool = True
    overlaps: bool = False
    graphs: bool = False
    reference: bool = False
    dtype: str = "float32"
    kv_dtype: str | None = None
    quantization: str | None = None

    def engine(
        self, folder: Path, wrap: Callable[[Decoder], Model] = lambda decoder: decoder, ops: Ops | None = None
    ) -> Engine:
        """wrap stands between the runner and the decoder, so that a test can make a forward go wrong.

        ops take the place of the reference operations.
        """
        decoder, config = decoder_of(folder, self.reference, self.dtype, self.quantization), load_config(folder)
        decoder = decoder if ops is None else replace(decoder, ops=ops)
        layout = layout_for(config, self.page_size, self.kv_dtype or self.dtype)
        kv = KVCache(layout, (self.pages + 1,) * len(layout.groups), CPU)
        for storage in kv.storages:
            storage.view(torch.uint8).fill_(255)  # NaN in any float type: what was never written must not matter
        tables = PageTables(layout, kv.num_pages, self.budget, self.prefix_caching)
        length = min(config.max_position_embeddings, tables.capacity())
        scheduler = Scheduler(
            Limits(length, self.max_num_seqs, self.budget, prompt_logits=max(1, self.budget // 4)), tables
        )
        late = self.overlaps or self.graphs
        last = LastTokens(self.max_num_seqs, config.vocab_size, CPU) if late else None
        stream: Stream = HostStream()
        graphs = None
        if self.graphs and last is not None:
            stream = staged = StagedStream(CPU)
            graphs = DecodeGraphs(decoder, kv, staged, last, graph_sizes(self.max_num_seqs), length)
            graphs.record(lambda work: work)
        runner = ModelRunner(wrap(decoder), kv, decoder.ops, config.vocab_size, stream, last, graphs)
        grammars = Grammars(folder, config.vocab_size)
        return Engine(scheduler, runner, info(length, config.vocab_size), grammars=grammars)


def run(engine: Engine, *submits: Submit) -> list[Row]:
    """Add all, then step until nothing is left, checking the books at every step."""
    for submit in submits:
        engine.add(submit)
    rows: list[Row] = []
    while engine.has_work:
        rows += engine.step().rows
        engine.check_integrity()
    return rows
