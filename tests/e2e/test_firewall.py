"""What the cluster of `make e2e` deletes from a host's firewall, tried with real iptables in a separate network namespace."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from e2e.own_cluster.firewall import NETWORK, STRAYS, removal
from support.harness.needed import lacking

ROOT = Path(__file__).parents[2]
OURS = f'-m comment --comment "name: \\"{NETWORK}\\" id: \\"0a1b\\""'
STRANGER = '-m comment --comment "name: \\"podman\\" id: \\"2c3d\\""'
RULES = f"""\
*nat
:PREROUTING ACCEPT [0:0]
:INPUT ACCEPT [0:0]
:OUTPUT ACCEPT [0:0]
:POSTROUTING ACCEPT [0:0]
:CNI-aaaa - [0:0]
:CNI-bbbb - [0:0]
:KUBE-SERVICES - [0:0]
-A PREROUTING -j KUBE-SERVICES
-A POSTROUTING -s 10.222.0.7/32 {OURS} -j CNI-aaaa
-A POSTROUTING -s 10.88.0.7/32 {STRANGER} -j CNI-bbbb
-A CNI-aaaa -d 10.222.0.0/16 {OURS} -j ACCEPT
-A CNI-bbbb -d 10.88.0.0/16 {STRANGER} -j ACCEPT
-A KUBE-SERVICES -d 10.223.0.1/32 -p tcp -m tcp --dport 443 -j ACCEPT
COMMIT
"""


def test_only_chains_of_our_own_network_are_deleted() -> None:
    assert removal(RULES, kube=False).splitlines() == [
        "*nat",
        f"-D POSTROUTING -s 10.222.0.7/32 {OURS} -j CNI-aaaa",
        "-F CNI-aaaa",
        "-X CNI-aaaa",
        "COMMIT",
    ]


def test_a_firewall_without_our_rules_is_left_alone() -> None:
    others = "".join(
        line for line in RULES.splitlines(keepends=True) if "KUBE" not in line and "aaaa" not in line
    )
    assert removal(others, kube=True) == ""


def test_real_iptables_keep_the_rules_of_other_tools() -> None:
    kept = [line for line in in_a_namespace(KEEP).splitlines() if line.startswith(("-A", ":"))]
    rules = [line for line in kept if line.startswith("-A")]
    assert len(rules) == 2
    assert all("podman" in line for line in rules)
    assert any(line.startswith(":CNI-bbbb") for line in kept)
    assert not any(name in line for line in kept for name in ("KUBE", "CNI-aaaa", STRAYS))


def test_a_packet_that_no_service_rule_forwards_is_refused_locally() -> None:
    assert in_a_namespace(REFUSE).split() == ["TimeoutError", "ConnectionRefusedError", "TimeoutError"]


KEEP = """
import subprocess, sys
from e2e.own_cluster import firewall
subprocess.run(["iptables-restore"], input=sys.stdin.read(), text=True, check=True)
firewall.refuse_strays("10.223.0.0/16")
firewall.clear(kube=True)
assert firewall.leftovers(kube=True) == [], firewall.leftovers(kube=True)
print(subprocess.run(["iptables-save"], capture_output=True, text=True, check=True).stdout)
"""
REFUSE = """
import socket, subprocess
from e2e.own_cluster import firewall

def attempt():
    try:
        socket.create_connection(("10.223.4.5", 8000), timeout=0.5)
    except OSError as error:
        print(type(error).__name__)

subprocess.run("ip link set lo up; ip link add out type veth peer name far; ip link set far up; ip address add 192.0.2.2/24 dev out; ip link set out up; "
               "ip route add default via 192.0.2.1; ip neigh add 192.0.2.1 lladdr 02:00:00:00:00:01 dev out",
               shell=True, check=True)
attempt()
firewall.refuse_strays("10.223.0.0/16")
attempt()
firewall.clear(kube=False)
attempt()
"""


def in_a_namespace(program: str) -> str:
    """What the program prints in a network of its own, with `RULES` as its input."""
    if missing := [tool for tool in ("unshare", "iptables-restore") if shutil.which(tool) is None]:
        lacking(f"not installed: {missing}")
    if os.geteuid() != 0:
        lacking("a network namespace needs root")
    done = subprocess.run(
        ["unshare", "--net", sys.executable, "-c", program],
        input=RULES,
        text=True,
        capture_output=True,
        timeout=60,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
