import json
import subprocess
import sys
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from mmd_cli import program
from mmd_cli.commands import validate as validate_command
from support.cluster.manifests import base_manifest, merge

EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("*.yaml"))


def mmd(*arguments: str, stdin: str = ""):
    return CliRunner().invoke(program.build().app, list(arguments), input=stdin)


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda p: p.name)
def test_every_example_is_valid(example):
    result = mmd("validate", "-f", str(example))
    assert result.exit_code == 0, result.output


def test_faults_are_printed_as_file_field_problem_and_remedy(tmp_path):
    bad = tmp_path / "bad.yaml"
    bad.write_text(
        yaml.safe_dump(merge(base_manifest(), {"spec": {"decode": {"gpus": -1}, "nats": {"managed": False}}}))
    )
    result = mmd("validate", "-f", str(bad))
    assert result.exit_code == 1
    assert result.stderr.splitlines() == [
        f"{bad}: spec.decode.gpus: -1 is too small; set at least 0",
        f"{bad}: spec.nats.url: managed is false, but url is not set; set url, or managed: true",
    ]


def test_a_bad_file_does_not_hide_a_good_one(tmp_path):
    good, bad = tmp_path / "good.yaml", tmp_path / "bad.yaml"
    good.write_text(yaml.safe_dump(base_manifest()))
    bad.write_text("{}")
    result = mmd("validate", "-f", str(bad), "-f", str(good))
    assert result.exit_code == 1
    assert f"{good}: sample is valid" in result.stdout
    assert f"{bad}: " in result.stderr


def test_programs_get_what_is_wrong_as_json(tmp_path):
    good, bad = tmp_path / "good.yaml", tmp_path / "bad.yaml"
    good.write_text(yaml.safe_dump(base_manifest()))
    bad.write_text(yaml.safe_dump(merge(base_manifest(), {"spec": {"decode": {"gpus": -1}}})))
    result = mmd("validate", "--json", "-f", str(good), "-f", str(bad))
    assert result.exit_code == 1
    fine, wrong = json.loads(result.stdout)
    assert (fine["valid"], fine["names"], fine["faults"]) == (True, [base_manifest()["metadata"]["name"]], [])
    assert (wrong["file"], wrong["valid"]) == (str(bad), False)
    assert wrong["faults"] == [{"field": "spec.decode.gpus", "message": "-1 is too small; set at least 0"}]


def test_standard_input_is_a_file_too():
    result = mmd("validate", "-f", "-", stdin=yaml.safe_dump(base_manifest()))
    assert (result.exit_code, result.stdout) == (0, "-: sample is valid\n")


def test_a_relative_model_path_is_valid_for_local_use_only():
    manifest = merge(base_manifest(), {"spec": {"model": {"id": "../models/a"}}})
    result = mmd("validate", "-f", "-", stdin=yaml.safe_dump(manifest))
    assert result.exit_code == 0
    assert "valid for `mmd up` only" in result.stdout
    assert mmd("render", "-f", "-", stdin=yaml.safe_dump(manifest)).exit_code == 1


def test_relative_adapters_are_found_beside_the_file_and_invalid_paths_named(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(validate_command, "engine_faults", lambda engine: asked.append(engine.adapters) or [])
    engine = {"type": "VLLM", "adapters": [{"name": "sql", "id": "./sql"}]}
    manifest = yaml.safe_dump(merge(base_manifest(), {"spec": {"engine": engine}}))
    for folder, code in (("good", 0), ("my folder", 1)):
        (tmp_path / folder).mkdir()
        file = tmp_path / folder / "one.yaml"
        file.write_text(manifest)
        result = mmd("validate", "-f", str(file))
        assert result.exit_code == code, result.output
    assert [[one.id for one in adapters] for adapters in asked] == [[str(tmp_path / "good" / "sql")]]
    assert "spec.engine.adapters[sql].id: " in result.output
    assert "has characters that an id cannot have" in result.output


def test_render_prefers_the_namespace_of_the_command_line():
    manifest = yaml.safe_dump(merge(base_manifest(), {"metadata": {"namespace": "infile"}}))
    for arguments, expected in ((["-n", "given"], "given"), ([], "infile")):
        objects = list(yaml.safe_load_all(mmd("render", "-f", "-", *arguments, stdin=manifest).stdout))
        assert {o["metadata"]["namespace"] for o in objects} == {expected}


def test_a_command_whose_library_is_missing_is_named_and_the_others_work(monkeypatch, capsys):
    found = [
        EntryPoint("up", "no_such_package.commands:up", program.COMMANDS_GROUP),
        EntryPoint("chat", "no_such_package.commands:chat", program.COMMANDS_GROUP),
        EntryPoint("validate", "mmd_cli.commands.validate:validate", program.COMMANDS_GROUP),
    ]
    monkeypatch.setattr(program, "entry_points", lambda group: found)
    mmd = program.build()
    assert mmd.commands() == {"validate"}
    (line,) = mmd.left_out
    assert "chat, up" in line
    assert "multimodal-operator[worker]" in line
    assert "no_such_package" in line

    for arguments, reported in ((["validate", "-f", str(EXAMPLES[0])], False), (["up"], True)):
        monkeypatch.setattr("sys.argv", ["mmd", *arguments])
        with pytest.raises(SystemExit):
            program.main()
        assert ("no_such_package" in capsys.readouterr().err) is reported


def test_an_entry_point_may_name_a_program_of_several_commands(monkeypatch):
    found = [EntryPoint("rollout", "mmd_cli.commands.rollout:rollout", program.COMMANDS_GROUP)]
    monkeypatch.setattr(program, "entry_points", lambda group: found)
    assert program.build("rollout").commands() == {"rollout"}
    result = mmd("rollout", "undo", "--help")
    assert result.exit_code == 0, result.output
    assert "--to-revision" in result.output


@pytest.mark.parametrize("command", ["worker", "gateway", "operator"])
def test_a_pod_imports_only_the_root_of_the_command_line(command):
    code = (
        "import atexit, sys; from mmd_cli.program import main; sys.argv = ['mmd', *sys.argv[1:]];"
        "atexit.register(lambda: print(*sorted(m for m in sys.modules if m.startswith('mmd_cli')), file=sys.stderr)); main()"
    )
    ran = subprocess.run([sys.executable, "-c", code, command, "--help"], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    assert command in ran.stdout
    assert ran.stderr.split() == ["mmd_cli", "mmd_cli.program"]
