"""The engine from its start to what it reports, and what a request leaves behind."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from server.engine.facts import EngineConfig
from server.engine.messages import Abort, GrammarSpec, Pooling, Query, SamplingParams, Submit
from server.engine.request import Request, Sequence
from server.engine.startup import build_engine
from server.engine.warm_up import mixed_chunk
from tests.fake_device import rig
from tests.real_engine import Setup, run

pytestmark = pytest.mark.usefixtures("one_thread")


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
