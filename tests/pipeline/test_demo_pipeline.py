"""The whole path on real files: HTTP in, encoder, prefill and decode processes, streamed answers equal to `generate`."""

from __future__ import annotations

import base64
import json
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal

import openai
import psutil
import pydantic
import pytest
from typer.testing import CliRunner

from e2e import questions
from mmd_api.spec.media import MediaPolicy
from mmd_cli.program import build
from mmd_cli.samples import draw
from mmd_workers.media.choice import SamplingChoice
from mmd_workers.media.frames import find_frames
from mmd_workers.media.probe import probe
from support.harness.waiting import wait_until
from support.oracles import oracle
from support.oracles.films import film
from support.serving.held import assert_nothing_held
from support.serving.local_deployment import Deployment, content

pytestmark = [pytest.mark.processes, pytest.mark.xdist_group("demo"), pytest.mark.timeout(600)]

DEMO = Path(str(resources.files("mmd_workers.model") / "demo"))
FILES = Path(__file__).parents[1] / "media" / "files"
KINDS = ("image", "video", "audio")
LONG_TOKENS = 200


def ask(demo: Deployment, content: list[dict[str, Any]] | str, **options: Any) -> Any:
    return demo.client().chat.completions.create(
        model="builtin/demo",
        messages=[{"role": "user", "content": content}],
        temperature=0,
        **{"max_tokens": 24} | options,
    )


@pytest.mark.parametrize("kind", KINDS)
def test_a_streamed_answer_about_a_real_file_equals_generate(demo: Deployment, kind: Any) -> None:
    sample = draw(kind, 31)
    pieces = [
        choice.delta.content or ""
        for chunk in ask(
            demo, content(sample), stream=True, max_tokens=LONG_TOKENS, extra_body={"ignore_eos": True}
        )
        for choice in chunk.choices
    ]
    question: oracle.Question = [(kind, sample.bytes), sample.question]
    assert "".join(pieces) == oracle.answer(DEMO, question, LONG_TOKENS, ignore_eos=True)
    assert len([piece for piece in pieces if piece]) > 1, (
        "a busy gateway may join tokens, but not all of them"
    )


def test_guided_answers_about_an_image_and_a_text_equal_generate(demo: Deployment) -> None:
    sample = draw("image", 31)
    asked: list[tuple[Any, oracle.Question]] = [
        (content(sample), [("image", sample.bytes), sample.question]),
        (sample.question, [sample.question]),
    ]
    cases = [(*one, negative) for one in asked for negative in (None, "What is it?")]

    def answered(case: tuple[Any, oracle.Question, str | None]) -> str:
        more = {} if case[2] is None else {"negative_prompt": case[2]}
        answer = ask(demo, case[0], extra_body={"guidance_scale": 2.5} | more)
        return str(answer.choices[0].message.content)

    with ThreadPoolExecutor(4) as threads:
        answers = list(threads.map(answered, cases))
    assert answers == [
        oracle.guided_answer(DEMO, question, 24, 2.5, negative) for _, question, negative in cases
    ]
    assert len(set(answers)) > 2


def test_sixteen_mixed_requests_at_once_all_equal_generate(demo: Deployment) -> None:
    samples = [draw(KINDS[number % 3], 100 + number) for number in range(16)]  # type: ignore[arg-type]
    with ThreadPoolExecutor(16) as threads:
        answers = list(threads.map(lambda s: ask(demo, content(s)).choices[0].message.content, samples))
    expected = [oracle.answer(DEMO, [(s.kind, s.bytes), s.question], 24) for s in samples]
    assert answers == expected


def test_a_question_about_image_video_and_sound_equals_generate(demo: Deployment) -> None:
    samples = [draw(kind, 7) for kind in KINDS]  # type: ignore[arg-type]
    everything = [content(sample)[0] for sample in samples] + [
        {"type": "text", "text": "What do you see and hear?"}
    ]
    expected = oracle.answer(DEMO, [*((s.kind, s.bytes) for s in samples), "What do you see and hear?"], 24)
    assert ask(demo, everything).choices[0].message.content == expected


def test_media_that_a_request_sampled_otherwise_are_answered_as_generate_does(demo: Deployment) -> None:
    picture, clip = draw("image", 7), draw("video", 7)
    plain = [content(picture)[0], content(clip)[0]]
    chosen = [{**plain[0], "max_pixels": 1024}, {**plain[1], "num_frames": 4}]
    text = {"type": "text", "text": "What do you see?"}
    answer, other = ask(demo, [*chosen, text]), ask(demo, [*plain, text])
    files = [("image", picture.bytes), ("video", clip.bytes)]
    choices = [SamplingChoice(max_pixels=1024), SamplingChoice(num_frames=4)]
    expected = oracle.answer(DEMO, [*files, "What do you see?"], 24, choices=choices)
    assert answer.choices[0].message.content == expected
    fewer, more = (each.usage.model_dump()["prompt_tokens_details"] for each in (answer, other))
    assert all(0 < fewer[name] < more[name] for name in ("image_tokens", "video_tokens"))


@pytest.mark.parametrize("name", ["scenes.mp4", "scenes-variable.webm", "scenes.avi"])
def test_frames_that_were_found_in_a_video_are_answered_as_generate_does(demo: Deployment, name: str) -> None:
    data = (FILES / name).read_bytes()
    part = _video_part(data)
    text = {"type": "text", "text": "What do you see?"}
    info = probe(data, "video", MediaPolicy())
    for choice in (
        SamplingChoice(sampling="keyframes"),
        SamplingChoice(sampling="scene_changes"),
        SamplingChoice(timestamps=(0.5, 2.5, 7.0)),
    ):
        fields = (
            {"timestamps": list(choice.timestamps)} if choice.timestamps else {"sampling": choice.sampling}
        )
        found = find_frames(data, info, choice.sampling, choice.timestamps)
        expected = oracle.answer(
            DEMO, [("video", data), "What do you see?"], 24, choices=[replace(choice, found=found)]
        )
        assert ask(demo, [{**part, **fields}, text]).choices[0].message.content == expected, fields


def test_videos_with_their_own_sound_are_answered_as_generate_does(demo: Deployment) -> None:
    """The second of them in the prefix cache of the first: all but the question."""
    films = [film(4, 4.2, seed=3), film(5, 2.6, seed=4, container="matroska")]
    clip, picture = draw("audio", 11), draw("image", 11)
    parts = [
        *(_video_part(data) for data in films),
        content(clip)[0],
        content(picture)[0],
    ]
    files = [
        *((oracle.WITH_SOUND, data) for data in films),
        ("audio", clip.bytes),
        ("image", picture.bytes),
    ]

    def cached(question: str) -> int:
        with_sound = {"extra_body": {"mm_processor_kwargs": {"use_audio_in_video": True}}}
        answer = ask(demo, [*parts, {"type": "text", "text": question}], **with_sound)
        if answer.choices[0].message.content != oracle.answer(DEMO, [*files, question], 24):
            raise RuntimeError(f"another answer than that of generate: {answer}")
        details = answer.usage.model_dump()["prompt_tokens_details"]
        assert sum(details[f"{kind}_tokens"] for kind in (*KINDS, "text")) == answer.usage.prompt_tokens
        found: int = details["cached_tokens"]
        return found

    assert cached("What do you see and hear?") == 0
    # What was cached is reported after the handover, and may miss the answer.
    wait_until(lambda: cached("What moves, and what is the sound?"), "an answer counts what was cached")
    assert_nothing_held(demo)


def _video_part(data: bytes) -> dict[str, Any]:
    return {
        "type": "video_url",
        "video_url": {"url": f"data:video/mp4;base64,{base64.b64encode(data).decode()}"},
    }


def test_a_cached_prefix_is_found_only_under_its_own_salt(demo: Deployment) -> None:
    sample, question = draw("image", 8), "Describe what you see, from the left to the right. " * 20

    def cached(salt: str) -> int:
        more = {"extra_body": {"cache_salt": salt}} if salt else {}
        answer = ask(demo, [*content(sample)[:1], {"type": "text", "text": question}], **more)
        found: int = answer.usage.prompt_tokens_details.cached_tokens
        return found

    salts = ("", "one", "other")
    assert [cached(salt) for salt in salts] == [0, 0, 0]

    def found() -> list[int]:
        again = [cached(salt) for salt in salts]
        assert min(again) >= 100, again
        return again

    again = wait_until(found, "routers know where it is, and that pod is free")
    assert again == [again[0]] * 3


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

    stream = ask_long(demo, stream=True)
    next(iter(stream))
    wait_until(lambda: bool(busy()), "the request is at work")
    stream.response.close()
    # Much sooner than a lease would end.
    wait_until(lambda: not busy(), "nothing is held for a client that is gone", seconds=30)


def ask_long(demo: Deployment, **options: Any) -> Any:
    return demo.client().chat.completions.create(
        model="builtin/demo",
        messages=[{"role": "user", "content": "Describe the image."}],
        temperature=1.0,
        max_tokens=3000,
        extra_body={"ignore_eos": True},
        **options,
    )


def test_a_clients_deadline_frees_its_request_in_all_pools(demo: Deployment) -> None:
    with pytest.raises(openai.APIStatusError) as ended:
        ask_long(demo, extra_headers={"x-request-timeout": "0.5"})
    assert (ended.value.status_code, ended.value.code) == (504, "deadline_exceeded")
    assert_nothing_held(demo)


def test_every_phase_of_a_request_is_in_its_timeline(demo: Deployment) -> None:
    answer = ask(demo, content(draw("video", 55)))
    timeline: dict[str, Any] = {}

    def complete() -> bool:
        timeline.update(demo.timeline(answer.id))
        return {"queue", "encode", "embedding_transfer", "prefill", "kv_transfer", "decode"} <= {
            phase["name"] for phase in timeline["phases"]
        }

    wait_until(complete, "all phases were reported")
    spans = [(phase["start"], phase["end"]) for phase in timeline["phases"]]
    assert all(timeline["arrived"] - 0.1 <= start <= end for start, end in spans)
    moved = [phase for phase in timeline["phases"] if phase["name"].endswith("_transfer")]
    assert sorted(phase["name"] for phase in moved) == ["embedding_transfer", "kv_transfer"]
    assert all(phase["detail"]["wire_seconds"] > 0 < phase["detail"]["bytes"] for phase in moved)


def test_the_end_to_end_questions_need_only_the_clients_port(
    demo: Deployment, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["questions.py", demo.gateway_url])
    questions.main()
    answers = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [one["answer"] for one in answers] == [one["expected"] for one in answers]
    assert len(answers) == 5


def test_stopping_leaves_no_process(tmp_path: Path) -> None:
    from support.serving.local_deployment import ROOT

    with Deployment(ROOT / "examples" / "monolithic.yaml") as deployment:
        pids = [deployment.pid(pod) for pod in deployment.local.pods] + [deployment.local.nats.pid]
        assert all(pids)
    wait_until(lambda: not any(psutil.pid_exists(pid) for pid in pids if pid), "no process is left")


def test_status_shows_that_no_key_is_needed(demo: Deployment) -> None:
    assert ask(demo, "hello").choices, "the client's key is none that anyone made"
    command = ["status", "--name", demo.local.name]
    shown = CliRunner().invoke(build().app, command)
    assert shown.exit_code == 0, shown.output
    assert "API keys: none needed, so anyone who can reach the gateway can use it" in shown.output
    pods = json.loads(CliRunner().invoke(build().app, [*command, "--json"]).output)["pods"]
    assert [pod["auth"] for pod in pods if pod["component"] == "gateway"] == 2 * [{"enabled": False}]
