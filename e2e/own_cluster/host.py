"""The machine that the cluster borrows: its requirements, what on it is the cluster's, and its earlier state."""

from __future__ import annotations

import json
import os
import shutil
import socket
from pathlib import Path

from e2e.own_cluster import firewall
from e2e.own_cluster.places import PLUGINS, RUN, STATE
from e2e.shell import FailedError, command_line

PROGRAMS = {
    "containerd": "containerd",
    "runc": "runc",
    "ip": "iproute2",
    "iptables": "iptables",
    "conntrack": "conntrack",
    "xz": "xz-utils",
    "buildah": "buildah",
    "mmdebstrap": "mmdebstrap",
}
"""What must be on the PATH, and the Debian package that it comes from."""
SYSCTLS = (
    *("net/ipv4/ip_forward", "net/ipv4/conf/all/route_localnet", "net/bridge/bridge-nf-call-iptables"),
    *("vm/overcommit_memory", "vm/panic_on_oom", "kernel/panic", "kernel/panic_on_oops"),
    *("kernel/keys/root_maxkeys", "kernel/keys/root_maxbytes"),
)
"""What kubelet, kube-proxy and the bridge change."""
MADE = (Path("/var/lib/kubelet"), Path("/var/log/containers"), Path("/run/containerd"), Path("/var/lib/cni"))
"""Folders that kubelet, containerd and the network plugins make whatever their configuration."""


def check() -> None:
    """Whether this machine can be a cluster.

    Raises:
        FailedError: it cannot; the message says what to install.
    """
    if os.geteuid() != 0:
        raise FailedError("creating a cluster needs root: run as root, or install docker and kind")
    packages = [package for program, package in PROGRAMS.items() if shutil.which(program) is None]
    packages += [] if (PLUGINS / "bridge").exists() else ["containernetworking-plugins"]
    if packages:
        raise FailedError(f"apt-get install {' '.join(packages)}")
    if before():
        return  # of a run that was killed; `stop` removes it
    if rules := firewall.rules_of_kube_proxy():
        raise FailedError(
            f"{len(rules)} iptables rules of a kube-proxy are on this host ({rules[0]}): another Kubernetes node "
            "runs here, or left them; remove it, or use --cluster kind or current"
        )
    for address, port in (("127.0.0.1", 10248), ("127.0.0.1", 10249)):
        with socket.socket() as probe:
            if probe.connect_ex((address, port)) == 0:
                raise FailedError(f"port {port} is taken: another Kubernetes node runs on this machine")


def remember() -> None:
    """What is to be restored: kernel settings, network namespaces, and folders that were not there."""
    settings = {n: p.read_text() for n in SYSCTLS if (p := Path("/proc/sys") / n).exists()}
    names = os.listdir("/run/netns") if Path("/run/netns").exists() else []
    absent = [str(folder) for folder in MADE if not folder.exists()]
    facts = {"sysctls": settings, "namespaces": names, "absent": absent}
    (RUN / "before.json").write_text(json.dumps(facts))


def before() -> dict[str, object]:
    """What `remember` wrote; empty when it has not, or `stop` has removed it."""
    file = RUN / "before.json"
    found: dict[str, object] = json.loads(file.read_text()) if file.exists() else {}
    return found


def restore() -> None:
    facts = before()
    settings = facts.get("sysctls", {})
    assert isinstance(settings, dict)
    for name, value in settings.items():
        path = Path("/proc/sys") / name
        if path.read_text() != value:
            path.write_text(value)
    absent = facts.get("absent", [])
    assert isinstance(absent, list)
    for folder in absent:
        shutil.rmtree(folder, ignore_errors=True)


def namespaces() -> list[str]:
    """Of pods: those with a name that the network plugins give, and that were not there before."""
    known = before().get("namespaces", [])
    assert isinstance(known, list)
    folder = Path("/run/netns")
    names = os.listdir(folder) if folder.exists() and before() else []
    return [name for name in names if name.startswith("cni-") and name not in known]


def mounts(images: Path) -> list[str]:
    folders = (str(RUN), str(STATE), str(images))
    points = [line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    return [point for point in points if point.startswith(folders)]


def own_processes() -> dict[int, str]:
    pids = [int(name) for name in os.listdir("/proc") if name.isdigit() and int(name) != os.getpid()]
    lines = {pid: command_line(pid) for pid in pids}
    return {pid: words for pid, words in lines.items() if RUN.name in words}


def cgroups() -> list[Path]:
    return sorted(Path("/sys/fs/cgroup").glob("kubepods")) + sorted(Path("/sys/fs/cgroup").glob("*/kubepods"))


def remove_cgroups() -> None:
    for path in cgroups():
        for folder, _, _ in os.walk(path, topdown=False):
            os.rmdir(folder)
