"""Calibrating from a running gateway: what is known of its requests comes back as the model's numbers, and what is not is refused."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from mmd_api.resource import load
from mmd_cli.program import build
from mmd_operator.simulate.calibration import Calibration
from mmd_operator.simulate.measured import NotMeasuredError, calibrated, look, seen
from mmd_operator.simulate.model import Pipeline
from mmd_operator.simulate.policies import Static

SPEC = Path(__file__).parents[2] / "examples" / "demo.yaml"
GATEWAY, READ, SLOWEST, SENT = 0.010, 0.030, 0.050, 0.004
PREFILL, RATE = 0.020, 5000.0
STATE = {
    "pods": [
        {"roles": ["encode"], "load": {"encode_work_per_second": {"video": 2000.0}, "of a newer version": 1}},
        {"roles": ["prefill"], "load": {"prefill_tokens_per_second": RATE}},
        {"roles": ["decode"], "load": {"kv_blocks_total": 777, "itl_seconds": 0.003}},
    ]
}


def timeline(number: int, slower: float = 1.0, **changes: Any) -> dict[str, Any]:
    """Every third request brings a video; none is in another's way. `slower`: every stage of it, by this factor."""
    at, video, tokens = 1000.0 + number, number % 3 == 0, 100 + 10 * (number % 7)
    begun = at + slower * GATEWAY / 2
    phases = []
    if video:
        encoded = begun + slower * (READ + SLOWEST)
        detail = {"modality": "video", "tower_ms": 1.0, "work": 2000.0 * SLOWEST}
        phases.append({"pod": "e", "name": "encode", "start": begun, "end": encoded, "detail": detail})
        begun = encoded + slower * SENT
    done = begun + slower * (PREFILL + tokens / RATE)
    phases.append({"pod": "p", "name": "prefill", "start": begun, "end": done})
    first = done + slower * GATEWAY / 2
    return {
        "request_id": f"r{number}",
        "arrived": at,
        "first_token": first,
        "last_token": first + 0.003 * 9,
        "code": "ok",
        "usage": {"prompt_tokens": tokens, "completion_tokens": 10},
        "media": [{"modality": "video"}] if video else [],
        "attempts": [{}],
        "phases": phases,
        **changes,
    }


def requests(count: int = 90) -> list[dict[str, Any]]:
    """One in nine is twice as slow as the others."""
    return [timeline(n, 2.0 if n % 9 == 4 else 1.0) for n in range(count)]


@pytest.fixture
def gateway() -> Iterator[str]:
    """A real HTTP server with a gateway's answers."""
    known = {f"/debug/requests/{r['request_id']}": r for r in requests()}
    answers: dict[str, Any] = {"/debug/state": STATE, **known}
    answers["/debug/requests"] = {"requests": [{"request_id": r["request_id"]} for r in known.values()]}

    class Answers(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = json.dumps(answers[self.path.partition("?")[0]]).encode()
            self.send_response(200)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Answers)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def test_the_numbers_of_a_deployment_that_is_known_come_back(gateway: str):
    spec = load(str(SPEC)).spec
    base = Calibration.load(None)
    numbers = calibrated(look(gateway), spec, base)
    assert numbers.gateway_seconds == pytest.approx(GATEWAY, rel=0.02)
    assert numbers.prefill.tokens_per_second == RATE
    assert numbers.prefill.overhead_seconds == pytest.approx(PREFILL, rel=0.02)
    assert numbers.encoder.work_per_second["video"] == 2000.0
    assert numbers.media["video"] == pytest.approx(2000.0 * SLOWEST, rel=0.02)
    assert numbers.encoder.overhead_seconds["video"] == pytest.approx(READ, rel=0.02)
    assert numbers.transfer.seconds_per_medium == pytest.approx(SENT, rel=0.02)
    assert numbers.decode.kv_blocks == 777
    assert numbers.decode.step_seconds == pytest.approx(0.003, rel=0.02)
    assert numbers.media["image"] == base.media["image"]  # none came
    assert numbers.spread.keys() == {"text", "video"}
    assert np.median(numbers.spread["text"]) == pytest.approx(1.0, rel=0.02)
    assert max(numbers.spread["text"]) == pytest.approx(2.0, rel=0.05)
    assert numbers.spread["video"] == pytest.approx([1.0] * 100, rel=0.02)


def test_the_calibrated_model_matches_the_deployments_median_and_tail(gateway: str):
    spec, found = load(str(SPEC)).spec, look(gateway)
    numbers = calibrated(found, spec, Calibration.load(None))
    modelled = Pipeline(spec, found.trace, numbers, Static()).run().ttft_seconds
    took = [r.ttft_seconds for r in found.requests]
    for percent in (50, 99):
        assert np.percentile(modelled, percent) == pytest.approx(np.percentile(took, percent), rel=0.1)


def test_a_calibration_saved_from_a_gateway_gives_the_same_run(gateway: str, tmp_path: Path):
    file = tmp_path / "measured.yaml"
    load_of_a_day = ["simulate", "-f", str(SPEC), "--generate", "bursty", "--seconds", "60", "--json"]
    first = CliRunner().invoke(
        build().app, [*load_of_a_day, "--calibrate", gateway, "--save-calibration", str(file)]
    )
    assert first.exit_code == 0, first.output
    again = CliRunner().invoke(build().app, [*load_of_a_day, "--calibration", str(file)])
    assert again.exit_code == 0, again.output
    assert json.loads(again.stdout) == json.loads(first.stdout)
    assert Calibration.load(file).prefill.tokens_per_second == RATE


def test_failed_repeated_and_unfinished_requests_teach_nothing():
    bad = [
        timeline(100, code="internal"),
        timeline(101, attempts=[{}, {}]),
        timeline(102, last_token=0.0),
        timeline(103, phases=[]),
    ]
    assert len(seen([*requests(), *bad], STATE).requests) == 90


def test_contention_between_requests_in_flight_is_measured_and_applied_in_the_model():
    """Of each pair the second comes while the first one's answer is still being written, and takes half as long again."""
    pairs = []
    for n in range(120):
        made = timeline(n, 1.0 if n % 2 == 0 else 1.5)
        earlier = 0.7 if n % 2 else 0.0  # before that second of its own
        for name in ("arrived", "first_token", "last_token"):
            made[name] -= earlier
        for phase in made["phases"]:
            phase["start"], phase["end"] = phase["start"] - earlier, phase["end"] - earlier
        made["last_token"] = made["first_token"] + 0.5
        made["usage"]["completion_tokens"] = 251
        pairs.append(made)
    spec, found = load(str(SPEC)).spec, seen(pairs, STATE)
    numbers = calibrated(found, spec, Calibration.load(None))
    assert numbers.contention == pytest.approx(0.5, rel=0.1)
    modelled = Pipeline(spec, found.trace, numbers, Static()).run().ttft_seconds
    took = np.array([r.ttft_seconds for r in found.requests])
    assert modelled.mean() == pytest.approx(took.mean(), rel=0.05)
    assert modelled[1::2].mean() / modelled[::2].mean() == pytest.approx(
        took[1::2].mean() / took[::2].mean(), rel=0.1
    )


@pytest.mark.parametrize(
    ("timelines", "words"),
    [
        (requests(20), "has 20 answered requests and at least 30 are needed"),
        ([timeline(n, usage={}) for n in range(90)], "from another version"),
        ([timeline(3 * n) for n in range(90)], "0 text requests ran alone in prefill"),
    ],
)
def test_too_few_observations_are_an_error_with_a_remedy(timelines: list[dict[str, Any]], words: str):
    with pytest.raises(NotMeasuredError) as refused:
        calibrated(seen(timelines, STATE), load(str(SPEC)).spec, Calibration.load(None))
    assert words in str(refused.value)


def test_a_url_without_a_gateway_is_an_error():
    result = CliRunner().invoke(
        build().app,
        ["simulate", "-f", str(SPEC), "--generate", "bursty", "--calibrate", "http://127.0.0.1:1"],
    )
    assert result.exit_code == 1
    assert "no gateway responded at http://127.0.0.1:1" in result.stderr
