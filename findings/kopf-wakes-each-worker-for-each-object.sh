#!/usr/bin/env bash
# kopf 1.45.2: at a start with an index, the number of wake-ups grows with the square of the number of listed objects.
#
# With an index, each listed object gets a toggle and a worker, and each worker waits until all toggles are gone. The set of toggles
# notifies all of its waiters whenever a toggle is made or dropped, though the set as a whole changes once. So with N objects each
# worker is woken up to N times before the first handler runs: twice as many objects take four times as long. No setting changes it.
#
# Here an HTTP server with N ConfigMaps answers kopf, and each evaluation of "are all indexed" is counted until all objects are indexed.
# Seen: about 31,000 evaluations for 250 objects and 125,000 for 500. Exit status 1 if that is no longer more than three times as many.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check kopf==1.45.2 aiohttp==3.14.5
cat >"$folder/count.py" <<'PYTHON'
import asyncio
import json
import logging
import os
import sys

import kopf
from aiohttp import web
from kopf._cogs.aiokits import aiotoggles

COUNT = int(sys.argv[1])
NAMES = [f"object-{number}" for number in range(COUNT)]
OBJECTS = [
    {"metadata": {"name": name, "namespace": "default", "uid": name, "resourceVersion": "1"}} for name in NAMES
]
VERBS = ["get", "list", "watch", "patch"]
KIND = {"name": "configmaps", "singularName": "configmap", "kind": "ConfigMap", "namespaced": True, "verbs": VERBS}
NAMESPACES = {"name": "namespaces", "singularName": "namespace", "kind": "Namespace", "namespaced": False, "verbs": VERBS}
evaluations = 0
indexed = set()
all_indexed = asyncio.Event()
own = aiotoggles.ToggleSet.is_on


def counted(self):
    global evaluations
    evaluations += 1
    return own(self)


aiotoggles.ToggleSet.is_on = counted


async def listed(request):
    if request.query.get("watch") != "true":
        return web.json_response({"metadata": {"resourceVersion": "1"}, "items": OBJECTS})
    response = web.StreamResponse()
    await response.prepare(request)
    await asyncio.sleep(3600)
    return response


async def main():
    application = web.Application()
    for path, answer in {
        "/api": {"versions": ["v1"]},
        "/apis": {"groups": []},
        "/api/v1": {"groupVersion": "v1", "resources": [KIND, NAMESPACES]},
        "/api/v1/namespaces": {"metadata": {"resourceVersion": "1"}, "items": []},
    }.items():
        application.router.add_get(path, lambda _, answer=answer: web.json_response(answer))
    application.router.add_get("/api/v1/configmaps", listed)
    runner = web.AppRunner(application)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = site._server.sockets[0].getsockname()[1]

    @kopf.on.login()
    def login(**_):
        return kopf.ConnectionInfo(server=f"http://127.0.0.1:{port}")

    @kopf.on.startup()
    def settings(settings, **_):
        settings.posting.enabled = False
        settings.scanning.disabled = True

    @kopf.index("v1", "configmaps")
    def names(name, **_):
        indexed.add(name)
        return {name: name}

    @kopf.on.event("v1", "configmaps")
    def seen(name, **_):
        seen_names.add(name)
        if len(seen_names) == COUNT:
            all_indexed.set()

    seen_names = set()
    operator = asyncio.create_task(kopf.operator(clusterwide=True, standalone=True))
    waiting = asyncio.create_task(all_indexed.wait())
    await asyncio.wait([operator, waiting], timeout=120, return_when=asyncio.FIRST_COMPLETED)
    assert all_indexed.is_set(), "not all objects were handled"
    print(json.dumps({"objects": COUNT, "evaluations": evaluations}), flush=True)


logging.disable(logging.CRITICAL)
loop = asyncio.new_event_loop()
loop.run_until_complete(main())
os._exit(0)
PYTHON
few=$("$folder/venv/bin/python" "$folder/count.py" 250)
many=$("$folder/venv/bin/python" "$folder/count.py" 500)
echo "$few"
echo "$many"
"$folder/venv/bin/python" -c '
import json, sys
few, many = (json.loads(text)["evaluations"] for text in sys.argv[1:])
print(f"twice as many objects: {many / few:.1f} times as many evaluations, {many / 500:.0f} for each object")
sys.exit(many < 3 * few)
' "$few" "$many"
