"""What the native operations reach of what the machine gives: `python -m model.ops.cpu.bench`.

Knows the shapes of SmolLM2-135M, no checkpoint: weights are random. The limits (read bandwidth, multiply-add rate) are
measured in the same run; native and reference take turns; medians count. On a busy machine use --cpu-time.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from model.batch import Batch
from model.config import ModelConfig
from model.decoder import Decoder
from model.kv_cache import KVCache
from model.kv_cost import KVGroup, KVLayout
from model.layers import MLP, Attention, Layer
from model.ops.cpu.bench_report import Calls, Clock, Others, Report, measure_limits
from model.ops.cpu.build import find_library
from model.ops.cpu.native import CpuOps
from model.ops.cpu.packed import QUANTIZED
from model.ops.interface import AttentionTables, Ops, PackedLinear
from model.ops.reference import ReferenceOps
from model.rope import cos_sin_table
from model.weights import HEAD_QUANTIZATION

CONFIG = ModelConfig.from_dict(
    {
        "model_type": "llama",
        "vocab_size": 49152,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "tie_word_embeddings": True,
    }
)
PAGE_SIZE = 16


HIDDEN, INNER = CONFIG.hidden_size, CONFIG.intermediate_size
QKV = (CONFIG.num_heads + 2 * CONFIG.num_kv_heads) * CONFIG.head_dim
LAYER_SHAPES = ((QKV, HIDDEN), (HIDDEN, HIDDEN), (2 * INNER, HIDDEN), (HIDDEN, INNER))
LAYER_WEIGHTS = CONFIG.num_layers * sum(outputs * inputs for outputs, inputs in LAYER_SHAPES)
HEAD_WEIGHTS = CONFIG.vocab_size * HIDDEN


def random_weights(dtype: torch.dtype) -> list[Tensor]:
    """The embedding [V, D], then four matrices a layer [N, K]."""
    shapes = [(CONFIG.vocab_size, HIDDEN), *LAYER_SHAPES * CONFIG.num_layers]
    return [(torch.randn(shape) * shape[1] ** -0.5).to(dtype) for shape in shapes]


@dataclass(frozen=True, slots=True)
class Model:
    """The weights behind one kind of operations."""

    ops: Ops
    decoder: Decoder
    linears: list[PackedLinear]  # four a layer

    @classmethod
    def of(cls, ops: Ops, weights: list[Tensor], quantization: str | None = None) -> Model:
        embedding = weights[0]
        norm = torch.ones(HIDDEN, dtype=embedding.dtype)
        packed = [ops.pack_linear(weight, None, quantization) for weight in weights[1:]]
        layers = []
        for qkv, out, gate_up, down in zip(*(packed[part::4] for part in range(4)), strict=True):
            attention = Attention(qkv, out, None, None, 1e-5, CONFIG.attention_scale, None)
            layers.append(Layer(norm, attention, norm, MLP(gate_up, down)))
        head = ops.pack_linear(embedding, None, quantization and HEAD_QUANTIZATION)
        table = cos_sin_table(CONFIG, 8192, "cpu")
        return cls(ops, Decoder(CONFIG, ops, embedding, tuple(layers), norm, head, table), packed)

    @property
    def layer_bytes(self) -> int:
        return sum(linear.nbytes for linear in self.linears)

    def all_linears(self, inputs: dict[int, Tensor]) -> None:
        """Every matrix of the layers once; inputs: width -> rows of it."""
        widths = [shape[1] for shape in LAYER_SHAPES] * CONFIG.num_layers
        for width, linear in zip(widths, self.linears, strict=True):
            self.ops.linear(inputs[width], linear)


def bench_linears(report: Report, models: dict[str, Model], dtype: torch.dtype) -> None:
    """The linear layers of all 30 layers, one after the other: more weights than any cache holds."""
    for rows in (1, 8, 32, 128, 512):
        inputs = {width: torch.randn(rows, width).to(dtype) for width in (HIDDEN, INNER)}
        calls: Calls = {name: partial(model.all_linears, inputs) for name, model in models.items()}
        report.line(f"linears, {rows} rows", models["native"].layer_bytes, 2 * rows * LAYER_WEIGHTS, calls)


@dataclass(frozen=True, slots=True)
class Scene:
    """Sequences of equal length, each asking with its last rows, on a cache of their own."""

    batch: Batch
    cache: KVCache

    @classmethod
    def of(cls, sequences: int, length: int, asked: int, dtype: torch.dtype) -> Scene:
        pages = -(-length // PAGE_SIZE)
        name = str(dtype).removeprefix("torch.")
        group = KVGroup(tuple(range(CONFIG.num_layers)), None, CONFIG.num_kv_heads, CONFIG.head_dim, name)
        cache = KVCache(KVLayout(PAGE_SIZE, (group,)), (sequences * pages + 1,), "cpu")
        for storage in cache.storages:
            storage.normal_()
        table = (torch.randperm(sequences * pages) + 1).to(torch.int32).view(sequences, pages)
        positions = torch.arange(length - asked, length).repeat(sequences)
        page = table.long().repeat_interleave(asked, 0).gather(1, (positions // PAGE_SIZE).unsqueeze(1)).squeeze(1)
        starts = torch.arange(sequences + 1, dtype=torch.int32) * asked
        batch = Batch(
            torch.randint(0, CONFIG.vocab_size, (sequences * asked,)), positions,
            (page * PAGE_SIZE + positions % PAGE_SIZE,), (table,),
            torch.full((sequences,), length, dtype=torch.int32), starts, starts[1:].long() - 1, asked, length,
        )  # fmt: skip
        return cls(batch, cache)

    @property
    def kv_bytes(self) -> int:
        return self.cache.layout.token_bytes * int(self.batch.kv_lens.sum())

    @property
    def attention_flops(self) -> float:
        keys = float((self.batch.positions + 1).sum())
        return 4 * keys * CONFIG.num_layers * CONFIG.num_heads * CONFIG.head_dim

    def all_attention(self, ops: Ops, q: Tensor) -> None:
        """Attention of every layer once; q [T, Hq, d]."""
        batch = self.batch
        tables = AttentionTables(batch.page_table[0], batch.kv_lens, batch.q_starts, batch.max_q, batch.max_kv)
        for layer in range(CONFIG.num_layers):
            ops.attention(q, self.cache.layer(layer), tables, CONFIG.attention_scale, None)


def bench_attention(report: Report, all_ops: dict[str, Ops], dtype: torch.dtype) -> None:
    """Attention of all 30 layers: decode at several contexts, and a prompt."""
    for sequences, length, asked in ((1, 256, 1), (1, 2048, 1), (16, 512, 1), (1, 512, 512)):
        scene = Scene.of(sequences, length, asked, dtype)
        q = torch.randn(sequences * asked, CONFIG.num_heads, CONFIG.head_dim).to(dtype)
        calls: Calls = {name: partial(scene.all_attention, ops, q) for name, ops in all_ops.items()}
        report.line(f"attention, {sequences} x {asked} of {length}", scene.kv_bytes, scene.attention_flops, calls)


def bench_decoder(report: Report, models: dict[str, Model], dtype: torch.dtype) -> None:
    """Whole steps: decoding at context 256, and a prompt of 512."""
    for sequences, length, asked in ((1, 256, 1), (8, 256, 1), (32, 256, 1), (1, 512, 512)):
        scene = Scene.of(sequences, length, asked, dtype)
        num_bytes = models["native"].layer_bytes + models["native"].decoder.head.nbytes + scene.kv_bytes
        flops = 2 * sequences * (asked * LAYER_WEIGHTS + HEAD_WEIGHTS) + scene.attention_flops
        calls: Calls = {
            name: partial(model.decoder.forward, scene.batch, scene.cache) for name, model in models.items()
        }
        report.line(f"step, {sequences} x {asked} of {length}", num_bytes, flops, calls)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m model.ops.cpu.bench", description=__doc__)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--quantization", choices=sorted(QUANTIZED), help="of the native weights")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--cpu-time", action="store_true", help="one thread, its CPU time instead of the wall's")
    parser.add_argument("--no-reference", action="store_true", help="native only")
    parser.add_argument("--seconds", type=float, default=2.0, help="spent on each comparison")
    arguments = parser.parse_args()
    torch.set_num_threads(1 if arguments.cpu_time else arguments.threads)
    dtype = getattr(torch, arguments.dtype)
    native = CpuOps(find_library())
    all_ops: dict[str, Ops] = {"native": native}
    if not arguments.no_reference:
        all_ops["reference"] = ReferenceOps()
    clock = Clock(arguments.cpu_time, arguments.seconds)
    limits = measure_limits(clock)
    kind = f"{arguments.dtype}, weights {arguments.quantization or arguments.dtype}"
    print(f"{native.description}; {torch.get_num_threads()} threads; {kind}; SmolLM2-135M shapes")
    print(f"read {limits.bytes_per_second / 1e9:.1f} GB/s, fp32 {limits.flops_per_second / 1e9:.1f} GFLOP/s")
    weights = random_weights(dtype)
    models = {"native": Model.of(native, weights, arguments.quantization)}
    if not arguments.no_reference:
        models["reference"] = Model.of(all_ops["reference"], weights)
    report = Report(clock, Others())
    bench_linears(report, models, dtype)
    bench_attention(report, all_ops, dtype)
    bench_decoder(report, models, dtype)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
