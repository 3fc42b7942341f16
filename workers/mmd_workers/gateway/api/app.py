"""The routes for clients: completions, responses, messages, tokens, models, health, and the common part of both ports. No request handling."""

from __future__ import annotations

from collections.abc import MutableMapping, Sequence
from typing import Any

from pydantic import BaseModel
from pydantic_core import to_json
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from mmd_api.contract import paths
from mmd_api.contract.errors import MethodNotAllowedError, NotFoundError
from mmd_workers.gateway import page
from mmd_workers.gateway.answers.exchange import ReceiveChannel, Scope, SendChannel
from mmd_workers.gateway.api import openapi
from mmd_workers.gateway.api.audit import AuditMiddleware
from mmd_workers.gateway.api.authentication import AuthenticationMiddleware, tenant_of
from mmd_workers.gateway.api.chat.chat_endpoint import ChatCompletions
from mmd_workers.gateway.api.completions.completions_endpoint import TextCompletions
from mmd_workers.gateway.api.error_shapes import errors_at
from mmd_workers.gateway.api.files.files_endpoint import (
    DeleteFile,
    GetContent,
    GetFile,
    ListFiles,
    UploadFile,
)
from mmd_workers.gateway.api.gateway import Gateway
from mmd_workers.gateway.api.messages.messages_endpoint import AnthropicMessages, CountTokens
from mmd_workers.gateway.api.responses.responses_endpoint import Responses
from mmd_workers.gateway.api.state_answers import Alive, ModelList, Readiness, ServedModel
from mmd_workers.gateway.api.tokenize import Detokenize, Tokenize
from mmd_workers.gateway.basics.api_errors import ApiError

EMBEDDINGS = "/v1/embeddings"
FOR_CLIENTS = "POST /v1/chat/completions, /v1/completions, /v1/responses, /v1/messages, /v1/messages/count_tokens, /v1/files, /tokenize, /detokenize, GET /v1/models, /openapi.json, /health, /ready"


def build_app(gateway: Gateway) -> Starlette:
    """The application for clients: API, health, web page. Unknown paths and methods get errors in the API's shape."""
    asks_for_key = gateway.access is not None
    is_open = [
        *health_routes(gateway),
        *page.routes(lambda: gateway.settings.web_page, asks_for_key=asks_for_key),
    ]
    return application(gateway, is_open, FOR_CLIENTS)


def application(gateway: Gateway, is_open: Sequence[Route], known: str) -> Starlette:
    """An application with the API and the routes in `is_open`; an error about any other path or method lists the `known` ones.

    If API keys are required, every path that is not in `is_open` requires one, including unknown paths.
    """
    middleware = [
        Middleware(_SlashMiddleware),
        Middleware(_FarewellMiddleware, gateway=gateway),
        Middleware(AuditMiddleware, gateway=gateway, open_routes=is_open),
    ]
    if gateway.access is not None:
        middleware.append(
            Middleware(
                AuthenticationMiddleware, access=gateway.access, tokens=gateway.tokens, open_routes=is_open
            )
        )

    async def http_error(request: Request, error: Exception) -> Response:
        status = error.status_code if isinstance(error, HTTPException) else 500
        kind = MethodNotAllowedError if status == 405 else NotFoundError
        what = "path or method not found"
        if request.url.path == EMBEDDINGS:
            what = f"the model {gateway.settings.models[0]!r} generates text and makes no embeddings; use a deployment that has a model for them"
        fault = ApiError(kind(f"{what}; this port serves {known}"))
        errors = errors_at(request.url.path)
        return JSONResponse(errors.body(fault, ""), errors.status(fault))

    app = Starlette(
        middleware=middleware,
        routes=[*_api_routes(gateway), *is_open],
        exception_handlers={HTTPException: http_error},
    )
    app.router.redirect_slashes = False  # a redirect would go to the address in the client's own Host header
    return app


def _api_routes(gateway: Gateway) -> list[Route]:
    """The routes of the API, for both ports."""

    async def models(request: Request) -> Response:
        names = gateway.names_for(tenant_of(request.scope))
        return _json(ModelList(data=[_model(gateway, name, names) for name in names]))

    async def model(request: Request) -> Response:
        name, tenant = request.path_params["name"], tenant_of(request.scope)
        try:
            gateway.check_model(name, tenant)
        except ApiError as error:
            return JSONResponse(error.body(), error.status)
        return _json(_model(gateway, name, gateway.names_for(tenant)))

    async def openapi_document(_request: Request) -> Response:
        return Response(openapi.document(), media_type="application/json")

    return [
        Route("/v1/chat/completions", ChatCompletions(gateway), methods=["POST"]),
        Route("/v1/completions", TextCompletions(gateway), methods=["POST"]),
        Route("/v1/responses", Responses(gateway), methods=["POST"]),
        Route("/v1/messages", AnthropicMessages(gateway), methods=["POST"]),
        Route("/v1/messages/count_tokens", CountTokens(gateway), methods=["POST"]),
        Route("/tokenize", Tokenize(gateway), methods=["POST"]),
        Route("/detokenize", Detokenize(gateway), methods=["POST"]),
        Route(openapi.PATH, openapi_document),
        Route("/v1/files", UploadFile(gateway), methods=["POST"]),
        Route("/v1/files", ListFiles(gateway), methods=["GET"]),
        Route("/v1/files/{file_id}", GetFile(gateway), methods=["GET"]),
        Route("/v1/files/{file_id}", DeleteFile(gateway), methods=["DELETE"]),
        Route("/v1/files/{file_id}/content", GetContent(gateway), methods=["GET"]),
        Route("/v1/models", models),
        Route("/v1/models/{name:path}", model),
    ]


def health_routes(gateway: Gateway) -> list[Route]:
    """The routes for probes and load balancers, on both ports and without a key."""

    async def health(_request: Request) -> Response:
        return _json(Alive())

    async def takes_traffic(_request: Request) -> Response:
        """Answer readiness probes.

        A gateway without workers is ready: it holds requests until a pool has grown from zero. A draining gateway is ready too: Kubernetes
        sends it new connections only while no other gateway is Ready, and would otherwise refuse them. A gateway that requires API keys or a
        certificate and has none is not ready, so a rollout that turns them on stops there instead of refusing everybody. Nor is a gateway
        that drains because one of its parts failed: Kubernetes does not know that it is about to end.
        """
        starting = "" if gateway.listening else "starting"
        return readiness(gateway.failed or starting or _cut_off(gateway) or gateway.unusable)

    async def ready(_request: Request) -> Response:
        reason = (
            "draining"
            if gateway.draining
            else _cut_off(gateway) or gateway.unusable or _missing_pods(gateway)
        )
        return readiness(reason)

    def readiness(reason: str) -> Response:
        pods = gateway.dispatcher.ready_pods()
        return _json(Readiness(ready=not reason, reason=reason, ready_pods=pods), 503 if reason else 200)

    return [
        Route("/health", health),
        Route(paths.LIVEZ, health),
        Route("/ready", ready),
        Route(paths.READYZ, takes_traffic),
    ]


class _SlashMiddleware:
    """Drops a slash at the end of the path before anything else reads it: some clients add one to every path."""

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: ReceiveChannel, send: SendChannel) -> None:
        if scope["type"] == "http" and len(scope["path"]) > 1:
            scope["path"] = scope["path"].removesuffix("/")
        await self._app(scope, receive, send)


class _FarewellMiddleware:
    """Closes each connection after its answer while the gateway drains, so that the client's next request reaches another pod."""

    def __init__(self, app: Any, gateway: Gateway) -> None:
        self._app = app
        self._gateway = gateway

    async def __call__(self, scope: Scope, receive: ReceiveChannel, send: SendChannel) -> None:
        async def closing(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start" and self._gateway.draining:
                message = {**message, "headers": [*message.get("headers", ()), (b"connection", b"close")]}
            await send(message)

        await self._app(scope, receive, closing)


def _json(answer: BaseModel, status: int = 200) -> Response:
    return Response(to_json(answer), status, media_type="application/json")


def _model(gateway: Gateway, name: str, names: Sequence[str]) -> ServedModel:
    """The entry of a model. An adapter has its model as `parent`, as in vLLM, if that model is among the `names` that the client sees."""
    adapter, model = gateway.adapter_of(name), gateway.settings.models[0]
    return ServedModel(
        id=name,
        created=int(gateway.started),
        max_model_len=gateway.model_len() or gateway.frontend.max_model_len,
        modalities=["text", *sorted(gateway.frontend.modalities)],
        parent=model if adapter and model in names else None,
    )


def _cut_off(gateway: Gateway) -> str:
    return "" if gateway.bus.is_connected else "no connection to NATS"


def _missing_pods(gateway: Gateway) -> str:
    """Names the roles that no ready pod of this revision holds; a model without media needs no encoder."""
    missing = [
        role
        for role, count in gateway.dispatcher.ready_pods().items()
        if not count and (role != "encode" or gateway.frontend.modalities)
    ]
    return f"no ready pod for {' and '.join(missing)}: requests are waiting for one" if missing else ""
