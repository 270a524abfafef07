"""The `ropeway` command: serve, chat, convert, verify, plan, bench, each a thin and lazy call.

The engine process imports this module again when it is spawned, so nothing heavy may be imported at the top.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from server.config import add_options, read_config
from server.version import ropeway_version

PASSED_ON = {
    "convert": "convert an external checkpoint to a folder that is served, and prove the conversion",
    "verify": "check a converted folder against its source",
    "plan": "what a model's KV cache costs and how much of it fits, before launch",
    "bench": "load-test a server",
}
DEFAULT_URL = "http://127.0.0.1:8000"


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="ropeway", description="Serve decoder-only language models.")
    parser.add_argument("--version", action="version", version=f"ropeway {ropeway_version()}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    add_options(commands.add_parser("serve", help="serve a model over HTTP", description="Serve a model over HTTP."))
    talk = commands.add_parser("chat", help="talk to a server", description="Talk to a server.")
    talk.add_argument("url", nargs="?", default=DEFAULT_URL, help=f"where it listens (default {DEFAULT_URL})")
    talk.add_argument("--model", help="one of its names (default: the first)")
    talk.add_argument("--api-key", default=os.environ.get("ROPEWAY_API_KEY"), help="(env ROPEWAY_API_KEY)")
    for name, text in PASSED_ON.items():
        commands.add_parser(name, help=text, add_help=False)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code: 0 done, 1 refused or failed (one line says why), 2 wrong usage."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if given and given[0] in PASSED_ON:
        return pass_on(given[0], given[1:])
    parser = make_parser()
    parsed = parser.parse_args(given)
    if parsed.command == "chat":
        from server.chat import chat

        return chat(parsed.url, parsed.model, parsed.api_key)
    try:
        config = read_config(parsed)
    except ValueError as error:
        parser.error(str(error))
    from server.serve import serve

    return serve(config)


def pass_on(command: str, arguments: list[str]) -> int:
    """Commands that read their own arguments."""
    if command == "bench":
        from server.loadtest.__main__ import main as main_bench

        return main_bench(arguments)
    if command == "plan":
        from server.plan.__main__ import main as main_plan

        return main_plan(arguments)
    from convert.__main__ import main_convert, main_verify

    return main_convert(arguments) if command == "convert" else main_verify(arguments)


if __name__ == "__main__":
    sys.exit(main())
