"""The reports of every process: logs, metrics, probes, phases."""
