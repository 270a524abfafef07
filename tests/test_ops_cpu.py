"""Native CPU operations: equal to the reference within rounding, and each row bit-equal whatever shares its batch."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from model.ops.cpu.native import CpuOps
from model.ops.interface import AttentionTables, LayerKV
from model.ops.reference import ReferenceOps
from tests.native_ops import close, ops_built_with, random, threads

REFERENCE = ReferenceOps()
DTYPES = (torch.float32, torch.bfloat16)


@pytest.fixture(scope="module", params=["", "-DRW_NO_DOTS -DRW_EMULATE_DOTS"], ids=["own", "emulated"])
def ops(request: pytest.FixtureRequest) -> Iterator[CpuOps]:
    """Emulated: attention multiplies pairs of bf16 on any CPU, in the portable form."""
    with ops_built_with(request.param) as built:
        yield built


# ---- layer operations ------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 8, 33, 576])
def test_add_rms_norm(ops: CpuOps, width: int, dtype: torch.dtype) -> None:
    x, residual = random(40, width, dtype=dtype), random(40, width, dtype=dtype, seed=1)
    weight = random(width, dtype=dtype, seed=2)
    for other in (None, residual):
        actual, expected = (backend.add_rms_norm(x, other, weight, 1e-5) for backend in (ops, REFERENCE))
        close(actual[0], expected[0], dtype)
        assert torch.equal(actual[1], expected[1])
        alone = ops.add_rms_norm(x[7:8], None if other is None else other[7:8], weight, 1e-5)
        assert torch.equal(alone[0][0], actual[0][7])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 9, 96, 1536])
def test_silu_mul(ops: CpuOps, width: int, dtype: torch.dtype) -> None:
    gate_up = random(30, 2 * width, dtype=dtype) * 20
    actual = ops.silu_mul(gate_up)
    close(actual, REFERENCE.silu_mul(gate_up), dtype)
    assert torch.equal(ops.silu_mul(gate_up[3:4])[0], actual[3])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("cache_dtype", DTYPES)
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim", "rotary"), [(4, 2, 8, 8), (9, 3, 64, 64), (3, 1, 20, 12)])
@pytest.mark.parametrize("norms", [False, True])
def test_rope_write(
    ops: CpuOps,
    dtype: torch.dtype,
    cache_dtype: torch.dtype,
    heads: int,
    kv_heads: int,
    head_dim: int,
    rotary: int,
    norms: bool,
) -> None:
    qkv = random(37, (heads + 2 * kv_heads) * head_dim, dtype=dtype)
    q_norm, k_norm = (random(head_dim, dtype=dtype, seed=seed) if norms else None for seed in (1, 2))
    positions = torch.randint(0, 100, (37,), generator=torch.Generator().manual_seed(3))
    slots = torch.randperm(80, generator=torch.Generator().manual_seed(4))[:37]
    caches = [
        LayerKV(*(random(20, kv_heads, 4, head_dim, dtype=cache_dtype, seed=seed) for seed in (5, 6))) for _ in range(2)
    ]
    table = random(100, rotary, seed=7)
    actual = ops.rope_write(qkv, q_norm, k_norm, 1e-6, table, positions, slots, caches[0])
    close(actual, REFERENCE.rope_write(qkv, q_norm, k_norm, 1e-6, table, positions, slots, caches[1]), dtype)
    close(caches[0].k, caches[1].k, dtype if dtype == torch.bfloat16 else cache_dtype)
    assert torch.equal(caches[0].v, caches[1].v)


# ---- attention -------------------------------------------------------------------------------------------------------
class Scene:
    """Random sequences in a shuffled paged cache whose unused slots hold NaN."""

    def __init__(
        self,
        lens: list[int],
        heads: int,
        kv_heads: int,
        head_dim: int,
        page_size: int,
        dtype: torch.dtype,
        seed: int = 0,
    ) -> None:
        width = max(-(-length // page_size) for length in lens)
        pages = len(lens) * width + 3
        order = torch.randperm(pages, generator=torch.Generator().manual_seed(seed)).to(torch.int32)
        self.lens, self.heads, self.page_size = lens, heads, page_size
        self.page_table = order[: len(lens) * width].view(len(lens), width)
        self.kv = LayerKV(
            *(torch.full((pages, kv_heads, page_size, head_dim), torch.nan, dtype=dtype) for _ in range(2))
        )
        self.q = [random(length, heads, head_dim, dtype=dtype, seed=seed + 1 + b) for b, length in enumerate(lens)]
        for b, length in enumerate(lens):
            rows = random(2, length, kv_heads, head_dim, dtype=dtype, seed=seed + 100 + b)
            for token in range(length):
                page, offset = int(self.page_table[b, token // page_size]), token % page_size
                self.kv.k[page, :, offset], self.kv.v[page, :, offset] = rows[0, token], rows[1, token]

    def ask_in_chunks(self, ops: CpuOps, sequence: int, chunk: int, window: int | None) -> Tensor:
        """All rows of a sequence [rows, heads * head_dim], so many to a batch."""
        length = self.lens[sequence]
        spans = [(sequence, first, min(first + chunk, length)) for first in range(0, length, chunk)]
        return torch.cat([self.ask(ops, [span], window)[0] for span in spans])

    def ask(
        self, ops: CpuOps | ReferenceOps, spans: list[tuple[int, int, int]], window: int | None = None
    ) -> list[Tensor]:
        """One batch of (sequence, first row, last row): each answer [rows, heads * head_dim]."""
        sizes = torch.tensor([last - first for _, first, last in spans])
        tables = AttentionTables(
            page_table=self.page_table[[b for b, _, _ in spans]].contiguous(),
            kv_lens=torch.tensor([last for _, _, last in spans], dtype=torch.int32),
            q_starts=torch.cat((torch.zeros(1), sizes.cumsum(0))).to(torch.int32),
            max_q=int(sizes.max()),
            max_kv=max(last for _, _, last in spans),
        )
        q = torch.cat([self.q[b][first:last] for b, first, last in spans])
        out = ops.attention(q, self.kv, tables, q.shape[-1] ** -0.5, window)
        return list(torch.split(out, [int(size) for size in sizes]))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("page_size", [4, 16, 24])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim"), [(2, 2, 8), (9, 3, 64), (8, 2, 20), (16, 1, 40), (4, 2, 128), (2, 1, 256)]
)
@pytest.mark.parametrize("window", [None, 5, 100])
def test_attention_agrees_with_the_reference(
    ops: CpuOps, heads: int, kv_heads: int, head_dim: int, page_size: int, dtype: torch.dtype, window: int | None
) -> None:
    scene = Scene([1, 63, 64, 65, 150], heads, kv_heads, head_dim, page_size, dtype)
    spans = [(0, 0, 1), (1, 60, 63), (2, 63, 64), (3, 0, 65), (4, 149, 150), (4, 100, 141)]
    for actual, expected in zip(scene.ask(ops, spans, window), scene.ask(REFERENCE, spans, window), strict=True):
        close(actual, expected, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(9, 3, 64), (4, 4, 20), (16, 1, 32)])
@pytest.mark.parametrize("window", [None, 90])
def test_attention_rows_are_bit_equal_however_the_prompt_is_cut(
    ops: CpuOps, heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype, window: int | None
) -> None:
    scene = Scene([200, 333], heads, kv_heads, head_dim, 16, dtype)
    whole = scene.ask(ops, [(0, 0, 200), (1, 0, 333)], window)
    for count in (1, 2, 3):
        with threads(count):
            for chunk in (7, 64, 100):
                assert torch.equal(scene.ask_in_chunks(ops, 1, chunk, window), whole[1]), (count, chunk)
            for row in (0, 1, 63, 64, 130, 199):  # decoded, alone and beside another
                assert torch.equal(scene.ask(ops, [(0, row, row + 1)], window)[0][0], whole[0][row])
                pair = scene.ask(ops, [(1, 5, 70), (0, row, row + 1), (1, 332, 333)], window)
                assert torch.equal(pair[1][0], whole[0][row]) and torch.equal(pair[2][0], whole[1][332])


def test_attention_over_a_long_context_is_bit_equal_for_any_number_of_threads(ops: CpuOps) -> None:
    scene = Scene([2049], 3, 1, 16, 16, torch.bfloat16)
    answers = []
    for count in (1, 2, 3):
        with threads(count):
            answers.append(scene.ask(ops, [(0, 2048, 2049)])[0])
    assert torch.equal(answers[0], answers[1]) and torch.equal(answers[0], answers[2])
    close(answers[0], scene.ask(REFERENCE, [(0, 2048, 2049)])[0], torch.bfloat16)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("window", [None, 9])
def test_a_token_that_is_not_finite_touches_no_row_that_does_not_see_it(
    ops: CpuOps, dtype: torch.dtype, bad: float, window: int | None
) -> None:
    scene = Scene([70], 4, 2, 16, 4, dtype)
    clean = scene.ask(ops, [(0, 0, 70)], window)[0]
    page, offset = int(scene.page_table[0, 55 // 4]), 55 % 4
    scene.kv.v[page, :, offset] = bad
    spoilt = scene.ask(ops, [(0, 0, 70)], window)[0]
    last = 70 if window is None else 55 + window
    assert torch.equal(spoilt[:55], clean[:55]) and torch.equal(spoilt[last:], clean[last:])
    assert not spoilt[55:last].isfinite().any()
    scene.kv.k[page, :, offset] = torch.nan
    worse = scene.ask(ops, [(0, 0, 70)], window)[0]
    assert torch.equal(worse[:55], clean[:55]) and torch.equal(worse[last:], clean[last:])
    assert worse[55:last].isnan().all()


def test_padding_rows_and_extreme_scores(ops: CpuOps) -> None:
    scene = Scene([5], 2, 1, 8, 4, torch.float32)
    tables = AttentionTables(
        scene.page_table, torch.tensor([5], dtype=torch.int32), torch.tensor([0, 5], dtype=torch.int32), 5, 5
    )
    padded = torch.cat((scene.q[0] * 1e4, torch.full((3, 2, 8), torch.nan)))
    out = ops.attention(padded, scene.kv, tables, 1.0, None)
    assert out[:5].isfinite().all() and torch.equal(out[5:], torch.zeros(3, 16))


def test_two_tokens_by_hand(ops: CpuOps) -> None:
    """Q = K = I, V = [[1, 2], [3, 4]], scale 1/sqrt(2): the second row sees both."""
    kv = LayerKV(torch.eye(2).view(1, 1, 2, 2).contiguous(), torch.tensor([[1.0, 2.0], [3.0, 4.0]]).view(1, 1, 2, 2))
    lens, starts = torch.tensor([2], dtype=torch.int32), torch.tensor([0, 2], dtype=torch.int32)
    tables = AttentionTables(torch.zeros(1, 1, dtype=torch.int32), lens, starts, 2, 2)
    out = ops.attention(torch.eye(2).unsqueeze(1), kv, tables, 2**-0.5, None)
    assert torch.equal(out[0], torch.tensor([1.0, 2.0]))
    torch.testing.assert_close(out[1], torch.tensor([2.3395, 3.3395]), atol=1e-4, rtol=0)


# ---- what is not native ----------------------------------------------------------------------------------------------
def test_half_precision_goes_to_the_reference(ops: CpuOps) -> None:
    x, weight = random(3, 16, dtype=torch.float16), random(8, 16, dtype=torch.float16, seed=1)
    assert torch.equal(
        ops.linear(x, ops.pack_linear(weight, None)), REFERENCE.linear(x, REFERENCE.pack_linear(weight, None))
    )
    assert torch.equal(ops.silu_mul(x), REFERENCE.silu_mul(x))


def test_one_openmp_in_the_process() -> None:
    """Own process: the engine's. Other libraries of the suite bring OpenMP runtimes of their own into this one."""
    code = (
        "from model.ops.select import ops_for; ops_for('cpu')\n"
        "print(*{line.split()[-1] for line in open('/proc/self/maps') if 'libgomp' in line or 'libomp' in line})"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert len(done.stdout.split()) == 1, done.stdout
