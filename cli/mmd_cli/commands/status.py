"""`mmd status`: shows the pods of the deployment running on this machine."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any

import httpx
import typer
from rich.table import Table

from mmd_api.contract import paths
from mmd_cli.console import NO_KEYS, NameOption, console, fail
from mmd_cli.errors import CommandError
from mmd_cli.local import state


def status(
    name: NameOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, for scripts.")] = False,
) -> None:
    """Show the pods of the deployment running on this machine: roles, state, work in progress."""
    try:
        running = state.find(name)
    except CommandError as error:
        raise fail(error) from error
    pods = []
    for pod in running.pods:
        path = paths.GATEWAY_STATE if pod.component == "gateway" else paths.WORKER_STATE
        try:
            facts = httpx.get(pod.admin_url + path, timeout=3.0).json()
        except (httpx.HTTPError, ValueError):
            facts = {"state": "unreachable"}
        pods.append({"pod": pod.name, "component": pod.component, "url": pod.admin_url, **facts})
    if as_json:
        sys.stdout.write(
            json.dumps(
                {
                    "name": running.name,
                    "gateway": running.gateway_url,
                    "admin": running.admin_url,
                    "pods": pods,
                },
                indent=1,
            )
            + "\n"
        )
        return
    table = Table(title=f"{running.name} at {running.gateway_url}", title_justify="left")
    headings = (
        "pod",
        "roles",
        "state",
        "encode work",
        "waiting tokens",
        "sequences",
        "KV blocks used",
        "measured",
    )
    for heading in headings:
        table.add_column(heading)
    for facts in pods:
        load = facts.get("load", {})
        used = load.get("kv_blocks_total", 0) - load.get("kv_blocks_free", 0)
        table.add_row(
            facts["pod"],
            ", ".join(facts.get("roles", [facts["component"]])),
            facts.get("state", "unknown"),
            str(sum(load.get("encode_queued_work", {}).values())) if load else "",
            str(load.get("prefill_waiting_tokens", "")),
            f"{load['decode_running']}/{load['decode_max_sequences']}"
            if load.get("decode_max_sequences")
            else "",
            f"{used}/{load['kv_blocks_total']}" if load.get("kv_blocks_total") else "",
            _measured(load),
        )
    console.print(table)
    for line in (*_access(pods), *_quality(pods)):
        console.print(line, highlight=False, soft_wrap=True)
    for decision in running.decisions.values():
        console.print(decision, highlight=False, soft_wrap=True)


def _access(pods: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield who may use the gateways, as reported by those that answer."""
    for facts in pods:
        auth = facts.get("auth")
        if auth is None:
            continue
        if not auth["enabled"]:
            yield f"API keys: {NO_KEYS}"
            break
        fault = f"; its file of keys cannot be used: {auth['fault']}" if auth["fault"] else ""
        yield f"API keys: needed; tenants that {facts['pod']} knows: {auth['tenants']}{fault}"
        if auth.get("issuer_fault"):
            yield f"tokens: {facts['pod']} cannot fetch the keys of their issuer: {auth['issuer_fault']}"
    for facts in pods:
        if (tls := facts.get("tls", {})).get("fault"):
            yield f"TLS: {facts['pod']} cannot use its certificate: {tls['fault']}"


def _quality(pods: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield the gateways that reduce media because of load."""
    for facts in pods:
        if tier := facts.get("media_tier"):
            yield (
                f"media: {facts['pod']} sends less of each, tier {tier} of spec.gateway.media.underLoad; if it stays so, add encoder and "
                "prefill replicas"
            )


def _measured(load: Mapping[str, Any]) -> str:
    """The pod's measured throughput per second, by kind of work."""
    rates = [f"{rate:,.0f} {kind}/s" for kind, rate in load.get("encode_work_per_second", {}).items()]
    tokens = load.get("prefill_tokens_per_second", 0.0)
    return ", ".join([*rates, *([f"{tokens:,.0f} tokens/s"] if tokens else [])])
