"""The `ropeway` command: serve, chat, convert, verify, plan, bench, each a thin and lazy call.

The engine process imports this module again when it is spawned, so nothing heavy may be imported at the top.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Sequence
from functools import partial

from server.command_end import guarded, importing

COMMANDS = {
    "serve": "serve a model over HTTP",
    "chat": "talk to a server",
    "convert": "convert an external checkpoint to a folder that is served, and prove the conversion",
    "verify": "check a converted folder against its source",
    "plan": "what a model's KV cache costs and how much of it fits, before launch",
    "bench": "load-test a server",
}
DEFAULT_URL = "http://127.0.0.1:8000"


def make_parser() -> argparse.ArgumentParser:
    """The command line up to the name of the command: each reads the rest itself."""
    from server.version import ropeway_version

    parser = argparse.ArgumentParser(
        prog="ropeway",
        description="Serve decoder-only language models.",
        epilog="ropeway COMMAND --help lists the options of a command",
    )
    parser.add_argument("--version", action="version", version=f"ropeway {ropeway_version()}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, text in COMMANDS.items():
        commands.add_parser(name, help=text, add_help=False)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code: 0 done, 1 refused or failed (one line says why), 2 wrong usage, 130 ended by Ctrl-C, 141 unread."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if given and given[0] in COMMANDS:
        return guarded(given[0], lambda: run_command(given[0], given[1:]))
    make_parser().parse_args(given)
    return 2


def run_command(command: str, arguments: list[str]) -> int:
    if command == "serve":
        return main_serve(arguments)
    if command == "chat":
        return main_chat(arguments)
    if command == "bench":
        with importing(command):
            from server.loadtest.__main__ import main as main_bench

        return main_bench(arguments)
    if command == "plan":
        with importing(command):
            from server.plan.__main__ import main as main_plan

        return main_plan(arguments)
    with importing(command):
        from convert.__main__ import main_convert, main_verify

    return main_convert(arguments) if command == "convert" else main_verify(arguments)


def main_serve(arguments: list[str]) -> int:
    from server.config import add_options, misspelled, read_config

    parser = argparse.ArgumentParser(
        prog="ropeway serve",
        usage="ropeway serve [MODEL] [options]   (--help lists them)",
        description="Serve a model over HTTP. Cached conversions and kernels: ROPEWAY_CACHE, else ~/.cache/ropeway.",
    )
    add_options(parser)
    try:
        config = read_config(parser.parse_args(arguments))
    except ValueError as error:
        parser.error(str(error))
    for line in misspelled():
        print(f"ropeway: {line}", file=sys.stderr)
    from server.engine_process import end_process, spawn_engine

    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})  # until the server can heed them
    spawned = spawn_engine()
    try:
        from server.client import EngineClient
        from server.serve import serve

        return serve(config, partial(EngineClient, spawned=spawned))
    finally:
        end_process(spawned.process, seconds=0)


def main_chat(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="ropeway chat", description="Talk to a server.")
    parser.add_argument("url", nargs="?", default=DEFAULT_URL, help=f"where it listens (default {DEFAULT_URL})")
    parser.add_argument("--model", help="one of its names (default: the first)")
    keys = os.environ.get("ROPEWAY_API_KEY", "")  # a server takes several from it
    parser.add_argument(
        "--api-key", default=keys.partition(",")[0].strip() or None, help="the server's key (env ROPEWAY_API_KEY)"
    )
    parser.add_argument("--temperature", type=float, help="0: always the likeliest token (default: the server's)")
    parsed = parser.parse_args(arguments)
    from server.chat import chat

    sampling = {} if parsed.temperature is None else {"temperature": parsed.temperature}
    return chat(parsed.url, parsed.model, parsed.api_key, sampling)


if __name__ == "__main__":
    sys.exit(main())
