"""Which web pages of other origins may call the gateway from a browser. Keys are no cookies: a page sends one only if it has it."""

from __future__ import annotations

from typing import Any

from starlette.middleware.cors import CORSMiddleware

from mmd_api.spec.gateway import CorsSpec
from mmd_workers.gateway.intake.omissions import HEADERS

METHODS = ("GET", "POST", "DELETE")
SHOWN_HEADERS = (
    "idempotent-replayed",
    "request-id",
    "retry-after",
    "www-authenticate",
    "x-mmd-gateway",
    "x-request-id",
    *HEADERS,
)
"""Of answers, which browsers hide from pages of other origins unless they are named."""
PREFLIGHT_SECONDS = 600  # for which a browser may remember what is allowed


def with_cors(application: Any, cors: CorsSpec | None) -> Any:
    """The application for the pages of these origins as well.

    Outermost, so that preflights, which have no key, are answered before keys are looked at, and errors carry the headers too.
    """
    if cors is None:
        return application
    return CORSMiddleware(
        application,
        allow_origins=cors.allowed_origins,
        allow_methods=METHODS,
        allow_headers=("*",),
        allow_private_network=True,  # of a gateway with a private address: these pages may, wherever they come from
        expose_headers=SHOWN_HEADERS,
        max_age=PREFLIGHT_SECONDS,
    )
