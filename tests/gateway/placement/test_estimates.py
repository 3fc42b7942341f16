"""Each estimate is kept beside what the request took, and learnt from."""

from __future__ import annotations

import asyncio

import pytest

from mmd_api.contract.load import PodLoad
from mmd_workers.gateway.placement import router
from mmd_workers.wire.messages.message_parts import Phase
from mmd_workers.wire.messages.prefill import GenerateRequest
from support.harness.waiting import until
from tests.gateway.running import Launch, Running
from tests.gateway.scripted import ScriptedWorker, answer_well

HELLO = [{"role": "user", "content": "hello"}]
BODY = {"model": "builtin/demo", "messages": HELLO}


async def slow(worker: ScriptedWorker, request: GenerateRequest) -> None:
    await asyncio.sleep(0.3)
    await answer_well(worker, request)


async def test_a_requests_timeline_has_its_estimate_beside_the_outcome(launch: Launch) -> None:
    gateway = await launch()
    load = PodLoad(prefill_tokens_per_second=100.0, prefill_waiting_tokens=50, decode_max_sequences=4)
    await gateway.worker("the red circle", slow, load=load)
    response = await gateway.http.post("/v1/chat/completions", json=BODY)
    timeline = (await gateway.admin.get(f"/debug/requests/{response.json()['id']}")).json()
    (attempt,) = timeline["attempts"]
    tokens = response.json()["usage"]["prompt_tokens"]
    assert attempt["estimated"] == {
        "ttft": pytest.approx(0.5 + tokens / 100),
        "queue": pytest.approx(0.5),
        "encode": 0,
        "transfer": 0,
        "prefill": pytest.approx(tokens / 100),
    }
    assert attempt["ttft_seconds"] == pytest.approx(timeline["first_token"] - attempt["placed"], abs=0.05)
    assert attempt["ttft_seconds"] >= 0.3


async def test_outcomes_move_the_factors_and_their_error_is_counted(launch: Launch) -> None:
    gateway = await launch()
    load = PodLoad(prefill_tokens_per_second=1.0, decode_max_sequences=4)  # it answers at once
    await gateway.worker("the red circle", load=load)
    for _ in range(3):
        await gateway.http.post("/v1/chat/completions", json=BODY)
    await gateway.until_metric("mmd_router_error_ratio_count", 3)
    factors = {
        line.split('term="')[1].split('"')[0]: float(line.split()[-1])
        for line in (await gateway.admin.get("/metrics")).text.splitlines()
        if line.startswith("mmd_router_factor_ratio{")
    }
    assert factors["prefill"] < 0.95
    assert factors["encode"] == factors["transfer"] == 1


async def test_each_attempt_of_a_request_has_an_estimate_and_an_outcome(
    launch: Launch,
) -> None:
    gateway = await launch()

    async def give_up_first(worker: ScriptedWorker, request: GenerateRequest) -> None:
        if request.attempt == 0:
            await worker.tokens(request, [0])
            await worker.fail(request, "overloaded", "no room", retryable=True)
        else:
            await answer_well(worker, request)

    await gateway.worker("the red circle", give_up_first)
    response = await gateway.http.post("/v1/chat/completions", json=BODY)
    timeline = (await gateway.admin.get(f"/debug/requests/{response.json()['id']}")).json()
    assert len(timeline["attempts"]) == 2
    assert all(attempt["estimated"]["ttft"] > 0 for attempt in timeline["attempts"])
    assert all(attempt["ttft_seconds"] > 0 for attempt in timeline["attempts"])


async def until_joined(gateway: Running, request_id: str, pods: set[str]) -> None:
    """The gateway has joined phases of these pods into the request's timeline."""

    async def are_joined() -> bool:
        timeline = (await gateway.admin.get(f"/debug/requests/{request_id}")).json()
        return pods <= {phase["pod"] for phase in timeline["phases"]}

    await until(are_joined, f"phases of {pods}")


async def test_decoders_that_receive_kv_faster_come_first_despite_late_reports(
    launch: Launch,
) -> None:
    gateway = await launch()
    load = PodLoad(decode_max_sequences=8, itl_seconds=1e-4, kv_block_tokens=16)
    decoders = [await gateway.worker(roles=["decode"], pod=f"decode-{n}", load=load) for n in range(2)]
    prefill = await gateway.worker("the red circle", roles=["prefill"], pod="prefill-0")
    answer = (await gateway.http.post("/v1/chat/completions", json=BODY)).json()
    await gateway.until_metric("mmd_gateway_sequences", 0)
    for decoder, seconds in zip(decoders, (1.0, 0.001), strict=True):
        sizes = {"tokens": 100, "bytes": 10**8, "wire_seconds": seconds}
        await decoder.phases(prefill.requests[0], Phase("kv_transfer", 0.0, 1.0, sizes))
    await until_joined(gateway, answer["id"], {"decode-0", "decode-1"})
    for _ in range(10):
        await gateway.http.post("/v1/chat/completions", json=BODY)
    orders = [request.decode_pods for request in prefill.requests[1:]]
    assert orders == [["decode-1", "decode-0"]] * 10


async def test_clients_that_hang_up_during_placement_leave_nothing_waiting(
    launch: Launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(router.PlacementLimits, "of", lambda spec: router.PlacementLimits(1))
    gateway = await launch()
    worker = await gateway.worker("the red circle")
    worker.placing = held = asyncio.Event()
    asking = asyncio.create_task(gateway.http.post("/v1/chat/completions", json=BODY))
    await worker.until(lambda: len(worker.requests) == 1)
    asking.cancel()
    await asyncio.wait([asking])
    await gateway.until_metric("mmd_gateway_sequences", 0)
    held.set()
    response = await gateway.http.post("/v1/chat/completions", json=BODY)
    assert response.status_code == 200, response.text
