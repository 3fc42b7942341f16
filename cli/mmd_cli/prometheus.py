"""A Prometheus configuration for a deployment that runs on this machine: its gateway knows every pod that may be scraped."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from mmd_api.contract import paths


def configuration(admin_url: str, rules: Path | None = None, scrape_seconds: int = 5) -> str:
    """YAML for `prometheus --config.file`; `admin_url` is of the gateway's admin port, `rules` is the chart's alerts/rules.yaml, if they are wanted."""
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
