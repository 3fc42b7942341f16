"""The dashboard Prefill, decode and KV: prompts in, tokens out, and the KV between."""

from __future__ import annotations

from mmd_dashboards.panels import Board, Panel, Query, Row
from mmd_dashboards.queries import (
    KV_USED,
    level_by,
    of,
    quantiles,
    rate,
    rate_by,
)

ENGINE = Board(
    "engine",
    "Prefill, decode and KV",
    "The language model's pools: prompts in, tokens out, and the KV transferred between them.",
    (
        Row(
            "Prefill",
            (
                Panel(
                    "Prompt tokens waiting",
                    "By pod, and by what they wait for: prefill, or media not encoded yet.",
                    "short",
                    (
                        Query(
                            of("mmd_prefill_waiting_tokens", "pod=~.*-prefill-.*|.*-decode-.*"),
                            "{{pod}} for {{role}}",
                        ),
                    ),
                ),
                Panel(
                    "Prompt tokens computed per second",
                    "And the throughput measured while prompts are running.",
                    "ops",
                    (
                        rate_by("mmd_prefill_tokens_total", "pod"),
                        Query(of("mmd_prefill_tokens_per_second"), "{{pod}} maximum"),
                    ),
                ),
                Panel(
                    "Prompt tokens of a step with media",
                    "As many as fit into engine.stepMilliseconds, by pod. An eighth of prefill.chunkTokens is the minimum: steps then take longer.",
                    "short",
                    (Query(of("mmd_media_step_tokens") + " > 0", "{{pod}}"),),
                ),
                Panel(
                    "Duration of prefill",
                    "From the engine's queue to the first token.",
                    "s",
                    quantiles("mmd_phase_seconds", "phase=prefill"),
                ),
                Panel(
                    "Prompt tokens served from the prefix cache",
                    "Share of admitted prompt tokens whose KV was cached.",
                    "percentunit",
                    (
                        Query(
                            f"sum({rate('mmd_prefix_cache_tokens_total', 'outcome=hit')}) / sum({rate('mmd_prefix_cache_tokens_total')})",
                            "hit",
                        ),
                    ),
                ),
            ),
        ),
        Row(
            "Decode",
            (
                Panel(
                    "Sequences",
                    "Of all engines, by state. Waiting sequences have no slot or no KV blocks.",
                    "short",
                    (level_by("mmd_sequences", "state"),),
                    "stack",
                ),
                Panel("Duration of a step", "Of all engines.", "s", quantiles("mmd_step_seconds")),
                Panel(
                    "Sequences in a step",
                    "Average batch size, by pod.",
                    "short",
                    (
                        Query(
                            f"sum by (pod) ({rate('mmd_step_sequences_sum')}) / sum by (pod) ({rate('mmd_step_sequences_count')})",
                            "{{pod}}",
                        ),
                    ),
                ),
                Panel(
                    "Duration of decode",
                    "From handover to last token.",
                    "s",
                    quantiles("mmd_phase_seconds", "phase=decode"),
                ),
            ),
        ),
        Row(
            "KV blocks",
            (
                Panel(
                    "KV in use",
                    "Share of blocks used or reserved, by pod. At 1, new sequences wait.",
                    "percentunit",
                    (Query(KV_USED, "{{pod}}"),),
                    warn_above=0.9,
                ),
                Panel(
                    "Blocks by state",
                    "Of all pods. Free includes unused blocks in the prefix cache.",
                    "short",
                    (level_by("mmd_kv_blocks", "state"),),
                    "stack",
                ),
                Panel(
                    "Tokens by modality",
                    "Of the sequences that prefill and decode pods work on: what takes their KV.",
                    "short",
                    (level_by("mmd_sequence_tokens", "modality"),),
                    "stack",
                ),
                Panel(
                    "Leases per second",
                    "On blocks of decode pods, by outcome. Expired and lost leases cost another attempt.",
                    "ops",
                    (rate_by("mmd_kv_leases_total", "outcome"),),
                ),
                Panel(
                    "Preempted sequences",
                    "To free KV for others; their prompts are computed again. If above zero, add KV memory or lower maxSequences.",
                    "ops",
                    (rate_by("mmd_preemptions_total", "pod"),),
                ),
            ),
        ),
    ),
)
