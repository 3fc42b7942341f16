"""The page `docs/metrics.md`, made from the metrics of operator and workers: `python docs/make_metrics_page.py` writes it."""

from __future__ import annotations

import argparse
import sys
from itertools import groupby
from pathlib import Path

from mmd_api.contract.metric_table import LONG_SECONDS, SHORT_SECONDS, Entry
from mmd_operator.kube.metrics import OperatorMetrics
from mmd_workers.observe.metrics import Metrics

PAGE = Path(__file__).with_name("metrics.md")

_HEAD = """# Metrics

<!-- Generated from workers/mmd_workers/observe/metrics.py and operator/mmd_operator/kube/metrics.py by `make crds`. Do not edit. -->

Every pod serves `/metrics` on port 8080: workers, gateways, the operator. The suffix of a name is its unit.
Labels take values from small fixed sets, or names of tenants from their file; no value sent by a client becomes a label. Where to scrape them, and what to look at:
[observe.md](observe.md).

"Moves with" states what makes a metric nonzero: **load**, any served request; **tenants**, one with an API key; **deployment**, one that the operator
brings up; **scaling**, a pool that grows and shrinks; **trouble**, a failure or a shortage. Tests serve
requests until each metric of a pod that moves with load has moved, and bring up and scale a deployment until each metric of the operator has.

The operator's series about deployments carry the labels `namespace` and `deployment` themselves, and end when the deployment is
deleted. Scrape it with `honor_labels: true`. Only the leader exposes them.

Scraped as OpenMetrics, `mmd_ttft_seconds` and `mmd_e2e_seconds` carry the trace id of a recent request in each bucket as an
exemplar. Every process also exposes the usual `process_*` metrics (CPU time, memory, file descriptors).
Pods that run vLLM serve [vLLM's own metrics](engines.md#metrics), too.

A process belongs to one pipeline revision for its whole life, so revision is not a label of each series: join it where
needed.

```promql
histogram_quantile(0.95, sum by (le, revision) (
  rate(mmd_step_seconds_bucket[5m]) * on (instance) group_left (revision) mmd_build_info))
```
"""


def page() -> str:
    """The whole page."""
    parts = [_HEAD]
    catalogue = (*Metrics().catalogue, *OperatorMetrics().catalogue)
    for section, entries in groupby(catalogue, key=lambda entry: entry.section):
        parts.append(
            f"\n## {section}\n\n| metric | kind | description | labels | moves with |\n|---|---|---|---|---|\n"
        )
        parts += [_row(entry) for entry in entries]
    parts.append(
        f"\nBuckets of durations, in seconds: {_numbers(LONG_SECONDS)}; of transfers, engine steps, round trips, calls of the API server and `mmd_itl_seconds`: "
        f"{_numbers(SHORT_SECONDS)}.\n"
    )
    return "".join(parts)


def _row(entry: Entry) -> str:
    labels = "<br>".join(f"`{name}`: {values}" for name, values in entry.labels)
    return f"| `{entry.name}` | {entry.kind} | {entry.text} | {labels} | {entry.moved_by} |\n"


def _numbers(values: tuple[float, ...]) -> str:
    return ", ".join(f"{value:g}" for value in values)


def main() -> None:
    """Write the page, or with `--check` exit 1 when it is not what the code says."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    if not parser.parse_args().check:
        PAGE.write_text(page())
    elif PAGE.read_text() != page():
        sys.exit(f"{PAGE.name} is out of date: run make crds")


if __name__ == "__main__":
    main()
