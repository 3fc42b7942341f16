#!/usr/bin/env bash
# openai 3.54.0: once a stream of events has had an `id:`, each comment in it ends the stream with a JSONDecodeError.
#
# Servers keep a silent stream open with comments, such as ": waiting" and an empty line. The standard of server-sent events dispatches
# nothing at an empty line if no data has come since the last event. The client's decoder keeps the id of an earlier event, as the
# standard says, and takes it for a reason to dispatch: it yields an event whose data is empty, which the client then parses as JSON.
# Without ids, or without the empty line after the comment, the same stream is read to its end.
#
# Seen: the stream without ids and the one without empty lines give both pieces; the other one gives the first, then raises
# JSONDecodeError. Exit status 1 if that changes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check openai==3.54.0
cat >"$folder/stream.py" <<'PYTHON'
import json
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import openai


def chunk(text):
    choice = {"index": 0, "delta": {"content": text}, "finish_reason": None}
    return "data: " + json.dumps({"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "m", "choices": [choice]}) + "\n\n"


STREAMS = {
    "no ids": chunk("a") + ": waiting\n\n" + chunk("b"),
    "ids": "id: 1\n" + chunk("a") + ": waiting\n\n" + "id: 2\n" + chunk("b"),
    "ids, no empty line": "id: 1\n" + chunk("a") + ": waiting\n" + "id: 2\n" + chunk("b"),
}


class Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        name = json.loads(self.rfile.read(int(self.headers["content-length"])))["messages"][0]["content"]
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.end_headers()
        self.wfile.write((STREAMS[name] + "data: [DONE]\n\n").encode())

    def log_message(self, *_):
        pass


server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
threading.Thread(target=server.serve_forever, daemon=True).start()
client = openai.OpenAI(base_url=f"http://127.0.0.1:{server.server_port}", api_key="any", max_retries=0)


def read(name):
    pieces = []
    try:
        for part in client.chat.completions.create(model="m", messages=[{"role": "user", "content": name}], stream=True):
            pieces.append(part.choices[0].delta.content)
    except Exception as error:
        pieces.append(type(error).__name__)
    return pieces


seen = {name: read(name) for name in STREAMS}
print(seen)
sys.exit(seen != {"no ids": ["a", "b"], "ids": ["a", "JSONDecodeError"], "ids, no empty line": ["a", "b"]})
PYTHON
"$folder/venv/bin/python" "$folder/stream.py"
