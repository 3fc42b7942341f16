"""How every process reports what it does: logs, metrics, probes, phases."""
