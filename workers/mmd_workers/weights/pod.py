"""The pod that fills a claim with weights. It reports progress over HTTP and the reason for its end by its exit status."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from mmd_api.contract import environment as env
from mmd_api.contract import paths
from mmd_api.contract.weights import EXIT_STATUS, WeightsError
from mmd_api.weights import Download
from mmd_workers.observe.logs import configure
from mmd_workers.weights import cache
from mmd_workers.weights.download import prefetch
from mmd_workers.weights.progress import DownloadProgress

log = logging.getLogger(__name__)


def run(downloads: list[Download], claim: str, last_words: Path) -> int:
    """Fill the cache and return the exit status. `last_words`: the file that Kubernetes reads when the container ends."""
    configure(os.environ.get(env.POD_NAME, "weights"))
    # Threads may be waiting for servers.
    signal.signal(signal.SIGTERM, lambda *_: os._exit(128 + signal.SIGTERM))
    progress = DownloadProgress()
    server = _serve(progress, int(os.environ.get(env.HTTP_PORT, "0")))
    try:
        prefetch(downloads, cache.root(), progress, claim)
    except WeightsError as error:
        log.critical("%s", error)
        return EXIT_STATUS[error.reason]
    finally:
        server.shutdown()
    last_words.write_text(progress.snapshot().dump())
    return 0


def _serve(progress: DownloadProgress, port: int) -> ThreadingHTTPServer:
    class Handler(BaseHTTPRequestHandler):
        timeout = 10

        def do_GET(self) -> None:
            is_served = self.path in (paths.WORKER_STATE, paths.LIVEZ)
            body = progress.snapshot().dump().encode() if is_served else b"{}"
            self.send_response(200 if is_served else 404)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Log nothing: most requests are probes."""

    server = ThreadingHTTPServer(("0.0.0.0", port), Handler)  # noqa: S104 - in a pod
    threading.Thread(target=server.serve_forever, name="state", daemon=True).start()
    return server


def end(status: int) -> None:
    """Exit at once: a thread may still be waiting for an unresponsive server."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
