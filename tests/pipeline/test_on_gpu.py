"""Pods that share one GPU, in half precision, and KV that goes between them over each link that one GPU allows."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from support.oracles.devices import DEVICE, needs_gpu
from support.serving.backends import needs_nixl
from support.serving.held import scrape
from support.serving.local_deployment import Deployment, write

from .redundant import SPEC, ask, expected, samples

pytestmark = [needs_gpu, pytest.mark.processes, pytest.mark.timeout(600)]
CONTEXT_BYTES = 100 * 2**20  # of CUDA, in each process that uses it; measured: several times that
PODS = 6


@pytest.fixture(scope="module", params=["Gloo", "Nixl"])
def deployment(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Deployment]:
    if request.param == "Nixl":
        needs_nixl()
    spec = SPEC | {
        "model": SPEC["model"] | {"dtype": "BFloat16"},
        "transfer": {"kv": {"backend": request.param}},
    }
    free, _ = torch.cuda.mem_get_info(DEVICE)
    with Deployment(write(tmp_path_factory.mktemp("gpu") / "gpu.yaml", spec, name="gpu")) as running:
        assert free - torch.cuda.mem_get_info(DEVICE)[0] > PODS * CONTEXT_BYTES, "pods compute elsewhere"
        yield running


def test_answers_about_real_files_equal_generate(deployment: Deployment) -> None:
    asked = samples(24, 5)
    with ThreadPoolExecutor(8) as threads:
        answers = list(threads.map(lambda sample: ask(deployment, sample), asked))
    assert answers == [expected(sample) for sample in asked]
    moved = [scrape(pod.http_url)["mmd_transfer_bytes_total"]["kv"] for pod in deployment.pods("prefill")]
    assert sum(moved) > 0
