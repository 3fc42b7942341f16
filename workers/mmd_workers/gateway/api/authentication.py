"""Lets requests in by their API keys or tokens, on both ports. What keys stand for is in `access`, what tokens do in `tokens`."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from starlette.responses import JSONResponse
from starlette.routing import Match, Route

from mmd_api.contract.errors import (
    InvalidApiKeyError,
    InvalidTokenError,
    IssuerUnavailableError,
    KeysUnavailableError,
    MmdError,
    UnknownTenantError,
)
from mmd_api.tenants import digest
from mmd_workers.gateway.access.bearer_tokens import TokenVerifier, is_token
from mmd_workers.gateway.access.keys import Access, KnownTenant
from mmd_workers.gateway.answers.exchange import ReceiveChannel, Scope, SendChannel
from mmd_workers.gateway.api.messages.messages_shape import errors_at
from mmd_workers.gateway.basics.api_errors import ApiError

CHALLENGE = 'Bearer realm="mmd"'
FINGERPRINT_CHARACTERS = (
    8  # of a key's hash: enough to find it in the file, too few to be of use without the file
)
_TENANT, _PRINCIPAL = "mmd_tenant", "mmd_principal"  # in a scope

_REFUSALS = (
    InvalidApiKeyError,
    InvalidTokenError,
    UnknownTenantError,
    KeysUnavailableError,
    IssuerUnavailableError,
)


class AuthenticationMiddleware:
    """Lets a request in whose key or token stands for a tenant, or whose path is that of one of `open_routes`; any other is refused."""

    def __init__(
        self, app: Any, access: Access, tokens: TokenVerifier | None, open_routes: Collection[Route]
    ) -> None:
        self._app, self._access, self._tokens, self._open_routes = app, access, tokens, open_routes

    async def __call__(self, scope: Scope, receive: ReceiveChannel, send: SendChannel) -> None:
        """Pass a request on with its tenant, or answer it."""
        if scope["type"] == "http" and not is_open(scope, self._open_routes):
            try:
                scope[_TENANT], scope[_PRINCIPAL] = await self._sender(scope)
            except _REFUSALS as error:
                await _refusal(error, scope["path"])(scope, receive, send)
                return
        await self._app(scope, receive, send)

    async def _sender(self, scope: Scope) -> tuple[KnownTenant, str]:
        """The tenant of a request, and who of it sends it, as `principal_of` returns it."""
        credential = self._access.credential(scope["headers"])
        if self._tokens is None or not is_token(credential):
            tenant = self._access.holder(credential)
            return tenant, f"key:{digest(credential).hex()[:FINGERPRINT_CHARACTERS]}"
        try:
            bearer = await self._tokens.bearer(credential)
        except InvalidTokenError:
            self._access.refused_token()
            raise
        return self._access.named(bearer.tenant, self._tokens.default_tenant), f"sub:{bearer.subject}"


def is_open(scope: Scope, open_routes: Collection[Route]) -> bool:
    """Whether the path of a request is that of one of these routes."""
    return any(route.matches(scope)[0] is not Match.NONE for route in open_routes)


def tenant_of(scope: Scope) -> KnownTenant | None:
    """The tenant that a request was let in for; None where the gateway needs no keys."""
    found: KnownTenant | None = scope.get(_TENANT)
    return found


def principal_of(scope: Scope) -> str | None:
    """Who of its tenant sends a request: `key:` and the beginning of a key's hash, or `sub:` and a token's subject; None: not let in, or no keys."""
    found: str | None = scope.get(_PRINCIPAL)
    return found


def _refusal(error: MmdError, path: str) -> JSONResponse:
    fault, errors = ApiError(error), errors_at(path)
    headers = fault.headers
    if isinstance(error, InvalidApiKeyError):
        headers["www-authenticate"] = CHALLENGE
    elif isinstance(error, InvalidTokenError):
        headers["www-authenticate"] = f'{CHALLENGE}, error="{error.code}"'
    return JSONResponse(errors.body(fault, ""), errors.status(fault), headers)
