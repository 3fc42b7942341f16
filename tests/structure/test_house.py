"""The rules of the house find what breaks them, and nothing else."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from ci import house


def made(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(house, "PACKAGES", ("package",))
    monkeypatch.setattr(house, "LONG_CONSTRUCTORS", tmp_path / "long.txt")
    return tmp_path


def test_a_house_that_keeps_its_rules_has_no_faults(root: Path) -> None:
    made(root, {"package/room/thing.py": '"""A thing."""\n\nSECONDS = 1  # as long as a step\n'})
    assert house.faults(root) == []


def test_a_folder_has_at_most_twenty_modules(root: Path) -> None:
    made(root, {f"package/room/m{number}.py": "" for number in range(20)} | {"package/room/__init__.py": ""})
    assert house.faults(root) == []
    made(root, {"package/room/m20.py": ""})
    assert house.faults(root) == ["package/room: 21 modules, more than 20; divide it into folders"]


def test_two_files_may_have_one_name_and_three_may_not(root: Path) -> None:
    made(root, {"package/a/service.py": "", "package/b/service.py": ""})
    assert house.faults(root) == []
    made(root, {"package/c/service.py": ""})
    (fault,) = house.faults(root)
    assert fault.startswith("service.py: package/a, package/b, package/c; ")


@pytest.mark.parametrize("comment", ["# of the step that runs", "# that waits", "# for which nobody asks"])
def test_a_comment_is_no_genitive(root: Path, comment: str) -> None:
    made(root, {"package/thing.py": f"SECONDS = 1  {comment}\n"})
    (fault,) = house.faults(root)
    assert fault.startswith("package/thing.py:1: the comment is a genitive")


@pytest.mark.parametrize(
    ("docstring", "words"),
    [
        ("Runs.", 1),
        ("Runs now. Then it waits for a very long time.", 2),
        ("Runs now; then it waits.", 2),
        ("Runs `a.b` of one\n    line.\n\n    More.", 5),
    ],
)
def test_the_first_sentence_ends_at_a_full_stop_or_a_semicolon(docstring: str, words: int) -> None:
    assert len(house.first_sentence(docstring).split()) == words


def test_a_first_sentence_has_at_most_twenty_five_words(root: Path) -> None:
    made(root, {"package/thing.py": f'def run():\n    """{"word " * 25}."""\n'.replace(" .", ".")})
    assert house.faults(root) == []
    made(root, {"package/thing.py": f'def run():\n    """{"word " * 26}."""\n'.replace(" .", ".")})
    (fault,) = house.faults(root)
    assert fault.startswith("package/thing.py:2: 26 words in the first sentence")


def test_constructors_over_eight_arguments_are_on_a_list_that_shrinks(root: Path) -> None:
    arguments = ", ".join(f"a{number}" for number in range(9))
    made(root, {"package/thing.py": f"class Long:\n    def __init__(self, {arguments}):\n        pass\n"})
    (fault,) = house.faults(root)
    assert fault.startswith("package/thing.py:Long: more than 8 arguments")
    made(root, {"long.txt": "package/thing.py:Long\n"})
    assert house.faults(root) == []
    made(root, {"package/thing.py": "class Long:\n    pass\n"})
    (fault,) = house.faults(root)
    assert fault.startswith("package/thing.py:Long: no longer too long; remove it from long.txt")


def test_arguments_are_counted_without_self() -> None:
    tree = ast.parse("class Thing:\n    def __init__(self, a, /, b, *, c): ...\n")
    assert list(house.constructors(Path("thing.py"), tree)) == [("thing.py:Thing", 3)]
