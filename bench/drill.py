"""The fault drill of docs/measurements/observe.md: load, a killed encoder, full KV, a message server that is gone.

Seen through the dashboards' queries on a real Prometheus. Writes the pictures and prints the values: `.venv/bin/python -m bench.drill docs/images`.
"""

from __future__ import annotations

import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import openai

from mmd_cli.pictures import Prometheus, TimeWindow, draw
from mmd_cli.samples import draw as sample
from mmd_dashboards.boards import BOARDS
from mmd_dashboards.panels import Panel
from mmd_dashboards.queries import KV_USED, filled
from support.harness.waiting import wait_until
from support.servers.prometheus_server import Prometheus as Server
from support.serving.local_deployment import Deployment
from support.serving.observed_fixture import KINDS, ask, content, observed_deployment

PANELS = {
    "overview": ("Requests per second", "Time to first token", "Time by phase", "Placed again"),
    "drill": ("Ready pods", "Redelivered jobs", "KV in use", "Sequences", "Round trip", "Pods without a connection"),
}  # fmt: skip


def panel(title: str) -> Panel:
    return next(p for board in BOARDS for p in board.panels() if p.title == title)


def main() -> None:
    images = Path(sys.argv[1])
    with tempfile.TemporaryDirectory() as folder:
        pools = {"decode": {"replicas": 2, "gpus": 0, "kvCacheMebibytes": 16, "maxSequences": 32}}
        path = observed_deployment(Path(folder) / "observed.yaml", **pools)
        with (
            Deployment(path, gateways=1) as deployment,
            Server.of_gateway(Path(folder), deployment.local.admin_url) as server,
        ):
            server.until_scraped(len(deployment.local.pods))
            drill(deployment, server, images)


def drill(deployment: Deployment, server: Server, images: Path) -> None:
    begun = time.time()
    over = threading.Event()
    failed: list[str] = []

    def clients(number: int) -> None:
        seed = 200_000 + 10_000 * number
        while not over.is_set():
            seed += 1
            try:
                ask(deployment, content(sample(KINDS[seed % 3], seed)))  # type: ignore[arg-type]
            except openai.OpenAIError as error:
                failed.append(str(error)[:200])
            over.wait(0.3)

    def value(expr: str) -> float:
        return server.value(filled(expr, "default", "observed", "20s"))

    def report(step: str, **values: float) -> None:
        figures = ", ".join(f"{name} {number:.3g}" for name, number in values.items())
        print(f"{time.time() - begun:6.1f} s  {step}: {figures}", flush=True)

    def promised() -> dict[str, float]:
        p95 = panel("Time to first token").queries[1].expr
        return {
            "requests_per_second": value(panel("Requests per second").queries[0].expr),
            "ttft_p95": value(p95),
        }

    threads = [threading.Thread(target=clients, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    time.sleep(40)
    report("quiet", **promised())

    encoder = deployment.pods("encoder")[0]
    killed = time.time()
    deployment.kill(encoder)
    time.sleep(6)
    report("encoder killed", ready_encoders=value('max(mmd_gateway_pods{role="encode",state="ready"})'),
        queue_jobs=value("sum(max by (modality) (mmd_encode_queue_jobs))"), pods_down=value("count(up == 0)"))  # fmt: skip
    wait_until(lambda: deployment.is_ready(encoder), f"{encoder.name} is ready", seconds=120)
    report(
        "encoder is back",
        after=time.time() - killed,
        queue_jobs=value("sum(max by (modality) (mmd_encode_queue_jobs))"),
    )
    time.sleep(15)
    report("its work is done again", redelivered=value("sum(mmd_encode_redeliveries_total)"), **promised())

    with ThreadPoolExecutor(36) as pool:
        story = {"max_tokens": 700, "temperature": 1.0, "extra_body": {"ignore_eos": True}}
        long = [pool.submit(ask, deployment, "Tell a long story.", **story) for _ in range(36)]
        highest, refused = 0.0, 0.0
        while not all(job.done() for job in long):
            highest = max(highest, value(f"max({KV_USED})"))
            refused = max(refused, value('sum(mmd_kv_leases_total{outcome="refused"})'))
            time.sleep(1)
    report("KV was full", highest_share=highest, leases_refused=refused, preempted=value("sum(mmd_preemptions_total)"),
        stories_failed=sum(job.exception() is not None for job in long))  # fmt: skip
    time.sleep(15)

    with deployment.without_nats():
        cut = time.time()
        time.sleep(8)
        report("NATS gone", pods_without_connection=value(panel("Pods without a connection").queries[0].expr))
    wait_until(
        lambda: value("sum(mmd_nats_connected) == count(mmd_nats_connected)") > 0,
        "everybody is connected",
        seconds=60,
    )
    report("NATS back", after=time.time() - cut, reconnects=value("sum(mmd_nats_reconnects_total)"))
    time.sleep(30)
    over.set()
    for thread in threads:
        thread.join(130)
    server.until_scraped(len(deployment.local.pods))
    lost = 'sum(mmd_requests_total{code=~"internal|peer_lost|link_failed|lease_ended|feature_lost|drained"})'
    report("in the end", ok=value('sum(mmd_requests_total{code="ok"})'), lost=value(lost), placed_again=value("sum(mmd_retries_total)"),
        moved_with_tokens=value("sum(mmd_migrations_total)"), client_errors=len(failed))  # fmt: skip
    for error in failed[:5]:
        print("   client saw:", error)
    asked, window = Prometheus(server.url), TimeWindow("default", "observed", begun, time.time())
    for name, titles in PANELS.items():
        drawn = [(panel(title), asked.lines(panel(title), window)) for title in titles]
        (images / f"observe-{name}.png").write_bytes(draw(drawn, form="png"))


if __name__ == "__main__":
    main()
