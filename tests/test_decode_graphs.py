"""The GPU's side of the runner, run on a CPU: staged copies, recorded decodes, late results, and nobody waits.

A recording here is the recorded function itself, over the same static buffers that a CUDA graph would use.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from model.batch import Batch, SampleBatch, Sampled
from model.decoder import Decoder
from model.kv_cache import KVCache
from model.ops.interface import AttentionTables, LayerKV
from model.ops.reference import ReferenceOps
from server.engine.core import Engine
from server.engine.decode_graphs import SIZES, graph_sizes
from server.engine.decode_inputs import Columns, DecodeRows, blank_rows, table_start
from server.engine.last_tokens import ON_HOST, LastTokens
from server.engine.messages import Row, SamplingParams, Submit
from server.engine.runner import ModelRunner
from server.engine.stream import ALIGNMENT, StagedStream
from tests.conftest import VOCAB_SIZE
from tests.fake_device import finishes, outputs
from tests.real_engine import Setup, run

CPU = torch.device("cpu")
PLAIN = Setup(reference=True, budget=24, max_num_seqs=6)
GRAPHS = Setup(reference=True, budget=24, max_num_seqs=6, graphs=True)


pytestmark = pytest.mark.usefixtures("one_thread")

# ---- planning ---------------------------------------------------------------------------------------------


def test_sizes_reach_the_first_that_holds_everybody() -> None:
    assert SIZES[:6] == (1, 2, 4, 8, 16, 24) and SIZES[-1] == 512
    assert graph_sizes(1) == (1,)
    assert graph_sizes(5) == (1, 2, 4, 8)
    assert graph_sizes(32) == (1, 2, 4, 8, 16, 24, 32)
    assert graph_sizes(4000) == SIZES


def test_a_buffer_holds_rows_then_padding_that_reads_one_token_of_page_zero() -> None:
    rows = DecodeRows(
        np.arange(10).reshape(5, 2), np.arange(6, dtype=np.float32).reshape(3, 2),
        np.array([[5, 9], [40, 50]], np.int32), [np.array([[1, 2, 6], [3, 4, 5]], np.int32)] * 2,
    )  # fmt: skip
    buffer = torch.full((rows.nbytes(8),), 255, dtype=torch.uint8)
    rows.write(buffer.numpy(), 8)
    columns = Columns.of(buffer, 8)
    assert columns.wide.tolist() == [
        [0, 1, *[0] * 6], [2, 3, *[ON_HOST] * 6], [4, 5, *[0] * 6], [6, 7, *[0] * 6], [8, 9, *[0] * 6]
    ]  # fmt: skip
    assert columns.narrow.tolist() == [[5, 9, *[1] * 6], [40, 50, *[0] * 6]]
    sampling = columns.sampling(3, 2)
    assert sampling.temperature.tolist() == [0, 1, 0] and sampling.top_p.tolist() == [2, 3, 1]
    assert sampling.min_p.tolist() == [4, 5, 0] and sampling.top_k.tolist() == [40, 50, 0]
    assert sampling.seed.tolist() == [4, 5, 0] and sampling.index.tolist() == [8, 9, 0]
    tables = buffer[table_start(8) :].view(torch.int32).view(2, 8, 3)
    assert tables.tolist() == [[[1, 2, 6], [3, 4, 5], *[[0, 0, 0]] * 6]] * 2


@pytest.mark.parametrize("size", SIZES[:5])
def test_columns_begin_at_aligned_places_that_depend_on_the_size_alone(size: int) -> None:
    columns = Columns.of(torch.zeros(blank_rows(1, 3).nbytes(size), dtype=torch.uint8), size)
    for block in (columns.wide, columns.real, columns.narrow):
        assert block.shape[1] >= size
        assert all(row.storage_offset() * row.element_size() % ALIGNMENT == 0 for row in block)
    assert table_start(size) % ALIGNMENT == 0


def test_one_copy_carries_tensors_of_any_kind_to_aligned_places() -> None:
    tensors = [torch.tensor([1, 2, 3], dtype=torch.int32), torch.tensor([[True], [False]]), torch.tensor([1.5])]
    tensors += [torch.zeros(0, 4, dtype=torch.int64), torch.tensor([[2**40, -1]])]
    for tensor, view in zip(tensors, StagedStream(CPU).upload(tensors), strict=True):
        assert view.dtype == tensor.dtype and torch.equal(view, tensor)
        assert view.storage_offset() * view.element_size() % ALIGNMENT == 0


def test_a_download_does_not_change_when_the_next_step_writes() -> None:
    ids = torch.tensor([1, 2])
    copy = StagedStream(CPU).download(ids)
    ids.zero_()
    assert copy.tolist() == [1, 2]


def test_an_id_without_meaning_cannot_lead_the_next_step_out_of_the_vocabulary() -> None:
    last = LastTokens(4, 50, CPU)
    last.keep([([], torch.zeros(0, dtype=torch.int64)), ([object(), object()], torch.tensor([-9, 1 << 40]))])  # type: ignore[list-item]
    assert last.feed(torch.tensor([3, 3, 3]), torch.tensor([0, ON_HOST, 1])).tolist() == [0, 3, 49]


# ---- the same tokens --------------------------------------------------------------------------------------


PLAIN_SETTINGS: list[dict[str, Any]] = [{}, {"top_p": 0.8, "top_k": 9}, {"min_p": 0.1}]
"""What is sampled within a recording."""
OTHER_SETTINGS: list[dict[str, Any]] = [
    {"logprobs": 0}, {"logprobs": 3}, {"n": 2}, {"presence_penalty": 1.0}, {"repetition_penalty": 1.3},
    {"logit_bias": ((5, 3.0),)}, {"allowed_token_ids": tuple(range(40, 60))}, {"prompt_logprobs": 2},
    {"bad_words": ((7,),)},
]  # fmt: skip


def submits(seed: int, count: int = 10, plain: bool = False) -> list[Submit]:
    """Prompts of every length, settings of every kind or plain ones."""
    rng, found = random.Random(seed), []
    for index in range(count):
        fields: dict[str, Any] = {"max_tokens": rng.randint(1, 20), "seed": index}
        settings = PLAIN_SETTINGS if plain else PLAIN_SETTINGS + OTHER_SETTINGS
        fields |= {"temperature": rng.choice([0.0, 0.9])} | rng.choice(settings)
        prompt = [rng.randrange(VOCAB_SIZE - 3) for _ in range(rng.randint(1, 30))]
        found.append(Submit(f"r{index}", Submit.pack(prompt), SamplingParams(**fields)))
    return found


def tell(engine: Engine, requests: list[Submit], seed: int) -> list[Row]:
    """Requests arrive while others run."""
    rng, waiting, rows = random.Random(seed), list(requests), list[Row]()
    while engine.has_work or waiting:
        for submit in [waiting.pop(0) for _ in range(min(len(waiting), rng.randint(0, 2)))]:
            engine.add(submit)
        rows += engine.step().rows
        engine.check_integrity()
    return rows


def everything(rows: list[Row]) -> dict[tuple[str, int], list[Any]]:
    """All that clients see, by choice."""
    seen: dict[tuple[str, int], list[Any]] = {}
    for row in rows:
        seen.setdefault((row.id, row.choice), []).extend([*row.tokens, *row.logprobs, row.prompt_logprobs, row.error])
    return {key: [item for item in items if item is not None] for key, items in seen.items()}


@pytest.mark.parametrize("kind", ["llama", "mistral"])
@pytest.mark.parametrize(("seed", "only_plain"), [(0, False), (1, False), (2, True), (3, True)])
def test_recorded_decodes_say_what_the_plain_runner_says(
    kind: str, seed: int, only_plain: bool, tiny_model: Callable[..., Path]
) -> None:
    requests, folder = submits(seed, plain=only_plain), tiny_model(kind)
    plain = tell(PLAIN.engine(folder), requests, seed)
    recorded = tell(GRAPHS.engine(folder), requests, seed)
    assert everything(recorded) == everything(plain)
    assert finishes(recorded) == finishes(plain)


def test_every_step_that_only_decodes_is_replayed(tiny_model: Callable[..., Path]) -> None:
    """Sizes are those of the steps: three, then two, then one; whoever wants more than ids samples for itself."""
    replayed, sampled = list[int](), list[int]()
    engine = GRAPHS.engine(tiny_model())
    runner = engine._runner
    assert isinstance(runner, ModelRunner) and runner._graphs is not None
    forward, plain = runner._graphs.forward, runner._graphs.sample_plain

    def counted(rows: DecodeRows, size: int) -> None:
        replayed.append(size)
        forward(rows, size)

    def counted_plain(num_rows: int, size: int) -> Sampled:
        sampled.append(num_rows)
        return plain(num_rows, size)

    runner._graphs.forward = counted  # type: ignore[method-assign]
    runner._graphs.sample_plain = counted_plain  # type: ignore[method-assign]
    logprobs = [None, None, 0]
    for i in range(3):
        engine.add(Submit(f"r{i}", Submit.pack([i, 1]), SamplingParams(2 + 3 * i, temperature=0, logprobs=logprobs[i])))
    run(engine)
    assert replayed == [4, 2, 2, 2, 1, 1, 1] and sampled == []
    run(engine, Submit("plain", Submit.pack([1, 2]), SamplingParams(4, temperature=0)))
    assert replayed[7:] == [1, 1, 1] and sampled == [1, 1, 1]


def test_embeddings_and_scores_arrive_late_and_alike(tiny_model: Callable[..., Path]) -> None:
    requests = [
        Submit("e", Submit.pack([1, 2, 3]), SamplingParams(max_tokens=0), kind="embed"),
        Submit("m", Submit.pack(list(range(40))), SamplingParams(max_tokens=0), kind="embed", pooling="mean"),
        Submit("s", Submit.pack([4, 5, 6]), SamplingParams(max_tokens=0, prompt_logprobs=1), kind="score"),
    ]
    plain, late = (run(setup.engine(tiny_model()), *requests) for setup in (PLAIN, GRAPHS))
    assert [(row.embedding, row.prompt_logprobs) for row in late] == [
        (row.embedding, row.prompt_logprobs) for row in plain
    ]


class Tight:
    """A decoder that has memory for two rows at a time."""

    def __init__(self, decoder: Decoder) -> None:
        self.decoder = decoder

    def hidden(self, batch: Batch, kv: KVCache) -> Tensor:
        if len(batch.kv_lens) > 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return self.decoder.hidden(batch, kv)

    def logits(self, hidden: Tensor) -> Tensor:
        return self.decoder.logits(hidden)


def test_steps_cut_for_memory_still_hand_their_tokens_on(tiny_model: Callable[..., Path]) -> None:
    """Every piece reads the tokens of the step before; none may have been overwritten by the piece before it."""
    requests = [
        Submit(f"r{i}", Submit.pack(list(range(i, 30 + i))), SamplingParams(12, temperature=0)) for i in range(5)
    ]
    late = Setup(reference=True, budget=24, max_num_seqs=6, overlaps=True).engine(tiny_model(), Tight)
    assert outputs(run(late, *requests)) == outputs(run(PLAIN.engine(tiny_model()), *requests))


# ---- what padding touches ---------------------------------------------------------------------------------


def test_padding_writes_the_first_slot_of_page_zero_and_nothing_else(tiny_model: Callable[..., Path]) -> None:
    engine = GRAPHS.engine(tiny_model())
    runner = engine._runner
    assert isinstance(runner, ModelRunner)
    for i in range(3):  # three rows replay the recording of four
        engine.add(Submit(f"r{i}", Submit.pack([i, 1, 2]), SamplingParams(max_tokens=8, temperature=0)))
    storage = runner._kv.storages[0]
    while engine.has_work:
        before = storage.clone()
        running = [(sequence, sequence.num_computed) for sequence in engine.scheduler.running]
        engine.step()
        changed = storage.view(torch.int32) != before.view(torch.int32)  # [layers, 2, pages, Hkv, page_size, d]
        slots = {(page, slot) for page, slot in changed.any(5).any(3).any(1).any(0).nonzero().tolist()}
        own = {
            (page, slot) for sequence, start in running if sequence.pages
            for position in range(start, sequence.num_computed)
            for page, slot in [(sequence.pages[0][position // 4], position % 4)]
        }  # fmt: skip
        if running and all(sequence.pages for sequence, _ in running):
            assert slots - {(0, 0)} <= own
    assert not storage[:, :, 0, :, 0].isnan().any() and storage[:, :, 0, :, 1:].isnan().all()


# ---- nobody waits -----------------------------------------------------------------------------------------


class NoWaiting(TorchFunctionMode):
    """Fails on everything that would make the host wait for a GPU, or copy without being told not to wait.

    numpy() is no danger: torch refuses it for a tensor of a GPU.
    """

    READS = ("item", "tolist", "cpu", "nonzero", "masked_select", "unique", "__bool__", "__int__", "__float__")

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.paused = False

    @contextmanager
    def pause(self) -> Iterator[None]:
        self.paused = True
        yield
        self.paused = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        self.calls += 1
        if not self.paused:
            assert name not in self.READS, f"launch() waits: {name}"
            moves = name == "to" and any(isinstance(value, (str, torch.device)) for value in args[1:])
            assert not moves or kwargs.get("non_blocking"), "launch() waits for a copy"
            assert name != "tensor" or "device" not in kwargs, "launch() builds a tensor on the device from a list"
        return func(*args, **kwargs)


class KernelOps(ReferenceOps):
    """The reference attention and sampling read lengths and counts; kernels do not, so they may do so here."""

    def __init__(self, guard: NoWaiting) -> None:
        self.guard = guard

    def attention(self, q: Tensor, kv: LayerKV, tables: AttentionTables, scale: float, window: int | None) -> Tensor:
        with self.guard.pause():
            return super().attention(q, kv, tables, scale, window)

    def sample(self, logits: Tensor, batch: SampleBatch) -> Sampled:
        with self.guard.pause():
            return super().sample(logits, batch)


@pytest.mark.parametrize("read", [lambda t: t.tolist(), lambda t: bool(t > 0), lambda t: t.item(), lambda t: t.cpu()])
def test_the_guard_sees_a_read(read: Callable[[Tensor], object]) -> None:
    with NoWaiting(), pytest.raises(AssertionError, match="waits"):
        read(torch.ones(()))


@pytest.mark.parametrize("seed", range(2))
def test_launch_waits_for_nothing(seed: int, tiny_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    guard = NoWaiting()
    engine = GRAPHS.engine(tiny_model(), ops=KernelOps(guard))
    launch = engine._runner.launch

    def guarded(plan: Any) -> Any:
        with guard:
            return launch(plan)

    monkeypatch.setattr(engine._runner, "launch", guarded)
    requests = submits(seed)
    assert len(finishes(tell(engine, requests, seed))) >= len(requests)
    assert guard.calls > 1000
