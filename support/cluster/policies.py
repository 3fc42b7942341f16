"""Evaluates NetworkPolicies as their API defines them.

Policies add up, and a pod that none selects for a direction is open in it. Knows what this project's policies
have, and fails at anything else rather than guess: named ports, for one.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

Labels = dict[str, str]


@dataclass(frozen=True, slots=True)
class Place:
    """An end of a connection: a pod, or an address outside the cluster (no labels)."""

    labels: Labels | None = None
    address: str = "10.244.0.7"
    namespace: str = "x"
    namespace_labels: Labels = field(default_factory=dict)


def lets_through(
    policies: Iterable[dict[str, Any]], source: Place, target: Place, port: int, protocol: str = "TCP"
) -> bool:
    """Whether a connection passes the policies for egress of its source and those for ingress of its target."""
    policies = list(policies)
    return all(
        _passes(policies, direction, pod, peer, port, protocol)
        for direction, pod, peer in (("Egress", source, target), ("Ingress", target, source))
    )


def selects(selector: dict[str, Any], labels: Labels) -> bool:
    """Whether a label selector selects something with these labels; an empty one selects everything."""
    _only(selector, "matchLabels", "matchExpressions")
    return all(labels.get(key) == value for key, value in selector.get("matchLabels", {}).items()) and all(
        _expression(each, labels) for each in selector.get("matchExpressions", ())
    )


def _expression(expression: dict[str, Any], labels: Labels) -> bool:
    value = labels.get(expression["key"])
    match expression["operator"]:
        case "In":
            return value in expression["values"]
        case "NotIn":
            return value not in expression["values"]
        case "Exists":
            return value is not None
        case "DoesNotExist":
            return value is None
        case other:
            raise ValueError(f"no operator of a label selector: {other}")


def _passes(
    policies: list[dict[str, Any]], direction: str, pod: Place, peer: Place, port: int, protocol: str
) -> bool:
    if pod.labels is None:
        return True
    applying = [
        policy["spec"]
        for policy in policies
        if policy["metadata"]["namespace"] == pod.namespace
        and direction in _directions(policy["spec"])
        and selects(policy["spec"]["podSelector"], pod.labels)
    ]
    key, ends = direction.lower(), "to" if direction == "Egress" else "from"
    return not applying or any(
        _rule(rule, ends, pod, peer, port, protocol) for spec in applying for rule in spec.get(key, ())
    )


def _directions(spec: dict[str, Any]) -> list[str]:
    _only(spec, "podSelector", "policyTypes", "ingress", "egress")
    return spec.get("policyTypes") or ["Ingress", *(["Egress"] if "egress" in spec else [])]


def _rule(rule: dict[str, Any], ends: str, pod: Place, peer: Place, port: int, protocol: str) -> bool:
    _only(rule, ends, "ports")
    at_port = not rule.get("ports") or any(_port(each, port, protocol) for each in rule["ports"])
    return at_port and (not rule.get(ends) or any(_peer(each, pod, peer) for each in rule[ends]))


def _port(rule_port: dict[str, Any], port: int, protocol: str) -> bool:
    _only(rule_port, "port", "endPort", "protocol")
    first = rule_port.get("port")
    if not isinstance(first, int | None):
        raise TypeError(f"a named port: {first}")
    last = rule_port.get("endPort", first)
    return rule_port.get("protocol", "TCP") == protocol and (first is None or first <= port <= last)


def _peer(rule_peer: dict[str, Any], pod: Place, peer: Place) -> bool:
    _only(rule_peer, "podSelector", "namespaceSelector", "ipBlock")
    if (block := rule_peer.get("ipBlock")) is not None:
        # Network plugins differ on whether an ipBlock applies to pods, so it counts only for addresses outside the cluster.
        address = ipaddress.ip_address(peer.address)
        inside = [ipaddress.ip_network(each) for each in block.get("except", ())]
        return (
            peer.labels is None
            and address in ipaddress.ip_network(block["cidr"])
            and not any(address in each for each in inside)
        )
    if peer.labels is None:
        return False
    if "namespaceSelector" in rule_peer:
        in_namespace = selects(rule_peer["namespaceSelector"], peer.namespace_labels)
    else:
        in_namespace = peer.namespace == pod.namespace
    return in_namespace and selects(rule_peer.get("podSelector", {}), peer.labels)


def _only(mapping: dict[str, Any], *keys: str) -> None:
    if unknown := set(mapping) - set(keys):
        raise ValueError(f"the evaluator does not know {sorted(unknown)} of a NetworkPolicy")
