"""The engine under random traffic with faults, its books checked at every step; and what a fault may touch."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from torch import Tensor

from model.batch import Batch
from model.decoder import Decoder
from model.kv_cache import KVCache
from server.engine.facts import EngineConfig
from server.engine.messages import Abort, GrammarSpec, Pooling, Query, Row, SamplingParams, Submit
from server.engine.plan import PlanRow
from server.engine.request import Request, Sequence
from server.engine.startup import build_engine
from server.engine.warm_up import mixed_chunk
from tests.fake_device import FULL, VOCAB, Rig, expected, finishes, outputs, rig, windowed
from tests.real_engine import Setup, run


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


# ---- random traffic ---------------------------------------------------------------------------------------

PROMPTS = st.builds(
    lambda shared, own: [(i * 7) % VOCAB for i in range(shared)] + own,
    st.integers(0, 20),
    st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=8),
)
PARAMS = st.fixed_dictionaries(
    {
        "max_tokens": st.integers(0, 20),
        "n": st.integers(1, 3),
        "seed": st.integers(0, 3),
        "stop_token_ids": st.sampled_from([(), (3,), tuple(range(0, VOCAB, 9))]),
        "presence_penalty": st.sampled_from([0.0, 1.0]),
        "tenant": st.sampled_from(["", "a", "b"]),
        "priority": st.integers(0, 2),
        "cache_salt": st.sampled_from(["", "x"]),
    }
)


class Traffic(RuleBasedStateMachine):
    """Submit, abort, step and fail in any order, on pools that are too small for what is asked of them."""

    checked_steps = 0
    """Steps of all runs together after which the books were checked."""

    @initialize(
        pages=st.integers(6, 24),
        groups=st.sampled_from([(FULL,), (FULL, windowed(6)), (windowed(5),)]),
        budget=st.integers(1, 24),
        max_num_seqs=st.integers(1, 6),
        prefix_caching=st.booleans(),
        overlaps=st.booleans(),
    )
    def start(self, **setup: object) -> None:
        self.rig: Rig = rig(**setup)  # type: ignore[arg-type]
        self.rig.device.fault = self.fault
        self.sent: dict[str, tuple[list[int], SamplingParams]] = {}
        self.rows: list[Row] = []
        self.broken: dict[str, str] = {}
        self.billed = 0

    def fault(self, row: PlanRow) -> str | None:
        return self.broken.get(row.sequence.request.id)

    @rule(prompt=PROMPTS, fields=PARAMS)
    def submit(self, prompt: list[int], fields: dict[str, object]) -> None:
        name = f"r{len(self.sent)}"
        self.sent[name] = prompt, self.rig.submit(name, prompt, **dict(fields))

    @precondition(lambda self: self.sent)
    @rule(which=st.integers(0, 1000), also=st.integers(0, 1000))
    def abort(self, which: int, also: int) -> None:
        names = list(self.sent)
        self.rig.engine.abort(Abort((names[which % len(names)], names[also % len(names)])))

    @precondition(lambda self: self.sent)
    @rule(which=st.integers(0, 1000), kind=st.sampled_from(["nan", "out of memory"]))
    def break_one(self, which: int, kind: str) -> None:
        self.broken[list(self.sent)[which % len(self.sent)]] = kind

    @rule(count=st.integers(1, 6))
    def step(self, count: int) -> None:
        for _ in range(count):
            self.rows += self.rig.step().rows  # checks the books
            type(self).checked_steps += 1

    @invariant()
    def books_balance(self) -> None:
        if hasattr(self, "rig"):
            self.rig.engine.check_integrity()

    def teardown(self) -> None:
        if not hasattr(self, "rig"):
            return
        self.rows += self.rig.run()
        self.everyone_got_an_end()
        self.everyone_got_their_own_tokens()
        self.nothing_is_left()

    def everyone_got_an_end(self) -> None:
        ends = finishes(self.rows)
        for name, (_, params) in self.sent.items():
            refused = ends.get((name, 0)) == "error" and (name, 1) not in ends
            assert refused or all((name, choice) in ends for choice in range(params.n)), name
        last = {(row.id, row.choice): index for index, row in enumerate(self.rows)}
        assert all(self.rows[index].finish for index in last.values()), "a row came after the end"

    def everyone_got_their_own_tokens(self) -> None:
        limit, ends = self.rig.engine.scheduler.limits.max_model_len, finishes(self.rows)
        for (name, choice), tokens in outputs(self.rows).items():
            prompt, params = self.sent[name]
            if len(prompt) + (params.max_tokens > 0) > limit:
                assert ends[name, choice] == "error"
                continue
            whole = expected(prompt, params, choice, limit) if params.max_tokens else []
            assert tokens == whole[: len(tokens)], name
            assert ends[name, choice] in ("abort", "error") or tokens == whole

    def nothing_is_left(self) -> None:
        pools = self.rig.engine.tables.pools
        assert not any(pool.num_active for pool in pools)
        assert not self.rig.engine.scheduler.running and not self.rig.engine.scheduler.waiting
        paid = sum(row.usage.kv_byte_ns for row in self.rows if row.usage)
        assert paid == sum(pool.page_bytes * pool.ledger.active_ns for pool in pools)


TestTraffic = Traffic.TestCase
TestTraffic.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


@pytest.mark.slow
def test_ten_thousand_steps_of_traffic(capsys: pytest.CaptureFixture[str]) -> None:
    long, before = settings(max_examples=200, stateful_step_count=60, deadline=None), Traffic.checked_steps
    run_state_machine_as_test(Traffic, settings=long)
    steps = Traffic.checked_steps - before
    with capsys.disabled():
        print(f"\n{steps} engine steps of random traffic, the books checked after each")
    assert steps >= 10_000


# ---- a fault stays where it happened ----------------------------------------------------------------------


@pytest.mark.fault
def test_nan_ends_that_request_and_its_pages_are_not_reused() -> None:
    """omlx 3777: NaN logits became token 0 with status 200."""
    engine = rig()
    engine.device.fault = lambda row: "nan" if row.sequence.request.id == "bad" else None
    prompt = [1] * 9
    engine.submit("bad", prompt, n=2)
    good = engine.submit("good", [2] * 9)
    rows = engine.run()
    assert finishes(rows) == {("bad", 0): "error", ("bad", 1): "error", ("good", 0): "length"}
    assert "NaN" in str(next(row.error for row in rows if row.id == "bad"))
    assert outputs(rows)[("good", 0)] == expected([2] * 9, good)
    assert outputs(rows)[("bad", 0)] == []
    assert engine.engine.step().stats.nan_rows == 1
    engine.submit("again", prompt, max_tokens=1)
    assert engine.run()[0].cached_tokens == 0


@pytest.mark.fault
def test_a_failed_row_ends_its_request_alone() -> None:
    engine = rig()
    engine.device.fault = lambda row: "out of memory" if row.sequence.request.id == "big" and row.end > 9 else None
    engine.submit("big", [1] * 9, n=2, max_tokens=5)
    small = engine.submit("small", [2] * 9)
    rows = engine.run()
    assert {row.id: row.error for row in rows if row.error} == {"big": "out of memory"}
    assert outputs(rows)[("small", 0)] == expected([2] * 9, small)
    assert len(outputs(rows)[("big", 0)]) == len(outputs(rows)[("big", 1)]) == 1


class Narrow:
    """A decoder with memory for so many tokens at a time."""

    def __init__(self, decoder: Decoder, most: int) -> None:
        self.decoder, self.most = decoder, most
        self.widths: list[int] = []

    def hidden(self, batch: Batch, kv: KVCache) -> Tensor:
        self.widths.append(len(batch.token_ids))
        if len(batch.token_ids) > self.most:
            raise RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried ...")
        return self.decoder.hidden(batch, kv)

    def logits(self, hidden: Tensor) -> Tensor:
        return self.decoder.logits(hidden)


def submits(*lengths: int, **fields: object) -> list[Submit]:
    params = SamplingParams(**{"max_tokens": 5, "temperature": 0.0, "logprobs": 1, **fields})  # type: ignore[arg-type]
    return [Submit(f"r{length}", Submit.pack([length] * length), params) for length in lengths]


@pytest.mark.fault
def test_a_step_that_lacks_memory_is_rerun_by_halves(tiny_model: Callable[..., Path]) -> None:
    plenty = run(Setup().engine(tiny_model()), *submits(3, 4, 5, 6))
    narrow: list[Narrow] = []
    engine = Setup().engine(tiny_model(), lambda decoder: narrow.append(Narrow(decoder, 7)) or narrow[0])  # type: ignore[func-returns-value]
    rows = run(engine, *submits(3, 4, 5, 6))
    assert narrow[0].widths[:6] == [18, 7, 11, 5, 6, 4]
    assert [(row.id, row.tokens, row.logprobs) for row in rows] == [(r.id, r.tokens, r.logprobs) for r in plenty]


@pytest.mark.fault
@pytest.mark.parametrize("overlaps", [False, True])
def test_who_lacks_memory_alone_is_told_and_the_rest_go_on(tiny_model: Callable[..., Path], overlaps: bool) -> None:
    engine = Setup(overlaps=overlaps).engine(tiny_model(), lambda decoder: Narrow(decoder, 8))
    rows = run(engine, *submits(3, 20, 5))
    assert finishes(rows) == {("r3", 0): "length", ("r20", 0): "error", ("r5", 0): "length"}
    assert "out of memory while computing 20 tokens" in str(next(row.error for row in rows if row.error))
    alone = run(Setup().engine(tiny_model()), *submits(3))
    assert outputs(rows)[("r3", 0)] == outputs(alone)[("r3", 0)]


UNDER_A_LIMIT = """
import json, resource, sys
from pathlib import Path
import torch
from tests.real_engine import Setup, run
from tests.test_engine import Narrow, submits
torch.set_num_threads(1)
seen = []
def count(decoder):
    seen.append(Narrow(decoder, 1 << 30))
    return seen[0]
engine = Setup(max_num_seqs=24).engine(Path(sys.argv[1]), count)
run(engine, *submits(2))
if sys.argv[2] == "limited":
    taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (taken + (8 << 20),) * 2)
rows = run(engine, *submits(*range(3, 27), max_tokens=2))
print(json.dumps([len(seen[0].widths), sorted([row.id, row.tokens, row.logprobs[0].logprob] for row in rows)]))
"""


@pytest.mark.slow
@pytest.mark.fault
def test_under_a_memory_limit_of_the_system_the_same_tokens_come(tiny_model: Callable[..., Path]) -> None:
    """RLIMIT_AS leaves room for the logits of a few rows (400 kB each, and what sampling makes of them), not of 24."""
    folder, root = str(tiny_model(vocab_size=100_000)), str(Path(__file__).parent.parent)

    def run_as(how: str) -> tuple[int, list[object]]:
        command = [sys.executable, "-c", UNDER_A_LIMIT, folder, how]
        env = os.environ | {"PYTHONPATH": root, "MALLOC_MMAP_THRESHOLD_": "65536"}  # what is freed goes back at once
        forwards, rows = json.loads(subprocess.run(command, env=env, capture_output=True, check=True, text=True).stdout)
        return forwards, rows

    plenty, limited = run_as("free"), run_as("limited")
    assert limited[1] == plenty[1]
    assert limited[0] > plenty[0], "nothing was rerun: the limit was too wide to show anything"


class Poisoned:
    """A decoder whose states turn to NaN wherever a token id occurs."""

    def __init__(self, decoder: Decoder, token: int) -> None:
        self.decoder, self.token = decoder, token

    def hidden(self, batch: Batch, kv: KVCache) -> Tensor:
        hidden = self.decoder.hidden(batch, kv)
        hidden[batch.token_ids == self.token] = torch.nan
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        return self.decoder.logits(hidden)


UNSAMPLED = {"max_tokens": 0}


@pytest.mark.parametrize("fields", [{}, {"temperature": 1.0}, {"prompt_logprobs": 0}, UNSAMPLED])
@pytest.mark.fault
def test_nan_from_the_model_never_becomes_a_token(tiny_model: Callable[..., Path], fields: dict[str, object]) -> None:
    bad, good = submits(20, 5, **fields)
    rows = run(Setup().engine(tiny_model(), lambda decoder: Poisoned(decoder, 20)), bad, good)
    assert finishes(rows) == {("r20", 0): "error", ("r5", 0): "length"}
    assert outputs(rows)[("r20", 0)] == []
    assert outputs(rows)[("r5", 0)] == outputs(run(Setup().engine(tiny_model()), good))[("r5", 0)]


@pytest.mark.fault
def test_nan_never_becomes_an_embedding_and_its_pages_are_forgotten(tiny_model: Callable[..., Path]) -> None:
    engine = Setup().engine(tiny_model(), lambda decoder: Poisoned(decoder, 20))
    prompt = Submit.pack([20] * 9)
    (row,) = run(engine, Submit("e", prompt, SamplingParams(1), kind="embed"))
    assert row.finish == "error" and row.embedding is None
    assert engine.tables.pools[0].num_cached == 0


def test_other_errors_of_the_model_are_not_swallowed(tiny_model: Callable[..., Path]) -> None:
    class Broken(Narrow):
        def hidden(self, batch: Batch, kv: KVCache) -> Tensor:
            raise RuntimeError("shape mismatch")

    with pytest.raises(RuntimeError, match="shape mismatch"):
        run(Setup().engine(tiny_model(), lambda decoder: Broken(decoder, 1)), *submits(3))


# ---- the start --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("length", "prompt_seconds", "decode_seconds", "chunk"),
    [(64, 0.32, 0.05, 32), (65, 0.114, 0.05, 96), (64, 0.05, 0.05, 1 << 30), (64, 9.0, 0.01, 32)],
)
def test_prompt_tokens_beside_decodes_make_a_step_at_most_three_times_as_long(
    length: int, prompt_seconds: float, decode_seconds: float, chunk: int
) -> None:
    assert mixed_chunk(length, prompt_seconds, decode_seconds) == chunk


def test_the_warm_up_leaves_no_trace(tiny_model: Callable[..., Path]) -> None:
    config = EngineConfig(str(tiny_model()), device="cpu", page_size=4, kv_cache_memory=1 << 20, threads=1)
    seen: list[str] = []
    engine = build_engine(config, lambda progress: seen.append(progress.phase))
    stats = engine.step().stats
    assert (stats.steps, stats.generation_tokens, stats.pages_cached, stats.prefix_queries) == (0, 0, 0, 0)
    assert list(dict.fromkeys(seen)) == ["kernels", "load", "allocate", "warm_up"]
    assert engine.info.mixed_chunk is not None and engine.info.mixed_chunk >= 32


# ---- what is reported -------------------------------------------------------------------------------------


@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_embeddings_have_length_one_whatever_the_chunks_and_leave_their_pages(
    tiny_model: Callable[..., Path], pooling: Pooling
) -> None:
    prompt = Submit.pack(list(range(30)))
    found = []
    for budget in (256, 7):
        engine = Setup(budget=budget).engine(tiny_model())
        (row,) = run(engine, Submit("e", prompt, SamplingParams(1), kind="embed", pooling=pooling))
        assert row.finish == "length" and row.tokens == () and row.embedding is not None
        found.append(row.embedding)
        (row,) = run(engine, Submit("e2", prompt, SamplingParams(1), kind="embed", pooling=pooling))
        assert row.cached_tokens == 0 and row.embedding == found[0]
        assert run(engine, Submit("g", prompt, SamplingParams(1)))[0].cached_tokens == 28
    assert found[0] == found[1] and sum(x * x for x in found[0]) == pytest.approx(1, abs=1e-5)


def test_embeddings_are_what_transformers_computes(tiny_model: Callable[..., Path]) -> None:
    transformers = pytest.importorskip("transformers")
    folder, prompt = tiny_model(), list(range(30))
    states = transformers.AutoModel.from_pretrained(folder)(torch.tensor([prompt])).last_hidden_state[0]
    expected: dict[Pooling, torch.Tensor] = {"last": states[-1], "mean": states.mean(0)}
    engine = Setup(budget=7).engine(folder)
    for pooling, state in expected.items():
        (row,) = run(engine, Submit(pooling, Submit.pack(prompt), SamplingParams(1), kind="embed", pooling=pooling))
        assert row.embedding == pytest.approx((state / state.norm()).tolist(), abs=1e-4)


def test_max_tokens_0_scores_the_prompt_and_ends(tiny_model: Callable[..., Path]) -> None:
    params = SamplingParams(0, prompt_logprobs=1, n=2)
    rows = run(Setup(budget=16).engine(tiny_model()), Submit("s", Submit.pack(list(range(20))), params))
    assert [(row.choice, row.tokens, row.finish) for row in rows] == [(0, (), "length"), (1, (), "length")]
    scored = rows[0].prompt_logprobs
    assert scored is not None and scored[0] is None
    assert [one.token for one in scored[1:] if one] == list(range(1, 20))


def test_the_first_row_tells_times_and_the_last_cost_as_well() -> None:
    engine = rig()
    engine.submit("a", [1] * 9, n=2, max_tokens=4)
    rows = engine.run()
    first, last = rows[0], rows[-1]
    assert (first.cached_tokens, first.usage) == (0, None)
    assert first.times is not None and first.times.decode == 0
    assert last.cached_tokens is None and last.usage is not None and last.times is not None
    assert last.usage.peak_pages == 3 and last.usage.kv_peak_bytes == 3 * engine.engine.tables.pools[0].page_bytes
    assert (last.times.queue, last.times.prefill, last.times.decode) == (7e-9, 0, 21e-9)


def test_stats_tell_pages_and_slots_of_live_requests() -> None:
    engine = rig()
    engine.submit("a", [1] * 6, n=2, max_tokens=4)
    engine.submit("b", [2] * 3, max_tokens=4)
    stats = engine.step().stats
    assert (stats.running, stats.waiting, stats.step_tokens, stats.steps) == (3, 0, 9, 1)
    assert (stats.pages_active, stats.slots_allocated, stats.slots_used) == (3, 12, 9)
    stats = engine.step().stats
    assert (stats.pages_active, stats.slots_allocated, stats.slots_used) == (4, 16, 4 + 3 + 3 + 4)
    assert (stats.prompt_tokens, stats.generation_tokens) == (9, 6)
    assert stats.rss_bytes > 1 << 20


def test_queries_show_pools_requests_and_pages() -> None:
    engine = rig()
    engine.submit("a", [1] * 6, max_tokens=4, tenant="t")
    engine.step()
    answers = {kind: engine.engine.query(Query(1, kind)).value for kind in ("kv_summary", "kv_requests", "kv_pages")}
    summary, requests, pages = (answers[kind] for kind in ("kv_summary", "kv_requests", "kv_pages"))
    assert isinstance(summary, dict) and isinstance(requests, dict) and isinstance(pages, dict)
    assert (summary["groups"][0]["active"], summary["slots_used"]) == (2, 6)
    (one,) = requests["requests"]
    assert (one["id"], one["tenant"], one["state"], one["computed_tokens"]) == ("a", "t", "running", 6)
    assert [pages["groups"][0]["references"][page] for page in one["pages"][0]] == [1, 1]


def test_a_grammar_is_refused_rather_than_ignored() -> None:
    engine = rig()
    engine.engine.add(Submit("g", Submit.pack([1]), SamplingParams(3), grammar=GrammarSpec("regex", "a+")))
    (row,) = engine.run()
    assert row.finish == "error" and "structured output" in str(row.error)


@pytest.fixture
def no_collection() -> Iterator[None]:
    """A full collection may be thousands of requests away, so nothing may wait for one."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.parametrize("overlaps", [False, True])
@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(3),
        SamplingParams(3, n=3, logprobs=2),
        SamplingParams(3, best_of=2, prompt_logprobs=1, presence_penalty=1.0),
        SamplingParams(0, prompt_logprobs=1),
    ],
    ids=["plain", "choices", "ranked", "scored"],
)
def test_a_request_that_is_over_leaves_nothing(
    tiny_model: Callable[..., Path], no_collection: None, params: SamplingParams, overlaps: bool
) -> None:
    engine = Setup(overlaps=overlaps).engine(tiny_model())
    before = kept()
    run(engine, *(Submit(f"r{number}", Submit.pack([1, 2, 3, number]), params) for number in range(4)))
    engine.add(Submit("left", Submit.pack([1, 2, 3]), params))
    engine.step()
    engine.abort(Abort(("left",)))
    run(engine, Submit("refused", b"", params))
    run(engine, Submit("next", Submit.pack([1]), SamplingParams(1)))
    assert kept() == before


def kept() -> int:
    return sum(type(thing) in (Request, Sequence) for thing in gc.get_objects())
