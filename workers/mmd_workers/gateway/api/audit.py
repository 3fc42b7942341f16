"""The audit log: one line of JSON on standard output per API request. It has sender, path, outcome and token counts, but no content."""

from __future__ import annotations

import time
from collections.abc import Collection, MutableMapping
from datetime import UTC, datetime
from typing import Any

from starlette.routing import Route

from mmd_workers.gateway.answers.exchange import ReceiveChannel, Scope, SendChannel
from mmd_workers.gateway.api.authentication import is_open, principal_of, tenant_of
from mmd_workers.gateway.api.gateway import Gateway
from mmd_workers.gateway.placement.timeline import Timeline
from mmd_workers.observe.logs import printable

MAX_FIELD_CHARACTERS = 256
_TIMELINE = "mmd_timeline"  # key in a scope


class AuditMiddleware:
    """Logs every request after its end, except those to `open_routes`, while the spec enables the audit log."""

    def __init__(self, app: Any, gateway: Gateway, open_routes: Collection[Route]) -> None:
        self._app, self._gateway, self._open_routes = app, gateway, open_routes

    async def __call__(self, scope: Scope, receive: ReceiveChannel, send: SendChannel) -> None:
        """Pass a request on, and log its end, whatever happens."""
        if scope["type"] != "http" or not self._gateway.settings.audit or is_open(scope, self._open_routes):
            await self._app(scope, receive, send)
            return
        arrived, status = time.time(), 0

        async def sending(message: MutableMapping[str, Any]) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, sending)
        finally:
            self._gateway.audit_log.write(self._entry(scope, status, arrived))

    def _entry(self, scope: Scope, status: int, arrived: float) -> dict[str, Any]:
        timeline = timeline_of(scope)
        tenant, client = tenant_of(scope), scope.get("client")
        usage: dict[str, Any] = timeline.usage if timeline is not None else {}
        return {
            "audit": "request",
            "time": datetime.fromtimestamp(arrived, UTC).isoformat(timespec="milliseconds"),
            "request_id": timeline.request_id if timeline is not None else None,
            "tenant": tenant.name if tenant is not None else None,
            "principal": _bounded(principal_of(scope)),
            "client": client[0] if client else None,
            "method": _bounded(scope["method"]),
            "path": _bounded(scope["path"]),
            "model": self._model(timeline),
            "status": (timeline.status if timeline is not None else 0) or status or None,
            "code": timeline.code if timeline is not None else None,
            "tokens_in": usage.get("prompt_tokens"),
            "tokens_out": usage.get("completion_tokens"),
            "seconds": round(time.time() - arrived, 3),
        }

    def _model(self, timeline: Timeline | None) -> str | None:
        """The requested model, if it is served; any other name is text from the client and is not logged."""
        return timeline.model if timeline is not None and timeline.model in self._gateway.names else None


def show_timeline(scope: Scope, timeline: Timeline) -> None:
    """Give the audit log access to the timeline of a request."""
    scope[_TIMELINE] = timeline


def timeline_of(scope: Scope) -> Timeline | None:
    """The timeline of a request; None if it was refused before it had one, or has none."""
    timeline: Timeline | None = scope.get(_TIMELINE)
    return timeline


def _bounded(text: str | None) -> str | None:
    return printable(text[:MAX_FIELD_CHARACTERS]) if text is not None else None
