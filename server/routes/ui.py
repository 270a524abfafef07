"""The page at / and its files, as they lie in the package: static, and cut off from every other origin.

Knows no engine and no key: the page asks for both over the API, like any client.
"""

from __future__ import annotations

import mimetypes
from functools import cache
from hashlib import sha256
from pathlib import Path

from fastapi import APIRouter, Request
from starlette.exceptions import HTTPException
from starlette.responses import Response

FILES = Path(__file__).resolve().parent.parent / "ui"
POLICY = "default-src 'self'; object-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}

router = APIRouter()


@router.get("/")
async def page(request: Request) -> Response:
    return await file("index.html", request)


@router.get("/ui/{name}")
async def file(name: str, request: Request) -> Response:
    """One file, or 304 where the browser holds the same bytes. 404 for a name that is not in the folder."""
    found = load_files().get(name)
    if found is None:
        raise HTTPException(404, f"there is no /ui/{name}")
    body, media_type, tag = found
    headers = HEADERS | {"ETag": tag}
    if request.headers.get("if-none-match") == tag:
        return Response(status_code=304, headers=headers)
    return Response(body, headers=headers, media_type=media_type)


@cache
def load_files() -> dict[str, tuple[bytes, str, str]]:
    """name -> (bytes, media type, ETag). Names are looked up here and never become paths."""
    files = {path.name: path.read_bytes() for path in FILES.iterdir() if path.is_file()}
    return {name: (body, media_type_of(name), f'"{sha256(body).hexdigest()[:20]}"') for name, body in files.items()}


def media_type_of(name: str) -> str:
    """Of the system's table only the standard part: some systems call JavaScript text/plain."""
    types = {".js": "text/javascript", ".css": "text/css", ".html": "text/html", ".svg": "image/svg+xml"}
    suffix = Path(name).suffix
    return types.get(suffix) or mimetypes.guess_type(name)[0] or "application/octet-stream"
