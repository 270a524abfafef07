"""The page's files over HTTP, without a browser: policy, types, caching, nothing from elsewhere, open without a key."""

from __future__ import annotations

import re
from pathlib import Path

import httpx
import pytest

from tests.conftest import REPOSITORY, LiveServer, ModelFactory, ServerFactory

FILES = sorted((REPOSITORY / "server" / "ui").iterdir())


def test_the_page_comes_with_a_policy_that_lets_nothing_in(live_server: LiveServer) -> None:
    reply = httpx.get(f"{live_server.url}/")
    assert reply.status_code == 200
    assert reply.headers["content-type"].startswith("text/html")
    assert reply.headers["content-security-policy"].startswith("default-src 'self';")
    assert "unsafe" not in reply.headers["content-security-policy"]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_every_file_is_served_as_it_lies_there(live_server: LiveServer, path: Path) -> None:
    reply = httpx.get(f"{live_server.url}/ui/{path.name}")
    assert reply.content == path.read_bytes()
    types = {".js": "text/javascript", ".css": "text/css", ".html": "text/html", ".svg": "image/svg+xml"}
    assert reply.headers["content-type"].startswith(types[path.suffix])
    tag = reply.headers["etag"]
    again = httpx.get(f"{live_server.url}/ui/{path.name}", headers={"If-None-Match": tag})
    assert (again.status_code, again.content, again.headers["etag"]) == (304, b"", tag)


@pytest.mark.parametrize("name", ["nothing.js", "..%2froutes%2fui.py", "%2e%2e/ui.py"])
def test_other_names_are_404(live_server: LiveServer, name: str) -> None:
    assert httpx.get(f"{live_server.url}/ui/{name}").status_code == 404


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_no_file_names_another_origin_or_holds_inline_code(path: Path) -> None:
    text = path.read_text().replace("http://www.w3.org/2000/svg", "")
    assert not re.search(r"https?://|//[a-z]+\.", text)
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(", text)
    assert not re.search(r"<[^>]*\s(style|on\w+)=", text)


def test_the_page_is_open_and_what_it_asks_for_is_not(tiny_model: ModelFactory, server_factory: ServerFactory) -> None:
    server = server_factory(tiny_model("llama"), "--page-size", "4", "--api-key", "sesame")
    assert httpx.get(f"{server.url}/").status_code == 200
    assert httpx.get(f"{server.url}/ui/app.js").status_code == 200
    assert [httpx.get(f"{server.url}{path}").status_code for path in ("/kv/summary", "/v1/models", "/uix")] == [401] * 3


def test_the_page_can_be_left_out(tiny_model: ModelFactory, server_factory: ServerFactory) -> None:
    server = server_factory(tiny_model("llama"), "--page-size", "4", "--ui", "false")
    assert [httpx.get(f"{server.url}{path}").status_code for path in ("/", "/ui/app.js")] == [404, 404]
