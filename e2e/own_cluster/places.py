"""Where the cluster lives on this machine: its folders, and its addresses and names in the network."""

from __future__ import annotations

from pathlib import Path

RUN = Path("/run/multimodal-e2e")
"""Sockets, process ids, keys and configuration."""
STATE = Path("/var/lib") / RUN.name
"""etcd, volumes and logs."""
KEYS = RUN / "keys"
KUBECONFIG = RUN / "admin.kubeconfig"
BRIDGE = "mmd-e2e0"
HOST = "10.222.0.1"
PODS = "10.222.0.0/16"
SERVICES = "10.223.0.0/16"
API_SERVICE = "10.223.0.1"
DNS_SERVICE = "10.223.0.10"
NODE = "e2e"
PLUGINS = Path("/usr/lib/cni")
