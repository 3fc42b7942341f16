"""Where a pod is asked about its load: its admin port, or the only port of one that has none."""

from __future__ import annotations

from typing import Any

import pytest

from mmd_operator.observed.observed import pod_of
from mmd_operator.resources.plan import plan_objects

from .planned import deployment


def seen(ports: list[dict[str, Any]] | None) -> int:
    container = {"name": "worker", **({} if ports is None else {"ports": ports})}
    return pod_of({"metadata": {"name": "p", "uid": "u"}, "spec": {"containers": [container]}}).report_port


@pytest.mark.parametrize(
    ("ports", "expected"),
    [
        ({"http": 8000, "admin": 8080}, 8080),
        ({"admin": 9090, "http": 8000}, 9090),
        ({"http": 8000}, 8000),  # a gateway of a release before the admin port, which an upgrade leaves alone
        ({"http": 8080}, 8080),
        ({}, 8080),
        (None, 8080),
    ],
)
def test_load_reports_are_read_at_this_port(ports: dict[str, int] | None, expected: int) -> None:
    made = None if ports is None else [{"name": name, "containerPort": port} for name, port in ports.items()]
    assert seen(made) == expected


def test_load_reports_use_the_port_that_is_scraped() -> None:
    for item in plan_objects(deployment({}), "somewhere"):
        template = item.get("spec", {}).get("template")
        if template is None or "prometheus.io/port" not in template["metadata"].get("annotations", {}):
            continue
        pod = pod_of({"metadata": {"name": "p", "uid": "u"}, "spec": template["spec"]})
        assert str(pod.report_port) == template["metadata"]["annotations"]["prometheus.io/port"]
