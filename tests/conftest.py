"""Shared fixtures: tiny real models, a byte tokenizer, a real server process.

Nothing is downloaded and nothing is mocked: every fixture makes what a user would have, only smaller.
"""

from __future__ import annotations

import os

os.environ.setdefault("GOMP_SPINCOUNT", "1000")  # before torch: idle threads that spin starve a busy machine

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from tests.live_server import REPOSITORY as REPOSITORY
from tests.live_server import LiveServer as LiveServer
from tests.live_server import free_port as free_port
from tests.live_server import start_server as start_server
from tests.native_ops import threads
from tests.scripted_server import running

BOS, EOS, PAD = 256, 257, 258
VOCAB_SIZE = 259

BASE_CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
    "torch_dtype": "float32",
}
KINDS: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 16},
    "phi3": {"architectures": ["Phi3ForCausalLM"], "model_type": "phi3", "original_max_position_embeddings": 512},
    "qwen2": {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"},
    "qwen3": {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"},
}
CHAT_TEMPLATE = (
    "{% for message in messages %}<|bos|>{{ message.role }}: {{ message.content }}<|eos|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|bos|>assistant: {% endif %}"
)

ModelFactory = Callable[..., Path]


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Real checkpoints and vocabularies, where the machine has them (ROPEWAY_TEST_DATA or ../shared/data)."""
    folder = Path(os.environ.get("ROPEWAY_TEST_DATA", REPOSITORY.parent / "shared" / "data"))
    if not folder.is_dir():
        pytest.skip(f"no shared test data at {folder} (set ROPEWAY_TEST_DATA)")
    return folder


def byte_alphabet() -> dict[int, str]:
    """The printable stand-in of each byte in byte-level BPE: bytes that print keep theirs, the rest move up."""
    kept = [*range(33, 127), *range(161, 173), *range(174, 256)]
    moved = [byte for byte in range(256) if byte not in kept]
    return {byte: chr(byte) for byte in kept} | {byte: chr(256 + index) for index, byte in enumerate(moved)}


@pytest.fixture(scope="session")
def byte_tokenizer() -> Tokenizer:
    """256 byte tokens, then BOS, EOS, PAD: id = byte value, so tests can read prompts off their ids."""
    return make_byte_tokenizer()


def make_byte_tokenizer() -> Tokenizer:
    vocab = {char: byte for byte, char in sorted(byte_alphabet().items())}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in ("<|bos|>", "<|eos|>", "<|pad|>")])
    return tokenizer


def write_tokenizer(folder: Path) -> None:
    make_byte_tokenizer().save(str(folder / "tokenizer.json"))
    names = {"bos_token": "<|bos|>", "eos_token": "<|eos|>", "pad_token": "<|pad|>", "add_bos_token": False}
    (folder / "tokenizer_config.json").write_text(json.dumps(names))
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    (folder / "generation_config.json").write_text(json.dumps({"bos_token_id": BOS, "eos_token_id": EOS}))


def tensor_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Names and shapes that Hugging Face gives the tensors of a dense Llama-like decoder."""
    d, ffn = config["hidden_size"], config["intermediate_size"]
    q = config["num_attention_heads"] * config["head_dim"]
    kv = config["num_key_value_heads"] * config["head_dim"]
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config["vocab_size"], d)}
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        fused = config["model_type"] == "phi3"
        for name, rows in [("qkv", q + 2 * kv)] if fused else [("q", q), ("k", kv), ("v", kv)]:
            shapes[f"{prefix}self_attn.{name}_proj.weight"] = (rows, d)
            if config["model_type"] == "qwen2":
                shapes[f"{prefix}self_attn.{name}_proj.bias"] = (rows,)
        if config["model_type"] == "qwen3":
            shapes |= {f"{prefix}self_attn.{name}_norm.weight": (config["head_dim"],) for name in "qk"}
        shapes[f"{prefix}self_attn.o_proj.weight"] = (d, q)
        mlp = {"gate_up": 2 * ffn} if fused else {"gate": ffn, "up": ffn}
        shapes |= {f"{prefix}mlp.{name}_proj.weight": (rows, d) for name, rows in mlp.items()}
        shapes[f"{prefix}mlp.down_proj.weight"] = (d, ffn)
        shapes |= {f"{prefix}{name}_layernorm.weight": (d,) for name in ("input", "post_attention")}
    shapes["model.norm.weight"] = (d,)
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (config["vocab_size"], d)
    return shapes


def random_tensors(config: dict[str, Any], seed: int = 0) -> dict[str, torch.Tensor]:
    """Random weights with every norm and bias away from its neutral value, so that a dropped one shows."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, shape in tensor_shapes(config).items():
        noise = torch.randn(shape, generator=generator)
        is_norm = name.endswith("norm.weight")
        tensors[name] = 1 + 0.2 * noise if is_norm else noise * (0.3 if len(shape) == 1 else shape[-1] ** -0.5)
    return tensors


def write_model(folder: Path, config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    write_tokenizer(folder)
    return folder


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> ModelFactory:
    """tiny_model("llama" | "mistral" | "phi3" | "qwen2" | "qwen3", **config overrides) -> a Hugging Face folder."""
    made: dict[str, Path] = {}

    def make(kind: str = "llama", seed: int = 0, **overrides: Any) -> Path:
        key = json.dumps([kind, seed, overrides], sort_keys=True)
        if key not in made:
            config = BASE_CONFIG | KINDS[kind] | overrides
            folder = tmp_path_factory.mktemp(f"tiny-{kind}")
            made[key] = write_model(folder, config, random_tensors(config, seed))
        return made[key]

    return make


@pytest.fixture(scope="session")
def chain_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[dict[int, int]], Path]:
    """chain_model({a: b, b: c}) -> a checkpoint whose greedy output walks a -> b -> c; other ids follow id + 1.

    The blocks add nothing (zero output projections), embedding rows are random unit vectors, and the head's row for
    b is the embedding of a. It ignores context: use it for text and stops, not for the cache.
    """

    def make(next_ids: dict[int, int]) -> Path:
        config = BASE_CONFIG | {"hidden_size": 192, "num_attention_heads": 4, "num_key_value_heads": 2}
        tensors = random_tensors(config)
        for name, tensor in tensors.items():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                tensor.zero_()
            elif name.endswith("norm.weight"):
                tensor.fill_(1.0)
        rows = torch.randn(VOCAB_SIZE, 192, generator=torch.Generator().manual_seed(1))
        embedding = torch.nn.functional.normalize(rows, dim=-1)
        head = torch.zeros(VOCAB_SIZE, 192)
        for index in range(VOCAB_SIZE):
            head[next_ids.get(index, (index + 1) % VOCAB_SIZE)] += embedding[index]
        tensors |= {"model.embed_tokens.weight": embedding, "lm_head.weight": head}
        return write_model(tmp_path_factory.mktemp("chain"), config, tensors)

    return make


ServerFactory = Callable[..., LiveServer]


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Tiny products gain nothing from a second thread and lose much where other work runs."""
    with threads(1):
        yield


@pytest.fixture
def server_factory(tmp_path: Path) -> Iterator[ServerFactory]:
    """server_factory(model, *flags, wait=True, env=None) -> LiveServer of this test alone, killed at its end."""
    started: list[LiveServer] = []

    def start(model: Path, *args: str, wait: bool = True, env: dict[str, str] | None = None) -> LiveServer:
        server = start_server(model, tmp_path / f"server-{len(started)}.log", *args, env=env)
        started.append(server)
        if wait:
            server.wait_ready()
        return server

    yield start
    for server in started:
        if server.process.poll() is None:
            server.process.kill()
        server.process.wait()


@pytest.fixture(scope="session")
def live_server(tiny_model: ModelFactory, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """One server of the tiny llama for all tests that share it (page size 4)."""
    log = tmp_path_factory.mktemp("live-server") / "server.log"
    server = start_server(tiny_model("llama"), log, "--page-size", "4", "--kv-cache-memory", "512KiB")
    try:
        server.wait_ready()
        yield server
    finally:
        if server.process.poll() is None:
            server.stop()


@pytest.fixture(scope="session")
def repeater(tiny_model: ModelFactory, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """One server whose engine repeats its prompt, for all tests that share it; its model is called m and other."""
    log = tmp_path_factory.mktemp("repeater") / "server.log"
    with running(tiny_model(), log, "--served-model-name", "m", "--served-model-name", "other") as server:
        yield server


@pytest.fixture(scope="session")
def http(repeater: LiveServer) -> Iterator[httpx.Client]:
    """A client of the repeater."""
    with httpx.Client(base_url=repeater.url, timeout=30) as client:
        yield client
