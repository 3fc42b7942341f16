"""What a grammar costs: tokens a second of either engine with one in every sequence beside none, in process.

    make vllm && python -m bench.grammars [--rounds 4] [--tokens 32] [--batches 1 8 32] [--temperature 0] [--engine VLLM]

A mask costs by the size of the vocabulary, so the model has that of a published tokenizer, Mistral's Tekken with 131,072 tokens, which comes
with vLLM; its weights are random, and as many as the smallest published models with such a vocabulary have. Each engine runs in the environment of its pods, one after the other. The same prompts run with and
without in turns, on one engine; the second begins every other round. The grammar is a list of objects that is longer than any answer, so
both make the same number of tokens. A ratio is of one round; the report has its median, least and greatest. Steps that compute prompts
do not count. What a grammar adds to a step, in milliseconds, does not depend on the weights: with a larger model the ratio is nearer to 1.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
import transformers
from rich.console import Console
from rich.table import Table

from bench.native_step import engine
from bench.report import keep
from bench.versus_vllm import VLLM, vllm_versions
from mmd_api.contract.answers import Grammar
from mmd_api.pipeline import PipelineConfig, pipeline_revision
from mmd_api.spec.deployment import MultimodalDeploymentSpec
from mmd_workers.engine.interface import SamplingParams, SequenceInput, StepOutput
from mmd_workers.model.grammar import Constraint, Grammars, load_tokenizer
from mmd_workers.process.pod import Pod
from mmd_workers.process.settings import WorkerSettings
from mmd_workers.vllm_engine.setup.environment import prepare_environment
from mmd_workers.wire.messages.message_parts import Sampling
from mmd_workers.wire.messages.prefill import GenerateRequest
from support.oracles import random_model

ENTRY = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "count": {"type": "integer", "minimum": 0, "maximum": 999},
        "kind": {"enum": ["circle", "square", "triangle"]},
    },
    "required": ["name", "count", "kind"],
    "additionalProperties": False,
}
GRAMMAR = Grammar("json_schema", json.dumps({"type": "array", "items": ENTRY, "minItems": 1000}))
KINDS = ("without", "with a grammar")
ENGINES = {"Native": Path(sys.executable), "VLLM": VLLM / "bin" / "python"}
"""By name: the interpreter of its environment."""
SIZE = random_model.Size(hidden=1024, layers=24, heads=16, kv_heads=8, feed_forward_ratio=3)
MODEL = Path(f".cache/models/bench-tekken-{SIZE.hidden}x{SIZE.layers}").resolve()
RUN_SECONDS = 1800.0
KV_MEBIBYTES = 512
Rates = dict[int, dict[str, list[float]]]
"""Tokens a second by sequences and kind, in the order of the rounds."""
console = Console(width=110)


class Stepped(Protocol):
    """What both engines have in common."""

    def step(self) -> StepOutput: ...

    def has_work(self) -> bool: ...


Add = Callable[[str, list[int], Constraint | None], None]
"""Queues a sequence: its name, its prompt, and its grammar."""


def write_model() -> None:
    """The checkpoint, where it is not there. In vLLM's environment, which has the vocabulary."""
    if (MODEL / "config.json").exists():
        return
    package = Path(str(importlib.import_module("mistral_common").__file__)).parent
    convert = importlib.import_module("transformers.integrations.mistral").convert_tekken_tokenizer
    tokenizer = convert(package / "data" / "tekken_240911.json", chat_template="")
    random_model.build("llama", MODEL, size=SIZE, tokenizer=tokenizer)


def native(options: argparse.Namespace) -> tuple[Stepped, Grammars, Add]:
    """The native engine, its grammars, and how it takes a sequence."""
    torch.set_num_threads(options.threads)
    made = engine(MODEL, fused=True)
    sampling = SamplingParams(options.tokens, temperature=options.temperature, ignore_eos=True)

    def add(name: str, prompt: list[int], begun: Constraint | None) -> None:
        made.add(SequenceInput(name, made.model.lower(prompt, []), sampling, constraint=begun))

    grammars = Grammars(partial(load_tokenizer, MODEL), made.model.vocab_size, made.model.eos_token_ids)
    return made, grammars, add


def vllm(options: argparse.Namespace) -> tuple[Stepped, Grammars, Add]:
    """The same of vLLM, as a pod makes its core."""
    prepare_environment()
    make_core = importlib.import_module("mmd_workers.vllm_engine.setup.make").make_core
    spec = MultimodalDeploymentSpec.model_validate(
        {
            "model": {"id": str(MODEL), "dtype": "Float32", "maxModelLen": 1024},
            "engine": {"type": "VLLM"},
            "decode": {"kvCacheMebibytes": KV_MEBIBYTES, "maxSequences": max(options.batches)},
        }
    )
    config = PipelineConfig(namespace="bench", name="bench", revision=pipeline_revision(spec), spec=spec)
    settings = WorkerSettings(config, "bench-decode-0", "127.0.0.1", 0, "", options.threads)
    core = make_core(Pod.of(settings, "decode", ("prefill", "decode")), torch.device("cpu"))
    plain = Sampling(options.tokens, temperature=options.temperature, ignore_eos=True)
    bound = Sampling(options.tokens, temperature=options.temperature, ignore_eos=True, grammar=GRAMMAR)

    def add(name: str, prompt: list[int], begun: Constraint | None) -> None:
        sampling = plain if begun is None else bound
        request = GenerateRequest(name, 0, "", prompt, [], sampling, [], 0.0, 0.0)
        core.add(name, request, stop_after_prefill=False, constraint=begun)

    return core, core.grammars, add


MAKE = {"Native": native, "VLLM": vllm}


def rate(
    made: Stepped,
    add: Add,
    grammars: Grammars | None,
    prompts: Iterable[list[int]],
    clock: Callable[[], float],
) -> float:
    """Tokens a second of the steps that decode the whole batch."""
    for number, ids in enumerate(prompts):
        add(str(number), ids, grammars.begin(GRAMMAR) if grammars is not None else None)
    tokens, spent = 0, 0.0
    while made.has_work():
        begin = clock()
        output = made.step()
        if output.failed:
            raise output.failed[0][1]
        if not output.prefill_tokens:
            spent += clock() - begin
            tokens += len(output.tokens)
    return tokens / spent


def measure(options: argparse.Namespace) -> Rates:
    """One engine, in the environment of this process."""
    clock = time.process_time if options.cpu_time else time.perf_counter
    write_model()
    made, grammars, add = MAKE[options.engine](options)
    vocabulary = transformers.AutoConfig.from_pretrained(MODEL).vocab_size
    rates: Rates = {size: {kind: [] for kind in KINDS} for size in options.batches}
    for number, size in itertools.product(range(-1, options.rounds), options.batches):  # the first warms up
        prompts = np.random.default_rng([number + 1, size]).integers(3, vocabulary, (size, options.prompt))
        for kind in sorted(KINDS, reverse=bool(number % 2)):
            bound = grammars if kind == KINDS[1] else None
            found = rate(made, add, bound, prompts.tolist(), clock)
            if number >= 0:
                rates[size][kind].append(found)
    return rates


def in_its_environment(name: str) -> Rates:
    """What `measure` finds in another process.

    Raises:
        SystemExit: that process failed; the message names its log.
    """
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "rates.json"
        given = [*sys.argv[1:], "--engine", name, "--rates", str(file)]
        command = [str(ENGINES[name]), "-m", "bench.grammars", *given]
        log = VLLM.with_name(f"grammars-{name.lower()}.log")
        with console.status(name), log.open("wb") as output:
            ended = subprocess.run(
                command, stdout=output, stderr=subprocess.STDOUT, timeout=RUN_SECONDS, check=False
            )
        if ended.returncode or not file.exists():
            sys.exit(f"{name}: its process ended with {ended.returncode}; see {log}")
        return {int(size): found for size, found in json.loads(file.read_text()).items()}


def lines(found: dict[str, Rates]) -> list[dict[str, Any]]:
    """One for each engine and number of sequences."""
    made = []
    for name, rates in found.items():
        for size, by_kind in rates.items():
            ratios = [b / a for a, b in zip(by_kind[KINDS[0]], by_kind[KINDS[1]], strict=True)]
            made.append(
                {
                    "engine": name,
                    "sequences": size,
                    "ratio": statistics.median(ratios),
                    "ratio_min": min(ratios),
                    "ratio_max": max(ratios),
                    "added_to_a_step_ms": 1000 * size * _added(by_kind),
                    "tokens_per_second": by_kind,
                }
            )
    return made


def _added(by_kind: dict[str, list[float]]) -> float:
    """Seconds that a grammar adds to each token."""
    plain, bound = (statistics.median(by_kind[kind]) for kind in KINDS)
    return 1 / bound - 1 / plain


def table(rows: list[dict[str, Any]]) -> Table:
    """The report for a reader."""
    made = Table(title="tokens a second, median of the rounds; a vocabulary of 131,072", title_justify="left")
    for heading in ("engine", "sequences", *KINDS, "ratio (rounds)", "added to a step"):
        made.add_column(heading)
    for row in rows:
        made.add_row(
            row["engine"],
            str(row["sequences"]),
            *(f"{statistics.median(row['tokens_per_second'][kind]):.1f}" for kind in KINDS),
            f"{row['ratio']:.3f} ({row['ratio_min']:.3f} to {row['ratio_max']:.3f})",
            f"{row['added_to_a_step_ms']:.1f} ms",
        )
    return made


def main() -> None:
    """Measure both engines and print one table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=32, help="of each answer")
    parser.add_argument("--prompt", type=int, default=32, help="tokens of each prompt")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="of each engine")
    parser.add_argument("--engine", choices=ENGINES, help="only this one")
    parser.add_argument(
        "--cpu-time",
        action="store_true",
        help="of all threads in place of wall time: for one thread on a machine that is busy",
    )
    parser.add_argument(
        "--rates", type=Path, help=argparse.SUPPRESS
    )  # where the process of one engine writes
    options = parser.parse_args()
    transformers.logging.set_verbosity_error()
    if options.rates is not None:
        options.rates.write_text(json.dumps(measure(options)))
        return
    if not (VLLM / ".installed").exists():
        sys.exit("vLLM is not installed, which has the vocabulary; run `make vllm`")
    wanted = [options.engine] if options.engine else ["VLLM", "Native"]
    rows = lines({name: in_its_environment(name) for name in wanted})
    console.print(table(rows))
    body = {
        "options": {name: value for name, value in vars(options).items() if name != "rates"},
        "model": {**vars(SIZE), "vocabulary": 131_072},
        "vllm": vllm_versions(),
        "lines": rows,
    }
    console.print(f"report: {keep('grammars', body)}", highlight=False)


if __name__ == "__main__":
    main()
