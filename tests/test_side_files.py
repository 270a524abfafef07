"""A start that finds a broken tokenizer, template or generation config: one line that names it, never a wait."""

from __future__ import annotations

import asyncio
import shutil
from functools import partial
from pathlib import Path

import pytest

from server.client import EngineClient
from server.config import ServeConfig
from server.prepare import prepare
from server.service import Service
from tests import scripted_engine
from tests.conftest import ModelFactory


@pytest.mark.parametrize(
    ("name", "content", "text"),
    [
        ("tokenizer.json", "{}", "cannot load"),
        ("tokenizer.json", "[]", "expected an object"),
        ("tokenizer_config.json", "[1]", "expected an object"),
        ("chat_template.jinja", "\n{% if %}", "is broken in line 2"),
        ("generation_config.json", '{"repetition_penalty": 0}', "repetition_penalty is 0"),
        ("generation_config.json", '{"temperature": "hot"}', "temperature is 'hot'"),
    ],
)
def test_side_files_that_are_no_good_are_one_line(
    tiny_model: ModelFactory, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, content: str, text: str
) -> None:
    folder = Path(shutil.copytree(tiny_model(), tmp_path / "model"))
    (folder / name).write_text(content)
    service = Service(ServeConfig(model=str(folder)), prepare, partial(EngineClient, engine_main=scripted_engine.run))
    asyncio.run(load_and_close(service))
    assert service.failure is not None and text in service.failure
    assert capsys.readouterr().err == f"ropeway: {service.failure}\n"


async def load_and_close(service: Service) -> None:
    await service.load()
    await service.close()
