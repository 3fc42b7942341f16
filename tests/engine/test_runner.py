"""The engine's thread: commands between steps, outputs in order on the loop, failures that stay where they belong."""

import asyncio
import threading
import time

import pytest
import torch

from mmd_api.contract.errors import DeviceLostError, EngineDeadError, OverloadedError, StepFailedError
from mmd_workers.engine.interface import SamplingParams
from mmd_workers.engine.runner import MAX_COMMANDS, EngineRunner
from support.harness.waiting import until
from support.oracles.devices import cpu_only
from support.oracles.engine_oracle import TextModel, generate, llama, make_engine, prompt_of, text_input


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
        await until(condition, changed=self.changed)


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


def failing_for(model, poison, error):
    """Make `model.forward` raise for every batch that holds the embedding of token `poison`."""
    forward = model.forward
    mark = model.embed(torch.tensor([poison]))[0][0]

    def maybe(embeds, positions, extras):
        if (embeds == mark).all(dim=-1).any():
            raise error
        return forward(embeds, positions, extras)

    model.forward = maybe


@pytest.mark.parametrize("kind", [RuntimeError, AssertionError, AttributeError, ZeroDivisionError])
async def test_a_sequence_that_breaks_the_step_fails_alone(started, kind, caplog):
    runner, model, collector = started
    failing_for(model, 199, kind("shapes cannot be multiplied"))
    prompts = {name: prompt_of(length, length) for name, length in (("a", 5), ("b", 9), ("c", 4))}

    def add_all(engine):
        for name, prompt in prompts.items():
            engine.add(text_input(model, name, prompt, 6))
        engine.add(text_input(model, "poison", [3, 199, 7], 6))

    await runner.call(add_all)
    await collector.until(lambda: sum(len(o.tokens) for o in collector.outputs) == 18)
    [(name, error)] = [failed for output in collector.outputs for failed in output.failed]
    assert name == "poison"
    assert isinstance(error, StepFailedError)
    assert not error.retryable, "it would break the next batch too"
    assert f"{kind.__name__}: shapes cannot be multiplied" in error.message
    assert "in maybe" in caplog.text, "the log has the line of the model that failed"
    reference = llama()
    assert {n: collector.tokens(n) for n in prompts} == {
        n: generate(reference, prompt, 6) for n, prompt in prompts.items()
    }
    stats = await runner.call(lambda e: e.stats())
    assert stats.blocks_free == stats.blocks_total


@pytest.mark.parametrize("kind", [torch.OutOfMemoryError, MemoryError])
async def test_a_sequence_too_large_for_this_device_may_be_placed_elsewhere(started, kind):
    runner, model, collector = started
    failing_for(model, 199, kind("tried to allocate 80 GiB"))
    await runner.call(lambda e: e.add(text_input(model, "large", [3, 199, 7], 6)))
    await collector.until(lambda: collector.outputs)
    [(_, error)] = collector.outputs[0].failed
    assert isinstance(error, OverloadedError)
    assert error.retryable
    assert "80 GiB" in error.message


@pytest.mark.parametrize("temperature", [0.0, 1.0])
async def test_broken_logits_fail_their_own_sequence_once_and_say_why(started, temperature):
    runner, model, collector = started
    forward = model.forward
    mark = model.embed(torch.tensor([199]))[0][0]

    def broken(embeds, positions, extras):
        hidden = forward(embeds, positions, extras)
        return hidden.masked_fill((embeds == mark).all(dim=-1)[:, None], float("nan"))

    model.forward = broken
    item = text_input(model, "poison", [3, 7, 199], 6)
    item.sampling = SamplingParams(max_tokens=6, temperature=temperature, logprobs=1)
    prompt = prompt_of(9, 9)

    def add_both(engine):
        engine.add(text_input(model, "good", prompt, 6))
        engine.add(item)

    await runner.call(add_both)
    await collector.until(lambda: len(collector.tokens("good")) == 6)
    [(name, error)] = [failed for output in collector.outputs for failed in output.failed]
    assert (name, error.code, error.retryable) == ("poison", "bad_logits", False)
    assert collector.tokens("good") == generate(llama(), prompt, 6)


@cpu_only
async def test_a_lost_device_ends_the_engine_although_the_model_wraps_its_error():
    dead = asyncio.get_running_loop().create_future()
    model = TextModel(llama())
    wrapped = AssertionError("attention failed")
    wrapped.__cause__ = torch.AcceleratorError("CUDA error: an illegal memory access was encountered")
    failing_for(model, 199, wrapped)
    collector = Collector()
    runner = EngineRunner(make_engine(model), collector, dead.set_result)
    runner.start()
    await runner.call(lambda e: e.add(text_input(model, "innocent", [3, 199, 7], 6)))
    async with asyncio.timeout(30):
        assert isinstance(await dead, DeviceLostError)
    assert not any(output.failed for output in collector.outputs)
    assert await runner.stop(10)


@cpu_only
async def test_a_command_that_loses_the_device_ends_the_engine():
    dead = asyncio.get_running_loop().create_future()
    runner = EngineRunner(make_engine(TextModel(llama())), Collector(), dead.set_result)

    def lose(_):
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered\nmore")

    runner.start()
    gate = threading.Event()
    runner.submit(lambda _: gate.wait(30))
    first, second = runner.submit(lose), runner.submit(lambda engine: engine.stats())
    gate.set()
    async with asyncio.timeout(30):
        with pytest.raises(DeviceLostError, match="an illegal memory access was encountered; the process"):
            await asyncio.wrap_future(first)
        with pytest.raises(EngineDeadError):
            await asyncio.wrap_future(second)
        assert isinstance(await dead, DeviceLostError)
    with pytest.raises(EngineDeadError):
        runner.submit(lambda engine: engine.stats())


async def test_a_failed_engine_reports_it_and_rejects_further_commands():
    dead = asyncio.get_running_loop().create_future()
    model = TextModel(llama())
    engine = make_engine(model)
    runner = EngineRunner(engine, Collector(), dead.set_result)
    runner.start()
    engine.scheduler.schedule = lambda *_: (_ for _ in ()).throw(SystemError("no such block"))
    await runner.call(lambda e: e.add(text_input(model, "a", prompt_of(5, 1), 3)))
    async with asyncio.timeout(30):
        assert isinstance(await dead, SystemError)
    assert not runner.alive
    with pytest.raises(EngineDeadError):
        await runner.call(lambda e: e.stats())


async def stuck_in_a_step(runner, model):
    """Begin a step that lasts until the event that this returns is set."""
    entered, leave = threading.Event(), threading.Event()
    forward = model.forward

    def stuck(*args):
        entered.set()
        assert leave.wait(30)
        return forward(*args)

    model.forward = stuck
    await runner.call(lambda e: e.add(text_input(model, "a", prompt_of(5, 1), 1)))
    assert await asyncio.to_thread(entered.wait, 10)
    return leave


async def test_a_stuck_step_stops_the_progress_that_liveness_looks_at(started):
    runner, model, _ = started
    leave = await stuck_in_a_step(runner, model)
    before = runner.last_progress
    assert not await runner.stop(0.05)
    assert runner.last_progress == before
    leave.set()
    assert await runner.stop(10)
    assert runner.last_progress > before
    assert time.monotonic() >= runner.last_progress


async def test_a_look_at_the_engine_waits_for_no_step(started):
    runner, model, _ = started
    leave = await stuck_in_a_step(runner, model)
    try:
        async with asyncio.timeout(10):
            assert await runner.look(lambda engine: engine.has_work())
    finally:
        leave.set()


@pytest.mark.parametrize("change", [RuntimeError, StopIteration])
async def test_a_look_that_meets_a_change_is_taken_again_between_two_steps(started, change):
    runner, _, _ = started
    threads = []

    def changing(_engine):
        threads.append(threading.current_thread())
        if len(threads) == 1:
            raise change
        return "seen"

    assert await runner.look(changing) == "seen"
    assert [thread is runner._thread for thread in threads] == [False, True]


async def test_looks_run_one_after_the_other(started):
    runner, _, _ = started
    threads = await asyncio.gather(*(runner.look(lambda _: threading.current_thread()) for _ in range(20)))
    assert len(set(threads)) == 1
    assert threads[0] is not runner._thread


async def test_a_look_at_an_engine_that_has_stopped_says_so(started):
    runner, _, _ = started
    assert await runner.stop(10)
    with pytest.raises(EngineDeadError):
        await runner.look(lambda engine: engine.has_work())


@pytest.mark.parametrize("beyond", [-1, 0, 1, 500])
async def test_calls_beyond_a_full_queue_wait_for_the_next_turn(started, beyond):
    runner, _, _ = started
    running, go_on = threading.Event(), threading.Event()

    def hold(_engine):
        running.set()
        assert go_on.wait(30)

    blocking = asyncio.create_task(runner.call(hold))
    await asyncio.to_thread(running.wait, 30)
    calls = [asyncio.create_task(runner.call(lambda _engine, n=n: n)) for n in range(MAX_COMMANDS + beyond)]
    await asyncio.sleep(0.05)
    assert len(runner._commands) == min(MAX_COMMANDS, MAX_COMMANDS + beyond)
    go_on.set()
    async with asyncio.timeout(30):
        assert await asyncio.gather(*calls) == list(range(MAX_COMMANDS + beyond))
        await blocking


async def test_calls_that_wait_for_room_learn_that_the_engine_has_ended(started):
    runner, _, _ = started
    running, go_on = threading.Event(), threading.Event()

    def hold(_engine):
        running.set()
        assert go_on.wait(30)

    blocking = asyncio.create_task(runner.call(hold))
    await asyncio.to_thread(running.wait, 30)
    calls = [asyncio.create_task(runner.call(lambda _: None)) for _ in range(MAX_COMMANDS + 10)]
    await asyncio.sleep(0.05)
    stopping = asyncio.create_task(runner.stop(20))
    await asyncio.sleep(0.05)
    go_on.set()
    async with asyncio.timeout(30):
        ended = await asyncio.gather(*calls, return_exceptions=True)
        await asyncio.gather(blocking, stopping, return_exceptions=True)
    assert {type(error) for error in ended} == {EngineDeadError}


async def test_posted_commands_run_in_order_even_behind_a_full_queue(started):
    runner, _, _ = started
    running, go_on, order = threading.Event(), threading.Event(), []

    def hold(_engine):
        running.set()
        assert go_on.wait(30)

    blocking = asyncio.create_task(runner.call(hold))
    await asyncio.to_thread(running.wait, 30)
    for number in range(MAX_COMMANDS):
        runner.submit(lambda _engine, n=number: order.append(n))
    runner.post(lambda _engine: order.append("posted"))
    late = asyncio.create_task(runner.call(lambda _engine: order.append("late")))
    go_on.set()
    async with asyncio.timeout(30):
        await asyncio.gather(blocking, late)
    assert order == [*range(MAX_COMMANDS), "posted", "late"]


async def test_a_posted_command_that_fails_is_logged_and_ends_nothing(started, caplog):
    runner, _, _ = started
    runner.post(lambda engine: engine.read_kv("nobody", 0, 1))
    await runner.call(lambda engine: engine.stats())
    assert runner.alive
    assert "an engine command failed: 'nobody'" in caplog.text


async def test_nothing_is_posted_to_an_engine_that_has_stopped(started, caplog):
    runner, _, _ = started
    assert await runner.stop(10)
    runner.post(lambda engine: engine.stats())
    assert not runner._commands
    assert caplog.text == ""


async def test_work_beside_the_engine_waits_for_no_step_and_shares_the_thread_of_looks(started):
    runner, _, _ = started
    stepping, may_end = threading.Event(), threading.Event()

    def long_command(_):
        stepping.set()
        assert may_end.wait(60)

    command = asyncio.create_task(runner.call(long_command))
    try:
        await asyncio.to_thread(stepping.wait, 60)
        threads = [
            await runner.aside(lambda _: threading.get_ident()),
            await runner.look(lambda _: threading.get_ident()),
        ]
    finally:
        may_end.set()
    await command
    engine_thread = await runner.call(lambda _: threading.get_ident())
    assert len(set(threads)) == 1
    assert not {engine_thread, threading.get_ident()} & set(threads)


async def test_work_beside_an_engine_runs_once_even_if_it_fails_and_not_after_the_engine_has_stopped(started):
    runner, _, _ = started
    tries = []

    def fails(_):
        tries.append(threading.current_thread().name)
        raise RuntimeError("the layout is wrong")

    with pytest.raises(RuntimeError, match="the layout is wrong"):
        await runner.aside(fails)
    assert len(tries) == 1
    assert await runner.stop(10)
    with pytest.raises(EngineDeadError):
        await runner.aside(fails)
    assert len(tries) == 1
