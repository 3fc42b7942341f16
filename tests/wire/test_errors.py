"""Errors that cross a process stand in the one table of the contract, and arrive as what they are."""

from __future__ import annotations

import importlib
import pkgutil
from collections import Counter

import pytest

import mmd_cli
import mmd_workers
from mmd_api.contract.errors import ERRORS, MmdError
from mmd_api.errors_page import errors_page
from mmd_api.generate import ERRORS_FILE
from mmd_workers.wire.messages.prefill import Cancel, Placed

ELSEWHERE = ("vllm", "kubernetes")
"""Installed in one of the two environments of `make test` each."""


def below(kind: type[MmdError]) -> list[type[MmdError]]:
    """All subclasses."""
    return [found for child in kind.__subclasses__() for found in (child, *below(child))]


def with_a_code() -> list[type[MmdError]]:
    """Every type of our packages that has its own code; one without is a case of the type that it derives from.

    `make test` runs this file in the environment of vLLM too, so that each module is imported in one of them.
    """
    for package in (mmd_cli, mmd_workers):
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            if module.name.endswith("__main__"):
                continue
            try:
                importlib.import_module(module.name)
            except ModuleNotFoundError as missing:
                if missing.name not in ELSEWHERE:
                    raise
    ours = [kind for kind in [MmdError, *below(MmdError)] if kind.__module__.startswith("mmd_")]
    return [kind for kind in ours if "code" in vars(kind)]


def test_every_error_with_a_code_is_a_row_of_the_table() -> None:
    assert set(with_a_code()) == set(ERRORS.values())


def test_no_two_errors_have_the_same_code() -> None:
    counts = Counter(kind.code for kind in with_a_code())
    assert counts == dict.fromkeys(counts, 1)


@pytest.mark.parametrize("kind", ERRORS.values(), ids=ERRORS)
def test_every_row_is_complete(kind: type[MmdError]) -> None:
    assert kind.remedy
    assert {"code", "status", "retryable", "remedy"} <= vars(kind).keys(), "no part of a row is inherited"
    if kind.status is not None:
        assert kind.retryable == (kind.status in (429, 503))


@pytest.mark.parametrize("kind", ERRORS.values(), ids=ERRORS)
async def test_an_error_arrives_at_the_requester_as_what_it_is(connect, kind: type[MmdError]) -> None:
    here, there = await connect("here"), await connect("there")

    async def refuse(_: Cancel) -> Placed:
        raise kind("why")

    await there.serve("refuse", Cancel, refuse)
    await there.flush()
    with pytest.raises(MmdError, match="why") as raised:
        await here.request("refuse", Cancel("r", 0), Placed, timeout=30)
    assert type(raised.value) is kind


def test_the_page_of_errors_is_up_to_date() -> None:
    assert ERRORS_FILE.read_text() == errors_page(), "run `make crds`"
