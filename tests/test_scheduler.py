"""Who runs, in what chunks, who waits and who gives way: the scheduler on a device that notices every foreign page.

Several cases retell faults that users of other engines met; the reports are named.
"""

from __future__ import annotations

import pytest

from server.engine.messages import Abort, Row
from tests.fake_device import EOS, FULL, VOCAB, Rig, expected, finishes, outputs, rig, windowed


def prompt_of(length: int, salt: int = 0) -> list[int]:
    return [(index * 7 + salt) % VOCAB for index in range(length)]


def planned(engine: Rig) -> list[list[tuple[str, int]]]:
    """Per step: (request, number of tokens)."""
    return [[(name, end - start) for name, _, start, end in plan] for plan in engine.device.plans]


# ---- budget and chunks ------------------------------------------------------------------------------------


def test_a_prompt_is_cut_to_the_budget_and_samples_once() -> None:
    engine = rig(budget=16)
    params = engine.submit("a", prompt_of(40), max_tokens=3)
    rows = engine.run()
    assert planned(engine)[:3] == [[("a", 16)], [("a", 16)], [("a", 8)]]
    assert [row.tokens for row in rows] == [(token,) for token in expected(prompt_of(40), params)]


def test_decodes_come_first_and_prompts_share_the_rest_in_order() -> None:
    engine = rig(budget=16)
    engine.submit("a", prompt_of(6), max_tokens=20)
    engine.step()
    engine.submit("b", prompt_of(20, 1), max_tokens=2)
    engine.submit("c", prompt_of(20, 2), max_tokens=2)
    engine.step()
    engine.step()
    assert planned(engine)[1:3] == [[("a", 1), ("b", 15)], [("a", 1), ("b", 5), ("c", 10)]]


def test_no_step_exceeds_the_budget_even_when_all_prompts_are_cached() -> None:
    engine = rig(pages=64, budget=8, max_num_seqs=8)
    for name in "abcdefgh":
        engine.submit(name, prompt_of(5), max_tokens=6)
    engine.run()
    for name in "ijklmnop":
        engine.submit(name, prompt_of(5), max_tokens=6)
    engine.run()
    assert max(sum(count for _, count in plan) for plan in planned(engine)) <= 8


def test_a_long_prompt_proceeds_while_others_decode_and_they_do_not_stall() -> None:
    """mlxcel 1011 and its reverse: every step serves all decodes and moves the prompt on."""
    engine = rig(pages=64, budget=16, mixed_chunk=4)
    for index in range(4):
        engine.submit(f"s{index}", prompt_of(3, index), max_tokens=40)
    engine.step()
    engine.submit("long", prompt_of(60, 9), max_tokens=2)
    for _ in range(15):
        engine.step()
    assert planned(engine)[1:16] == [[("s0", 1), ("s1", 1), ("s2", 1), ("s3", 1), ("long", 4)]] * 15


def test_a_crowd_of_prompts_shares_a_larger_part_of_the_step() -> None:
    """One stream against five prompts, four of which may run beside it: each prompt that could move on counts."""
    engine = rig(pages=64, budget=64, max_num_seqs=5, mixed_chunk=4)
    engine.submit("stream", prompt_of(3), max_tokens=40)
    engine.step()
    for index in range(5):
        engine.submit(f"p{index}", prompt_of(30, index + 1), max_tokens=40)
    shared = []
    for _ in range(8):
        engine.step()
        shared.append(sum(count for name, count in planned(engine)[-1] if name.startswith("p") and count > 1))
    assert shared == [16, 16, 12, 12, 12, 8, 8, 8]


def test_the_running_limit_holds_and_counts_every_choice() -> None:
    engine = rig(max_num_seqs=3)
    engine.submit("a", prompt_of(4), n=2)
    engine.submit("b", prompt_of(4, 1), n=4)
    while engine.engine.has_work:
        assert engine.step().stats.running <= 3


# ---- order of admission -----------------------------------------------------------------------------------


def admission_order(engine: Rig) -> list[str]:
    order: list[str] = []
    for plan in engine.device.plans:
        order += [name for name, _, _, _ in plan if name not in order]
    return order


def test_lower_priority_values_run_first_then_arrival() -> None:
    engine = rig(max_num_seqs=1)
    for name, priority in [("a", 5), ("b", 0), ("c", 5), ("d", -1)]:
        engine.submit(name, prompt_of(3), priority=priority, max_tokens=2)
    engine.run()
    assert admission_order(engine) == ["d", "b", "a", "c"]


def test_a_tenant_with_one_request_does_not_wait_behind_anothers_hundred() -> None:
    engine = rig(max_num_seqs=1)
    for index in range(20):
        engine.submit(f"many{index}", prompt_of(3), tenant="many", max_tokens=2)
    engine.submit("one", prompt_of(3), tenant="one", max_tokens=2)
    engine.submit("two", prompt_of(3), tenant="two", max_tokens=2)
    engine.run()
    assert admission_order(engine)[:5] == ["many0", "one", "two", "many1", "many2"]


def test_a_prompt_that_does_not_fit_now_is_not_overtaken() -> None:
    engine = rig(pages=10)
    engine.submit("runs", prompt_of(20), max_tokens=8)
    engine.step()
    engine.submit("big", prompt_of(30, 1), max_tokens=2)
    engine.submit("small", prompt_of(3, 2), max_tokens=2)
    rows = engine.run()
    assert admission_order(engine) == ["runs", "big", "small"]
    assert set(finishes(rows).values()) == {"length"}


# ---- what can never run -----------------------------------------------------------------------------------


def test_a_prompt_over_the_pool_is_refused_with_the_numbers_and_blocks_nobody() -> None:
    """vLLM 39734: a prompt longer than the pool waited for ever and blocked all behind it."""
    engine = rig(pages=8)
    engine.submit("over", prompt_of(32))
    engine.submit("fits", prompt_of(31), max_tokens=5)
    engine.submit("small", prompt_of(3), max_tokens=2)
    rows = engine.run()
    refused = next(row for row in rows if row.id == "over")
    assert refused.finish == "error" and "32" in str(refused.error) and "max_model_len" in str(refused.error)
    assert finishes(rows)[("fits", 0)] == "length" and len(outputs(rows)[("fits", 0)]) == 1
    assert finishes(rows)[("small", 0)] == "length"


def test_a_prompt_that_fills_the_pool_is_scored_if_nothing_is_generated() -> None:
    engine = rig(pages=8)
    engine.submit("fills", prompt_of(32), max_tokens=0)
    engine.submit("over", prompt_of(33), max_tokens=0)
    assert finishes(engine.run()) == {("fills", 0): "length", ("over", 0): "error"}


@pytest.mark.parametrize(
    ("prompt", "fields", "says"),
    [
        ([], {}, "empty"),
        ([VOCAB], {}, str(VOCAB)),
        ([-1], {}, "-1"),
        ([1], {"logit_bias": ((VOCAB, 1.0),)}, str(VOCAB)),
    ],
)
def test_bad_input_ends_that_request_with_a_reason(prompt: list[int], fields: dict[str, object], says: str) -> None:
    engine = rig()
    engine.submit("bad", prompt, **fields)
    (row,) = engine.run()
    assert row.finish == "error" and says in str(row.error)


def test_a_lone_request_that_fills_the_pool_ends_with_length() -> None:
    engine = rig(pages=5)
    params = engine.submit("a", prompt_of(6), max_tokens=1000)
    rows = engine.run()
    assert outputs(rows)[("a", 0)] == expected(prompt_of(6), params, limit=20)
    assert finishes(rows) == {("a", 0): "length"}
    assert engine.engine.scheduler.num_preemptions == 0


def test_choices_that_fill_the_pool_all_end_with_length() -> None:
    engine = rig(pages=5)
    params = engine.submit("a", prompt_of(6), max_tokens=1000, n=3)
    rows = engine.run()
    for choice in range(3):
        assert outputs(rows)[("a", choice)] == expected(prompt_of(6), params, choice, limit=20)
    assert set(finishes(rows).values()) == {"length"}


# ---- preemption -------------------------------------------------------------------------------------------


def test_the_victim_has_the_lowest_priority_and_came_last() -> None:
    engine = rig(pages=12, budget=64)
    for name, priority in [("low", 1), ("first", 0), ("last", 0)]:
        engine.submit(name, prompt_of(12, ord(name[0])), priority=priority, max_tokens=16)
    engine.step()
    preempted: list[str] = []
    while engine.engine.has_work:
        waiting = {sequence.request.id for sequence in engine.engine.scheduler.waiting}
        engine.step()
        preempted += [s.request.id for s in engine.engine.scheduler.waiting if s.request.id not in waiting]
    assert preempted[:2] == ["low", "last"]
    assert "first" not in preempted


@pytest.mark.parametrize("prefix_caching", [True, False])
@pytest.mark.parametrize("overlaps", [True, False])
@pytest.mark.parametrize("groups", [(FULL,), (FULL, windowed(6)), (windowed(7),)])
def test_preemption_loses_repeats_and_reorders_nothing(
    prefix_caching: bool, overlaps: bool, groups: tuple[object, ...]
) -> None:
    """vLLM 5349, nano-vllm 211: many requests that share prefixes on a pool that is far too small."""
    engine = rig(13, groups, prefix_caching=prefix_caching, overlaps=overlaps)  # type: ignore[arg-type]
    sent = {}
    for index in range(40):
        prompt = prompt_of(4 + index % 3 * 4) + prompt_of(index % 7, index)
        sent[f"r{index}"] = prompt, engine.submit(f"r{index}", prompt, max_tokens=24, n=1 + index % 2, seed=index)
    rows = engine.run()
    for name, (prompt, params) in sent.items():
        for choice in range(params.n):
            assert outputs(rows)[(name, choice)] == expected(prompt, params, choice)
    assert engine.engine.scheduler.num_preemptions > 0 or groups == (windowed(7),)
    assert sum(row.usage.preemptions for row in rows if row.usage) == engine.engine.scheduler.num_preemptions


# ---- prefix cache -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("length", "hit"), [(3, 0), (4, 0), (5, 4), (8, 4), (9, 8), (12, 8)])
def test_full_pages_are_hit_and_one_token_is_always_computed(length: int, hit: int) -> None:
    """nano-vllm 114: a prompt of exactly one block, all cached, left nothing to run."""
    engine = rig()
    for name in ("cold", "warm"):
        params = engine.submit(name, prompt_of(length), max_tokens=1)
        rows = engine.run()
        assert outputs(rows)[(name, 0)] == expected(prompt_of(length), params)
        assert rows[0].cached_tokens == (hit if name == "warm" else 0)
    stats = engine.step().stats if engine.engine.has_work else engine.engine.step().stats
    assert (stats.prefix_queries, stats.prefix_hits) == (2 * length, hit)


def test_a_page_is_shared_only_once_its_kv_is_computed() -> None:
    engine = rig(budget=8)
    engine.submit("a", prompt_of(12), max_tokens=1)
    engine.submit("b", prompt_of(12), max_tokens=1)
    rows = engine.run()
    assert [row.cached_tokens for row in rows] == [0, 8]  # a's first chunk was done when b was admitted
    engine = rig(budget=32)
    engine.submit("a", prompt_of(12), max_tokens=1)
    engine.submit("b", prompt_of(12), max_tokens=1)
    assert [row.cached_tokens for row in engine.run()] == [0, 0]


def test_generated_tokens_are_found_by_the_next_turn() -> None:
    engine = rig()
    params = engine.submit("turn1", prompt_of(6), max_tokens=7)
    engine.run()
    longer = prompt_of(6) + expected(prompt_of(6), params) + [1, 2]
    engine.submit("turn2", longer, max_tokens=1)
    assert engine.run()[0].cached_tokens == 12


def test_an_aborted_stream_leaves_its_full_pages() -> None:
    """llama.cpp 29163: a broken connection threw the cached conversation away."""
    engine = rig()
    engine.submit("a", prompt_of(20), max_tokens=50)
    for _ in range(4):
        engine.step()
    engine.engine.abort(Abort(("a",)))
    assert finishes(engine.run()) == {("a", 0): "abort"}
    engine.submit("again", [*prompt_of(20), 3], max_tokens=1)
    assert engine.run()[0].cached_tokens == 20


def test_salts_do_not_share() -> None:
    engine = rig()
    for salt in ("", "x", "y", "x"):
        engine.submit(f"s{salt}{len(engine.device.plans)}", prompt_of(9), cache_salt=salt, max_tokens=1)
        last = engine.run()[0]
    assert last.cached_tokens == 8
    assert engine.engine.scheduler.prefix_hits == 8


def test_a_prompt_whose_pages_were_overwritten_is_computed_again() -> None:
    """nano-vllm 163: eight blocks; P, then others that overwrite it, then P again."""
    engine = rig(pages=8)
    for name, salt in [("p", 0), ("x", 1), ("y", 2), ("p2", 0)]:
        params = engine.submit(name, prompt_of(16, salt), max_tokens=3)
        rows = engine.run()
        assert outputs(rows)[(name, 0)] == expected(prompt_of(16, salt), params)


def test_the_cache_can_be_switched_off() -> None:
    engine = rig(prefix_caching=False)
    for name in "ab":
        engine.submit(name, prompt_of(9), max_tokens=1)
        assert engine.run()[0].cached_tokens == 0
    assert engine.engine.tables.pools[0].num_cached == 0


def test_idle_means_nothing_is_active() -> None:
    """imp 1115: cached and live pages in one gauge looked like a leak."""
    engine = rig(pages=16)
    for index in range(200):
        engine.submit(f"r{index}", prompt_of(3 + index % 5, index), max_tokens=3)
        engine.run()
    stats = engine.engine.step().stats
    assert stats.pages_active == 0 and stats.pages_cached + stats.pages_free == 16


# ---- choices ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [4, 6])
@pytest.mark.parametrize("max_num_seqs", [2, 8])
def test_choices_compute_their_prompt_once_and_share_its_pages(length: int, max_num_seqs: int) -> None:
    engine = rig(max_num_seqs=max_num_seqs)
    params = engine.submit("a", prompt_of(length), n=5, max_tokens=6)
    first = engine.step()
    assert (
        first.stats.shared_bytes_saved
        == (min(5, max_num_seqs) - 1) * -(-length // 4) * engine.engine.tables.pools[0].page_bytes
    )
    rows = [*first.rows, *engine.run()]
    assert outputs(rows) == {("a", choice): expected(prompt_of(length), params, choice) for choice in range(5)}


def test_a_choice_that_writes_into_a_shared_page_gets_a_copy() -> None:
    engine = rig()
    params = engine.submit("a", prompt_of(6), n=3, max_tokens=4)
    engine.step()
    pool = engine.engine.tables.pools[0]
    assert pool.num_active == 2
    engine.step()
    assert pool.num_active == 4  # the full page is still shared; of the tail, two copies and the original
    rows = engine.run()
    for choice in range(3):
        assert outputs(rows)[("a", choice)] == expected(prompt_of(6), params, choice)[2:]


def test_best_of_reports_the_best_and_bills_all() -> None:
    engine = rig()
    params = engine.submit("a", prompt_of(6), n=2, best_of=6, max_tokens=5)
    rows = engine.run()
    every = [expected(prompt_of(6), params, choice) for choice in range(6)]
    ranked = sorted(every, key=lambda tokens: sum(tokens) / len(tokens))  # the fake's log-probability is -token
    assert [list(row.tokens) for row in rows] == ranked[:2]
    assert [row.choice for row in rows] == [0, 1] and all(row.logprobs == () for row in rows)
    pool = engine.engine.tables.pools[0]
    assert sum(row.usage.kv_byte_ns for row in rows if row.usage) == pool.page_bytes * pool.ledger.active_ns


# ---- ends -------------------------------------------------------------------------------------------------


def test_a_stop_token_ends_the_output_and_is_named() -> None:
    engine = rig()
    params = engine.submit("a", prompt_of(5), max_tokens=500, stop_token_ids=(EOS, 7))
    rows = engine.run()
    assert outputs(rows)[("a", 0)] == expected(prompt_of(5), params)
    assert rows[-1].finish == "stop" and rows[-1].stop_token == rows[-1].tokens[-1] in (EOS, 7)


def test_aborts_at_any_time_leave_nothing_behind() -> None:
    """vLLM 52969 and 31503: aborts of waiting requests crashed the engine, or were never counted."""
    engine = rig(max_num_seqs=2)
    for turn in range(10):
        names = [f"{turn}.{index}" for index in range(16)]
        for index, name in enumerate(names):
            engine.submit(name, prompt_of(5 + index), n=1 + index % 3, max_tokens=30)
        ended: dict[tuple[str, int], str] = {}
        for index in range(0, 14, 2):
            ended |= finishes(list(engine.step().rows))
            engine.engine.abort(Abort((names[index], names[index + 1], "unknown")))
            engine.engine.check_integrity()
        ended |= finishes(engine.run())
        assert {name for name, _ in ended} == set(names)
        assert list(ended.values()).count("abort") >= 14
    stats = engine.engine.step().stats
    assert (stats.running, stats.waiting, stats.pages_active) == (0, 0, 0)


def test_many_streams_get_their_own_tokens_in_order() -> None:
    """transformers 42943: streams of very different lengths, each whole and in order."""
    engine = rig(pages=40, max_num_seqs=32, budget=64)
    sent = {
        f"s{i}": (prompt_of(2 + i, i), engine.submit(f"s{i}", prompt_of(2 + i, i), max_tokens=1 + i)) for i in range(32)
    }
    rows = engine.run()
    assert outputs(rows) == {(name, 0): expected(*request) for name, request in sent.items()}
    assert all(len(row.tokens) == 1 for row in rows)


# ---- windows ----------------------------------------------------------------------------------------------


def test_a_windowed_group_gives_back_what_nobody_sees() -> None:
    engine = rig(pages=(40, 7), groups=(FULL, windowed(5)), budget=8)
    params = engine.submit("a", prompt_of(60), max_tokens=40)
    most, rows = 0, list[Row]()
    while engine.engine.has_work:
        rows += engine.step().rows
        most = max(most, engine.engine.tables.pools[1].num_active)
    assert most <= FULL_WINDOW_PEAK
    assert outputs(rows)[("a", 0)] == expected(prompt_of(60), params)


FULL_WINDOW_PEAK = windowed(5).peak_pages(100, 4, 8)


def test_a_hit_needs_only_the_pages_that_the_window_still_shows() -> None:
    engine = rig(pages=(40, 8), groups=(FULL, windowed(5)), budget=8)
    engine.submit("a", prompt_of(30), max_tokens=1)
    engine.run()
    params = engine.submit("b", [*prompt_of(30), 5], max_tokens=4)
    rows = engine.run()
    assert rows[0].cached_tokens == 28
    assert outputs(rows)[("b", 0)] == expected([*prompt_of(30), 5], params)


# ---- a device that answers late ---------------------------------------------------------------------------


def test_the_next_step_is_launched_before_the_last_one_is_collected() -> None:
    engine = rig(overlaps=True)
    params = engine.submit("a", prompt_of(5), max_tokens=4)
    first = engine.step()
    assert first.rows == () and len(engine.device.plans) == 1
    second = engine.step()
    assert len(engine.device.plans) == 2 and [row.tokens for row in second.rows] == [
        (expected(prompt_of(5), params)[0],)
    ]
    assert outputs([*second.rows, *engine.run()])[("a", 0)] == expected(prompt_of(5), params)
    assert len(engine.device.plans) == 4  # nothing is computed beyond max_tokens


def test_rows_that_need_their_last_token_wait_for_it_and_hold_up_nobody() -> None:
    engine = rig(overlaps=True)
    penalised = engine.submit("a", prompt_of(5), max_tokens=4, presence_penalty=1.0)
    free = engine.submit("b", prompt_of(5), max_tokens=8)
    rows = engine.run()
    assert outputs(rows) == {("a", 0): expected(prompt_of(5), penalised), ("b", 0): expected(prompt_of(5), free)}
    steps = [sorted(name for name, _ in plan) for plan in planned(engine)]
    assert steps[:4] == [["a", "b"], ["b"], ["a", "b"], ["b"]]


def test_what_was_launched_for_an_ended_sequence_is_dropped() -> None:
    engine = rig(overlaps=True)
    params = engine.submit("a", prompt_of(5), max_tokens=500, stop_token_ids=tuple(range(0, VOCAB, 3)))
    rows = engine.run()
    assert outputs(rows)[("a", 0)] == expected(prompt_of(5), params)
    assert finishes(rows) == {("a", 0): "stop"}
