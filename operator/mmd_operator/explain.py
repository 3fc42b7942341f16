"""Explains pool sizes and the rollout from a deployment's status, rule by rule, as lines for people."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, get_args

from kubernetes.aio import client

from mmd_api.contract.pools import POOL_NAMES
from mmd_api.resource import GROUP, PLURAL, VERSION
from mmd_api.status import ConditionType, PoolThroughput
from mmd_operator.kube.cluster import REQUEST_SECONDS, UNREACHABLE, words_of
from mmd_operator.serve import api_client

CONDITIONS: tuple[ConditionType, ...] = get_args(ConditionType)


class NoDeploymentError(Exception):
    """There is nothing to explain; the message gives the reason."""


async def status_of(namespace: str, name: str) -> dict[str, Any]:
    """The status of a deployment in the kubeconfig's cluster.

    Raises:
        NoDeploymentError: the deployment does not exist or may not be read, or the API server does not answer.
    """
    async with api_client() as api:
        custom = client.CustomObjectsApi(api)
        try:
            body = await custom.get_namespaced_custom_object(
                GROUP, VERSION, namespace, PLURAL, name, _request_timeout=REQUEST_SECONDS
            )
        except client.ApiException as error:
            raise NoDeploymentError(words_of(error)) from error
        except UNREACHABLE as error:
            raise NoDeploymentError(f"cannot reach the API server ({error!r})") from error
    status: dict[str, Any] = body.get("status", {})
    return status


def lines(status: Mapping[str, Any]) -> list[str]:
    """List each pool with its current decision and the rules behind it, the rollout steps, the bottleneck, and all conditions."""
    if not status:
        return ["no operator has reconciled it yet"]
    text = []
    for pool in POOL_NAMES:
        pool_status = status.get("pools", {}).get(pool)
        if pool_status is None:
            continue
        draining = f", {pool_status['draining']} draining" if pool_status.get("draining") else ""
        text.append(
            f"{pool}: {pool_status.get('ready', 0)} of {pool_status.get('desired', 0)} ready{draining}"
        )
        if (last := pool_status.get("lastDecision")) is not None:
            text.append(f"  {last['time']}  {last['message']}")
            text += [f"    {_rule(effect)}: {effect['message']}" for effect in last.get("effects", ())]
        if (change := pool_status.get("lastChange")) is not None and change != last:
            text.append(f"  {change['time']}  last change: {change['message']}")
        if (measured := pool_status.get("throughput")) is not None:
            text.append(f"  {measured['time']}  one replica processes {_throughput(measured)}")
    if steps := status.get("rollout"):
        text.append("rollout:")
        text += [f"    {effect['step']}: {effect['message']}" for effect in steps]
    if bottleneck := status.get("bottleneck"):
        text.append(f"bottleneck: {bottleneck}")
    conditions = {condition["type"]: condition for condition in status.get("conditions", ())}
    for kind in CONDITIONS:
        if (condition := conditions.get(kind)) is not None:
            text.append(f"{kind}: {condition['status']} ({condition['reason']}) {condition['message']}")
    return text


def _rule(effect: Mapping[str, Any]) -> str:
    """A rule and its limit: `cool_down (Cooldown)`."""
    return f"{effect['rule']} ({effect['limit']})" if effect.get("limit") else str(effect["rule"])


def _throughput(measured: Mapping[str, Any]) -> str:
    """Rates by kind of work: `1,200 tokens/s`, `60,000 video work/s`."""
    rates = PoolThroughput.model_validate(measured).rates
    return ", ".join(
        f"{rate:,.0f} {kind if kind == 'tokens' else f'{kind} work'}/s" for kind, rate in rates.items()
    )
