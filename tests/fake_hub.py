"""A hub on this machine: the few requests that huggingface_hub makes to fetch a model, answered from a folder.

Knows nothing of models. It keeps what was asked for, so that tests can look.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

COMMIT = "a" * 40


@dataclass
class FakeHub:
    """folder: the repository org/name. token: who does not send it gets 401. cut: this file ends half-way.

    other: a web server that is no hub and knows none of the paths.
    """

    folder: Path
    token: str | None = None
    gated: bool = False
    cut: str | None = None
    other: bool = False
    url: str = ""
    fetched: list[str] = field(default_factory=list)

    def answer(self, method: str, path: str, authorization: str | None) -> tuple[int, dict[str, str], bytes]:
        """Status, headers and body."""
        if self.other:
            return 404, {}, b""
        if not path.startswith(("/api/models/org/name", "/org/name/resolve/")):
            return 404, {"X-Error-Code": "RepoNotFound"}, b""
        if self.gated:
            return 403, {"X-Error-Code": "GatedRepo"}, b""
        if self.token is not None and authorization != f"Bearer {self.token}":
            return 401, {"X-Error-Code": "RepoNotFound"}, b""
        if "/resolve/" in path:
            return self.file(method, path.rpartition(f"/resolve/{COMMIT}/")[2])
        return 200, {"Content-Type": "application/json"}, json.dumps(self.listing("/tree/" in path)).encode()

    def file(self, method: str, name: str) -> tuple[int, dict[str, str], bytes]:
        """One file, with the headers that say which version of it this is."""
        data = (self.folder / name).read_bytes()
        if method == "GET":
            self.fetched.append(name)
        tag = hashlib.sha256(data).hexdigest()
        return 200, {"ETag": f'"{tag}"', "X-Repo-Commit": COMMIT, "X-Linked-Size": str(len(data))}, data

    def listing(self, tree: bool) -> object:
        """Every file, either as a tree or inside the description of the repository."""
        files = sorted(path for path in self.folder.rglob("*") if path.is_file())
        names = [str(path.relative_to(self.folder)) for path in files]
        if not tree:
            return {"id": "org/name", "sha": COMMIT, "siblings": [{"rfilename": name} for name in names]}
        sizes = [path.stat().st_size for path in files]
        rows = zip(names, sizes, strict=True)
        return [{"type": "file", "path": name, "size": size, "oid": "b" * 40} for name, size in rows]


@contextmanager
def serving(hub: FakeHub) -> Iterator[FakeHub]:
    """The hub answers at hub.url meanwhile."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            path = self.path.partition("?")[0]
            status, headers, body = hub.answer(self.command, path, self.headers.get("Authorization"))
            self.send_response(status)
            for name, value in (headers | {"Content-Length": str(len(body))}).items():
                self.send_header(name, value)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body[: len(body) // 2] if hub.cut and path.endswith(hub.cut) else body)

        do_HEAD = do_GET  # noqa: N815

        def log_message(self, *words: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
