"""A Prometheus configuration for a deployment on this machine, whose gateway knows every pod to scrape."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from mmd_api.contract import paths


def configuration(admin_url: str, rules: Path | None = None, scrape_seconds: int = 5) -> str:
    """YAML for `prometheus --config.file`.

    `admin_url`: URL of the gateway's admin port. `rules`: the chart's alerts/rules.yaml, to include alerts.
    """
    config: dict[str, Any] = {
        "global": {"scrape_interval": f"{scrape_seconds}s", "evaluation_interval": f"{scrape_seconds}s"},
        "scrape_configs": [
            {
                "job_name": "mmd",
                "http_sd_configs": [
                    {
                        "url": f"{admin_url}{paths.GATEWAY_TARGETS}",
                        "refresh_interval": f"{max(5, scrape_seconds)}s",
                    }
                ],
            }
        ],
    }
    if rules is not None:
        config["rule_files"] = [str(rules.resolve())]
    return yaml.safe_dump(config, sort_keys=False)
