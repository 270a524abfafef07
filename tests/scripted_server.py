"""A real server process around the scripted engine: `python -m tests.scripted_server MODEL --port N ...`.

For what a model cannot be made to do: faults in the middle of a stream, silence, exact timing of steps.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.live_server import REPOSITORY, LiveServer, free_port


def launch(model: Path, log: Path, *args: str, module: str = "tests.scripted_server") -> LiveServer:
    port = free_port()
    command = [sys.executable, "-m", module, str(model), "--port", str(port), *args]
    with log.open("w") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, text=True, cwd=REPOSITORY)
    return LiveServer(process, f"http://127.0.0.1:{port}", log)


@contextmanager
def running(model: Path, log: Path, *args: str) -> Iterator[LiveServer]:
    """Ready at the beginning of the block, ended in order at its end, and no traceback printed meanwhile."""
    server = launch(model, log, *args)
    server.wait_ready()
    yield server
    assert "Traceback" not in server.output
    assert server.stop() == 0


def main() -> int:
    """The engine process imports this module again, so what only the server needs is imported here."""
    from server.client import EngineClient
    from server.config import add_options, read_config
    from server.serve import serve
    from tests import scripted_engine

    parser = argparse.ArgumentParser()
    add_options(parser)
    return serve(read_config(parser.parse_args()), lambda config: EngineClient(config, scripted_engine.run))


if __name__ == "__main__":
    sys.exit(main())
