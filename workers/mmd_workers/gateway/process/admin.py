"""The routes for administrators, on a dedicated port: metrics, state, demand, recent requests, scrape targets."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import asdict
from typing import Any, get_args

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from mmd_api.contract import paths
from mmd_api.contract.errors import NotFoundError
from mmd_api.contract.load import MAX_FAULT_CHARACTERS, WorkerState
from mmd_api.contract.pools import ROLES
from mmd_workers.gateway import page
from mmd_workers.gateway.api.app import FOR_CLIENTS, application, health_routes
from mmd_workers.gateway.api.gateway import Gateway
from mmd_workers.gateway.basics.api_errors import ApiError
from mmd_workers.observe.server import scraped
from mmd_workers.wire.messages.every_pod import Heartbeat

MAX_STATE_PODS = 256
DEFAULT_REQUEST_LIMIT = 100
MAX_LIMIT_DIGITS = 9


def build_admin_app(gateway: Gateway, heartbeat: Callable[[], Heartbeat]) -> Starlette:
    """The application for administrators: the API for clients, with keys if they are required, and routes for administrators.

    `heartbeat`: returns the gateway's state.
    """
    asks_for_key = gateway.access is not None
    return application(
        gateway,
        [
            *health_routes(gateway),
            *_admin_routes(gateway, heartbeat),
            *page.routes(lambda: gateway.settings.web_page, admin=True, asks_for_key=asks_for_key),
        ],
        f"{FOR_CLIENTS}, {paths.METRICS}, {paths.GATEWAY_DEMAND}, "
        f"{paths.GATEWAY_REQUESTS}, {paths.GATEWAY_STATE}",
    )


def _admin_routes(gateway: Gateway, heartbeat: Callable[[], Heartbeat]) -> list[Route]:
    async def metrics(request: Request) -> Response:
        _sample(gateway)
        return scraped(gateway.metrics, request)

    async def requests(request: Request) -> Response:
        limit = request.query_params.get("limit", "")
        count = int(limit) if limit.isdecimal() and len(limit) <= MAX_LIMIT_DIGITS else DEFAULT_REQUEST_LIMIT
        timelines = gateway.dispatcher.timelines.newest(count)
        return JSONResponse({"requests": timelines})

    async def request_by_id(request: Request) -> Response:
        timeline = gateway.dispatcher.timelines.get(request.path_params["request_id"])
        if timeline is None:
            error = ApiError(NotFoundError("request not found; this gateway keeps only the newest 512"))
            return JSONResponse(error.body(), error.status)
        return JSONResponse(timeline.to_json())

    async def state(_request: Request) -> Response:
        pods = gateway.directory.pods(state=None)
        workers = [beat for beat in pods if beat.roles]
        return JSONResponse(
            {
                **asdict(heartbeat()),
                "running": gateway.running,
                "limits": {
                    "max_body_bytes": gateway.settings.max_body_bytes,
                    "max_concurrent_requests": gateway.settings.max_concurrent_requests,
                },
                "retained": {
                    "answers": len(gateway.repeats.answers),
                    "bytes": gateway.repeats.answers.used_bytes,
                },
                "auth": _auth(gateway),
                "tls": gateway.certificate.summary()
                if gateway.certificate is not None
                else {"enabled": False},
                "media_tier": gateway.intake.tiers.number if gateway.intake.tiers is not None else None,
                "num_pods": len(workers),
                "pods": [asdict(beat) for beat in workers[:MAX_STATE_PODS]],
            }
        )

    async def demand(_request: Request) -> Response:
        beat = heartbeat()
        held_requests = gateway.dispatcher.held_by_role()
        report = gateway.demand.report(
            beat.pod, beat.revision, held_requests, gateway.settings.slo.percentile
        )
        faults = {}
        if gateway.access is not None:
            faults["keys_fault"] = gateway.access.fault[:MAX_FAULT_CHARACTERS]
            default = gateway.tokens.default_tenant if gateway.tokens is not None else None
            if default and gateway.access.lacks(default):
                faults["missing_tenant"] = default
        if gateway.certificate is not None:
            faults["tls_fault"] = gateway.certificate.fault[:MAX_FAULT_CHARACTERS]
        if gateway.tokens is not None:
            faults["issuer_fault"] = gateway.tokens.keys.fault[:MAX_FAULT_CHARACTERS]
        if gateway.picker is not None:
            faults["picker_fault"] = gateway.picker.fault[:MAX_FAULT_CHARACTERS]
        report = report.model_copy(update=faults)
        if gateway.admissions is not None:
            report = report.model_copy(update={"waiting": gateway.admissions.demand()})
        return JSONResponse(report.model_dump(mode="json"))

    async def targets(_request: Request) -> Response:
        """Scrape targets in the format of Prometheus's HTTP service discovery."""
        common = {"namespace": gateway.bus.subjects.namespace, "deployment": gateway.bus.subjects.name}
        beats = [*gateway.directory.pods(state=None), heartbeat()]
        return JSONResponse(
            [
                {
                    "targets": [beat.http_endpoint],
                    "labels": {**common, "pod": beat.pod, "component": beat.pool},
                }
                for beat in {beat.pod: beat for beat in beats}.values()
            ]
        )

    return [
        Route(paths.METRICS, metrics),
        Route(paths.GATEWAY_DEMAND, demand),
        Route(paths.GATEWAY_STATE, state),
        Route(paths.GATEWAY_REQUESTS, requests),
        Route(paths.GATEWAY_TARGETS, targets),
        Route(paths.GATEWAY_REQUESTS + "/{request_id}", request_by_id),
    ]


def _auth(gateway: Gateway) -> dict[str, Any]:
    if gateway.access is None:
        return {"enabled": False}
    tokens = {"issuer_fault": gateway.tokens.keys.fault} if gateway.tokens is not None else {}
    return {**gateway.access.summary(), **tokens}


def _sample(gateway: Gateway) -> None:
    """Set the gauges that are computed only for a scrape."""
    dispatcher, hold, metrics = gateway.dispatcher, gateway.hold, gateway.metrics
    metrics.requests_running.set(gateway.running)
    metrics.held_bytes.set(hold.used_bytes)
    held_requests = dispatcher.held_by_role()
    pods = Counter((role, beat.state) for beat in gateway.directory.pods(state=None) for role in beat.roles)
    metrics.gateway_pods.clear()
    if gateway.access is not None:
        gateway.access.sample()
    if gateway.admissions is not None:
        gateway.admissions.sample()
    for role in ROLES:
        metrics.gateway_held.labels(role).set(held_requests.get(role, 0))
        metrics.gateway_pods.labels(role, "ready").set(0)
    for (role, state), count in pods.items():
        metrics.gateway_pods.labels(role, state).set(count)
    for state in get_args(WorkerState):
        metrics.pod_state.labels(state).set(state == ("draining" if gateway.draining else "ready"))
    metrics.gateway_sequences.set(dispatcher.live_sequences)
    if gateway.files is not None:
        metrics.file_bytes.set(gateway.files.used_bytes)
        metrics.file_budget.set(gateway.files.max_bytes)
        metrics.file_items.set(gateway.files.num_entries)
    metrics.media_budget.set(hold.budget_bytes)
    metrics.media_items.set(hold.held_media)
    metrics.media_waiting.set(hold.waiting)
    metrics.answer_bytes.set(gateway.answers.used_bytes)
    metrics.answer_budget.set(gateway.answers.budget_bytes)
    metrics.answers_waiting.set(gateway.answers.waiting)
