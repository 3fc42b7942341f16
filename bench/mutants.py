"""Mutation testing of the pure modules: which small changes of the code no test notices.

    python -m bench.mutants [--seed 1] [--sample 16] [--jobs 2] [--only router ...]

cosmic-ray lists the mutants of each module: a comparison for its neighbour, a plus for a minus, a min for a max, a condition negated,
a number one more or less. A seeded sample of them is tested, each in a private copy of the tree, with the tests of its module alone.
At most one in ten may survive, and `mutants.yaml` gives the reason of each that does: it changes nothing that can be observed, or
a test would cost more than it protects. bench/reports/mutants.json has a row for each module, with the seed and the sample it was drawn
with and a digest of its source; `--only` replaces the rows of some, and a row of a module that has changed since is reported as stale.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import hashlib
import importlib
import json
import multiprocessing
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, ClassVar

import parso.python.tree
import pytest
import yaml
from cosmic_ray import plugins
from cosmic_ray.commands import init
from cosmic_ray.mutating import use_mutation
from cosmic_ray.operators.operator import Example, Operator
from cosmic_ray.work_db import use_db
from cosmic_ray.work_item import MutationSpec
from rich.console import Console
from rich.table import Table

from bench.report import REPORTS, keep

ROOT = Path(__file__).parents[1]
REASONS = Path(__file__).with_suffix(".yaml")
MOST_SURVIVE = 0.1
OPERATORS = re.compile(
    r"mmd/.*"
    r"|core/ReplaceComparisonOperator_(Lt_LtE|LtE_Lt|Gt_GtE|GtE_Gt|Lt_Gt|Gt_Lt|LtE_GtE|GtE_LtE|Eq_NotEq|NotEq_Eq|Is_IsNot|IsNot_Is)"
    r"|core/ReplaceBinaryOperator_(Add_Sub|Sub_Add|Mul_Div|Div_Mul|FloorDiv_Mul|Mod_Add|Sub_BitOr|BitAnd_Sub)"
    r"|core/ReplaceUnaryOperator_(Delete_Not|Delete_USub)"
    r"|core/(AddNot|ReplaceAndWithOr|ReplaceOrWithAnd|ReplaceTrueWithFalse|ReplaceFalseWithTrue)"
    r"|core/(ReplaceBreakWithContinue|ReplaceContinueWithBreak|ZeroIterationForLoop|NumberReplacer)"
)
"""Slips of a hand. Of cosmic-ray's other replacements most are nonsense that any call fails on: a plus for a shift."""
CASES = "--noconftest"
"""For tests that need no fixture: they start at once, without what fixtures import."""
PACKAGES = "pythonpath=charts cli crds operator workers"
"""Before the installed packages, which are those of the tree that the copies were made of."""
IMPORTED_ONCE = (
    "hypothesis",
    "kubernetes",
    "nats",
    "openai",
    "pydantic",
    "pytest",
    "torch",
    "transformers",
    "uvicorn",
)
"""Before each process of tests is forked: to import them takes longer than most of the tests."""


@dataclass(frozen=True, slots=True)
class Target:
    """A module, and the pytest arguments that test it."""

    path: str
    tests: str


AUTOSCALING = f"{CASES} tests/autoscaling/test_edges.py tests/autoscaling/test_scaler.py \
tests/autoscaling/test_coordination.py tests/autoscaling/test_timelines.py"
ROLLOUT = (
    "tests/reconcile/test_rollout_sizes.py tests/reconcile/test_rollout_budget.py tests/reconcile/test_rollout_steps.py \
tests/reconcile/test_explain.py"
)
TARGETS = (
    Target(
        "workers/mmd_workers/engine/scheduler.py",
        f"{CASES} tests/engine/test_scheduler.py tests/engine/test_step_bounds.py",
    ),
    Target(
        "workers/mmd_workers/engine/pieces.py",
        f"{CASES} tests/engine/test_scheduler.py tests/engine/test_step_bounds.py tests/engine/test_text_share.py",
    ),
    Target("workers/mmd_workers/engine/pacing/pace.py", f"{CASES} tests/engine/test_step_bounds.py"),
    Target("workers/mmd_workers/encoder/run_pace.py", f"{CASES} tests/roles/test_run_pace.py"),
    Target("crds/mmd_api/contract/text_share.py", f"{CASES} tests/engine/test_text_share.py"),
    Target("crds/mmd_api/contract/steps.py", f"{CASES} tests/engine/test_step_bounds.py"),
    Target(
        "workers/mmd_workers/engine/memory/blocks.py",
        f"{CASES} tests/engine/test_blocks.py tests/engine/test_scheduler.py",
    ),
    Target("workers/mmd_workers/kv/leases.py", f"{CASES} tests/kv/test_leases.py"),
    Target(
        "workers/mmd_workers/gateway/placement/router.py", f"{CASES} tests/gateway/placement/test_router.py"
    ),
    Target(
        "workers/mmd_workers/gateway/basics/media_hold.py", f"{CASES} tests/gateway/intake/test_media_hold.py"
    ),
    Target("workers/mmd_workers/gateway/intake/intake.py", "tests/gateway/intake/test_intake_limits.py"),
    Target("workers/mmd_workers/gateway/intake/checks.py", "tests/gateway/intake/test_intake_limits.py"),
    Target("workers/mmd_workers/gateway/intake/texts.py", "tests/gateway/intake/test_intake_limits.py"),
    Target("workers/mmd_workers/gateway/intake/fitting.py", "tests/gateway/intake/test_intake_limits.py"),
    Target("workers/mmd_workers/gateway/intake/sampling.py", "tests/gateway/intake/test_intake_limits.py"),
    Target("operator/mmd_operator/autoscaling/decide.py", AUTOSCALING),
    Target("operator/mmd_operator/autoscaling/sizing.py", AUTOSCALING),
    Target("operator/mmd_operator/autoscaling/coordinate.py", AUTOSCALING),
    Target("operator/mmd_operator/autoscaling/history.py", AUTOSCALING),
    Target("operator/mmd_operator/autoscaling/policy.py", AUTOSCALING),
    Target("operator/mmd_operator/autoscaling/signals.py", AUTOSCALING),
    Target("operator/mmd_operator/autoscaling/scaler.py", AUTOSCALING),
    Target("operator/mmd_operator/autoscaling/decision.py", AUTOSCALING),
    Target("operator/mmd_operator/rollout/next_step.py", ROLLOUT),
    Target("operator/mmd_operator/rollout/rollout_steps.py", ROLLOUT),
    Target(
        "operator/mmd_operator/sizes/replacement.py",
        "tests/reconcile/test_replacement.py tests/reconcile/test_shrinking.py",
    ),
    Target("operator/mmd_operator/sizes/gpu_share.py", ROLLOUT),
    Target(
        "operator/mmd_operator/sizes/gpu_budget.py",
        "tests/reconcile/test_growth.py tests/reconcile/test_scaling_budget.py",
    ),
    Target("operator/mmd_operator/sizes/pending_growth.py", "tests/reconcile/test_growth.py"),
    Target(
        "operator/mmd_operator/scaling/scaling_limits.py",
        "tests/reconcile/test_shrinking.py tests/reconcile/test_growth.py tests/reconcile/test_scaling_budget.py",
    ),
    Target("operator/mmd_operator/sizes/pool_sizes.py", ROLLOUT),
    Target("operator/mmd_operator/resources/plan.py", "tests/plan/test_plan_golden.py"),
    Target("operator/mmd_operator/kube/contests.py", "tests/reconcile/test_contests.py"),
    Target("operator/mmd_operator/observed/problems.py", "tests/reconcile/test_problems.py"),
    Target("operator/mmd_operator/status/conditions.py", "tests/reconcile/test_conditions.py"),
    Target(
        "operator/mmd_operator/status/deployment_status.py",
        "tests/reconcile/test_conditions.py tests/reconcile/test_explain.py",
    ),
    Target("workers/mmd_workers/wire/jobs.py", "tests/wire/test_jobs.py"),
)
console = Console(width=150)


class SwapCall(Operator):
    """`min` for `max`, `any` for `all`, and back."""

    OTHER: ClassVar = {"min": "max", "max": "min", "any": "all", "all": "any"}

    def mutation_positions(self, node: Any) -> Iterator[tuple[Any, Any]]:
        if isinstance(node, parso.python.tree.Name) and node.value in self.OTHER:
            after = node.get_next_sibling()
            if after is not None and after.type == "trailer" and after.children[0].value == "(":
                yield node.start_pos, node.end_pos

    def mutate(self, node: Any, index: int) -> Any:
        node.value = self.OTHER[node.value]
        return node

    @classmethod
    def examples(cls) -> tuple[Example, ...]:
        return (Example("min(a, b)", "max(a, b)"),)


plugins.OPERATOR_PROVIDERS["mmd"] = {"SwapCall": SwapCall}


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one mutant. `was` and `becomes` name it: they stay when lines move."""

    path: str
    function: str | None
    line: int
    was: str
    becomes: str
    survived: bool
    timed_out: bool


def copied(target: Path) -> Path:
    """The working tree without what git ignores: mutants are never made in the tree itself."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        check=True,
        capture_output=True,
    )
    for name in listed.stdout.decode().split("\0"):
        if name and (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name)
    return target


def enter(copies: multiprocessing.Queue[Path]) -> None:
    """Make one copy the working directory of this process and of the tests that it starts."""
    tree = copies.get()
    os.chdir(tree)
    os.environ["CI"] = "1"  # hypothesis tries the same examples for every mutant, and remembers none
    for name in IMPORTED_ONCE:
        importlib.import_module(name)


def passed(tests: str, timeout_seconds: float, keep_bytecode: bool = False) -> bool | None:
    """Run pytest in a separate process, forked from this one; None: it did not end in time."""
    child = multiprocessing.get_context("fork").Process(target=_pytest, args=(tests, keep_bytecode))
    child.start()
    child.join(timeout_seconds)
    if child.exitcode is None:
        os.killpg(child.pid or 0, signal.SIGKILL)
        child.join()
        return None
    return child.exitcode == 0


def _pytest(tests: str, keep_bytecode: bool) -> None:
    os.setsid()  # what tests start ends with them
    # Bytecode of a mutant would be taken for that of the next one, written in the same second with the same length.
    sys.dont_write_bytecode = not keep_bytecode
    with Path("output").open("w") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
        code = pytest.main(
            ["-x", "-q", "-p", "no:xdist", "-p", "no:cacheprovider", "-o", PACKAGES, *tests.split()]
        )
        output.flush()
    os._exit(int(code))


def lines_of_functions(text: str) -> set[int]:
    """Where a module decides. What stands outside, constants and defaults of fields, are choices: a test of one would repeat it."""
    functions = [
        n for n in ast.walk(ast.parse(text)) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    return {line for f in functions for line in range(f.body[0].lineno, (f.end_lineno or 0) + 1)}


def mutants(path: str, scratch: Path) -> list[MutationSpec]:
    """All mutants of a module, in the order of its text."""
    with use_db(scratch / "session.sqlite") as session:
        init([ROOT / path], session, {})
        found = [mutation for item in session.work_items for mutation in item.mutations]
    inside = lines_of_functions((ROOT / path).read_text())
    found = [m for m in found if OPERATORS.fullmatch(m.operator_name) and m.start_pos[0] in inside]
    return sorted(found, key=lambda m: (m.start_pos, m.operator_name, m.occurrence))


def seconds_unmutated(target: Target) -> float:
    """How long the tests of a module take. They must pass, or their failures would mean nothing."""
    begun = time.monotonic()
    if not passed(target.tests, 600, keep_bytecode=True):
        raise RuntimeError(
            f"without a mutant, these tests of {target.path} fail: pytest {target.tests}\n{Path('output').read_text()}"
        )
    return time.monotonic() - begun


def tried(target: Target, mutation: MutationSpec, seconds: float) -> Outcome:
    """Test one mutant; one that takes many times as long as the tests without it hangs, and counts as killed."""
    operator = plugins.get_operator(mutation.operator_name)()
    with use_mutation(Path(target.path), operator, mutation.occurrence) as (original, mutated):
        verdict = passed(target.tests, 20 + 5 * seconds)
    changes = list(difflib.ndiff(original.splitlines(), mutated.splitlines()))
    was, becomes = (
        " ".join(" ".join(line[2:] for line in changes if line.startswith(sign)).split()) for sign in "-+"
    )
    line = mutation.start_pos[0]
    return Outcome(
        target.path,
        mutation.definition_name,
        line,
        was,
        becomes,
        survived=verdict is True,
        timed_out=verdict is None,
    )


def reasons() -> dict[tuple[str, str, str], str]:
    """Why each known survivor may survive, by module, line and replacement; a line that is gone needs no reason."""
    found = {}
    for path, entries in (yaml.safe_load(REASONS.read_text()) or {}).items():
        text = re.sub(r"\s+", " ", (ROOT / path).read_text())
        for entry in entries:
            if entry["was"] not in text:
                raise SystemExit(f"{REASONS.name}: {path} has no line {entry['was']!r}: remove the entry")
            found[path, entry["was"], entry["becomes"]] = entry["reason"]
    return found


def run(targets: Sequence[Target], seed: int, sample: int, jobs: int) -> Iterator[dict[str, Any]]:
    """One row a module: its counts and survivors."""
    reasons()  # an entry that is out of date is reported now, and not after half an hour
    unmutated: dict[str, float] = {}
    with tempfile.TemporaryDirectory(prefix="mutants-") as scratch:
        context = multiprocessing.get_context("fork")
        copies = context.Queue()
        for number in range(jobs):
            copies.put(copied(Path(scratch) / f"copy-{number}"))
        with ProcessPoolExecutor(jobs, context, enter, (copies,)) as pool:
            for target in targets:
                population = mutants(target.path, Path(scratch))
                draw = random.Random(f"{seed} {target.path}")
                chosen = draw.sample(population, min(sample, len(population)))
                begun = time.monotonic()
                if target.tests not in unmutated:
                    # Each copy runs them once without a mutant, which leaves it the bytecode of all that they import.
                    first = [pool.submit(seconds_unmutated, target) for _ in range(jobs)]
                    unmutated[target.tests] = max(task.result() for task in first)
                seconds = unmutated[target.tests]
                tests = [pool.submit(tried, target, mutation, seconds) for mutation in chosen]
                outcomes = []
                for done in as_completed(tests):
                    outcomes.append(done.result())
                    if outcomes[-1].survived:
                        one = outcomes[-1]
                        console.print(
                            f"{one.path}:{one.line}\n  - {one.was}\n  + {one.becomes}", markup=False
                        )
                survivors = sorted((o for o in outcomes if o.survived), key=lambda o: (o.line, o.becomes))
                row = {
                    "module": target.path,
                    "source": digest(target.path),
                    "tests": target.tests,
                    "seed": seed,
                    "sample": sample,
                    "seconds": round(time.monotonic() - begun, 1),
                    "mutants": len(population),
                    "tested": len(outcomes),
                    "killed": sum(not o.survived for o in outcomes),
                    "killed_by_timeout": sum(o.timed_out for o in outcomes),
                    "survived": len(survivors),
                    "survivors": [
                        {
                            key: value
                            for key, value in asdict(o).items()
                            if key in ("function", "line", "was", "becomes")
                        }
                        for o in survivors
                    ],
                }
                console.print(
                    f"{target.path}: {row['killed']} of {len(outcomes)} killed in {row['seconds']} s"
                )
                yield row


def digest(path: str) -> str:
    """Names the source of a module that its mutants were made of."""
    return hashlib.sha256((ROOT / path).read_bytes()).hexdigest()[:16]


def with_other_modules(row: dict[str, Any]) -> list[dict[str, Any]]:
    """This row and those that the report has of other modules; each survivor with its reason."""
    path = REPORTS / "mutants.json"
    before = json.loads(path.read_text()) if path.exists() else {}
    found = {row["module"]: row for row in [*before.get("modules", []), row]}
    known = reasons()
    for module in found.values():
        for survivor in module["survivors"]:
            survivor["reason"] = known.get((module["module"], survivor["was"], survivor["becomes"]))
    return [found[target.path] for target in TARGETS if target.path in found]


def table(rows: list[dict[str, Any]]) -> Table:
    """Counts by module, and their sum."""
    columns = ("mutants", "tested", "killed", "survived")
    shown = Table("module", *columns, "seconds")
    for row in rows:
        stale = "" if row["source"] == digest(row["module"]) else " (stale: the module has changed)"
        shown.add_row(row["module"] + stale, *(str(row[c]) for c in columns), str(row["seconds"]))
    shown.add_section()
    shown.add_row("all", *(str(sum(row[c] for row in rows)) for c in columns))
    return shown


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, default=1, help="draws the same mutants of the same source again")
    parser.add_argument("--sample", type=int, default=16, help="mutants of each module, at most")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="copies of the tree")
    parser.add_argument("--only", nargs="+", default=[], help="modules whose path contains one of these")
    args = parser.parse_args()
    targets = [t for t in TARGETS if not args.only or any(part in t.path for part in args.only)]
    console.print(f"seed {args.seed}, at most {args.sample} mutants of each of {len(targets)} modules")
    for row in run(targets, args.seed, args.sample, args.jobs):
        rows = with_other_modules(row)
        tested, survived = (sum(row[key] for row in rows) for key in ("tested", "survived"))
        unexplained = sum(not s["reason"] for row in rows for s in row["survivors"])
        totals = {"tested": tested, "survived": survived, "without_reason": unexplained}
        path = keep("mutants", {"cosmic_ray": version("cosmic-ray"), "totals": totals, "modules": rows})
    console.print(table(rows))
    console.print(f"{path}: {survived} of {tested} survived; {unexplained} of these without a reason")
    if survived > MOST_SURVIVE * tested or unexplained:
        raise SystemExit(
            f"at most {MOST_SURVIVE:.0%} may survive, each with a reason: add a test, or a reason to {REASONS.name}"
        )


if __name__ == "__main__":
    main()
