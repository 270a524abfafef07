"""Every setting of `ropeway serve`, once: flags, ROPEWAY_* environment and --help derive from the fields.

Knows no HTTP, no model and no engine: it only reads, checks and hands over values.
"""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from model.kv_cost import DTYPE_ALIASES, DTYPE_BYTES
from model.sizes import parse_size
from server.engine.cores import usable_cores
from server.engine.facts import EngineConfig


def parse_flag(text: str) -> bool:
    value = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}
    if text.lower() not in value:
        raise ValueError(f"{text!r} is not one of true, false, yes, no, on, off, 1, 0 (MODEL goes before the flags)")
    return value[text.lower()]


METAVARS: dict[Callable[[str], Any], str] = {str: "TEXT", int: "N", float: "SECONDS", parse_size: "SIZE"}


def option(
    default: Any,
    help: str,
    parse: Callable[[str], Any] = str,
    *,
    choices: tuple[str, ...] = (),
    positional: bool = False,
    at_least: float | None = None,
) -> Any:
    """A field with what a command line needs to know. A tuple default makes the flag repeatable."""
    metadata = {"help": help, "parse": parse, "choices": choices, "positional": positional, "at_least": at_least}
    return field(default=default, metadata=metadata)


@dataclass(frozen=True, slots=True)
class ServeConfig:
    """Settings of one server, checked when made: ValueError says which, what was given and what is allowed."""

    model: str | None = option(None, "folder, model file or hub id; the demo model if left out", positional=True)
    host: str = option("127.0.0.1", "address to listen on")
    port: int = option(8000, "port to listen on; 0 takes a free one", int, at_least=0)
    device: str = option("auto", "where the model runs", choices=("auto", "cpu", "cuda"))
    dtype: str = option(
        "auto",
        "of weights and activations; auto: on a CPU bfloat16, else the checkpoint's, bfloat16 for float32",
        choices=("auto", "float32", "bfloat16", "float16"),
    )
    quantization: str | None = option(
        None,
        "round the layers' weights while loading, the head to int8 with each; int4 on a CPU, fp8 on a GPU",
        choices=("int8", "int4", "fp8"),
    )
    page_size: int = option(16, "tokens of a KV page", int, at_least=1)
    kv_cache_memory: int | None = option(
        None, "bytes of the KV pool, e.g. 2GiB; sized from free memory if left out", parse_size, at_least=1
    )
    kv_cache_dtype: str = option(
        "auto", "of the KV cache; auto is the model's", choices=("auto", *DTYPE_BYTES, *DTYPE_ALIASES)
    )
    prefix_caching: bool = option(True, "keep the pages of finished requests for prompts that begin alike", parse_flag)
    max_model_len: int | None = option(
        None, "longest prompt + output in tokens; the model's own if left out", int, at_least=1
    )
    max_num_seqs: int | None = option(
        None, "sequences that run at once; if left out 32 on a CPU, 256 on a GPU", int, at_least=1
    )
    max_num_batched_tokens: int | None = option(
        None, "tokens of one forward; if left out 512 on a CPU, 4096 on a GPU", int, at_least=1
    )
    max_queue: int = option(
        256, "sequences that may wait; more are answered 429, except to tenants below their share", int, at_least=0
    )
    threads: int | None = option(None, "compute threads; every core given to the process if left out", int, at_least=1)
    batch_invariant: bool = option(
        False, "same tokens whatever shares the batch, on CUDA too (CPU always does)", parse_flag
    )
    attention_backend: str = option(
        "auto",
        "whose attention a GPU runs; auto: flash-attn 3 where installed and fit, else Triton",
        choices=("auto", "triton", "flash-attn", "flashinfer"),
    )
    tensor_parallel_size: int = option(1, "devices that share each layer; 1 so far", int, at_least=1)
    served_model_name: tuple[str, ...] = option((), "name in the API, repeatable; the first one is reported")
    api_key: tuple[str, ...] = option((), "key that callers must send, repeatable; none leaves the server open")
    admin_api_key: tuple[str, ...] = option((), "key that also shows other tenants' requests under /kv, repeatable")
    api_key_file: str | None = option(None, "file with more keys, one a line; # begins a comment")
    metrics_need_key: bool = option(False, "ask for the key on /metrics as well", parse_flag)
    strict_params: bool = option(False, "refuse unknown request fields instead of warning", parse_flag)
    tool_parser: str = option(
        "auto",
        "how the model writes tool calls; auto goes by its chat template",
        choices=("auto", "none", "hermes", "llama3", "mistral", "smollm2"),
    )
    reasoning_parser: str = option(
        "auto", "split <think> from the answer; auto goes by the chat template", choices=("auto", "none", "think")
    )
    generation_defaults: bool = option(True, "sampling defaults from the model's generation_config.json", parse_flag)
    max_body_bytes: int = option(32 * 1024**2, "largest request body, e.g. 32MiB", parse_size, at_least=1)
    header_timeout: float = option(20.0, "seconds a client may take to send its headers", float, at_least=0.1)
    keep_alive_timeout: float = option(
        75.0, "seconds an idle connection is kept; let it exceed that of proxies and clients", float, at_least=1
    )
    body_timeout: float = option(60.0, "seconds a client may take to send its request body", float, at_least=0.1)
    slow_reader_timeout: float = option(60.0, "seconds a client may leave its stream unread", float, at_least=0.1)
    stall_timeout: float = option(
        120.0, "seconds without a step before /readyz turns 503 while work waits", float, at_least=1
    )
    drain_timeout: float = option(30.0, "seconds that running requests get after SIGTERM", float, at_least=0)
    ui: bool = option(True, "serve the page at /: playground, live page map, charts", parse_flag)
    access_log: bool = option(False, "one line a request on stderr", parse_flag)
    log_format: str = option("text", "json: one object a request and a message", choices=("text", "json"))
    log_prompts: bool = option(False, "request bodies in the JSON log, 64 KiB of each", parse_flag)
    otlp_traces_endpoint: str | None = option(None, "URL that takes OpenTelemetry traces (needs the extra otel)")
    cors_allow_origin: tuple[str, ...] = option(
        (), "origin whose pages may call, repeatable; * for any; none by default"
    )
    ssl_certfile: str | None = option(None, "PEM certificate; with it the server speaks HTTPS")
    ssl_keyfile: str | None = option(None, "PEM key of the certificate")

    def __post_init__(self) -> None:
        for item in fields(self):
            value = getattr(self, item.name)
            choices, at_least = item.metadata["choices"], item.metadata["at_least"]
            if choices and value is not None and value not in choices:
                raise ValueError(f"--{flag_name(item.name)} {value}: not one of {', '.join(choices)}")
            if at_least is not None and value is not None and not value >= at_least:
                raise ValueError(f"--{flag_name(item.name)} {value}: must be at least {at_least:g}")
        if self.port > 65535:
            raise ValueError(f"--port {self.port}: must be at most 65535")
        if (self.ssl_certfile is None) != (self.ssl_keyfile is None):
            raise ValueError("--ssl-certfile and --ssl-keyfile: each needs the other")
        if (self.max_num_batched_tokens or math.inf) < (self.max_num_seqs or 0):
            raise ValueError(
                f"--max-num-batched-tokens {self.max_num_batched_tokens}: must be at least "
                f"--max-num-seqs {self.max_num_seqs}, since every running sequence adds one token a step"
            )

    def engine_config(self, folder: str) -> EngineConfig:
        """What the engine process is told; folder is the canonical checkpoint that MODEL came to."""
        names = {item.name for item in fields(EngineConfig)} - {"model", "threads"}
        values = {name: getattr(self, name) for name in names}
        return EngineConfig(model=folder, threads=self.threads or usable_cores(), **values)


def flag_name(name: str) -> str:
    return name.replace("_", "-")


def env_name(name: str) -> str:
    return f"ROPEWAY_{name.upper()}"


def add_options(parser: argparse.ArgumentParser) -> None:
    """One argument a field; values stay text here, so that flags and environment are read by the same code."""
    for item in fields(ServeConfig):
        default = default_text(item.default, item.metadata["parse"])
        note = f", default {default}" if default else ""
        text = f"{item.metadata['help']} (env {env_name(item.name)}{note})"
        if item.metadata["positional"]:
            parser.add_argument(item.name, nargs="?", metavar=item.name.upper(), help=text)
        elif item.metadata["parse"] is parse_flag:
            parser.add_argument(f"--{flag_name(item.name)}", nargs="?", const="true", metavar="true|false", help=text)
        elif isinstance(item.default, tuple):
            parser.add_argument(f"--{flag_name(item.name)}", action="append", metavar="TEXT", help=text)
        else:
            choices = item.metadata["choices"]
            metavar = "|".join(choices) if choices else METAVARS[item.metadata["parse"]]
            parser.add_argument(f"--{flag_name(item.name)}", metavar=metavar, help=text)


def markdown_table() -> str:
    """The flags as docs/serve.md shows them."""
    rows = ["| Flag | Environment | Default | What |", "|---|---|---|---|"]
    for item in fields(ServeConfig):
        flag = "MODEL" if item.metadata["positional"] else f"--{flag_name(item.name)}"
        choices = f" ({', '.join(item.metadata['choices'])})" if item.metadata["choices"] else ""
        default = f"`{text}`" if (text := default_text(item.default, item.metadata["parse"])) else ""
        rows.append(f"| `{flag}` | `{env_name(item.name)}` | {default} | {item.metadata['help']}{choices} |")
    return "\n".join(rows)


def default_text(default: Any, parse: Callable[[str], Any]) -> str:
    """The default as it would be typed; empty where there is none."""
    if default in (None, ()):
        return ""
    if parse is parse_size:
        return f"{default // 1024**2}MiB"
    return f"{default:g}" if parse is float else str(default).lower()


def read_config(arguments: argparse.Namespace, environment: Mapping[str, str] = os.environ) -> ServeConfig:
    """Flag, else environment, else default. ValueError names the flag or the variable that is wrong."""
    values: dict[str, Any] = {}
    for item in fields(ServeConfig):
        flag, variable = getattr(arguments, item.name), environment.get(env_name(item.name))
        source = f"--{flag_name(item.name)}" if flag is not None else env_name(item.name)
        given = flag if flag is not None else variable
        if given is None or given == "":
            continue
        try:
            values[item.name] = parse_value(item.default, item.metadata["parse"], given)
        except ValueError as error:
            raise ValueError(f"{source}: {error}") from None
    config = ServeConfig(**values)
    return config if config.api_key_file is None else with_keys_of(config, Path(config.api_key_file))


def misspelled(environment: Mapping[str, str] = os.environ) -> list[str]:
    """One line for each variable that looks like a setting and is none."""
    known = [env_name(item.name) for item in fields(ServeConfig)]
    mine = sorted(name for name in environment if name.startswith(env_name("")) and name not in known)
    near = {name: get_close_matches(name, known, n=1, cutoff=0.85) for name in mine}
    return [f"{name} is not a setting: did you mean {match[0]}?" for name, match in near.items() if match]


def with_keys_of(config: ServeConfig, file: Path) -> ServeConfig:
    try:
        lines = [line.partition("#")[0].strip() for line in file.read_text(encoding="utf-8").splitlines()]
    except OSError as error:
        raise ValueError(f"--api-key-file {file}: {error.strerror or error}") from None
    keys = tuple(line for line in lines if line)
    if not keys:
        raise ValueError(f"--api-key-file {file}: no key in it, which would leave the server open")
    return replace(config, api_key=config.api_key + keys)


def parse_value(default: object, parse: Callable[[str], Any], given: str | Sequence[str]) -> Any:
    """A repeatable setting comes as a list from flags and comma-separated from the environment."""
    if isinstance(default, tuple):
        items = given.split(",") if isinstance(given, str) else given
        if not isinstance(given, str) and not all(map(str.strip, items)):
            raise ValueError("an empty value; leave the flag out if none is meant")  # as of an unset variable: "$KEY"
        return tuple(parse(part.strip()) for part in items if part.strip())
    assert isinstance(given, str)
    try:
        return parse(given)
    except ValueError:
        kind = {int: "a whole number", float: "a number"}.get(parse)  # type: ignore[call-overload]
        if kind is None:
            raise
        raise ValueError(f"{given!r} is not {kind}") from None
