"""What is reported for the requests of a step in which vLLM fails: which are placed again, which count it, and which end."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from mmd_api.contract.errors import DeviceLostError, MmdError, OverloadedError, StepFailedError, SuspectError
from mmd_workers.wire.messages.prefill import GenerateRequest

from .cores import checkpoint, clear, make, text_request


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    return make(checkpoint("llava", tmp_path_factory.mktemp("failed")), blocks=16)


@pytest.fixture
def core(shared):
    yield shared
    shared._failure = None
    clear([shared])


@pytest.fixture
def failing(core, monkeypatch):
    """Run one step with these requests that raises `error`. Returns by name what is reported of them."""

    def fail(error: Exception, **requests: GenerateRequest) -> dict[str, MmdError]:
        def broken(*_, **__):
            raise error

        for name, request in requests.items():
            core.add(name, request, stop_after_prefill=False)
        with monkeypatch.context() as patched:
            patched.setattr(core._core.model_executor, "execute_model", broken)
            return dict(core.step().failed)

    return fail


def placed(number: int, **facts: int) -> GenerateRequest:
    return replace(text_request([5 + number, 6, 7]), **facts)


def test_bystanders_of_a_failed_step_are_placed_again_despite_earlier_moves(failing):
    failed = failing(RuntimeError("boom"), fresh=placed(0), moved=placed(1, attempt=7))
    assert {name: (type(error), error.retryable) for name, error in failed.items()} == {
        "fresh": (SuspectError, True),
        "moved": (SuspectError, True),
    }


def test_a_request_ends_with_the_third_engine_that_fails_on_it(failing):
    failed = failing(
        RuntimeError("boom"), once=placed(0, engine_failures=1), twice=placed(1, engine_failures=2)
    )
    assert (type(failed["once"]), type(failed["twice"])) == (SuspectError, StepFailedError)
    assert "vLLM failed on this request: RuntimeError: boom" in failed["twice"].message


def test_a_request_that_ran_alone_ends_with_its_engine(failing):
    assert type(failing(RuntimeError("boom"), alone=placed(0))["alone"]) is StepFailedError


@pytest.mark.parametrize("beside", [0, 1])
def test_no_request_is_the_cause_of_a_lost_device(core, failing, beside):
    lost = torch.AcceleratorError("CUDA error: unspecified launch failure")
    requests = {f"r{n}": placed(n, engine_failures=2) for n in range(1 + beside)}
    assert failing(lost, **requests) == {}
    with pytest.raises(DeviceLostError, match="unspecified launch failure"):
        core.step()


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory"),
        RuntimeError("Worker failed with error 'CUDA out of memory', please check the stack trace above"),
    ],
)
def test_a_request_is_placed_again_where_memory_was_short(failing, error):
    failed = failing(error, alone=placed(0, engine_failures=2))
    assert (type(failed["alone"]), failed["alone"].retryable) == (OverloadedError, True)


def test_a_rank_that_loses_its_device_blames_no_request(failing):
    words = (
        "Worker failed with error 'CUDA error: an illegal memory access', please check the stack trace above"
    )
    assert failing(RuntimeError(words), alone=placed(0)) == {}
