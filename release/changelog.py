"""The changelog of a release, from the subjects of its commits: `python -m release.changelog v0.2.0`.

A subject is `area: what it does`, or `area, area: …`; it stands under its first area. Merges are left out.
"""

from __future__ import annotations

import argparse
import re
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

from e2e.shell import FailedError, run

REPOSITORY = Path(__file__).parents[1]
SUBJECT = re.compile(r"(?P<areas>[a-z][\w/ .-]*(?:, [a-z][\w/ .-]*)*): (?P<what>.+)", re.IGNORECASE)
LAST = ("docs", "bench", "e2e", "tests")
"""Areas that users read last."""
OTHER = "other"


def changelog(version: str, subjects: Iterable[str]) -> str:
    """Markdown: one section for each area, with its changes in the order of `subjects`, each once."""
    areas: dict[str, dict[str, None]] = defaultdict(dict)
    for subject in subjects:
        if subject.startswith("Merge "):
            continue
        found = SUBJECT.fullmatch(subject)
        area = found["areas"].split(",")[0].strip().lower() if found else OTHER
        areas[area][found["what"] if found else subject] = None
    lines = [f"# {version}", ""]
    for area in sorted(areas, key=lambda a: (a == OTHER, LAST.index(a) if a in LAST else -1, a)):
        lines += [f"## {area}", "", *(f"- {what}" for what in areas[area]), ""]
    return "\n".join(lines) if areas else f"# {version}\n\nNo changes.\n"


def subjects_of(release: str) -> list[str]:
    """Subjects of the commits up to `release`, the latest first, from the tag before it, or from the beginning where there is none.

    Raises:
        FailedError: there is no such commit, or this is no git repository.
    """
    here = ("git", "-C", REPOSITORY)
    try:
        earlier = run(*here, "describe", "--tags", "--abbrev=0", f"{release}^").strip()
    except FailedError:
        earlier = ""
    between = f"{earlier}..{release}" if earlier else release
    return run(*here, "log", "--no-merges", "--format=%s", between).splitlines()


def main() -> None:
    """Write the changelog of a tag to standard output."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("version", help="the release, such as v0.2.0")
    parser.add_argument("--commit", help="its commit, where it has no tag yet")
    options = parser.parse_args()
    print(changelog(options.version, subjects_of(options.commit or options.version)))


if __name__ == "__main__":
    main()
