"""The paths for clients: completions, responses, messages, tokens, models, health. What the paths of both ports share; no life of a request."""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from mmd_api.contract import paths
from mmd_api.contract.errors import MethodNotAllowedError, NotFoundError
from mmd_workers.gateway import messages, page
from mmd_workers.gateway.api_errors import ApiError, ErrorShape
from mmd_workers.gateway.completions import ChatCompletions, TextCompletions
from mmd_workers.gateway.exchange import ReceiveChannel, Scope, SendChannel
from mmd_workers.gateway.gateway import Gateway
from mmd_workers.gateway.messages import AnthropicMessages, CountTokens
from mmd_workers.gateway.messages_shape import MessagesErrors
from mmd_workers.gateway.responses import Responses
from mmd_workers.gateway.tokenize import Detokenize, Tokenize

FOR_CLIENTS = "POST /v1/chat/completions, /v1/completions, /v1/responses, /v1/messages, /v1/messages/count_tokens, /tokenize, /detokenize, GET /v1/models, /health, /ready"


def build_app(gateway: Gateway) -> Starlette:
    """What clients may reach: the API, health, the page. Unknown paths and methods get OpenAI-shaped errors too."""
    return application(
        gateway,
        [*api_routes(gateway), *page.routes(lambda: gateway.web_page)],
        FOR_CLIENTS,
    )


def application(gateway: Gateway, routes: list[Route], known: str) -> Starlette:
    """These routes; any other path or method gets an OpenAI-shaped error that names the `known` ones."""

    async def http_error(request: Request, error: Exception) -> Response:
        status = error.status_code if isinstance(error, HTTPException) else 500
        kind = MethodNotAllowedError if status == 405 else NotFoundError
        fault = ApiError(kind(f"path or method not found; this port serves {known}"))
        errors = MessagesErrors() if request.url.path.startswith(messages.PREFIX) else ErrorShape()
        return JSONResponse(errors.body(fault, ""), errors.status(fault))

    return Starlette(
        middleware=[Middleware(_FarewellMiddleware, gateway=gateway)],
        routes=routes,
        exception_handlers={HTTPException: http_error},
    )


def api_routes(gateway: Gateway) -> list[Route]:
    """What both ports serve."""

    async def models(_request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [_model(gateway, name) for name in gateway.names]})

    async def model(request: Request) -> Response:
        name = request.path_params["name"]
        try:
            gateway.check_model(name)
        except ApiError as error:
            return JSONResponse(error.body(), error.status)
        return JSONResponse(_model(gateway, name))

    async def health(_request: Request) -> Response:
        return JSONResponse({"status": "alive"})

    async def takes_traffic(_request: Request) -> Response:
        """For probes: a gateway without workers takes requests as well, and holds them until a pool has grown from zero.

        So does one that drains. Kubernetes sends it new connections only while no other gateway is Ready, and would refuse them otherwise.
        One that drains because a part of it failed takes none: Kubernetes does not know that it is about to end.
        """
        return readiness(gateway.failed or _cut_off(gateway))

    async def ready(_request: Request) -> Response:
        reason = "draining" if gateway.draining else _cut_off(gateway) or _missing_pods(gateway)
        return readiness(reason)

    def readiness(reason: str) -> Response:
        body = {"ready": not reason, "reason": reason, "ready_pods": gateway.dispatcher.ready_pods()}
        return JSONResponse(body, 503 if reason else 200)

    return [
        Route("/v1/chat/completions", ChatCompletions(gateway), methods=["POST"]),
        Route("/v1/completions", TextCompletions(gateway), methods=["POST"]),
        Route("/v1/responses", Responses(gateway), methods=["POST"]),
        Route("/v1/messages", AnthropicMessages(gateway), methods=["POST"]),
        Route("/v1/messages/count_tokens", CountTokens(gateway), methods=["POST"]),
        Route("/tokenize", Tokenize(gateway), methods=["POST"]),
        Route("/detokenize", Detokenize(gateway), methods=["POST"]),
        Route("/v1/models", models),
        Route("/v1/models/{name:path}", model),
        Route("/health", health),
        Route(paths.LIVEZ, health),
        Route("/ready", ready),
        Route(paths.READYZ, takes_traffic),
    ]


class _FarewellMiddleware:
    """While the gateway drains, every answer closes its connection: the next request of that client opens one to another pod."""

    def __init__(self, app: Any, gateway: Gateway) -> None:
        self._app = app
        self._gateway = gateway

    async def __call__(self, scope: Scope, receive: ReceiveChannel, send: SendChannel) -> None:
        async def closing(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start" and self._gateway.draining:
                message = {**message, "headers": [*message.get("headers", ()), (b"connection", b"close")]}
            await send(message)

        await self._app(scope, receive, closing)


def _model(gateway: Gateway, name: str) -> dict[str, Any]:
    """An adapter names the model that it belongs to as its parent, as vLLM's server does."""
    adapter = gateway.adapter_of(name)
    return {
        "id": name,
        "object": "model",
        "created": int(gateway.started),
        "owned_by": "multimodal-operator",
        "max_model_len": gateway.model_len() or gateway.frontend.max_model_len,
        "modalities": ["text", *sorted(gateway.frontend.modalities)],
        **({"parent": gateway.models[0]} if adapter else {}),
    }


def _cut_off(gateway: Gateway) -> str:
    return "" if gateway.bus.is_connected else "no connection to NATS"


def _missing_pods(gateway: Gateway) -> str:
    """Roles that no ready pod of this revision holds; a model that takes no media needs no encoder."""
    missing = [
        role
        for role, count in gateway.dispatcher.ready_pods().items()
        if not count and (role != "encode" or gateway.frontend.modalities)
    ]
    return f"no ready pod for {' and '.join(missing)}: requests are waiting for one" if missing else ""
