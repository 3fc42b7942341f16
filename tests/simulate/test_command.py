"""`mmd simulate` and the traces it reads: good ones, and bad ones whose row is named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from mmd_cli.program import build
from mmd_operator.simulate.traces import GENERATORS, TraceError, load_trace

SPEC = str(Path(__file__).parents[2] / "examples" / "gpu.yaml")


def simulate(*arguments: str):
    return CliRunner().invoke(build().app, ["simulate", "-f", SPEC, *arguments])


def test_a_trace_in_azures_format_yields_json_and_a_picture(tmp_path: Path):
    trace, picture = tmp_path / "trace.csv", tmp_path / "run.svg"
    GENERATORS["bursty"](1.0, 120.0, 1).write_csv(trace)
    result = simulate("--trace", str(trace), "--json", "--plot", str(picture))
    assert result.exit_code == 0, result.output
    run = json.loads(result.stdout)["runs"][0]
    assert run["policy"] == "autoscaler"
    assert run["requests"] == len(load_trace(trace))
    assert not run["lost"]
    assert 0 < run["attainment"] <= 1
    assert "<svg" in picture.read_text()


def test_policies_are_compared_on_the_same_requests():
    result = simulate("--generate", "bursty", "--rate", "1", "--seconds", "120", "--compare", "--json")
    runs = json.loads(result.stdout)["runs"]
    assert [run["policy"] for run in runs] == ["autoscaler", "cpu-hpa", "gpu-hpa", "queue-length", "static"]
    assert len({run["requests"] for run in runs}) == 1


@pytest.mark.parametrize(
    ("rows", "media"),
    [
        (
            """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:50.9951690,396,109
""",
            [0, 0],
        ),
        (
            """TIMESTAMP,NumImages,ContextTokens,GeneratedTokens
2024-05-10 00:00:00.009930+00:00,2,374,44
2024-05-10 00:00:04.324509+00:00,0,396,109
""",
            [2, 0],
        ),
        (
            """Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type
5,ChatGPT,374,44,418,Conversation log
9.314579,GPT-4,396,109,505,API log
""",
            [0, 0],
        ),
    ],
    ids=["Azure text", "Azure multimodal", "BurstGPT"],
)
def test_public_csv_traces_are_read_and_missing_media_columns_count_as_zero(
    tmp_path: Path, rows: str, media: list[int]
):
    file = tmp_path / "trace.csv"
    file.write_text(rows)
    trace = load_trace(file)
    assert trace.arrivals.tolist() == [0.0, pytest.approx(4.314579, abs=1e-5)]
    assert trace.media["image"].tolist() == media
    assert trace.media["video"].tolist() == [0, 0]
    assert trace.context_tokens.tolist() == [374, 396]
    assert trace.output_tokens.tolist() == [44, 109]


def test_a_qwen_trace_counts_seconds(tmp_path: Path):
    file = tmp_path / "qwen.jsonl"
    rows = [
        {"chat_id": n, "parent_chat_id": -1, "timestamp": at, "input_length": 9, "output_length": 2}
        for n, at in enumerate((61.1, 63.6))
    ]
    file.write_text("\n".join(json.dumps(row) for row in rows))
    assert load_trace(file).arrivals.tolist() == [0.0, pytest.approx(2.5)]


def test_a_mooncake_trace_counts_milliseconds_and_lengths(tmp_path: Path):
    file = tmp_path / "mooncake.jsonl"
    rows = [{"timestamp": t, "input_length": 100 + t, "output_length": 5} for t in (0, 500, 2500)]
    file.write_text("\n".join(json.dumps(row) for row in rows))
    trace = load_trace(file)
    assert trace.arrivals.tolist() == [0.0, 0.5, 2.5]
    assert trace.context_tokens.tolist() == [100, 600, 2600]


@pytest.mark.parametrize(
    ("name", "text", "row", "words"),
    [
        ("t.csv", "TIMESTAMP,NumImages,ContextTokens,GeneratedTokens\n0,0,5,5\n1,-2,5,5\n", "3", "NumImages"),
        ("t.csv", "TIMESTAMP,NumImages,ContextTokens,GeneratedTokens\nyesterday,0,5,5\n", "2", "TIMESTAMP"),
        ("t.csv", "TIMESTAMP,NumImages,ContextTokens,GeneratedTokens\n0,0,nan,5\n", "2", "ContextTokens"),
        (
            "t.jsonl",
            '{"timestamp": 0, "input_length": 5, "output_length": 5}\n{"timestamp": 1}\n',
            "2",
            "input_length",
        ),
        ("t.jsonl", "not json\n", "1", ""),
    ],
)
def test_a_bad_row_is_named(tmp_path: Path, name: str, text: str, row: str, words: str):
    file = tmp_path / name
    file.write_text(text)
    with pytest.raises(TraceError) as refused:
        load_trace(file)
    assert name in str(refused.value)
    assert row in str(refused.value)
    assert words in str(refused.value)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "either --trace or --generate"),
        (["--generate", "hurricane"], "not one of bursty, diurnal, video-storm"),
        (["--generate", "bursty", "--plot", "x.doc"], "unsupported extension"),
    ],
)
def test_what_cannot_be_run_is_refused_with_the_remedy(arguments: list[str], words: str):
    result = simulate(*arguments)
    assert result.exit_code == 1
    assert words in result.output
