"""Lets requests in by their API keys, on both ports. What keys stand for is in `access`."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from starlette.responses import JSONResponse
from starlette.routing import Match, Route

from mmd_api.contract.errors import InvalidApiKeyError, KeysUnavailableError
from mmd_workers.gateway.access import Access, KnownTenant
from mmd_workers.gateway.api_errors import ApiError
from mmd_workers.gateway.exchange import ReceiveChannel, Scope, SendChannel
from mmd_workers.gateway.messages_shape import errors_at

CHALLENGE = 'Bearer realm="mmd"'
_SCOPE_KEY = "mmd_tenant"


class AuthenticationMiddleware:
    """Lets a request in whose key stands for a tenant, or whose path is that of one of `open_routes`; any other gets status 401."""

    def __init__(self, app: Any, access: Access, open_routes: Collection[Route]) -> None:
        self._app, self._access, self._open_routes = app, access, open_routes

    async def __call__(self, scope: Scope, receive: ReceiveChannel, send: SendChannel) -> None:
        """Pass a request on with its tenant, or answer it."""
        if scope["type"] == "http" and not self._is_open(scope):
            try:
                scope[_SCOPE_KEY] = self._access.authenticate(scope["headers"])
            except (InvalidApiKeyError, KeysUnavailableError) as error:
                await _refusal(error, scope["path"])(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _is_open(self, scope: Scope) -> bool:
        return any(route.matches(scope)[0] is not Match.NONE for route in self._open_routes)


def tenant_of(scope: Scope) -> KnownTenant | None:
    """The tenant that a request was let in for; None where the gateway needs no keys."""
    found: KnownTenant | None = scope.get(_SCOPE_KEY)
    return found


def _refusal(error: InvalidApiKeyError | KeysUnavailableError, path: str) -> JSONResponse:
    fault, errors = ApiError(error), errors_at(path)
    headers = {"www-authenticate": CHALLENGE} if fault.status == 401 else {}
    if fault.retry_after is not None:
        headers["retry-after"] = str(fault.retry_after)
    return JSONResponse(errors.body(fault, ""), errors.status(fault), headers)
