"""Runs the model over the pieces of a step: batch, layers, logits, samples. It neither schedules sequences nor ends them."""

from __future__ import annotations

from collections.abc import Sequence as Items

import torch

from mmd_workers.engine import attention
from mmd_workers.engine.batch import Batch
from mmd_workers.engine.choosing.guidance import guide
from mmd_workers.engine.choosing.masks import Masks
from mmd_workers.engine.choosing.sampler import Draw, Sampled, logprobs_of, sample
from mmd_workers.engine.memory.kv_pool import KvPool
from mmd_workers.engine.pieces import Work
from mmd_workers.engine.sequence import Sequence
from mmd_workers.model.interfaces import LanguageModel


class ModelRunner:
    """Runs a model over a KV pool. `kernel`: computes attention. `num_runs`: runs so far.

    `window`: most tokens that a row of the last run saw, its own included; None: all.
    """

    def __init__(self, model: LanguageModel, kv: KvPool, max_sequences: int) -> None:
        self._model, self._kv, self._max_sequences = model, kv, max_sequences
        self.window: int | None = None
        self.kernel = attention.select_kernel(model.kv_layout, model.device)
        self.num_runs = 0

    def run(self, work: Items[Work], *, waits: bool = False) -> list[list[Sampled | None]]:
        """Compute the rows of `work`, and sample where a token is due.

        Returns for each item the samples after its last known token and after each of its drafts; None stands
        for a sample that was not possible. Sampling waits for a GPU's kernels. `waits`: a run without
        sampling waits too, because whatever comes next would.
        """
        self.num_runs += 1
        pieces = sorted(
            (piece for item in work for piece in item.in_rows()), key=lambda piece: not piece.is_single
        )
        batch = Batch(self._kv, pieces)
        last_row = {id(piece): row for piece, row in zip(pieces, batch.last_rows, strict=True)}
        sampled: list[list[Sampled | None]] = [[] for _ in work]
        with torch.inference_mode():
            embeds, positions, extras = self._inputs(pieces)
            with attention.running(batch, self.kernel):
                hidden = self._model.forward(embeds, positions, extras)
            self.window = batch.window
            self._note_prompts(pieces, batch, hidden)
            due = [
                (number, draft)
                for number, item in enumerate(work)
                if item.samples
                for draft in range(1 + len(item.drafts))
            ]
            if not due:
                if waits and hidden.is_cuda:
                    torch.cuda.current_stream(hidden.device).synchronize()
                return sampled
            constraints = {
                row: constraint
                for row, (number, _) in enumerate(due)
                if (constraint := work[number].sequence.constraint) is not None
            }
            # Before anything waits for the device.
            masks = Masks.of(constraints, hidden.device) if constraints else None
            rows = [last_row[id(work[number])] - len(work[number].drafts) + draft for number, draft in due]
            draws = [self._draw(work[number].sequence, draft) for number, draft in due]
            guided = {
                row: companion
                for row, (number, _) in enumerate(due)
                if (companion := work[number].companion) is not None
            }
            rows += [last_row[id(companion)] for companion in guided.values()]
            logits = self._model.logits(hidden[torch.tensor(rows, device=hidden.device)])
            if guided:
                scales = [work[due[row][0]].sequence.guidance_scale for row in guided]
                logits, companions = logits[: len(due)], logits[len(due) :]
                guide(logits, list(guided), companions, scales)
            for (number, _), result in zip(due, sample(logits, draws, masks), strict=True):
                sampled[number].append(result)
        return sampled

    def _note_prompts(self, work: Items[Work], batch: Batch, hidden: torch.Tensor) -> None:
        """Record log probabilities of prompt tokens where they are requested. Each row gives those of the token after it.

        Works on a few rows at a time: memory is measured for the logits of `max_sequences`.
        """
        most_rows = self._max_sequences
        for item, last in zip(work, batch.last_rows, strict=True):
            sequence = item.sequence
            if sequence.prompt_logprobs is None:
                continue
            end = min(item.end, sequence.prompt_length - 1)
            for start in range(item.start, end, most_rows):
                chunk = range(start, min(start + most_rows, end))
                rows = hidden[last + 1 - item.end + chunk.start :][: len(chunk)]
                tokens = sequence.token_ids[chunk.start + 1 : chunk.stop + 1]
                logprobs = logprobs_of(self._model.logits(rows), tokens, sequence.sampling.logprobs or 0)
                sequence.prompt_logprobs.update(zip(chunk, logprobs, strict=True))

    def _draw(self, sequence: Sequence, draft: int) -> Draw:
        """Return how to sample a sequence's next token, or the token after `draft` drafts."""
        if sequence.rules is not None:
            sequence.rules.follow(sequence.output_token_ids)
        index = sequence.num_outputs + draft
        return Draw(sequence.sampling, index, self._model.suppress_token_ids, sequence.rules)

    def _inputs(self, work: Items[Work]) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
        """Return embeddings [rows, hidden], positions [axes, rows] and extras [rows, ...] of prompts and
        generated tokens."""
        model, device = self._model, self._model.device
        generated: list[int] = []
        generated_positions: list[int] = []
        segments: list[tuple[Sequence | None, int, int]] = []  # rows of a prompt; None: generated tokens
        for item in work:
            sequence = item.sequence
            cut = min(max(sequence.prompt_length, item.start), item.end)
            if item.start < cut:
                segments.append((sequence, item.start, cut))
            if cut < item.end:
                first = len(generated)
                generated += [*sequence.token_ids[cut : item.end], *item.drafts]
                generated_positions += [sequence.position(index) for index in range(cut, item.end)]
                segments.append((None, first, len(generated)))
        generated_embeds, generated_rotary = torch.empty(0), torch.empty(0)
        generated_extras: dict[str, torch.Tensor] = {}
        if generated:
            generated_embeds, generated_extras = model.embed(torch.tensor(generated, device=device))
            generated_rotary = torch.tensor(generated_positions, device=device).expand(
                model.position_axes, -1
            )
            if len(segments) == sum(segment[0] is None for segment in segments):
                return generated_embeds, generated_rotary, generated_extras
        parts: list[tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]] = []
        for owner, start, end in segments:
            if owner is None:
                embeds, positions = generated_embeds[start:end], generated_rotary[:, start:end]
                extras = {name: tensor[start:end] for name, tensor in generated_extras.items()}
            else:
                assert owner.prompt is not None
                embeds, positions, extras = model.rows(owner.prompt, start, end)
            parts.append((embeds, positions.expand(model.position_axes, -1), extras))
        joined: dict[str, torch.Tensor] = {}
        samples = {name: tensor for _, _, extras in parts for name, tensor in extras.items()}
        for name, like in samples.items():
            joined[name] = torch.cat(
                [
                    extras[name] if name in extras else like.new_zeros(embeds.shape[0], *like.shape[1:])
                    for embeds, _, extras in parts
                ]
            )
        return torch.cat([p[0] for p in parts]), torch.cat([p[1] for p in parts], dim=1), joined
