"""The bridge that pods are on: made before the node starts, removed with what the network plugins left."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

from e2e.own_cluster import firewall
from e2e.own_cluster.host import namespaces
from e2e.own_cluster.places import BRIDGE, HOST, PODS, RUN, SERVICES, STATE
from e2e.shell import run


def make_bridge() -> None:
    if shutil.which("modprobe"):
        subprocess.run(["modprobe", "--quiet", "br_netfilter"], check=False, timeout=30)
    run("ip", "link", "add", BRIDGE, "type", "bridge")
    run("ip", "address", "add", f"{HOST}/16", "dev", BRIDGE)
    run("ip", "link", "set", BRIDGE, "up")
    for name in ("net/ipv4/ip_forward", "net/bridge/bridge-nf-call-iptables"):
        path = Path("/proc/sys") / name
        if path.exists():
            path.write_text("1")
    firewall.refuse_strays(SERVICES)
    plugin = {
        "type": "bridge",
        "bridge": BRIDGE,
        "isGateway": True,
        "ipMasq": True,
        "hairpinMode": True,
        "ipam": {
            "type": "host-local",
            "dataDir": str(STATE / "addresses"),
            "ranges": [[{"subnet": PODS}]],
            "routes": [{"dst": "0.0.0.0/0"}],
        },
    }
    network = {"cniVersion": "0.4.0", "name": firewall.NETWORK, "plugins": [plugin]}
    (RUN / "cni" / "10-e2e.conflist").write_text(json.dumps(network))


def remove_network(*, kube: bool) -> None:
    for name in namespaces():
        run("umount", "--lazy", Path("/run/netns") / name)
        (Path("/run/netns") / name).unlink()
    if Path(f"/sys/class/net/{BRIDGE}").exists():
        run("ip", "link", "delete", BRIDGE)
    firewall.clear(kube=kube)
