"""The bench of links ends when one of its processes fails."""

import pytest

from bench import links


def test_a_bench_with_a_process_that_fails_ends_with_an_error():
    with pytest.raises(RuntimeError, match="gloo: a process failed; its error is above"):
        links.measure("gloo", "nowhere", 1)
