"""How every process tells what it does: logs, metrics, probes, phases."""
