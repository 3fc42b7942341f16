"""The page at the gateway's `/`, where anyone can try the model: four files, served from memory. Independent of requests and pods;
the page asks its own port, like every other client.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from importlib import resources

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

# Named here and not guessed from the machine's own tables: a module script with a wrong type does not run.
_TYPES = {
    "page.html": "text/html; charset=utf-8",
    "page.css": "text/css; charset=utf-8",
    "page.js": "text/javascript; charset=utf-8",
    "icon.svg": "image/svg+xml",
}
# Nothing inline, nothing from elsewhere, no text that becomes HTML; `blob:` is for previews of the visitor's own files.
CONTENT_SECURITY_POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self' blob:",
        "media-src blob:",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
)


def routes(is_served: Callable[[], bool], *, admin: bool = False, asks_for_key: bool = False) -> list[Route]:
    """Serve `/` and its files below `/page/`; 404 while `is_served()` is false. Browsers cache the files and revalidate them.

    `admin`: the page is on the admin port and also shows pods and the progress of requests. `asks_for_key`: the API requires a key.
    """
    folder = resources.files(__name__)
    files = {name: (folder / name).read_bytes() for name in _TYPES}
    for attribute in (b"data-admin",) * admin + (b"data-key",) * asks_for_key:
        files["page.html"] = files["page.html"].replace(b"<body ", b"<body %s " % attribute, 1)
    return [
        _route("/" if name.endswith(".html") else f"/page/{name}", files[name], kind, is_served)
        for name, kind in _TYPES.items()
    ]


def _route(path: str, body: bytes, content_type: str, is_served: Callable[[], bool]) -> Route:
    etag = f'"{hashlib.sha256(body).hexdigest()[:32]}"'
    headers = {
        "cache-control": "no-cache",
        "etag": etag,
        "content-security-policy": CONTENT_SECURITY_POLICY,
        "cross-origin-opener-policy": "same-origin",
        "cross-origin-resource-policy": "same-origin",
        "permissions-policy": "camera=(), geolocation=(), microphone=()",
        "referrer-policy": "no-referrer",
        "x-content-type-options": "nosniff",
    }

    async def answer(request: Request) -> Response:
        if not is_served():
            raise HTTPException(404)
        etags = request.headers.get("if-none-match", "").replace("W/", "").split(",")
        if etag in (tag.strip() for tag in etags):
            return Response(status_code=304, headers=headers)
        return Response(body, headers={**headers, "content-type": content_type})

    return Route(path, answer, include_in_schema=False)
