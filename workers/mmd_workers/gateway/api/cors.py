"""Allows web pages of other origins to call the gateway from a browser. Keys are not cookies: a page sends a key only if it has one."""

from __future__ import annotations

from typing import Any

from starlette.middleware.cors import CORSMiddleware

from mmd_api.spec.gateway import CorsSpec
from mmd_workers.gateway.basics.api_errors import SHOULD_RETRY
from mmd_workers.gateway.intake.omissions import HEADERS

METHODS = ("GET", "POST", "DELETE")
SHOWN_HEADERS = (
    "idempotent-replayed",
    "request-id",
    "retry-after",
    "www-authenticate",
    "x-mmd-gateway",
    "x-request-id",
    SHOULD_RETRY,
    *HEADERS,
)
"""Response headers to expose: browsers hide headers from pages of other origins unless they are listed."""
PREFLIGHT_CACHE_SECONDS = 600


def with_cors(application: Any, cors: CorsSpec | None) -> Any:
    """The application, opened to pages of the origins in `cors`.

    This layer is outermost, so that preflights, which have no key, are answered before keys are checked, and errors have the headers too.
    """
    if cors is None:
        return application
    return CORSMiddleware(
        application,
        allow_origins=cors.allowed_origins,
        allow_methods=METHODS,
        allow_headers=("*",),
        allow_private_network=True,  # these pages may call a gateway with a private address from any network
        expose_headers=SHOWN_HEADERS,
        max_age=PREFLIGHT_CACHE_SECONDS,
    )
