"""The dashboard Transfers and NATS: embeddings, KV and messages between pods, and what Gateways ask them."""

from __future__ import annotations

from dataclasses import replace

from mmd_dashboards.panels import Board, Panel, Query, Row
from mmd_dashboards.queries import (
    RATE,
    of,
    quantile,
    quantiles,
    rate,
    rate_by,
    trouble_by,
)

_PICKER = Row(
    "Endpoint picker (with spec.gateway.inferencePool)",
    (
        Panel(
            "Requests that Gateways ask about",
            "Requests by outcome. picked: a gateway was chosen. passed: forwarded without a choice because NATS was unreachable. late: the client's upload stalled. All others were refused, because a peer misbehaved or there were too few gateways.",
            "reqps",
            (replace(rate_by("mmd_gateway_picks_total", "outcome"), moves="picker"),),
            "stack",
        ),
        Panel(
            "Time to pick",
            "From the headers of a request to the answer. Every request waits for it.",
            "s",
            tuple(replace(query, moves="picker") for query in quantiles("mmd_gateway_pick_seconds")),
        ),
        Panel(
            "Streams and restarts",
            "Streams that are open, and how often the process was started again. While it is down, Envoy fails requests with a body.",
            "short",
            (
                Query(f"sum({of('mmd_gateway_picker_requests')})", "streams", "picker"),
                Query(
                    f"sum(increase({of('mmd_gateway_picker_restarts_total')}[{RATE}]))", "restarts", "picker"
                ),
            ),
        ),
    ),
)

TRANSFERS = Board(
    "transfers",
    "Transfers and NATS",
    "Embeddings, KV and messages between pods, and what Gateways ask them.",
    (
        Row(
            "Payload",
            (
                Panel(
                    "Bytes per second",
                    "Embeddings over NATS, KV over its own links.",
                    "Bps",
                    (
                        Query(
                            f"sum by (link) ({rate('mmd_transfer_bytes_total', 'direction=received')})",
                            "{{link}}",
                        ),
                    ),
                ),
                Panel(
                    "Duration of a transfer",
                    "95th percentile, first byte to last.",
                    "s",
                    (quantile(0.95, "mmd_transfer_seconds", "link"),),
                ),
                Panel(
                    "Offers of features",
                    "sent: transferred; have: already there; refused: no longer needed.",
                    "ops",
                    (rate_by("mmd_embedding_offers_total", "outcome"),),
                ),
                Panel(
                    "Credit granted",
                    "Credit that receivers have granted to transfers in progress, and sequences waiting for their KV.",
                    "bytes",
                    (
                        Query(f"sum({of('mmd_embedding_credit_bytes')})", "embeddings"),
                        Query(f"sum({of('mmd_kv_inbound_sequences')})", "sequences"),
                    ),
                ),
                Panel(
                    "Failed transfers",
                    "By link and reason. Each is retried; a steady rate means a broken pair or network.",
                    "ops",
                    (
                        Query(
                            f"sum by (link, reason) ({rate('mmd_transfer_failures_total')})",
                            "{{link}} {{reason}}",
                            "trouble",
                        ),
                    ),
                ),
            ),
        ),
        Row(
            "NATS",
            (
                Panel(
                    "Round trip",
                    "To the NATS server and back, over all pods.",
                    "s",
                    quantiles("mmd_nats_round_trip_seconds"),
                ),
                Panel(
                    "Pods without a connection",
                    "Disconnected pods neither receive nor deliver work.",
                    "short",
                    (Query(f"count({of('mmd_nats_connected')}) - sum({of('mmd_nats_connected')})", "pods"),),
                    "number",
                    warn_above=0.5,
                ),
                Panel(
                    "Reconnections",
                    "By pod.",
                    "ops",
                    (rate_by("mmd_nats_reconnects_total", "pod"),),
                ),
                Panel(
                    "Messages that had no effect",
                    "Malformed, dropped, or their handler failed. Should always be zero.",
                    "ops",
                    (rate_by("mmd_nats_messages_lost_total", "reason"),),
                ),
                Panel(
                    "Errors by code",
                    "Typed errors of all pods; see docs/errors.md.",
                    "ops",
                    (trouble_by("mmd_errors_total", "code"),),
                ),
            ),
        ),
        _PICKER,
    ),
)
