"""A plan as text of at most 100 columns.

Knows no arithmetic beyond shares of a whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from shlex import quote

from server.plan.advice import Change
from server.plan.compare import DTYPES, FORMULA
from server.plan.result import Plan, Preemption
from server.plan.waterfall import Scenario

BAR = 30
WIDTH = 100
LEAST_SHOWN = 0.0005  # a share that rounds to 0.1 %


def size(count: float) -> str:
    """1.50 GiB, 360.0 KiB, 23 B; negative sizes keep their sign."""
    for unit, name in ((1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if abs(count) >= unit:
            return f"{count / unit:,.2f} {name}"
    return f"{count:,.0f} B"


def table(rows: Sequence[Sequence[str]], left: int = 1) -> list[str]:
    """Columns as wide as their widest cell, the first `left` of them aligned left, the others right."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [
            cell.ljust(width) if column < left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append(("  " + "  ".join(cells)).rstrip())
    return lines


def report(plan: Plan) -> str:
    parts = [_model(plan), _token(plan), _request(plan), _memory(plan), _answer(plan)]
    if plan.preemption:
        parts.append(_preemption(plan.scenario, plan.preemption))
    if plan.advice:
        parts.append(_advice(plan))
    if plan.variants:
        parts.append(_compare(plan))
    return "\n\n".join("\n".join(part) for part in parts)


def _model(plan: Plan) -> list[str]:
    config = plan.model.config
    heads = f"{config.num_heads} heads, {config.num_kv_heads} KV heads of {config.head_dim}"
    parameters = sum(tensor.elements for tensor in plan.model.tensors)
    return [
        f"{plan.model.name}: {parameters / 1e6:,.1f} M parameters, {config.num_layers} layers, {heads}",
        f"Weights from {plan.model.origin}. Only headers were read.",
        *([f"Warning: ropeway serve refuses it: {plan.model.warning}"] if plan.model.warning else []),
    ]


def _token(plan: Plan) -> list[str]:
    layout, ranks = plan.outcome.layout, plan.scenario.ranks
    rows = [["layers", "count", "KV heads", "head dim", "dtype", "scale", "bytes/token", "bytes/page"]]
    for index, group in enumerate(layout.groups):
        kind = "full attention" if group.window is None else f"window {group.window:,}"
        shape = [str(len(group.layers)), str(group.kv_heads), str(group.head_dim), group.dtype, str(group.scale_bytes)]
        rows.append([kind, *shape, f"{group.token_bytes:,}", f"{layout.page_bytes(index):,}"])
    where = "" if ranks == 1 else " on each device"
    lines = [
        f"KV cache of a token{where}: {layout.token_bytes:,} bytes, in pages of {layout.page_size} tokens",
        f"  = {FORMULA}",
        *table(rows),
    ]
    return lines + _ranks(plan.model.config.num_kv_heads, ranks)


def _ranks(kv_heads: int, ranks: int) -> list[str]:
    if ranks == 1:
        return []
    copies = max(1, ranks // kv_heads)
    text = f"  There are {ranks} devices; in sum every key and value is kept "
    return [text + ("once." if copies == 1 else f"{copies} times, since there are only {kv_heads} KV heads.")]


def _request(plan: Plan) -> list[str]:
    rows = [["tokens", "pages", "exact bytes", "", "tokens alone", "rounding", "fit at once"]]
    for row in plan.contexts:
        waste = 1 - row.token_bytes / row.page_bytes
        pages = " + ".join(f"{count:,}" for count in row.pages)
        rows.append([f"{row.context:,}", pages, f"{row.page_bytes:,}", size(row.page_bytes), f"{row.token_bytes:,}",
                     f"{waste:.2%}", f"{row.max_concurrency:,}"])  # fmt: skip
    return ["KV cache of a request", *table(rows, left=0)]


def _memory(plan: Plan) -> list[str]:
    """Each bar begins where the one above ends; what the load needs is drawn over the pool."""
    budget, outcome = plan.outcome.budget, plan.outcome
    taken = [("weights", budget.weights)]
    taken += [("head, packed for CPU", budget.packed_head)] if budget.packed_head else []
    taken += [("workspace (estimate)", budget.workspace), ("reserve", budget.reserve)]
    lines, start = [_share("memory", budget.memory, 0, budget.memory)], 0
    for name, count in taken:
        lines.append(_share(name, count, start, budget.memory))
        start += count
    lines.append(_share("left for the KV pool", budget.pool, start, budget.memory))
    lines.append(_share("needed by the load", outcome.needed, start, budget.memory))
    return ["Memory of a device", *lines, *_pool(plan)]


def _pool(plan: Plan) -> list[str]:
    outcome = plan.outcome
    if not outcome.capacity_tokens:
        return ["  Pool: none, there is no room for a page."]
    pages = " + ".join(f"{count:,}" for count in outcome.num_pages)
    return [
        f"  Pool: {pages} pages (scratch included), {outcome.pool_bytes:,} bytes, {outcome.capacity_tokens:,} tokens"
    ]


def _share(name: str, count: int, start: int, whole: int) -> str:
    return f"  {name:<20}  {size(count):>12}  {count / whole:>8.1%}  {bar(start / whole, count / whole)}".rstrip()


def bar(start: float, share: float) -> str:
    """BAR cells of a whole, filled from `start` on; what goes beyond the whole is said in words."""
    begin, end = (round(BAR * min(1.0, max(0.0, edge))) for edge in (start, start + share))
    return "·" * begin + "█" * (end - begin) + "·" * (BAR - max(begin, end)) + (" over" if start + share > 1 else "")


def _answer(plan: Plan) -> list[str]:
    scenario, outcome = plan.scenario, plan.outcome
    load = requests(scenario.concurrency, scenario.context)
    if outcome.fits:
        spare = size(outcome.budget.pool - outcome.needed)
        verdict = f"Fits: {load} with {spare} to spare."
    else:
        verdict = f"Does not fit: {load} lack{'s' * (scenario.concurrency == 1)} {size(outcome.missing)}."
    return [
        verdict,
        *(launch_lines(plan) if outcome.fits else ()),
        f"  At {scenario.context:,} tokens each, {outcome.max_concurrency:,} requests run at once.",
        f"  At {scenario.concurrency:,} at once, each may have {outcome.max_context:,} tokens"
        f" (the model's longest is {scenario.config.max_position_embeddings:,}).",
    ]


def launch_lines(plan: Plan) -> list[str]:
    """How to serve exactly the load: the pool that the server then allocates is `needed` to the byte."""
    model, scenario = plan.model, plan.scenario
    if model.serve_as is None:
        return []
    if scenario.ranks > 1:
        return ["  A forecast: ropeway serve takes one device so far."]
    flags = {
        "max-model-len": scenario.context, "max-num-seqs": scenario.concurrency, "page-size": scenario.page_size,
        "max-num-batched-tokens": scenario.step_tokens, "kv-cache-memory": plan.outcome.needed,
        "dtype": scenario.activation_dtype, "kv-cache-dtype": scenario.kv_dtype,
    }  # fmt: skip
    lines = ["  ropeway serve" + (f" {quote(model.serve_as)}" if model.serve_as else "")]
    for word in (f"--{name} {value}" for name, value in flags.items() if value not in (None, "auto")):
        if len(lines[-1]) + len(word) > WIDTH - 3:
            lines[-1] += " \\"
            lines.append("   ")
        lines[-1] += f" {word}"
    return lines


def requests(count: int, context: int) -> str:
    return f"{count:,} request{'s' * (count > 1)} of {context:,} tokens"


def _preemption(scenario: Scenario, found: Preemption) -> list[str]:
    lengths = found.lengths
    cut = f"  {found.cut:.1%} of them are longer than the context and are cut at {scenario.context:,}"
    return [
        f"Lengths: half up to {lengths.p50:,} tokens, 95 % up to {lengths.p95:,} (lognormal)",
        *([cut] if found.cut >= LEAST_SHOWN else []),
        f"  mean {found.mean_tokens:,.0f} tokens; {found.tail_waste:.1%} of the slots of their pages stay empty",
        f"  chance of preemption, {scenario.concurrency:,} at full length at once: {percent(found.chance)}",
        f"  up to {found.most:,} at once keep it within {found.accepted:.0%}",
    ]


def percent(chance: float) -> str:
    return "below 0.01 %" if chance < 1e-4 else f"{100 * chance:.2f} %"


def _advice(plan: Plan) -> list[str]:
    rows = [["change", "from", "to", "times", "gain per device", "then"]]
    for change in plan.advice:
        then = "fits" if not change.missing else f"still lacks {size(change.missing)}"
        rows.append([f"--{flag(change)}", value(change, change.old), value(change, change.new), times(change.factor),
                     size(change.gain), then])  # fmt: skip
    return ["What alone would make it fit, the smallest change first", *table(rows)]


def times(factor: float) -> str:
    return f"{factor:.3g}" if factor < 1000 else f"{factor:,.0f}"


def flag(change: Change) -> str:
    return change.setting.replace("_", "-")


def value(change: Change, number: int | str) -> str:
    if isinstance(number, str):
        return number
    return size(number) if change.setting in ("memory", "reserve") else f"{number:,}"


def _compare(plan: Plan) -> list[str]:
    rows = [["attention", "KV heads", "layers", "head dim", *DTYPES, "of MHA"]]
    for row in plan.variants:
        rows.append([row.name, str(row.kv_heads), str(row.layers), str(row.head_dim),
                     *(f"{count:,}" for count in row.token_bytes), f"{row.ratio:.4g}"])  # fmt: skip
    return ["Bytes of a token side by side", f"  = {FORMULA}", *table(rows)]
