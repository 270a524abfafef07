"""What a step brought, as rows for the clients.

Knows requests and tokens; neither pages nor who runs next.
"""

from __future__ import annotations

from collections.abc import Callable

from server.engine.messages import FinishReason, Row, TokenLogprob
from server.engine.plan import SampledToken
from server.engine.request import Request, Sequence


class StepRows:
    """Rows since the last take(), in order."""

    def __init__(self, clock: Callable[[], int]) -> None:
        self._clock = clock
        self._rows: list[Row] = []

    def __len__(self) -> int:
        return len(self._rows)

    def take(self) -> tuple[Row, ...]:
        rows, self._rows = tuple(self._rows), []
        return rows

    def refuse(self, request_id: str, error: str) -> None:
        """A request that can never run."""
        self._rows.append(Row(request_id, 0, finish="error", error=error))

    def report(
        self,
        sequence: Sequence,
        tokens: tuple[int, ...] = (),
        logprobs: tuple[TokenLogprob, ...] = (),
        finish: FinishReason | None = None,
        error: str | None = None,
        embedding: tuple[float, ...] | None = None,
    ) -> None:
        """The first row of a choice and its last carry more than tokens."""
        request = sequence.request
        if sequence.reported and finish is None:
            self._rows.append(Row(request.id, sequence.choice, tokens, logprobs))
            return
        is_first, sequence.reported = not sequence.reported, True
        scored = request.prompt_logprobs
        self._rows.append(
            Row(
                id=request.id,
                choice=sequence.choice,
                tokens=tokens,
                logprobs=logprobs,
                prompt_logprobs=tuple(scored) if scored is not None and is_first else None,
                finish=finish,
                stop_token=tokens[-1] if finish == "stop" and tokens[-1] in request.stop_ids else None,
                error=error,
                cached_tokens=request.num_cached if is_first else None,
                usage=sequence.usage() if finish else None,
                times=sequence.times(self._clock()),
                embedding=embedding,
            )
        )

    def hold(self, sequence: Sequence, sampled: SampledToken, finish: FinishReason | None) -> None:
        """best_of: keep the token; when the last choice ends, report the n best by mean log-probability."""
        assert sampled.logprob is not None
        sequence.held.append(sampled.logprob)
        sequence.finish = finish
        request = sequence.request
        if all(other.finished for other in request.sequences):
            self._report_best(request)

    def _report_best(self, request: Request) -> None:
        ranked = sorted(request.sequences, key=lambda sequence: -sequence.mean_logprob)
        best, dropped = ranked[: request.params.n], ranked[request.params.n :]
        best[0].byte_ns += sum(sequence.byte_ns for sequence in dropped)  # the request pays for all of them
        for choice, sequence in enumerate(best):
            sequence.choice = choice
            wanted = tuple(sequence.held) if request.params.logprobs is not None else ()
            self.report(sequence, sequence.output_ids(), wanted, sequence.finish)
