"""What both engines count means the same, and vLLM's own metrics are served beside it under vLLM's names."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from mmd_api.contract.subjects import Subjects
from mmd_workers.engine.interface import StepOutput
from mmd_workers.model.prompt import Feature
from mmd_workers.observe.metrics import Metrics
from mmd_workers.observe.server import HttpServer, routes
from mmd_workers.observe.startup import Startup
from mmd_workers.process.pod import Tasks
from mmd_workers.sequences.engine import SequenceEngine
from mmd_workers.sequences.native import NativeEngine, NativeHost
from mmd_workers.sequences.sequence_events import Sequences
from mmd_workers.sequences.step_thread import SteppedHost
from mmd_workers.vllm_engine.host import VllmEngine, VllmHost
from support.harness.waiting import wait_until
from support.oracles import engine_oracle
from support.oracles import model_zoo as zoo
from support.servers.prometheus_server import Prometheus

from . import cores
from .cores import BLOCK, CHUNK, CPU, text_request

LONG = "tell me which of these is the larger one, and what else you see there, and then all the rest of it"
TIMES = ("mmd_step_seconds_sum", "mmd_step_seconds_bucket")


@pytest.fixture(scope="module")
def llava(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return cores.checkpoint("llava", tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def core(llava: Path) -> Any:
    return cores.make(llava)


def values(registry: CollectorRegistry, prefix: str = "") -> dict[tuple[str, ...], float]:
    """Samples by their name and the values of their labels."""
    return {
        (sample.name, *sample.labels.values()): sample.value
        for family in registry.collect()
        for sample in family.samples
        if sample.name.startswith(prefix)
    }


# --- both engines -------------------------------------------------------------------------------------------------


class Turns:
    """Runs commands at once: the test steps the engine itself."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine

    async def call(self, command: Any) -> Any:
        return command(self.engine)

    aside = call

    def post(self, command: Any) -> None:
        command(self.engine)


class Unheard:
    """A bus without gateways, which reports of the prefix cache reach."""

    subjects = Subjects("test", "metrics", "r1")

    async def publish(self, subject: str, message: object) -> None:
        """Nobody listens."""


class Side:
    """One engine in a pod, and the pod's metrics."""

    def __init__(self, host_type: Any, adapter: Any, stepped: Any, *more: Any) -> None:
        self.metrics = Metrics(("prefill", "decode"))
        pod: Any = SimpleNamespace(
            metrics=self.metrics,
            roles=("decode",),
            bus=Unheard(),
            name="decode-0",
            tracing=None,
            settings=SimpleNamespace(group=None, turns="", incarnation="1"),
            spec=SimpleNamespace(decode=SimpleNamespace(kv_block_tokens=BLOCK)),
        )
        self.stepped, turns = stepped, Turns(stepped)
        self.engine: SequenceEngine = adapter(turns, *more)
        self.host: SteppedHost = host_type(pod, CPU)
        self.host._runner = turns  # type: ignore[assignment]
        self._sequences = Sequences(pod, self.host)

    async def counted(self) -> dict[tuple[str, ...], float]:
        """What a scrape finds of the engine, without what depends on the clock."""
        await self.host.sample()
        return {
            key: value
            for key, value in values(self.metrics.registry, "mmd_").items()
            if key[0].startswith(FED) and key[0] not in TIMES
        }

    def step(self, steps: int = 200) -> None:
        """Step until nothing moves."""
        for _ in range(steps):
            if not self.stepped.has_work():
                return
            output: StepOutput = self.stepped.step()
            self._sequences._count(output)
            if not (output.sequences or output.changed):
                return


FED = (
    "mmd_kv_blocks",
    "mmd_max_sequences",
    "mmd_preemptions",
    "mmd_prefill_tokens_total",
    "mmd_prefill_waiting_tokens",
    "mmd_prefix_cache_tokens",
    "mmd_sequences",
    "mmd_step_",
)


def sides(folder: Path, **settings: Any) -> list[Side]:
    """The native engine and vLLM, with the same model and settings."""
    blocks = settings.pop("blocks", 64)
    model = cores.served(folder).language
    native = engine_oracle.make_engine(
        model, blocks=blocks, block_tokens=BLOCK, chunk_tokens=CHUNK, max_model_len=512
    )
    core = cores.make(folder, blocks=blocks, **settings)
    return [
        Side(NativeHost, NativeEngine, native, model, core.grammars),
        Side(VllmHost, VllmEngine, core, core.grammars, core.kv_layout, core.feature_row_bytes),
    ]


async def agreed(both: list[Side]) -> dict[tuple[str, ...], float]:
    """What both sides count."""
    native, vllm = [await side.counted() for side in both]
    assert vllm == native
    return vllm


async def test_both_engines_count_the_same_for_the_same_requests(llava: Path) -> None:
    both = sides(llava)
    prompt = engine_oracle.prompt_of(2 * BLOCK + 5, 1)
    late = cores.question(llava, "what is this? " + LONG, zoo.image(100, 64, 1), LONG).request
    start = late.features[0].ranges[0][0]
    await agreed(both)
    for side in both:
        for name in ("first", "again"):
            await side.engine.add(name, text_request(prompt), stop_after_prefill=False)
            side.step()
        for seed in (2, 3):
            request = text_request(engine_oracle.prompt_of(20, seed), 4)
            await side.engine.add(f"beside {seed}", request, stop_after_prefill=False)
        side.step()
    counted = await agreed(both)
    assert counted["mmd_prefix_cache_tokens_total", "hit"] == 2 * BLOCK
    assert counted["mmd_prefix_cache_tokens_total", "miss"] == len(prompt) + 5 + 2 * 20
    assert counted["mmd_prefill_tokens_total",] == counted["mmd_prefix_cache_tokens_total", "miss"]
    assert counted["mmd_step_sequences_sum",] == (2 + 7) + (1 + 7) + 2 * 4
    assert counted["mmd_step_sequences_count",] == (2 + 7) + (1 + 7) + 4
    for side in both:
        await side.engine.add("held", text_request(engine_oracle.prompt_of(40, 4)), stop_after_prefill=True)
        side.step()
        await side.engine.reserve("reserved", 40, 5, [])
    counted = await agreed(both)
    assert {state: counted["mmd_sequences", state] for state in ("held", "reserved")} == {
        "held": 1,
        "reserved": 1,
    }
    assert (counted["mmd_kv_blocks", "used"], counted["mmd_kv_blocks", "reserved"]) == (2, 2)
    for side in both:
        for name in ("held", "reserved"):
            side.engine.abort(name)
        await side.engine.add("late", late, stop_after_prefill=False)
        side.step()
    native, vllm = [await side.counted() for side in both]
    own = "mmd_kv_blocks"  # of a prompt, the native engine allocates all at once, and vLLM as it goes on
    assert {k: v for k, v in vllm.items() if k[0] != own} == {k: v for k, v in native.items() if k[0] != own}
    assert vllm["mmd_prefill_waiting_tokens", "prefill"] == 0
    assert vllm["mmd_prefill_waiting_tokens", "encode"] == len(late.token_ids) - start
    for side in both:
        side.engine.abort("late")
        side.step()
    await agreed(both)


async def test_both_engines_count_a_preemption_alike(llava: Path) -> None:
    both = sides(llava, blocks=7, max_model_len=6 * BLOCK)
    for side in both:
        for seed in (1, 2):
            request = text_request(engine_oracle.prompt_of(BLOCK - 2, seed), 100)
            await side.engine.add(str(seed), request, stop_after_prefill=False)
        while not side.stepped.stats().preemptions:
            side.step(1)
    counted = await agreed(both)
    assert (counted["mmd_sequences", "running"], counted["mmd_sequences", "waiting"]) == (1, 1)
    assert counted["mmd_prefill_waiting_tokens", "prefill"] == 3 * BLOCK + 1
    for side in both:
        side.step(500)
    counted = await agreed(both)
    assert counted["mmd_preemptions_total",] == 1
    assert counted["mmd_prefix_cache_tokens_total", "hit"] == 0
    assert counted["mmd_prefix_cache_tokens_total", "miss"] == 2 * (BLOCK - 2)


def test_both_engines_load_as_many_bytes(llava: Path, core: Any) -> None:
    assert core.loaded_bytes == cores.served(llava).language.loaded_bytes > 0


# --- vLLM's own ---------------------------------------------------------------------------------------------------


@pytest.fixture
def own(core: Any) -> Iterator[Any]:
    """What vLLM's metrics of the core have gained since."""
    before = values(core.metrics.registry)

    def gained(name: str, *labels: str) -> float:
        core.stats()
        key = (f"vllm:{name}", "llava-2", "0", *labels)
        return values(core.metrics.registry)[key] - before[key]

    yield gained
    cores.clear([core])


def test_vllm_counts_requests_tokens_and_times_as_its_server_does(core: Any, own: Any) -> None:
    prompt = engine_oracle.prompt_of(2 * BLOCK + 5, 11)
    for name in "ab":
        core.add(name, text_request(prompt, 8), stop_after_prefill=False)
        cores.step(core)
    assert own("prompt_tokens_total") == 2 * len(prompt)
    assert own("prompt_tokens_by_source_total", "local_cache_hit") == 2 * BLOCK
    assert own("generation_tokens_total") == 16
    assert own("prefix_cache_queries_total") == 2 * len(prompt)
    assert own("prefix_cache_hits_total") == 2 * BLOCK
    assert own("request_success_total", "length") == 2
    assert own("request_success_total", "abort") == 0
    for histogram, count in {
        "time_to_first_token_seconds": 2,
        "inter_token_latency_seconds": 14,
        "e2e_request_latency_seconds": 2,
        "request_queue_time_seconds": 2,
        "request_prompt_tokens": 2,
        "request_params_max_tokens": 2,
        "iteration_tokens_total": 16,
    }.items():
        assert own(f"{histogram}_count") == count, histogram
    assert 0 < own("time_to_first_token_seconds_sum") < own("e2e_request_latency_seconds_sum") < 60
    assert own("request_generation_tokens_sum") == 16


def test_vllm_shows_the_load_also_between_steps(core: Any, own: Any) -> None:
    core.add("held", text_request(engine_oracle.prompt_of(BLOCK + 1, 12)), stop_after_prefill=True)
    core.add("runs", text_request(engine_oracle.prompt_of(5, 13), 20), stop_after_prefill=False)
    cores.step(core, until=lambda o: o.tokens.get("held") and o.tokens.get("runs"))
    total = core.stats().blocks_total
    assert own("num_requests_running") == 1
    assert own("kv_cache_usage_perc") == pytest.approx(3 / total)
    cores.step(core)
    assert not core.has_work()
    assert own("kv_cache_usage_perc") == pytest.approx(2 / total)
    core.abort("held")
    assert not core.has_work()
    assert own("kv_cache_usage_perc") == own("num_requests_running") == 0


def test_tokens_whose_kv_came_from_another_pod_are_not_counted_as_computed(
    llava: Path, core: Any, own: Any
) -> None:
    prompt = engine_oracle.prompt_of(40, 14)
    request = text_request(prompt, 5)
    core.add("source", request, stop_after_prefill=True)
    made = cores.step(core, until=lambda o: o.tokens.get("source"))
    core.reserve("target", len(prompt), 5)
    core.write_kv("target", 0, core.read_kv("source", 0, len(prompt)))
    core.abort("source")
    core.attach("target", request, made.tokens["source"])
    cores.step(core)
    assert own("prompt_tokens_by_source_total", "local_compute") == len(prompt) + 1
    assert own("prompt_tokens_by_source_total", "external_kv_transfer") == len(prompt)
    assert own("generation_tokens_total") == 5


def test_a_request_that_ends_for_its_logits_is_counted_as_corrupted(llava: Path, core: Any, own: Any) -> None:
    asked = cores.question(llava, LONG, zoo.image(100, 64, 1), LONG)
    (feature,) = asked.features
    broken = {name: tensor * float("nan") for name, tensor in feature.tensors.items()}
    core.add("bad", asked.request, stop_after_prefill=False)
    core.fill("bad", 0, Feature(feature.modality, broken))
    assert "bad" in cores.step(core).failed
    assert own("corrupted_requests_total") == 1
    assert not core.metrics._requests


def test_a_warm_up_is_in_no_metric(core: Any) -> None:
    before = values(core.metrics.registry)
    core.warm_up()
    cores.step(core)
    assert values(core.metrics.registry) == before


def test_what_ends_without_an_output_is_counted_and_forgotten(llava: Path, core: Any, own: Any) -> None:
    other = cores.make(llava, blocks=7, max_model_len=6 * BLOCK)
    for seed, name in enumerate("ab"):
        prompt = engine_oracle.prompt_of(2 * BLOCK, seed)
        request = text_request(prompt, 100)
        core.add(name, request, stop_after_prefill=True)
        made = cores.step(core, until=lambda o, n=name: o.tokens.get(n))
        other.reserve(name, len(prompt), 100)
        other.write_kv(name, 0, core.read_kv(name, 0, len(prompt)))
        other.attach(name, request, made.tokens[name])
    cores.step(other)
    counted = values(other.metrics.registry)
    assert counted["vllm:num_preemptions_total", "llava-2", "0"] == other.stats().preemptions == 1
    core.abort("a")
    core.abort("b")
    assert not core.metrics._requests
    assert not other.metrics._requests


DRAFTS = """
import sys
from pathlib import Path
from tests.vllm_engine import cores
from tests.vllm_engine.test_metrics import values

core = cores.make(Path(sys.argv[1]), vllm={"speculative": {"method": "ngram", "numSpeculativeTokens": 3}})
model = core._core.model_executor.driver_worker.get_model()
compute_logits = model.compute_logits

def always_nine(*given):
    logits = compute_logits(*given)
    logits[:, 9] = 1000
    return logits

model.compute_logits = always_nine
core.add("a", cores.text_request([9] * 20, 41), stop_after_prefill=False)
outcome = cores.step(core)
assert outcome.tokens["a"] == [9] * 41
assert [output.sequences for output in outcome.steps if output.tokens] == [1] * 11, "one token, and ten times four"
assert abs(core.stats().itl_seconds / core._estimates.step_seconds - 0.25) < 1e-6
counted = {name: value for (name, *_), value in values(core.metrics.registry).items()}
assert counted["vllm:spec_decode_num_accepted_tokens_total"] == 30
assert counted["vllm:spec_decode_num_draft_tokens_total"] >= 30
assert counted["vllm:generation_tokens_total"] == 41
"""


def test_drafts_are_counted_and_several_tokens_of_a_step_are_one_sequence(llava: Path) -> None:
    """In another process: vLLM cannot make a core after it has compiled what looks for drafts."""
    command = [sys.executable, "-c", DRAFTS, str(llava)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr[-1000:]


# --- what a pod serves --------------------------------------------------------------------------------------------


async def test_a_pod_serves_vllms_metrics_beside_its_own_and_prometheus_reads_both(
    llava: Path, tmp_path: Path
) -> None:
    pod = cores.pod_of(llava)
    pod.metrics = Metrics(("prefill", "decode"))
    pod.startup, pod.tasks = Startup(pod.metrics), Tasks()
    host = VllmHost(pod, CPU)
    server = HttpServer.of_routes(routes(pod.metrics, dict, str, dict), "127.0.0.1", 0)
    await server.start()
    try:
        await host.start()
        await host.warm_up()
        await host.engine.add("a", text_request([5, 6, 7, 8], 8), stop_after_prefill=False)
        made = 0
        while made < 8:
            made += len((await host.outputs.get()).tokens)
            host.taken()
        await host.sample()
        found = await scraped(server.port, tmp_path)
    finally:
        await host.stop()
        await server.stop()
    assert found["vllm:generation_tokens_total"] == 8
    assert found["vllm:request_success_total"] == 1
    assert found["vllm:iteration_tokens_total_count"] == 8
    assert found["vllm:num_requests_running"] == 0
    assert found["vllm:cache_config_info"] == 1
    assert found["mmd_max_sequences"] == 16
    assert found["mmd_model_loaded_bytes"] == cores.served(llava).language.loaded_bytes
    assert found["series"] < 1500
    assert [name for name in found if "vllm_" in name] == []


async def scraped(port: int, folder: Path) -> dict[str, float]:
    """The sum of each metric over its series, as a real Prometheus has them after a scrape."""
    config = f"""
global: {{scrape_interval: 1s}}
scrape_configs:
  - job_name: pod
    static_configs: [{{targets: ["127.0.0.1:{port}"]}}]
"""

    def look() -> dict[str, float]:
        with Prometheus(folder, config) as prometheus:
            wait_until(lambda: prometheus.query("up == 1"), "the pod is scraped")
            rows = prometheus.query('sum by (__name__) ({job="pod"})')
            (series,) = prometheus.query('count({job="pod"})')
            found = {row["metric"]["__name__"]: float(row["value"][1]) for row in rows}
            return found | {"series": float(series["value"][1])}

    return await asyncio.to_thread(look)
