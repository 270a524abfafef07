"""The tensors of one forward, each with its shape.

Knows nothing of requests or schedules: rows are packed one sequence after the other.
Legend: T tokens of the step, B sequences, P pages of the longest sequence, R rows that need logits, G groups.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Batch:
    """One mixed batch: sequence b owns rows q_starts[b] : q_starts[b + 1], its last row at kv_lens[b] - 1."""

    token_ids: Tensor  # [T] i64
    positions: Tensor  # [T] i64
    slots: tuple[Tensor, ...]  # per group [T] i64: page * page_size + offset; padding rows write to page 0
    page_table: tuple[Tensor, ...]  # per group [B, P] i32, padded with 0
    kv_lens: Tensor  # [B] i32: tokens of the sequence in the cache after this step's writes
    q_starts: Tensor  # [B + 1] i32
    logits_rows: Tensor  # [R] i64: rows of the batch whose logits are wanted
    max_q: int
    max_kv: int


@dataclass(frozen=True, slots=True)
class SampleBatch:
    """Per-row sampling inputs for R rows, on the device of the logits.

    The random number of a row is Philox(seed, choice, index): nothing else of the batch enters.
    Sparse parts are COO triples (row, token, value); a row without entries is untouched.
    """

    temperature: Tensor  # [R] f32, 0 = greedy
    top_k: Tensor  # [R] i32, 0 = off
    top_p: Tensor  # [R] f32
    min_p: Tensor  # [R] f32
    seed: Tensor  # [R] i64
    choice: Tensor  # [R] i64
    index: Tensor  # [R] i64: how many tokens this choice has produced so far
    num_logprobs: int  # -1: no logprobs at all; 0: chosen only; k: and the k best
    bias: tuple[Tensor, Tensor, Tensor] | None = None  # rows i64 [N], tokens i64 [N], values f32 [N], added (-inf bans)
    allowed: tuple[Tensor, Tensor] | None = None  # rows i64 [A], mask bool [A, V]: False bans
    repetition: tuple[Tensor, Tensor, Tensor] | None = None  # rows, tokens, penalty: > 0 divided, < 0 multiplied
    frequency: tuple[Tensor, Tensor, Tensor] | None = None  # rows, tokens, amount: subtracted (presence included)


@dataclass(frozen=True, slots=True)
class Sampled:
    """What the sampler chose. Log-probabilities are of the unmodified logits, natural log, fp32."""

    ids: Tensor  # [R] i64
    finite: Tensor  # [R] bool: False where the row held NaN or +inf: its id means nothing
    logprobs: Tensor | None  # [R] f32
    top_ids: Tensor | None  # [R, k] i64, best first, ties to the lowest id
    top_logprobs: Tensor | None  # [R, k] f32
