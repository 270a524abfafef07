"""A real server process around the scripted engine: `python -m tests.scripted_server MODEL --port N ...`.

For what a model cannot be made to do: faults in the middle of a stream, silence, exact timing of steps.
"""

from __future__ import annotations

import argparse
import sys

from server.client import EngineClient
from server.config import add_options, read_config
from server.serve import serve
from tests import scripted_engine


def main() -> int:
    parser = argparse.ArgumentParser()
    add_options(parser)
    return serve(read_config(parser.parse_args()), lambda config: EngineClient(config, scripted_engine.run))


if __name__ == "__main__":
    sys.exit(main())
