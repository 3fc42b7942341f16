import os
import subprocess
import sys

import psutil
import pytest

from mmd_api.contract.errors import PeerLostError
from mmd_workers.wire.server import NatsServer
from support.harness.waiting import DEADLINE_SECONDS


def test_the_port_and_the_directory_survive_a_restart(tmp_path):
    server = NatsServer(tmp_path)
    url, pid = server.start().url, server.pid
    server.stop()
    assert server.pid is None
    assert not psutil.pid_exists(pid)
    assert server.start().url == url
    server.kill()
    assert (tmp_path / "jetstream").is_dir()


def test_it_listens_on_loopback_alone(nats_server):
    (listening,) = [
        c for c in psutil.Process(nats_server.pid).net_connections("inet") if c.status == "LISTEN"
    ]
    assert listening.laddr.ip == "127.0.0.1"


def test_a_server_that_cannot_start_reports_why(tmp_path, nats_server):
    port = int(nats_server.url.rsplit(":", 1)[1])
    with pytest.raises(PeerLostError, match="address already in use"):
        NatsServer(tmp_path, port=port).start(timeout_seconds=DEADLINE_SECONDS)


def test_the_data_plane_needs_no_torch():
    modules = [
        "bulk",
        "bus",
        "codec",
        "embedding_receiver",
        "embedding_sender",
        "embeddings",
        "jobs",
        "media",
        "messages",
        "peers",
        "server",
    ]
    code = f"import sys; import {', '.join('mmd_workers.wire.' + m for m in modules)}; sys.exit('torch' in sys.modules)"
    assert (
        subprocess.run([sys.executable, "-c", code], env=os.environ, timeout=60, check=False).returncode == 0
    )
