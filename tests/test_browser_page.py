"""The page at / in a real Chromium against real servers: chat, map, key, restart, themes, phone, keyboard.

Every visit must end without a console error, a violation of the policy or a request to another origin.
"""

from __future__ import annotations

import re
import subprocess
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

pytest.importorskip("playwright.sync_api", reason="no playwright: pip install 'ropeway[browser]'")

from playwright.sync_api import expect

from tests.bench_ui import serving, synthetic_app
from tests.browser import chromium, find_chromium, visit
from tests.conftest import LiveServer, ModelFactory, ServerFactory, start_server
from tests.scripted_engine import ERROR, SILENT
from tests.scripted_server import launch

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(find_chromium() is None, reason="no Chromium: install Debian's chromium or set CHROMIUM"),
]
SMALL_POOL = ("--page-size", "4", "--kv-cache-memory", "512KiB")
ALPHABET = "".join(map(chr, range(33, 93)))
"""What the chain model says after "assistant: ", 60 tokens of it: every id is followed by the next one."""
REFUSED, UNAUTHORISED = "ERR_CONNECTION_REFUSED", "401 (Unauthorized)"
BROKEN = ("net::ERR_", "503 (Service")


@pytest.fixture(scope="module", name="browser")
def one_browser() -> Iterator[Any]:
    with chromium() as started:
        yield started


@pytest.fixture(scope="module")
def server(chain_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """The chain model, so that texts are known, in a pool that a few requests fill."""
    live = start_server(chain_model({}), tmp_path_factory.mktemp("page") / "server.log", *SMALL_POOL)
    try:
        live.wait_ready()
        yield live
    finally:
        live.stop()


def ask(page: Any, text: str, **parameters: str) -> None:
    page.locator("#settings").evaluate("(element) => { element.open = true; }")
    for name, value in parameters.items():
        page.fill(f"#parameters [name={name}]", value)
    page.fill("#prompt", text)
    page.press("#prompt", "Enter")


def finished(page: Any) -> Any:
    """The last answer, once it has ended."""
    answer = page.locator(".message.assistant").last
    expect(answer).to_have_class(re.compile(r"^message assistant( failed)?$"))
    return answer


def test_a_chat_streams_as_plain_text(browser: Any, server: LiveServer) -> None:
    with visit(browser, server.url) as guest:
        page = guest.open_live().page
        page.evaluate(
            """() => { window.changes = 0; const count = (list) => { window.changes += list.length; };
            new MutationObserver(count).observe(document.getElementById("messages"),
              { subtree: true, characterData: true }); }"""
        )
        ask(page, "<img src=x onerror=alert(1)>", max_tokens="60", temperature="0", seed="7")
        expect(finished(page)).to_have_text(ALPHABET)
        assert page.evaluate("window.changes") > 20, "the answer did not arrive piece by piece"
        assert page.locator("#messages img").count() == 0
        assert guest.text("#fact-tokens") == "60"
        assert float(guest.text("#fact-speed")) > 0
        assert re.fullmatch(r"[\d.]+ (ms|s)", guest.text("#fact-first"))
        used = int(guest.text("#fact-context").split(" of ")[0])
        assert used > 60 + len("<img src=x onerror=alert(1)>"), "prompt and output both count"
        guest.screenshot("chat-light")
        assert guest.faults == []


def test_a_conversation_carries_its_system_prompt_and_stops_where_told(browser: Any, server: LiveServer) -> None:
    with visit(browser, server.url) as guest:
        page = guest.open_live().page
        bodies: list[Any] = []
        page.on("request", lambda request: bodies.append(request.post_data_json) if request.method == "POST" else None)
        ask(page, "one", system="Be brief.", stop="+\n;", max_tokens="60", temperature="0", top_p="0.9", seed="3")
        expect(finished(page)).to_have_text("!\"#$%&'()*")
        ask(page, "two")
        expect(page.locator(".message.assistant")).to_have_count(2)
        finished(page)
        assert [message["role"] for message in bodies[1]["messages"]] == ["system", "user", "assistant", "user"]
        assert (bodies[1]["top_p"], bodies[1]["seed"], bodies[1]["stop"]) == (0.9, 3, ["+", ";"])
        page.click("#chat-clear")
        expect(page.locator(".message")).to_have_count(0)
        assert guest.faults == []


def test_the_curl_line_gives_the_same_text(browser: Any, server: LiveServer) -> None:
    with visit(browser, server.url) as guest:
        page = guest.open_live().page
        ask(page, "it's", max_tokens="9", temperature="0")
        said = finished(page).inner_text()
        page.click("#chat-clear")
        page.locator("#parameters [name=system]").fill('it\'s "quoted" $HOME `date`')
        page.click("#chat-curl")
        line = page.input_value("#curl-text").replace("curl ", "curl -s ", 1)
        page.keyboard.press("Escape")
        command = line.replace('"messages":[', '"messages":[{"role":"user","content":"x"},')
        events = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True).stdout
        assert "".join(re.findall(r'"content":"((?:[^"\\]|\\.)+)"', events)).replace('\\"', '"') == said
        assert guest.faults == []


def test_stop_and_errors_are_said_in_words(browser: Any, scripted: LiveServer) -> None:
    with visit(browser, scripted.url) as guest:
        page = guest.open_live().page
        ask(page, "hello", seed=str(SILENT))
        expect(page.locator("#send")).to_have_text("Stop")
        page.click("#send")
        expect(page.locator(".note")).to_have_text("stopped")
        expect(page.locator("#send")).to_have_text("Send")
        ask(page, "hello", seed=str(ERROR), max_tokens="20")
        expect(page.locator(".failed .note")).to_contain_text("logits were not finite")
        assert guest.faults == []


@pytest.fixture
def scripted(chain_model: Callable[..., Path], tmp_path: Path) -> Iterator[LiveServer]:
    live = launch(chain_model({}), tmp_path / "scripted.log")
    try:
        live.wait_ready()
        yield live
    finally:
        live.stop()


@contextmanager
def traffic(url: str, streams: int) -> Iterator[None]:
    """Requests with a common prefix, one after another on each stream, until the block ends."""
    over = threading.Event()
    prefix = "the same words begin every prompt, so that their pages are shared; "

    def work(name: int) -> None:
        body = {"prompt": f"{prefix}{name}", "max_tokens": 200, "ignore_eos": True, "stream": True}
        while not over.is_set():
            with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=60) as reply:
                for _ in reply.iter_raw():
                    if over.is_set():
                        return

    workers = [threading.Thread(target=work, args=(name,)) for name in range(streams)]
    for worker in workers:
        worker.start()
    try:
        yield
    finally:
        over.set()
        for worker in workers:
            worker.join()


CELLS = """() => {
  const canvas = document.getElementById("cells"), ratio = canvas.width / canvas.clientWidth;
  const step = Number(canvas.dataset.pitch) * ratio, columns = Number(canvas.dataset.columns);
  const copy = new OffscreenCanvas(canvas.width, canvas.height).getContext("2d", { willReadFrequently: true });
  copy.drawImage(canvas, 0, 0);
  const cells = [];
  for (let y = 0; y < canvas.height; y += step)
    for (let column = 0; column < columns; column += 1)
      cells.push(copy.getImageData(column * step, y, 1, 1).data.join());
  return cells; }"""
PIXEL = """(element) => { const probe = new OffscreenCanvas(1, 1).getContext("2d", { willReadFrequently: true });
  probe.fillStyle = getComputedStyle(element).backgroundColor; probe.fillRect(0, 0, 1, 1);
  return probe.getImageData(0, 0, 1, 1).data.join(); }"""
COLOUR = """(name) => { const probe = new OffscreenCanvas(1, 1).getContext("2d", { willReadFrequently: true });
  const span = document.body.appendChild(document.createElement("span"));
  span.style.color = `var(${name})`; probe.fillStyle = getComputedStyle(span).color;
  span.remove(); probe.fillRect(0, 0, 1, 1); return probe.getImageData(0, 0, 1, 1).data.join(); }"""


def drawn(page: Any) -> Counter[str]:
    """Cells of the map by state, read off the canvas."""
    names = {page.evaluate(COLOUR, "--cell-free"): "free", page.evaluate(COLOUR, "--cell-cached"): "cached"}
    return Counter(names.get(cell, "active") for cell in page.evaluate(CELLS) if cell != "0,0,0,0")


def test_the_map_has_a_cell_for_every_page_in_its_state(browser: Any, server: LiveServer) -> None:
    with visit(browser, server.url) as guest:
        page = guest.open_live().page
        with traffic(server.url, 4):
            expect(page.locator("#rows tr")).not_to_have_count(0)
            expect(page.locator("#map-summary")).to_contain_text(re.compile(r"[1-9]\d* held"))
            guest.screenshot("map-light")
        expect(page.locator("#vital-running")).to_have_text("0")
        expect(page.locator("#rows tr")).to_have_count(0)
        pages = httpx.get(f"{server.url}/kv/summary").json()["pages"]
        total = pages.pop("total")
        page.wait_for_timeout(150)
        assert drawn(page) == Counter({state: count for state, count in pages.items() if count})
        assert pages["cached"] > 0
        words = f"{total:,} pages: {pages['active']:,} held, {pages['cached']:,} cached, {pages['free']:,} free"
        assert guest.text("#map-summary").startswith(words)
        assert guest.faults == []


def test_a_request_that_is_chosen_lights_up_its_pages(browser: Any) -> None:
    """10,000 pages and 200 requests that stand still."""
    with serving(synthetic_app(updates=0)) as url, visit(browser, url) as guest:
        page = guest.open_live().page
        expect(page.locator("#rows tr")).to_have_count(200)
        expect(page.locator("#banner")).to_contain_text("3 requests wait")
        row = page.locator("#rows tr").nth(5)
        row.locator("button").press("Enter")
        expect(row).to_have_class("selected")
        assert drawn_like(page, row) == int(row.locator("td").nth(5).inner_text())
        assert drawn_like(page, page.locator("#rows tr").nth(6)) == 0, "the others are dimmed"
        guest.screenshot("chosen-light")
        page.focus("#cells")
        page.keyboard.press("Escape")
        expect(page.locator("#rows tr.selected")).to_have_count(0)
        assert guest.faults == []


def drawn_like(page: Any, row: Any) -> int:
    """Cells in the full colour of a row's swatch."""
    return Counter(page.evaluate(CELLS))[row.locator(".swatch").evaluate(PIXEL)]


def test_keys_walk_the_map_and_every_page_is_told(browser: Any, server: LiveServer) -> None:
    with visit(browser, server.url) as guest:
        page = guest.open_live().page
        ask(page, "fill some pages", max_tokens="60", temperature="0")
        finished(page)
        expect(page.locator("#vital-running")).to_have_text("0")
        page.wait_for_timeout(150)
        pages = httpx.get(f"{server.url}/kv/summary").json()["pages"]
        page.focus("#cells")
        page.keyboard.press("Home")
        told: Counter[str] = Counter()
        for number in range(1, pages["total"] + 1):
            words = page.text_content("#spoken")
            assert words.startswith(f"page {number} ·")
            told["cached" if "cached" in words else "free" if "free" in words else "active"] += 1
            page.keyboard.press("ArrowRight")
        assert told == Counter({state: count for state, count in pages.items() if count and state != "total"})
        assert guest.faults == []


def test_a_key_is_asked_for_kept_in_the_tab_and_forgotten_with_it(
    browser: Any, chain_model: Callable[..., Path], server_factory: ServerFactory
) -> None:
    server = server_factory(chain_model({}), *SMALL_POOL, "--api-key", "sesame")
    with visit(browser, server.url) as guest:
        page = guest.open().page
        expect(page.locator("#key-dialog")).to_be_visible()
        guest.screenshot("key-light")
        page.fill("#key", "wrong")
        page.keyboard.press("Enter")
        expect(page.locator("#key-text")).to_contain_text("did not accept")
        page.fill("#key", "sesame")
        page.keyboard.press("Enter")
        page.wait_for_selector("#connection[data-state=live]")
        expect(page.locator("#key-dialog")).to_be_hidden()
        ask(page, "hi", max_tokens="5", temperature="0")
        expect(finished(page)).to_have_text(ALPHABET[:5])
        page.reload()
        page.wait_for_selector("#connection[data-state=live]")
        assert page.evaluate("JSON.stringify(localStorage)") == "{}"
        assert page.evaluate("Object.values(sessionStorage)") == ["sesame"]
        assert guest.faults_but(UNAUTHORISED) == []


def test_without_a_key_the_page_waits_and_the_button_asks_again(
    browser: Any, chain_model: Callable[..., Path], server_factory: ServerFactory
) -> None:
    server = server_factory(chain_model({}), *SMALL_POOL, "--api-key", "sesame")
    with visit(browser, server.url) as guest:
        page = guest.open().page
        expect(page.locator("#key-dialog")).to_be_visible()
        page.keyboard.press("Escape")
        expect(page.locator("#connection")).to_have_text("enter API key")
        page.click("#connection")
        page.fill("#key", "sesame")
        page.keyboard.press("Enter")
        page.wait_for_selector("#connection[data-state=live]")
        assert guest.faults_but(UNAUTHORISED) == []


def test_the_page_comes_back_with_the_server(
    browser: Any, tiny_model: ModelFactory, server_factory: ServerFactory
) -> None:
    first = server_factory(tiny_model("llama"), *SMALL_POOL)
    with visit(browser, first.url) as guest:
        page = guest.open_live().page
        assert first.stop() == 0, "a page that watches does not keep the server from draining"
        page.wait_for_selector("#connection[data-state=lost]")
        second = server_factory(tiny_model("llama"), *SMALL_POOL, "--port", first.url.rsplit(":", 1)[1], wait=False)
        second.url = first.url
        second.wait_ready()
        page.wait_for_selector("#connection[data-state=live]")
        ask(page, "again", max_tokens="5", temperature="0")
        finished(page)
        expect(page.locator("#map-summary")).to_contain_text(re.compile(r"[1-9]\d* cached"))
        assert guest.faults_but(*BROKEN) == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_follows_the_system_and_the_button_overrules_it(browser: Any, server: LiveServer, scheme: str) -> None:
    with visit(browser, server.url, color_scheme=scheme) as guest:
        page = guest.open_live().page
        paper = "getComputedStyle(document.body).backgroundColor"
        by_system = page.evaluate(paper)
        assert (max(map(int, re.findall(r"\d+", by_system))) < 60) == (scheme == "dark")
        guest.screenshot(f"theme-{scheme}")
        other = "dark" if scheme == "light" else "light"
        while other not in guest.text("#theme"):
            page.click("#theme")
        assert page.evaluate(paper) != by_system
        page.reload()
        page.wait_for_selector("#connection[data-state=live]")
        assert page.evaluate(paper) != by_system
        assert guest.faults == []


def test_a_phone_shows_one_pane_at_a_time_and_never_scrolls_sideways(browser: Any, server: LiveServer) -> None:
    phone = {"viewport": {"width": 390, "height": 844}, "device_scale_factor": 3, "is_mobile": True, "has_touch": True}
    with visit(browser, server.url, **phone) as guest:
        page = guest.open_live().page
        ask(page, "hello", max_tokens="60", temperature="0")
        expect(finished(page)).to_have_text(ALPHABET)
        for pane in ("chat", "map", "load"):
            page.tap(f"#tabs [data-pane={pane}]")
            shown = [name for name in ("chat", "map", "load") if page.is_visible(f"#{name}")]
            assert shown == [pane]
            assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
            guest.screenshot(f"phone-{pane}")
        assert guest.faults == []


def test_tab_reaches_every_control_and_shows_where_it_is(browser: Any, server: LiveServer) -> None:
    with visit(browser, server.url) as guest:
        page = guest.open_live().page
        page.locator("#settings").evaluate("(element) => { element.open = true; }")
        controls = page.locator("button:visible, input:visible, textarea:visible, summary:visible, canvas[tabindex]")
        reached = []
        for _ in range(controls.count() + 4):
            page.keyboard.press("Tab")
            reached.append(
                page.evaluate(
                    """() => { const at = document.activeElement;
                    return [at.id || at.name || at.tagName, getComputedStyle(at).outlineStyle]; }"""
                )
            )
        names = {name for name, _ in reached}
        assert names >= {
            "connection",
            "theme",
            "chat-curl",
            "chat-clear",
            "prompt",
            "send",
            "cells",
            "temperature",
            "stop",
        }
        assert [name for name, outline in reached if outline == "none" and name != "BODY"] == []
        unnamed = controls.evaluate_all(
            """(all) => all.filter((at) =>
              !(at.getAttribute("aria-label") || at.textContent.trim() || at.closest("label")))
            .map((at) => at.outerHTML)"""
        )
        assert unnamed == []
        assert guest.faults == []
