"""The dashboards of the chart: one module each, the source of `dashboards/*.json`, of the pictures in the docs and of `mmd report`."""
