"""Alerts fire on what they are for, are quiet otherwise, and lead to words on what to do."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from mmd_operator.kube.metrics import OperatorMetrics
from mmd_workers.observe.metrics import Metrics
from support.servers.prometheus_server import RULES, documented_job, program

CASES = Path(__file__).with_name("alerts_test.yaml")
RUNBOOKS = Path(__file__).resolve().parents[2] / "docs" / "runbooks.md"
GROUPS = yaml.safe_load(RULES.read_text())["groups"]
ALERTS = [rule for group in GROUPS for rule in group["rules"] if "alert" in rule]


def promtool(folder: Path, *arguments: str) -> None:
    """It finds nothing wrong in the files of a folder."""
    command = [program("promtool"), *arguments]
    ran = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=60)
    assert ran.returncode == 0, ran.stdout + ran.stderr


def test_promtool_sees_every_alert_fire_and_stay_quiet_as_the_cases_say(tmp_path: Path) -> None:
    for file in (RULES, CASES):
        shutil.copy(file, tmp_path)
    promtool(tmp_path, "test", "rules", CASES.name)


def test_no_alert_fires_for_a_follower_of_a_group(tmp_path: Path) -> None:
    """It takes no requests and knows no NATS: what it has not is no fault of it."""
    text = Metrics(["follower"]).expose()[0].decode()
    place = {"namespace": "n", "deployment": "d", "pod": "d-0-1"}
    series = [
        {
            "series": f"{sample.name}{{{','.join(f'{k}={json.dumps(v)}' for k, v in {**sample.labels, **place}.items())}}}",
            "values": f"{sample.value}x60",
        }
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name.startswith("mmd_")
    ]
    quiet = [{"eval_time": "50m", "alertname": alert["alert"], "exp_alerts": []} for alert in ALERTS]
    case = {"name": "a follower", "interval": "1m", "input_series": series, "alert_rule_test": quiet}
    file = tmp_path / "follower.yaml"
    file.write_text(yaml.safe_dump({"rule_files": [RULES.name], "tests": [case]}))
    shutil.copy(RULES, tmp_path)
    promtool(tmp_path, "test", "rules", file.name)


def test_the_documented_scrape_configuration_is_one(tmp_path: Path) -> None:
    """All but the discovery itself: Debian builds Prometheus without Kubernetes."""
    job = documented_job()
    assert job.pop("kubernetes_sd_configs") == [{"role": "pod"}]
    file = tmp_path / "prometheus.yml"
    file.write_text(yaml.safe_dump({"rule_files": [str(RULES)], "scrape_configs": [job]}))
    promtool(tmp_path, "check", "config", file.name)


def test_every_alert_is_seen_to_fire_in_some_case() -> None:
    cases = yaml.safe_load(CASES.read_text())["tests"]
    fired = {
        check["alertname"]
        for case in cases
        for check in case.get("alert_rule_test", ())
        if check["exp_alerts"]
    }
    assert fired == {alert["alert"] for alert in ALERTS}


@pytest.mark.parametrize("alert", ALERTS, ids=lambda alert: alert["alert"])
def test_an_alert_leads_to_its_runbook(alert: dict) -> None:
    page, _, anchor = alert["annotations"]["runbook_url"].partition("#")
    assert page == "docs/runbooks.md"
    headings = [line[3:].strip() for line in RUNBOOKS.read_text().splitlines() if line.startswith("## ")]
    assert alert["alert"] in headings
    assert anchor == alert["alert"].lower()
    assert alert["labels"]["severity"] in ("critical", "warning")


def test_rules_ask_for_metrics_that_exist() -> None:
    known = {entry.name for table in (Metrics(), OperatorMetrics()) for entry in table.catalogue}
    for group in GROUPS:
        for rule in group["rules"]:
            for name in re.findall(r"\bmmd_\w+", rule["expr"]):
                assert name in known or re.sub("_(bucket|count|sum)$", "", name) in known, name
