"""The whole path on real files: HTTP in, encoder, prefill and decode processes, streamed answers equal to `generate`."""

from __future__ import annotations

import base64
import json
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal

import openai
import pydantic
import pytest

from e2e import questions
from mmd_cli.samples import draw
from tests.support import oracle
from tests.support.local_deployment import Deployment, content, until

pytestmark = [pytest.mark.processes, pytest.mark.xdist_group("demo"), pytest.mark.timeout(600)]

DEMO = Path(str(resources.files("mmd_workers.model") / "demo"))
KINDS = ("image", "video", "audio")


def ask(demo: Deployment, content: list[dict[str, Any]] | str, **options: Any) -> Any:
    return demo.client().chat.completions.create(
        model="builtin/demo",
        messages=[{"role": "user", "content": content}],
        temperature=0,
        max_tokens=24,
        **options,
    )


@pytest.mark.parametrize("kind", KINDS)
def test_a_streamed_answer_about_a_real_file_equals_generate(demo: Deployment, kind: Any) -> None:
    sample = draw(kind, 31)
    pieces = [
        choice.delta.content or ""
        for chunk in ask(demo, content(sample), stream=True)
        for choice in chunk.choices
    ]
    expected = oracle.answer(DEMO, [(kind, sample.bytes), sample.question], 24)
    assert "".join(pieces) == expected
    assert len([piece for piece in pieces if piece]) > 1


def test_sixteen_mixed_requests_at_once_all_equal_generate(demo: Deployment) -> None:
    samples = [draw(KINDS[number % 3], 100 + number) for number in range(16)]  # type: ignore[arg-type]
    with ThreadPoolExecutor(16) as threads:
        answers = list(threads.map(lambda s: ask(demo, content(s)).choices[0].message.content, samples))
    expected = [oracle.answer(DEMO, [(s.kind, s.bytes), s.question], 24) for s in samples]
    assert answers == expected


def test_one_question_about_an_image_a_video_and_a_sound_together_equals_generate(demo: Deployment) -> None:
    samples = [draw(kind, 7) for kind in KINDS]  # type: ignore[arg-type]
    everything = [content(sample)[0] for sample in samples] + [
        {"type": "text", "text": "What do you see and hear?"}
    ]
    expected = oracle.answer(DEMO, [*((s.kind, s.bytes) for s in samples), "What do you see and hear?"], 24)
    assert ask(demo, everything).choices[0].message.content == expected


def test_usage_counts_tokens_by_modality(demo: Deployment) -> None:
    samples = [draw(kind, 9) for kind in KINDS]  # type: ignore[arg-type]
    usage = ask(
        demo, [content(sample)[0] for sample in samples] + [{"type": "text", "text": "?"}]
    ).usage.model_dump()
    details = usage["prompt_tokens_details"]
    assert all(details[f"{kind}_tokens"] > 0 for kind in KINDS)
    assert sum(details[f"{kind}_tokens"] for kind in (*KINDS, "text")) == usage["prompt_tokens"]


def test_seeded_sampling_repeats_itself_and_differs_between_seeds(demo: Deployment) -> None:
    def sample(seed: int) -> str:
        return str(
            demo.client()
            .chat.completions.create(
                model="builtin/demo",
                messages=[{"role": "user", "content": "Describe the image."}],
                temperature=1.5,
                seed=seed,
                max_tokens=24,
                extra_body={"ignore_eos": True},
            )
            .choices[0]
            .message.content
        )

    assert sample(1) == sample(1)
    assert len({sample(seed) for seed in range(4)}) > 1


class Seen(pydantic.BaseModel):
    shape: Literal["circle", "square", "triangle"]
    colour: Annotated[str, pydantic.Field(max_length=8)]
    count: Annotated[int, pydantic.Field(ge=0, le=9)]
    moves: bool | None


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_an_answer_in_a_form_is_parsed_by_openais_client(demo: Deployment, temperature: float) -> None:
    sample = draw("image", 31)

    def parse(max_tokens: int) -> Any:
        return demo.client().chat.completions.parse(
            model="builtin/demo",
            messages=[{"role": "user", "content": content(sample)}],  # type: ignore[typeddict-item, list-item]
            response_format=Seen,
            temperature=temperature,
            seed=5,
            max_tokens=max_tokens,
        )

    choice = parse(200).choices[0]
    assert choice.finish_reason == "stop"
    assert isinstance(choice.message.parsed, Seen)
    with pytest.raises(openai.LengthFinishReasonError):
        parse(6)
    free = ask(demo, content(sample), response_format={"type": "json_object"})
    assert free.choices[0].message.content.startswith("{")


def test_the_encoder_loads_only_towers_and_the_others_only_the_language_model(demo: Deployment) -> None:
    def loaded(pod: str, role: str) -> int:
        lines = [line for name, line in demo.lines if name == pod and f"{role} role loaded" in line]
        assert lines, f"{pod} said nothing of its {role} role"
        digits = lines[0].split(f"{role} role loaded ")[1].split(" ")[0]
        return int(digits)

    encoder = loaded(demo.pods("encoder")[0].name, "encoder")
    language = [loaded(pod.name, "language") for pool in ("prefill", "decode") for pod in demo.pods(pool)]
    weights = (DEMO / "model.safetensors").stat().st_size
    assert len(set(language)) == 1
    assert 0.9 * weights < encoder + language[0] < 1.1 * weights
    for pool in ("prefill", "decode"):
        assert not [
            1
            for name, line in demo.lines
            if name == demo.pods(pool)[0].name and "encoder role loaded" in line
        ]


def test_bad_media_are_rejected_with_their_reason_and_affect_no_other_request(demo: Deployment) -> None:
    truncated = draw("image", 3, "image/png").bytes[:200]
    bad = [
        {
            "type": "image_url",
            "image_url": {"url": "data:image/png;base64," + base64.b64encode(truncated).decode()},
        },
        {"type": "text", "text": "What is in this image?"},
    ]
    good = draw("image", 4)
    with ThreadPoolExecutor(2) as threads:
        well = threads.submit(lambda: ask(demo, content(good)).choices[0].message.content)
        with pytest.raises(openai.APIStatusError) as refused:
            ask(demo, bad)
        assert 400 <= refused.value.status_code < 500
        assert well.result() == oracle.answer(DEMO, [("image", good.bytes), good.question], 24)


def test_a_client_that_leaves_frees_its_memory_everywhere(demo: Deployment) -> None:
    def busy() -> list[str]:
        held = []
        for pod in demo.pods("prefill") + demo.pods("decode"):
            load = demo.state(pod)["load"]
            if load["decode_running"] or load["prefill_waiting_requests"] or load["kv_blocks_reserved"]:
                held.append(pod.name)
        return held

    stream = ask_long(demo)
    next(iter(stream))
    until(lambda: bool(busy()), 60, "the request is at work")
    stream.response.close()
    until(lambda: not busy(), 10, "nothing is held for a client that is gone")


def ask_long(demo: Deployment) -> Any:
    return demo.client().chat.completions.create(
        model="builtin/demo",
        messages=[{"role": "user", "content": "Describe the image."}],
        temperature=1.0,
        max_tokens=3000,
        stream=True,
        extra_body={"ignore_eos": True},
    )


def test_every_phase_of_a_request_is_in_its_timeline(demo: Deployment) -> None:
    import httpx

    answer = ask(demo, content(draw("video", 55)))
    timeline: dict[str, Any] = {}

    def complete() -> bool:
        timeline.update(httpx.get(f"{demo.local.admin_url}/debug/requests/{answer.id}").json())
        return {"queue", "encode", "embedding_transfer", "prefill", "kv_transfer", "decode"} <= {
            phase["name"] for phase in timeline["phases"]
        }

    until(complete, 60, "all phases were reported")
    spans = [(phase["start"], phase["end"]) for phase in timeline["phases"]]
    assert all(timeline["arrived"] - 0.1 <= start <= end for start, end in spans)


def test_the_questions_of_the_end_to_end_test_need_the_port_of_clients_only(
    demo: Deployment, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["questions.py", demo.local.gateway_url])
    questions.main()
    answers = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [one["answer"] for one in answers] == [one["expected"] for one in answers]
    assert len(answers) == 5


def test_stopping_leaves_no_process(tmp_path: Path) -> None:
    from tests.support.local_deployment import ROOT

    with Deployment(ROOT / "examples" / "monolithic.yaml") as deployment:
        pids = [deployment.pid(pod) for pod in deployment.local.pods] + [deployment.local.nats.pid]
        assert all(pids)
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)  # type: ignore[arg-type]
