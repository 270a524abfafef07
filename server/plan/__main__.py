"""`ropeway plan`: what a model's KV cache costs and how much of it fits, before anything is launched.

Knows the order of things only. Imports neither torch nor numpy, reads no weights and no network.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from convert.errors import ConvertError
from model.config import ConfigError, served_dtype
from model.kv_cost import DTYPE_BYTES
from model.memory import available_bytes
from server.plan.options import parse
from server.plan.report import report
from server.plan.result import Plan, make_plan
from server.plan.source import PlannedModel, open_model
from server.plan.waterfall import Scenario


class PlanError(Exception):
    """One line: which option, what was given, what is possible."""


def main(argv: list[str]) -> int:
    """0: planned, whether it fits or not; 1: refused with one line on stderr; wrong usage exits with 2."""
    arguments = parse(argv)
    try:
        plan = _plan(arguments)
        if arguments.plot:
            _plot(plan, arguments.plot)
        print(json.dumps(plan.to_json(), indent=2) if arguments.json else report(plan))
    except (PlanError, ConvertError, ConfigError) as error:
        print(f"ropeway plan: {error}", file=sys.stderr)
        return 1
    return 0


def _plan(arguments: argparse.Namespace) -> Plan:
    model = open_model(arguments.model)
    compare = None if arguments.compare is None else [open_model(other) for other in arguments.compare]
    return make_plan(model, _scenario(arguments, model), arguments.lengths, compare)


def _scenario(arguments: argparse.Namespace, model: PlannedModel) -> Scenario:
    config, ranks = model.config, arguments.tensor_parallel
    longest = config.longest_context
    context = arguments.context or config.max_position_embeddings
    if context > longest:
        raise PlanError(f"--context {context}: {model.name} has positions for {longest} tokens, give at most that")
    if config.num_heads % ranks:
        raise PlanError(f"--tensor-parallel {ranks}: must divide the {config.num_heads} heads of {model.name}")
    memory = available_bytes() if arguments.memory is None else arguments.memory
    if not memory:
        raise PlanError("--memory: no memory is left on this host, give a size such as 24GiB")
    dtype = served_dtype(config.dtype) if arguments.dtype == "auto" else arguments.dtype
    scenario = Scenario(
        config=config, tensors=model.tensors, memory=memory, context=context, concurrency=arguments.concurrency,
        page_size=arguments.page_size, dtype=dtype, kv_dtype=arguments.kv_dtype, ranks=ranks,
        reserve=arguments.reserve, step_tokens=max(arguments.step_tokens, arguments.concurrency),
    )  # fmt: skip
    if scenario.cache_dtype not in DTYPE_BYTES:
        known = ", ".join(DTYPE_BYTES)
        raise PlanError(f"--kv-dtype auto: {model.name} is {scenario.cache_dtype}, which is none of {known}")
    try:
        scenario.layout()
    except ValueError as error:
        raise PlanError(f"--tensor-parallel {ranks}: {error}") from None
    return scenario


def _plot(plan: Plan, path: Path) -> None:
    try:
        from server.plan.plot import draw
    except ModuleNotFoundError as error:
        raise PlanError(f"--plot needs {error.name}: pip install 'ropeway[plot]'") from None
    draw(plan, path)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
