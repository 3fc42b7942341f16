"""The operator's pauses, in one place: between polls of unwatched objects, before retries, between decisions.

A wait for others (a lease, a deadline, the answer to a call, a lagging watch) is not a pause, and stays with the part that waits.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Pauses:
    """Pauses in seconds. If a pause grows, `first` is its minimum and `last` its maximum."""

    gather_seconds: float = 0.05
    """Pause after the first change of a burst, so that one pass sees the whole burst."""
    moving_seconds: float = 5.0
    """Pause between passes over a deployment that is not settled."""
    resync_seconds: float = 60.0
    """Pause between passes over a settled deployment."""
    first_retry_seconds: float = 0.2
    last_retry_seconds: float = 60.0
    """Pause after a failed pass."""

    tick_seconds: float = 2.0
    """Pause between ticks of the autoscaler."""
    last_tick_seconds: float = 30.0
    """Longest pause between ticks that keep failing."""

    namespace_seconds: float = 2.0
    """Pause between polls of a namespace with a deployment; longer if there are more than ten such namespaces."""
    sweep_seconds: float = 60.0
    """Pause between lists of a kind, which find deletions that a watch has missed."""
    sweep_retry_seconds: float = 1.0
    """Pause after a failed list; doubled for each further failure, up to `sweep_seconds`."""
    sweep_settle_seconds: float = 0.5
    """Pause after a watch restarts, so that its own list arrives first."""

    first_refused_watch_seconds: float = 5.0
    last_refused_watch_seconds: float = 60.0
    """Pause before a watch that the API server refuses begins again."""

    first_secret_seconds: float = 5.0
    last_secret_seconds: float = 600.0
    """Pause between polls of the Secret with the passwords of NATS."""
    gateway_secrets_seconds: float = 30.0
    """Pause between polls of the Secrets of gateways."""
    bad_secret_seconds: float = 4.0
    """Pause between polls of a Secret of either kind that has a problem."""
    download_seconds: float = 5.0
    """Pause between polls of a pod that downloads weights. A status that a poll changes wakes the next pass."""

    first_contest_seconds: float = 5.0
    last_contest_seconds: float = 300.0
    """Pause between repairs of an object that another client keeps changing."""
    warnings_seconds: float = 30.0
    """Pause between reads of the Events about a workload that is short of pods."""
    not_served_seconds: float = 15.0
    """Pause between attempts with a kind that the API server does not serve."""
    first_event_retry_seconds: float = 0.5
    last_event_retry_seconds: float = 30.0
    """Pause after an Event could not be written."""
    record_retry_seconds: float = 5.0
    """Pause after a spec could not be recorded."""
    refused_record_seconds: float = 60.0
    """Pause after the API server refused to record a spec."""

    lease_seconds: float = 2.0
    """Pause between attempts to acquire the Lease, and between its renewals."""


PRODUCTION = Pauses()
