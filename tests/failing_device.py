"""A real server whose device breaks: `python -m tests.failing_device MODEL --port N ...`.

A request with the seed DEVICE_ERROR makes the device report, after some tokens, what a GPU reports after a wild read:
late, when a step is waited for, and of no use ever after.
"""

from __future__ import annotations

import argparse
import sys
from multiprocessing.connection import Connection

import torch

from server.engine import worker
from server.engine.facts import EngineConfig
from server.engine.launched_step import LaunchedStep
from server.engine.plan import StepPlan
from server.engine.runner import ModelRunner

DEVICE_ERROR = 1005
TOKENS_BEFORE = 3


class Broken:
    """A mark that is never reached."""

    def synchronize(self) -> None:
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")


def run(conn: Connection, config: EngineConfig) -> None:
    """Main of the engine process."""
    launch = ModelRunner.launch

    def launch_and_break(self: ModelRunner, plan: StepPlan) -> LaunchedStep:
        step = launch(self, plan)
        sequences = [row.sequence for row in plan.rows]
        if any(s.request.params.seed == DEVICE_ERROR and s.num_output >= TOKENS_BEFORE for s in sequences):
            step.end = Broken()
        return step

    ModelRunner.launch = launch_and_break  # type: ignore[method-assign]
    worker.run(conn, config)


def main() -> int:
    """The engine process imports this module again, so what only the server needs is imported here."""
    from server.client import EngineClient
    from server.config import add_options, read_config
    from server.serve import serve
    from tests import failing_device

    parser = argparse.ArgumentParser()
    add_options(parser)
    return serve(read_config(parser.parse_args()), lambda config: EngineClient(config, failing_device.run))


if __name__ == "__main__":
    sys.exit(main())
