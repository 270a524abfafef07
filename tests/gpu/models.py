"""Decoders of known shapes with random weights, their caches and engines, for a visit to a GPU.

Nothing is read but a config; no tokenizer, no HTTP.
"""

from __future__ import annotations

import json
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from model.config import ModelConfig, load_config
from model.decoder import Decoder
from model.kv_cache import KVCache
from model.kv_cost import KVLayout, layout_for
from model.layers import MLP, Attention, Layer
from model.ops.interface import Ops, PackedLinear
from model.rope import cos_sin_table
from model.tensor_shapes import tensor_shapes
from model.weights import HEAD_QUANTIZATION, load_decoder
from server.engine.core import Engine
from server.engine.decode_graphs import DecodeGraphs, graph_sizes
from server.engine.facts import EngineInfo
from server.engine.last_tokens import LastTokens
from server.engine.page_tables import PageTables
from server.engine.pool_size import DEVICE_CHUNK
from server.engine.runner import ModelRunner
from server.engine.scheduler import Limits, Scheduler
from server.engine.warm_up import try_every_path
from tests.gpu.visit import Visit

PAGE_SIZE = 16
LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0, "torch_dtype": "bfloat16", "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
SHAPES: dict[str, dict[str, Any]] = {
    "8B": {
        "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 128256, "tie_word_embeddings": False,
        "max_position_embeddings": 40960,
    },
    "1B": {
        "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32,
        "num_key_value_heads": 8, "head_dim": 64, "vocab_size": 128256, "tie_word_embeddings": True,
        "max_position_embeddings": 4096,
    },
    "stories": {
        "hidden_size": 288, "intermediate_size": 768, "num_hidden_layers": 6, "num_attention_heads": 6,
        "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 32000, "tie_word_embeddings": True,
        "max_position_embeddings": 1024,
    },
    "toy": {
        "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 300, "tie_word_embeddings": False,
        "max_position_embeddings": 256,
    },
}  # fmt: skip


def config_of(name: str) -> ModelConfig:
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(LLAMA | SHAPES[name]))
        return load_config(Path(folder))


def write_checkpoint(name: str, folder: Path) -> Path:
    """A folder of random fp32 weights under the names of Hugging Face."""
    generator = torch.Generator().manual_seed(7)
    (folder / "config.json").write_text(json.dumps(LLAMA | SHAPES[name]))
    tensors = {}
    for tensor, shape in tensor_shapes(load_config(folder)).items():
        noise = torch.randn(shape, generator=generator)
        tensors[tensor] = noise * shape[-1] ** -0.5 if len(shape) > 1 else 1 + 0.2 * noise
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def checkpoint(visit: Visit, ops: Ops, device: torch.device, dtype: torch.dtype) -> Decoder:
    """The same weights on any device, read from a folder as a server reads them."""
    with tempfile.TemporaryDirectory() as name:
        folder = write_checkpoint("toy" if visit.tiny else "stories", Path(name))
        return load_decoder(folder, load_config(folder), ops, device, dtype)


def random_decoder(
    config: ModelConfig, ops: Ops, device: torch.device, dtype: torch.dtype, quantization: str | None = None
) -> Decoder:
    """Weights are made on the device; quantization as in model/weights.py."""

    def weight(rows: int, columns: int) -> Tensor:
        return torch.randn(rows, columns, device=device, dtype=dtype).mul_(columns**-0.5)

    def packed(rows: int, columns: int) -> PackedLinear:
        return ops.pack_linear(weight(rows, columns), None, quantization)

    hidden, wide = config.hidden_size, config.intermediate_size
    q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    one = torch.ones(hidden, device=device, dtype=dtype)
    layers = tuple(
        Layer(
            one,
            Attention(
                packed(q + 2 * kv, hidden), packed(hidden, q), None, None,
                config.rms_norm_eps, config.attention_scale, config.windows[index],
            ),
            one,
            MLP(packed(2 * wide, hidden), packed(hidden, wide)),
        )
        for index in range(config.num_layers)
    )  # fmt: skip
    embedding = weight(config.vocab_size, hidden)
    head_weight = embedding if config.tie_word_embeddings else weight(config.vocab_size, hidden)
    head = ops.pack_linear(head_weight, None, quantization and HEAD_QUANTIZATION)
    table = cos_sin_table(config, config.max_position_embeddings, device)
    return Decoder(config, ops, embedding, layers, one, head, table)


@dataclass(frozen=True)
class Rig:
    """A decoder with its cache, ready to be driven by hand or by an engine."""

    visit: Visit
    decoder: Decoder
    kv: KVCache
    max_num_seqs: int
    max_len: int
    budget: int

    @classmethod
    def of(
        cls, visit: Visit, decoder: Decoder, tokens: int, max_num_seqs: int, max_len: int, budget: int = 2048
    ) -> Rig:
        """tokens: what the cache holds."""
        dtype = str(decoder.embedding.dtype).removeprefix("torch.")
        layout = layout_for(decoder.config, PAGE_SIZE, dtype)
        kv = KVCache(layout, (-(-tokens // PAGE_SIZE) + 1,) * len(layout.groups), visit.device)
        for storage in kv.storages:
            storage.normal_()
        return cls(visit, decoder, kv, max_num_seqs, max_len, budget)

    @property
    def layout(self) -> KVLayout:
        return self.kv.layout

    @property
    def weights_read(self) -> int:
        """Bytes of weights that one step must read: all but the rows of the embedding that nobody looks up."""
        looked_up = not self.decoder.head.shares(self.decoder.embedding)
        return self.decoder.weights_nbytes - (self.decoder.embedding.nbytes if looked_up else 0)

    def graphs(self) -> DecodeGraphs:
        """Decodes recorded for up to max_num_seqs sequences."""
        accelerator = self.visit.accelerator()
        assert accelerator.capture is not None, "these operations cannot be recorded"
        last = LastTokens(self.max_num_seqs, self.decoder.config.vocab_size, self.visit.device)
        sizes = graph_sizes(self.max_num_seqs)
        graphs = DecodeGraphs(self.decoder, self.kv, accelerator.stream, last, sizes, self.max_len)
        graphs.record(accelerator.capture)
        return graphs

    def engine(self, graphs: DecodeGraphs | None) -> Engine:
        config, layout = self.decoder.config, self.layout
        last = graphs.last if graphs else LastTokens(self.max_num_seqs, config.vocab_size, self.visit.device)
        stream = self.visit.accelerator().stream
        runner = ModelRunner(self.decoder, self.kv, self.decoder.ops, config.vocab_size, stream, last, graphs)
        tables = PageTables(layout, self.kv.num_pages, self.budget, prefix_caching=False)
        limits = Limits(self.max_len, self.max_num_seqs, self.budget, mixed_chunk=DEVICE_CHUNK)
        facts = replace(
            FACTS, vocab_size=config.vocab_size, max_model_len=self.max_len, max_num_batched_tokens=self.budget
        )
        return Engine(Scheduler(limits, tables), runner, facts)

    def warm_engine(self, graphs: DecodeGraphs) -> Engine:
        """One that compiles nothing any more."""
        engine = self.engine(graphs)
        try_every_path(engine)
        return engine


FACTS = EngineInfo(
    vocab_size=0, max_model_len=0, device="", dtype="", kv_dtype="", backend="", threads=1, batch_invariant=False,
    page_size=PAGE_SIZE, num_pages=(), page_bytes=(), kv_bytes_predicted=0, kv_bytes_allocated=0, kv_bytes_resident=0,
    weights_bytes=0, workspace_bytes=0, rss_bytes=0, max_num_seqs=0, max_num_batched_tokens=0, prefix_caching=False,
    pid=0,
)  # fmt: skip
