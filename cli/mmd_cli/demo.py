"""`mmd demo`: asks real questions about a PNG, a JPEG, an MP4 and a WAV over HTTP.

The right answers are known.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mmd_cli.client import Answer, Client, media_part, timeline
from mmd_cli.samples import Sample, draw

PHASES = ("queue", "encode", "embedding_transfer", "prefill", "kv_transfer", "ttft", "total")
FILES = (
    ("PNG", "image", "image/png"),
    ("JPEG", "image", "image/jpeg"),
    ("MP4", "video", "video/mp4"),
    ("WAV", "audio", "audio/wav"),
)


@dataclass(frozen=True, slots=True)
class Asked:
    """One question, its answer, and the request's timeline."""

    label: str
    sample: Sample
    answer: Answer
    timeline: dict[str, Any]

    @property
    def right(self) -> bool:
        """Whether the answer is exactly the expected one."""
        return self.answer.text.strip() == self.sample.answer


def samples(seed: int) -> list[tuple[str, Sample]]:
    """One fresh file of each format with its question."""
    return [(label, draw(kind, seed + number, mime)) for number, (label, kind, mime) in enumerate(FILES)]  # type: ignore[arg-type]


def answer_of(client: Client, sample: Sample) -> Answer:
    """Ask one question, as any client can."""
    part = media_part(sample.kind, sample.bytes, sample.mime)
    content = [part, {"type": "text", "text": sample.question}]
    return client.ask([{"role": "user", "content": content}], max_tokens=32, temperature=0)


def ask(client: Client, admin_url: str, label: str, sample: Sample) -> Asked:
    """Ask one question and fetch its timeline from the gateway's admin port."""
    answer = answer_of(client, sample)
    return Asked(label, sample, answer, timeline([admin_url], answer.request_id))
