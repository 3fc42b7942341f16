"""Why vLLM does not start, in one line that fits into a condition."""

from __future__ import annotations

import runpy

import pytest
from pydantic import BaseModel, ValidationError

from mmd_workers.vllm_engine.reasons import MAX_CHARACTERS, reason


def caused(outer: Exception, inner: Exception) -> Exception:
    outer.__cause__ = inner
    return outer


FROM_A_RANK = "Worker failed with error 'no kernel', please check the stack trace above for the root cause"


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (ValueError("Heads (5) must be divisible by (2)."), "Heads (5) must be divisible by (2)"),
        (caused(RuntimeError("see above"), ValueError("no kernel")), "no kernel"),
        (RuntimeError(FROM_A_RANK), "no kernel"),
        (RuntimeError("first\n  second"), "first second"),
        (KeyError(), "KeyError"),
        (RuntimeError("x" * 1000), "x" * MAX_CHARACTERS + "…"),
    ],
)
def test_the_words_are_those_of_the_innermost_cause_in_one_line(error, line):
    assert reason(error) == line


def test_an_assertion_without_words_is_the_condition_that_did_not_hold(tmp_path):
    file = tmp_path / "module.py"  # pytest gives those of tests words
    file.write_text("dtype = 'e5m2'\nassert dtype in {'e4m3'}\n")
    with pytest.raises(AssertionError) as raised:
        runpy.run_path(str(file))
    assert reason(raised.value) == "AssertionError (assert dtype in {'e4m3'})"


def test_what_pydantic_rejects_is_given_without_the_value():
    class Number(BaseModel):
        n: int

    with pytest.raises(ValidationError) as rejected:
        Number(n="secret")  # type: ignore[arg-type]
    assert "valid integer" in reason(rejected.value)
    assert "secret" not in reason(rejected.value)
