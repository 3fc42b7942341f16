"""Which iptables rules belong to the cluster of this run, and how to delete those and no others."""

from __future__ import annotations

import re
import shutil

from e2e.shell import run

NETWORK = "multimodal-e2e"
"""Name of the pod network. The bridge plugin writes it into the comment of every rule it makes."""
STRAYS = "MULTIMODAL-E2E-STRAYS"
"""The chain that refuses what no rule of kube-proxy has sent on."""
FAMILIES = ("iptables", "ip6tables")
_CHAIN = re.compile(r"^:(\S+) ")
_RULE = re.compile(r"^-A (\S+) ")
_JUMP = re.compile(r" -[jg] (\S+)")


def rules_of_kube_proxy() -> list[str]:
    """The rules and chains that a kube-proxy or kubelet has on this host, whichever cluster it belongs to."""
    return [line for family in _families() for line in run(f"{family}-save").splitlines() if _is_kube(line)]


def refuse_strays(services: str) -> None:
    """Refuse packets that still have the address of a service (`services`: all of them, CIDR) when they leave.

    While kube-proxy exchanges its rules, a service may have neither an endpoint nor the rule that refuses connections: for that moment
    packets would follow the default route out of this host, and whatever answers there would answer for the service.
    """
    rules = ["*filter", f":{STRAYS} - [0:0]", f"-A {STRAYS} -d {services} -j REJECT"]
    jumps = [f"-A {hook} -j {STRAYS}" for hook in ("FORWARD", "OUTPUT")]
    run("iptables-restore", "--noflush", stdin="\n".join([*rules, *jumps, "COMMIT", ""]))


def leftovers(*, kube: bool) -> list[str]:
    """What `clear` would delete."""
    return [
        line
        for family in _families()
        for line in removal(run(f"{family}-save"), kube=kube).splitlines()
        if line.startswith("-")
    ]


def clear(*, kube: bool) -> None:
    """Delete the chains of our pod network, that of strays and, with `kube`, those of kube-proxy and kubelet.

    Rules are deleted one by one: restoring a filtered copy of all tables would undo what other programs changed meanwhile.
    """
    for family in _families():
        commands = removal(run(f"{family}-save"), kube=kube)
        if commands:
            run(f"{family}-restore", "--noflush", stdin=commands)


def removal(saved: str, *, kube: bool) -> str:
    """Input for `iptables-restore --noflush` that deletes our rules and chains from the tables that `iptables-save` printed.

    Chains of the bridge plugin (CNI-…) are ours if one of their rules, or a rule that jumps to them, names our network in its comment.
    """
    mark = f'"name: \\"{NETWORK}\\" id: '
    output: list[str] = []
    for table in re.split(r"(?m)^(?=\*)", saved):
        lines = table.splitlines()
        named = [line for line in lines if mark in line]
        ours = {STRAYS} | {chain for line in named for chain in _chains(line) if chain.startswith("CNI-")}
        if kube:
            ours |= {match[1] for line in lines if (match := _CHAIN.match(line)) and _is_kube(line)}
        entries = [
            f"-D {line[3:]}"
            for line in lines
            if (rule := _RULE.match(line))
            and rule[1] not in ours
            and (jump := _JUMP.search(line))
            and jump[1] in ours
        ]
        present = sorted(ours & {match[1] for line in lines if (match := _CHAIN.match(line))})
        changes = [*entries, *(f"-F {chain}" for chain in present), *(f"-X {chain}" for chain in present)]
        if changes:
            output += [lines[0], *changes, "COMMIT"]
    return "".join(f"{line}\n" for line in output)


def _chains(rule: str) -> list[str]:
    """The chain that holds a rule and the one it jumps to."""
    return [match[1] for pattern in (_RULE, _JUMP) if (match := pattern.search(rule))]


def _is_kube(line: str) -> bool:
    return line.startswith((":KUBE-", "-A KUBE-")) or " -j KUBE-" in line


def _families() -> list[str]:
    return [family for family in FAMILIES if shutil.which(f"{family}-save")]
