"""The engine's thread: commands between steps, outputs in order on the loop, failures that stay where they belong."""

import asyncio
import threading
import time

import pytest
from engine_oracle import TextModel, generate, llama, make_engine, prompt_of, text_input

from mmd_workers.engine.engine import StepFailedError
from mmd_workers.engine.runner import EngineDeadError, EngineRunner


class Collector:
    def __init__(self):
        self.outputs = []
        self.changed = asyncio.Event()

    def __call__(self, output):
        self.outputs.append(output)
        self.changed.set()

    def tokens(self, name):
        return [t.token_id for output in self.outputs for t in output.tokens if t.sequence_id == name]

    async def until(self, condition):
        async with asyncio.timeout(30):
            while not condition():
                self.changed.clear()
                await self.changed.wait()


@pytest.fixture
async def started():
    collector = Collector()
    model = TextModel(llama())
    runner = EngineRunner(make_engine(model), collector)
    runner.start()
    yield runner, model, collector
    assert await runner.stop(10)


async def test_tokens_of_concurrent_requests_arrive_in_order_and_equal_generate(started):
    runner, model, collector = started
    prompts = [prompt_of(n, n) for n in (9, 30, 4)]
    for number, prompt in enumerate(prompts):
        await runner.call(lambda e, n=number, p=prompt: e.add(text_input(model, str(n), p, 8)))
    await collector.until(lambda: sum(len(o.tokens) for o in collector.outputs) == 24)
    reference = llama()
    assert [collector.tokens(str(n)) for n in range(3)] == [generate(reference, p, 8) for p in prompts]


async def test_the_exception_of_a_command_goes_to_its_caller_alone(started):
    runner, model, collector = started
    with pytest.raises(KeyError):
        await runner.call(lambda engine: engine.read_kv("nobody", 0, 1))
    await runner.call(lambda e: e.add(text_input(model, "a", prompt_of(5, 1), 3)))
    await collector.until(lambda: len(collector.tokens("a")) == 3)
    assert runner.alive


async def test_a_failing_step_fails_its_own_sequences_and_the_next_ones_are_served(started):
    runner, model, collector = started
    forward, armed = model.forward, [True]

    def failing(*args):
        if armed.pop() if armed else False:
            raise RuntimeError("no memory left")
        return forward(*args)

    model.forward = failing
    await runner.call(lambda e: e.add(text_input(model, "broken", prompt_of(5, 1), 3)))
    await collector.until(lambda: collector.outputs)
    [(name, error)] = collector.outputs[0].failed
    assert name == "broken"
    assert isinstance(error, StepFailedError)
    assert error.retryable
    await runner.call(lambda e: e.add(text_input(model, "next", prompt_of(5, 1), 3)))
    await collector.until(lambda: len(collector.tokens("next")) == 3)
    stats = await runner.call(lambda e: e.stats())
    assert stats.blocks_free == stats.blocks_total


async def test_a_broken_engine_says_so_and_refuses_further_commands():
    dead = asyncio.get_running_loop().create_future()
    model = TextModel(llama())
    runner = EngineRunner(make_engine(model), Collector(), dead.set_result)
    runner.start()
    model.forward = lambda *_: (_ for _ in ()).throw(SystemError("the device is gone"))
    await runner.call(lambda e: e.add(text_input(model, "a", prompt_of(5, 1), 3)))
    async with asyncio.timeout(10):
        assert isinstance(await dead, SystemError)
    assert not runner.alive
    with pytest.raises(EngineDeadError):
        await runner.call(lambda e: e.stats())


async def test_a_stuck_step_stops_the_progress_that_liveness_looks_at(started):
    runner, model, _ = started
    entered, leave = threading.Event(), threading.Event()
    forward = model.forward

    def stuck(*args):
        entered.set()
        assert leave.wait(30)
        return forward(*args)

    model.forward = stuck
    await runner.call(lambda e: e.add(text_input(model, "a", prompt_of(5, 1), 1)))
    assert await asyncio.to_thread(entered.wait, 10)
    before = runner.last_progress
    assert not await runner.stop(0.05)
    assert runner.last_progress == before
    leave.set()
    assert await runner.stop(10)
    assert runner.last_progress > before
    assert time.monotonic() >= runner.last_progress
