"""Authenticates requests by API key or token, on both ports. `access.keys` resolves keys, and `access.bearer_tokens` resolves tokens."""

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
from mmd_workers.gateway.api.error_shapes import errors_at
from mmd_workers.gateway.basics.api_errors import ApiError

CHALLENGE = 'Bearer realm="mmd"'
FINGERPRINT_CHARACTERS = 8
"""The length of a key's shortened hash: enough to find the key in the file, too little to be of use without the file."""
_TENANT, _PRINCIPAL = "mmd_tenant", "mmd_principal"  # keys in a scope

_REFUSALS = (
    InvalidApiKeyError,
    InvalidTokenError,
    UnknownTenantError,
    KeysUnavailableError,
    IssuerUnavailableError,
)


class AuthenticationMiddleware:
    """Admits a request if its key or token belongs to a tenant or its path is in `open_routes`; refuses any other."""

    def __init__(
        self, app: Any, access: Access, tokens: TokenVerifier | None, open_routes: Collection[Route]
    ) -> None:
        self._app, self._access, self._tokens, self._open_routes = app, access, tokens, open_routes

    async def __call__(self, scope: Scope, receive: ReceiveChannel, send: SendChannel) -> None:
        """Pass a request on with its tenant, or refuse it."""
        if scope["type"] == "http" and not is_open(scope, self._open_routes):
            try:
                scope[_TENANT], scope[_PRINCIPAL] = await self._sender(scope)
            except _REFUSALS as error:
                await _refusal(error, scope["path"])(scope, receive, send)
                return
        await self._app(scope, receive, send)

    async def _sender(self, scope: Scope) -> tuple[KnownTenant, str]:
        """The tenant of a request and its principal, in the form that `principal_of` returns."""
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
    """True if one of these routes has the path of the request."""
    return any(route.matches(scope)[0] is not Match.NONE for route in open_routes)


def tenant_of(scope: Scope) -> KnownTenant | None:
    """The tenant under which a request was admitted; None if the gateway needs no keys."""
    tenant: KnownTenant | None = scope.get(_TENANT)
    return tenant


def principal_of(scope: Scope) -> str | None:
    """The sender of a request within its tenant; None if it was not admitted or the gateway needs no keys.

    The form is `key:` with the beginning of a key's hash, or `sub:` with a token's subject.
    """
    principal: str | None = scope.get(_PRINCIPAL)
    return principal


def _refusal(error: MmdError, path: str) -> JSONResponse:
    fault, errors = ApiError(error), errors_at(path)
    headers = fault.headers
    if isinstance(error, InvalidApiKeyError):
        headers["www-authenticate"] = CHALLENGE
    elif isinstance(error, InvalidTokenError):
        headers["www-authenticate"] = f'{CHALLENGE}, error="{error.code}"'
    return JSONResponse(errors.body(fault, ""), errors.status(fault), headers)
