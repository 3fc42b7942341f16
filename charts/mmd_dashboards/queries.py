"""PromQL queries of the panels, about one deployment and about the operators."""

from __future__ import annotations

import re

from mmd_dashboards.panels import Query

OURS = 'namespace="$namespace",deployment="$deployment"'
RATE = "$__rate_interval"


def of(metric: str, *matchers: str) -> str:
    """A metric of the chosen deployment.

    Matchers are written without quotes: `state=free`, `state=~waiting|running`.
    """
    quoted = [re.sub(r"^(\w+)(=~|=)(.*)$", r'\1\2"\3"', matcher) for matcher in matchers]
    return f"{metric}{{{','.join((OURS, *quoted))}}}"


def rate(metric: str, *matchers: str) -> str:
    """How fast a counter of the chosen deployment grows, per second."""
    return f"rate({of(metric, *matchers)}[{RATE}])"


def rate_by(metric: str, by: str, *matchers: str) -> Query:
    """How fast a counter grows, one line per value of a label."""
    return Query(f"sum by ({by}) ({rate(metric, *matchers)})", f"{{{{{by}}}}}")


def level_by(metric: str, by: str, *matchers: str) -> Query:
    """A gauge, one line per value of a label."""
    return Query(f"sum by ({by}) ({of(metric, *matchers)})", f"{{{{{by}}}}}")


def trouble_by(metric: str, by: str, *matchers: str) -> Query:
    """Like `rate_by`, for a counter that grows only when something went wrong."""
    return Query(f"sum by ({by}) ({rate(metric, *matchers)})", f"{{{{{by}}}}}", "trouble")


def operator_level_by(metric: str, by: str, *matchers: str) -> Query:
    """A gauge that operators report about the chosen deployment.

    During a handover, two operators may report it.
    """
    legend = " ".join(f"{{{{{label}}}}}" for label in by.split(", "))
    return Query(f"max by ({by}) ({of(metric, *matchers)})", legend, "operator")


def operator_rate_by(metric: str, by: str) -> Query:
    """A rate of the operators themselves, over all deployments."""
    legend = " ".join(f"{{{{{label}}}}}" for label in by.split(", "))
    return Query(f"sum by ({by}) (rate({metric}[{RATE}]))", legend, "operator")


def operator_quantile(level: float, histogram: str, by: str) -> Query:
    """A quantile over all operators, one line per value of a label."""
    expr = f"histogram_quantile({level:g}, sum by (le, {by}) (rate({histogram}_bucket[{RATE}])))"
    return Query(expr, f"p{level * 100:g} {{{{{by}}}}}", "operator")


def quantile(level: float, histogram: str, by: str = "", *matchers: str, legend: str = "") -> Query:
    """A quantile of a histogram; with `by`, one line per value of that label."""
    groups = f"le, {by}" if by else "le"
    expr = f"histogram_quantile({level:g}, sum by ({groups}) ({rate(f'{histogram}_bucket', *matchers)}))"
    name = f"p{level * 100:g}"
    return Query(expr, legend or (f"{name} {{{{{by}}}}}" if by else name))


def quantiles(histogram: str, *matchers: str) -> tuple[Query, ...]:
    """The median, the 95th and the 99th percentile of a histogram."""
    return tuple(quantile(q, histogram, "", *matchers) for q in (0.5, 0.95, 0.99))


def promise(signal: str) -> Query:
    """The bound that spec.slo sets for a signal."""
    return Query(f"max({of('mmd_slo_target_seconds', 'signal=' + signal)})", "promised")


def share(metric: str, wanted: str, by: str) -> Query:
    """The share of a counter that matches `wanted`, one line per value of a label."""
    part, whole = f"sum by ({by}) ({rate(metric, wanted)})", f"sum by ({by}) ({rate(metric)})"
    return Query(f"{part} / {whole}", f"{{{{{by}}}}}")


KV_USED = f"1 - sum by (pod) ({of('mmd_kv_blocks', 'state=free')}) / sum by (pod) ({of('mmd_kv_blocks')})"
BUSY = f"rate({of('mmd_encode_busy_seconds_total')}[{RATE}])"

# Events that every picture marks: a pod that did not exist two minutes ago (scaling, a restart), a decision of the autoscaler, a
# second revision.
STARTED = f"{of('mmd_build_info')} unless {of('mmd_build_info')} offset 2m"
SCALED = f"sum by (pool, direction, reason) (increase({of('mmd_scaling_decisions_total')}[{RATE}])) > 0"
ROLLOUT = f"count(count by (revision) ({of('mmd_build_info')})) > 1"


def filled(expr: str, namespace: str, deployment: str, rate_interval: str) -> str:
    """An expression with its variables filled in, for a plain Prometheus."""
    for name, value in (("$namespace", namespace), ("$deployment", deployment), (RATE, rate_interval)):
        expr = expr.replace(name, value)
    return expr
