"""One running deployment of the demo model for all tests that look at it from outside, and load for it.

Every test that uses `observed` belongs to the xdist group of the same name, so that it starts once.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from mmd_cli.local.pods import LocalPod
from mmd_cli.samples import draw
from support.harness.waiting import DEADLINE_SECONDS
from support.servers.otlp_collector import Collector
from support.serving.local_deployment import Deployment, content

ROOT = Path(__file__).resolve().parents[2]
KINDS = ("image", "video", "audio")
Series = tuple[str, tuple[tuple[str, str], ...]]


def observed_deployment(path: Path, name: str = "observed", **spec: Any) -> Path:
    """examples/demo.yaml with promises, so that there is something to keep or to miss.

    Its decoders are soon full, and compute short prompts themselves.
    """
    resource = yaml.safe_load((ROOT / "examples" / "demo.yaml").read_text())
    resource["metadata"]["name"] = name
    resource["spec"]["decode"] |= {"kvCacheMebibytes": 32, "localPrefillTokens": 48}
    resource["spec"] |= {"slo": {"ttftMilliseconds": 2000, "itlMilliseconds": 100}, **spec}
    path.write_text(yaml.safe_dump(resource))
    return path


@pytest.fixture(scope="session")
def collector() -> Iterator[Collector]:
    with Collector() as running:
        yield running


@pytest.fixture(scope="session")
def observed(tmp_path_factory: pytest.TempPathFactory, collector: Collector) -> Iterator[Deployment]:
    folder = tmp_path_factory.mktemp("observed")
    traced = {"otlpEndpoint": collector.url}
    file = observed_deployment(folder / "observed.yaml", observability=traced)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MMD_STATE_DIR", str(folder))
        with Deployment(file, gateways=1) as deployment:  # its metrics and its page show every request
            yield deployment


def ask(deployment: Deployment, what: list[dict[str, Any]] | str, **options: Any) -> Any:
    defaults: dict[str, Any] = {"temperature": 0, "max_tokens": 24}
    return deployment.client().chat.completions.create(
        model="builtin/demo", messages=[{"role": "user", "content": what}], **defaults | options
    )


def load(deployment: Deployment, count: int, first_seed: int, at_once: int = 8) -> list[str]:
    """Ask about `count` different files and about text, several at a time. Returns the request ids."""

    def ask_about(number: int) -> str:
        seed = first_seed + number
        kind = (*KINDS, "text")[number % 4]
        what: Any = f"What is {seed}?" if kind == "text" else content(draw(kind, seed))  # type: ignore[arg-type]
        return str(ask(deployment, what).id)

    with ThreadPoolExecutor(at_once) as threads:
        return list(threads.map(ask_about, range(count)))


def scrape(pods: list[LocalPod]) -> dict[Series, float]:
    """The sum over pods of every series."""
    sums: dict[Series, float] = {}
    for pod in pods:
        text = httpx.get(f"{pod.admin_url}/metrics", timeout=DEADLINE_SECONDS).text
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                series = (sample.name, tuple(sorted(sample.labels.items())))
                sums[series] = sums.get(series, 0.0) + sample.value
    return sums
