"""The operator's pauses, in one place: between looks at what it does not watch, before a repeated attempt, between decisions.

How long it waits for others (a lease, a deadline, the answer to a call, a watch that lags) is no pause and stays with the part that waits.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Pauses:
    """Pauses in seconds. Where a pause grows, `first` is its least and `last` its most."""

    gather_seconds: float = 0.05
    """After the first of a burst of changes, so that one pass sees them all."""
    moving_seconds: float = 5.0
    """Between passes over a deployment that is not settled."""
    resync_seconds: float = 60.0
    """Between passes over a deployment that is settled."""
    first_retry_seconds: float = 0.2
    last_retry_seconds: float = 60.0
    """After a failed pass."""

    tick_seconds: float = 2.0
    """Between ticks of the autoscaler."""
    last_tick_seconds: float = 30.0
    """Between ticks that keep failing."""

    namespace_seconds: float = 2.0
    """Between looks at a namespace with a deployment; more where there are more than ten."""
    sweep_seconds: float = 60.0
    """Between lists of a kind that find what a watch has missed."""
    sweep_retry_seconds: float = 1.0
    """After a list that failed; doubled for each further failure, up to `sweep_seconds`."""
    sweep_settle_seconds: float = 0.5
    """After a watch restarts, so that its own list arrives first."""

    first_secret_seconds: float = 5.0
    last_secret_seconds: float = 600.0
    """Between looks at the Secret with the passwords of NATS."""
    gateway_secrets_seconds: float = 30.0
    """Between looks at the Secrets of gateways."""
    bad_secret_seconds: float = 4.0
    """Between looks at a Secret of either kind while there is a problem with it."""
    download_seconds: float = 5.0
    """Between looks at a pod that downloads weights: the status that one changes wakes the next pass."""

    first_contest_seconds: float = 5.0
    last_contest_seconds: float = 300.0
    """Between repairs of what another client keeps changing."""
    warnings_seconds: float = 30.0
    """Between reads of the Events about a workload that is short of pods."""
    not_served_seconds: float = 15.0
    """Between attempts with a kind that the API server does not serve."""
    first_event_retry_seconds: float = 0.5
    last_event_retry_seconds: float = 30.0
    """After an Event could not be written."""
    record_retry_seconds: float = 5.0
    """After a spec could not be recorded."""
    refused_record_seconds: float = 60.0
    """The same where the API server refused it."""

    lease_seconds: float = 2.0
    """Between attempts to take the Lease, and between its renewals."""


PRODUCTION = Pauses()
