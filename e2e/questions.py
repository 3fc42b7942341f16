"""Runs in a pod: asks the gateway at argv[1] about files drawn now, and about nothing, and prints the answers as JSON lines."""

from __future__ import annotations

import json
import sys

from mmd_cli.client import Client
from mmd_cli.demo import answer_of, samples

SEED = 20_261_121
WITHOUT_A_FILE = ("What color is the shape?", "Please show me an image, a video or a sound.")


def main() -> None:
    client = Client(sys.argv[1], timeout_seconds=120)
    for label, sample in samples(SEED):
        answer = answer_of(client, sample)
        report(label, sample.question, answer.text, sample.answer, answer.timings)
    question, expected = WITHOUT_A_FILE
    answer = client.ask([{"role": "user", "content": question}], max_tokens=32, temperature=0)
    report("text", question, answer.text, expected, answer.timings)


def report(label: str, question: str, answer: str, expected: str, timings: dict[str, float]) -> None:
    facts = {"label": label, "question": question, "answer": answer.strip(), "expected": expected}
    print(json.dumps({**facts, "milliseconds": round(timings.get("total", 0))}), flush=True)


if __name__ == "__main__":
    main()
