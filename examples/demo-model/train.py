"""Trains the demo model: a Qwen2.5-Omni thinker of 1.8 million parameters that sees shapes, follows their motion and hears tones.

Everything it learns from is a real file (`mmd_cli.samples`), decoded and processed exactly as at serving time, so that
compression and resizing are part of what it knows. One thread and half an hour are enough: see README.md.
"""

from __future__ import annotations

import argparse
import itertools
import logging
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from evaluate import decode_audio, decode_image, decode_video, misses
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoTokenizer,
    PreTrainedTokenizerFast,
    Qwen2_5OmniProcessor,
    Qwen2_5OmniThinkerForConditionalGeneration,
    Qwen2VLImageProcessor,
    Qwen2VLVideoProcessor,
    WhisperFeatureExtractor,
)
from transformers.models.qwen2_5_omni.configuration_qwen2_5_omni import Qwen2_5OmniThinkerConfig

from mmd_api.contract.pools import MODALITIES, Modality
from mmd_cli.samples import (
    COLORS,
    DIRECTIONS,
    PITCHES_HZ,
    POSITIONS,
    QUESTIONS,
    SHAPES,
    TRENDS,
    Scene,
    draw_scene,
    pick,
)

log = logging.getLogger("train")

# Seeds below are for demos, tests and evaluation; training never draws one of them.
FIRST_TRAINING_SEED = 1 << 32
SPECIAL = {
    "pad": "<|endoftext|>",
    "turn": "<|im_start|>",
    "eos": "<|im_end|>",
    "image": "<|IMAGE|>",
    "video": "<|VIDEO|>",
    "audio": "<|AUDIO|>",
    "vision_bos": "<|vision_bos|>",
    "vision_eos": "<|vision_eos|>",
    "audio_bos": "<|audio_bos|>",
    "audio_eos": "<|audio_eos|>",
}
PLACEHOLDERS = {SPECIAL[kind]: kind for kind in MODALITIES}
ASSISTANT = "<|im_start|>assistant\n"
PIXELS = {"shortest_edge": 64 * 64, "longest_edge": 64 * 64}  # whatever the file's size, about this many
MEL_BINS = 64
FRAMES = 8

POOL: dict[Modality, int] = {"image": 1000, "video": 300, "audio": 400}
REPLACED_PER_STEP: dict[Modality, int] = {"image": 3, "video": 2, "audio": 2}
BATCH: dict[Modality, int] = {"image": 24, "video": 8, "audio": 14}
WEIGHTS = {"image": 1.0, "video": 1.0, "audio": 1.0, "two": 0.4, "text": 0.2}

SYSTEM = ["You are a helpful assistant.", "Answer briefly.", "You look at pictures and listen to sounds."]
SMALL_TALK = {
    "Hello": "Hello! Show me an image, a video or a sound.",
    "Hello!": "Hello! Show me an image, a video or a sound.",
    "Hi": "Hello! Show me an image, a video or a sound.",
    "How are you?": "I am fine, thank you.",
    "Who are you?": "I am a tiny demo model for shapes and tones.",
    "What is your name?": "I am a tiny demo model for shapes and tones.",
    "What can you do?": "I name shapes in images, follow them in videos and hear tones.",
    "Help": "I name shapes in images, follow them in videos and hear tones.",
    "Thank you": "You are welcome.",
    "Thanks!": "You are welcome.",
    "Goodbye": "Goodbye!",
}
NOTHING_SHOWN = "Please show me an image, a video or a sound."
BEYOND_ME = "I only know shapes and tones."
OTHER_TEXT = (
    "tell me about the weather in Paris today and write a short poem for my friend",
    "how many people live there why is sky water explain history of computers please",
    "count to ten what time should we eat translate this sentence into French",
    "who won game yesterday list three books do you like music give some code that sorts numbers best way",
)
SEE_AND_HEAR = "What do you see and hear?"


def texts() -> list[str]:
    """Every text the model is to read or write often, for the tokenizer to learn its merges from."""
    facts = {
        "color": COLORS,
        "shape": SHAPES,
        "position": POSITIONS,
        "direction": DIRECTIONS,
        "pitch": PITCHES_HZ,
    }
    facts["trend"] = TRENDS
    found = ["user\n", "assistant\n", "system\n", "\n", SEE_AND_HEAR, NOTHING_SHOWN, BEYOND_ME, *SYSTEM]
    found += [*SMALL_TALK, *SMALL_TALK.values()]
    for question, answer in itertools.chain.from_iterable(QUESTIONS[kind].items() for kind in MODALITIES):
        names = [name for name in facts if f"{{{name}}}" in answer]
        for values in itertools.product(*(facts[name] for name in names)):
            found += [question, answer.format(**dict(zip(names, values, strict=True)))]
    return found * 4


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE: whole words for what the model talks about, bytes for everything else."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=640, special_tokens=list(SPECIAL.values()), initial_alphabet=alphabet, show_progress=False
    )
    bpe.train_from_iterator(texts(), trainer)
    named = ("image", "video", "audio", "vision_bos", "vision_eos", "audio_bos", "audio_eos")
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        eos_token=SPECIAL["eos"],
        pad_token=SPECIAL["pad"],
        extra_special_tokens={f"{name}_token": SPECIAL[name] for name in named},
        # The Omni processor has a video size of its own (at least 316 x 316) that beats the video processor's
        # settings; what stands in the tokenizer's settings beats that one.
        size=PIXELS,
    )


def build_processor(chat_template: str) -> Qwen2_5OmniProcessor:
    """Patches of 8 pixels merged 2 x 2, eight frames at two a second, mel spectrograms of up to 10 s."""
    patches = {"patch_size": 8, "merge_size": 2, "temporal_patch_size": 2, "size": PIXELS}
    return Qwen2_5OmniProcessor(
        image_processor=Qwen2VLImageProcessor(**patches),
        video_processor=Qwen2VLVideoProcessor(
            fps=2.0,
            min_frames=FRAMES,
            max_frames=FRAMES,
            do_sample_frames=True,
            cap_pixels_per_frame=False,
            **patches,
        ),
        feature_extractor=WhisperFeatureExtractor(feature_size=MEL_BINS, chunk_length=10),
        tokenizer=build_tokenizer(),
        chat_template=chat_template,
    )


def build_model(tokenizer: Any) -> Any:
    """A fresh model."""
    token = {name: tokenizer.convert_tokens_to_ids(text) for name, text in SPECIAL.items()}
    hidden, spread = 160, 0.06
    text = {
        "vocab_size": len(tokenizer),
        "hidden_size": hidden,
        "intermediate_size": 448,
        "num_hidden_layers": 3,
        "num_attention_heads": 5,
        "num_key_value_heads": 5,
        "max_position_embeddings": 4096,
        "rope_parameters": {"rope_type": "default", "mrope_section": [4, 6, 6], "rope_theta": 10_000.0},
        "tie_word_embeddings": True,
        "initializer_range": spread,
        "bos_token_id": None,
        "eos_token_id": token["eos"],
        "pad_token_id": token["pad"],
    }
    vision = {
        "depth": 3,
        "hidden_size": 96,
        "num_heads": 4,
        "intermediate_size": 256,
        "out_hidden_size": hidden,
        "patch_size": 8,
        "temporal_patch_size": 2,
        "spatial_merge_size": 2,
        "window_size": 64,
        "fullatt_block_indexes": [0, 1, 2],
        "initializer_range": spread,
    }
    audio = {
        "num_mel_bins": MEL_BINS,
        "encoder_layers": 2,
        "encoder_attention_heads": 4,
        "encoder_ffn_dim": 192,
        "d_model": 96,
        "max_source_positions": 1500,
        "n_window": 100,
        "output_dim": hidden,
        "initializer_range": spread,
    }
    config = Qwen2_5OmniThinkerConfig(
        text_config=text,
        vision_config=vision,
        audio_config=audio,
        image_token_id=token["image"],
        video_token_id=token["video"],
        audio_token_id=token["audio"],
        vision_start_token_id=token["vision_bos"],
        vision_end_token_id=token["vision_eos"],
        audio_start_token_id=token["audio_bos"],
        audio_end_token_id=token["audio_eos"],
        position_id_per_seconds=12,
        tie_word_embeddings=True,
    )
    model = Qwen2_5OmniThinkerForConditionalGeneration(config)
    model.generation_config.eos_token_id = token["eos"]
    model.generation_config.pad_token_id = token["pad"]
    return model


def resume(model: Any, tokenizer: Any, folder: Path) -> None:
    """Take over the weights of an earlier run of the same sizes; token embeddings go by the token's text."""
    earlier = Qwen2_5OmniThinkerForConditionalGeneration.from_pretrained(folder, dtype=torch.float32)
    rows = AutoTokenizer.from_pretrained(folder).get_vocab()
    old, new = earlier.get_input_embeddings().weight.data, model.get_input_embeddings().weight.data.clone()
    for text, row in tokenizer.get_vocab().items():
        if text in rows:
            new[row] = old[rows[text]]
    earlier.resize_token_embeddings(len(new), mean_resizing=False)
    model.load_state_dict(earlier.state_dict())
    model.get_input_embeddings().weight.data.copy_(new)


@dataclass(frozen=True, slots=True)
class Seen:
    """A scene, the tensors its tower gets and the number of placeholders it takes in a prompt."""

    scene: Scene
    tensors: dict[str, torch.Tensor]
    num_tokens: int


def perceive(processor: Any, scene: Scene) -> Seen:
    """Decode and process a scene's file as the server does."""
    if scene.kind == "image":
        out = processor.image_processor(images=[decode_image(scene.bytes)], return_tensors="pt")
        return Seen(scene, dict(out), int(out["image_grid_thw"].prod()) // 4)
    if scene.kind == "video":
        frames, metadata = decode_video(scene.bytes)
        out = processor.video_processor(videos=[frames], video_metadata=[metadata], return_tensors="pt")
        tensors = {name: out[name] for name in ("pixel_values_videos", "video_grid_thw")}
        return Seen(scene, tensors, int(out["video_grid_thw"].prod()) // 4)
    extractor = processor.feature_extractor
    out = extractor(
        decode_audio(scene.bytes),
        sampling_rate=extractor.sampling_rate,
        padding="max_length",
        return_attention_mask=True,  # said here, it counts mel frames; the extractor's own setting would count samples
        return_tensors="pt",
    )
    length = int(out["attention_mask"].sum())
    mel = out["input_features"][:, :, :length]  # the tower looks at nothing behind
    return Seen(scene, {"input_features": mel}, ((length - 1) // 2 + 1 - 2) // 2 + 1)


class Pool:
    """Scenes to learn from: a bounded number of each kind, a few of them replaced at every step."""

    def __init__(self, processor: Any, sizes: dict[Modality, int], seed: int) -> None:
        self.processor = processor
        self.sizes = sizes
        self.seeds = itertools.count(FIRST_TRAINING_SEED + seed * 10_000_000)
        self.seen: dict[Modality, list[Seen]] = {
            kind: [self.fresh(kind) for _ in range(size)] for kind, size in sizes.items()
        }
        self.oldest: dict[Modality, Iterator[int]] = {
            kind: itertools.cycle(range(size)) for kind, size in sizes.items()
        }

    def fresh(self, kind: Modality) -> Seen:
        """A scene nobody has seen."""
        return perceive(self.processor, draw_scene(kind, next(self.seeds)))

    def refresh(self, counts: dict[Modality, int]) -> None:
        """Replace the oldest scenes."""
        for kind, count in counts.items():
            for _ in range(count):
                self.seen[kind][next(self.oldest[kind])] = self.fresh(kind)


@dataclass(frozen=True, slots=True)
class Example:
    """A conversation (chat messages, the last one the assistant's) and its media in order of use."""

    messages: list[dict[str, Any]]
    media: list[Seen]


def conversation(
    rng: np.random.Generator, media: list[Seen], turns: list[tuple[str, str]], *, system: float = 0.3
) -> Example:
    """Questions and answers; the media stand in the first question, before or after its text."""
    messages: list[dict[str, Any]] = []
    if rng.random() < system:
        messages.append({"role": "system", "content": pick(rng, SYSTEM)})
    for number, (question, answer) in enumerate(turns):
        parts = [{"type": "text", "text": question}]
        shown = [{"type": seen.scene.kind} for seen in media] if number == 0 else []
        content = shown + parts if rng.random() < 0.5 else parts + shown
        messages += [{"role": "user", "content": content}, {"role": "assistant", "content": answer}]
    return Example(messages, media)


def about_one(rng: np.random.Generator, pool: Pool, kind: Modality) -> Example:
    """One to three questions about one medium: the later ones cost little and teach as much."""
    seen = pick(rng, pool.seen[kind])
    questions = rng.permutation(list(QUESTIONS[kind]))[: rng.integers(1, 4)]
    return conversation(rng, [seen], [(str(q), seen.scene.answer(str(q))) for q in questions])


def about_two(rng: np.random.Generator, pool: Pool) -> Example:
    """Something seen and something heard, in either order."""
    eye, ear = pick(rng, pool.seen[pick(rng, ("image", "video"))]), pick(rng, pool.seen["audio"])
    whole = next(iter(QUESTIONS[eye.scene.kind])), next(iter(QUESTIONS["audio"]))
    both = f"{eye.scene.answer(whole[0])} and {ear.scene.answer(whole[1])}"
    one = pick(rng, (eye, ear)).scene
    question = pick(rng, list(QUESTIONS[one.kind]))
    turns = [(SEE_AND_HEAR, both), (question, one.answer(question))]
    media = [eye, ear] if rng.random() < 0.5 else [ear, eye]
    return conversation(rng, media, turns if rng.random() < 0.5 else turns[::-1])


def small_talk(rng: np.random.Generator) -> Example:
    """Text alone: greetings, questions about a medium that is not there, and everything the model cannot know."""
    dice = rng.random()
    if dice < 0.6:
        turns = [pick(rng, list(SMALL_TALK.items())) for _ in range(rng.integers(1, 3))]
    elif dice < 0.8:
        turns = [(pick(rng, list(QUESTIONS[pick(rng, MODALITIES)])), NOTHING_SHOWN)]
    else:
        words = rng.choice(" ".join(OTHER_TEXT).split(), rng.integers(2, 9))
        turns = [(" ".join(words).capitalize() + pick(rng, ("", ".", "?", "!")), BEYOND_ME)]
    return conversation(rng, [], turns)


def collate(processor: Any, examples: list[Example]) -> dict[str, torch.Tensor]:
    """A padded batch; only the assistant's words and the end of its turns are labels."""
    tokenizer, rows = processor.tokenizer, []
    for example in examples:
        text = processor.apply_chat_template(example.messages, tokenize=False)
        media = iter(example.media)
        pieces = []
        for number, turn in enumerate(text.split(ASSISTANT)):
            answer, end, rest = turn.partition(SPECIAL["eos"]) if number else ("", "", turn)
            if number:
                pieces += [(ASSISTANT, False), (answer + end, True)]
            pieces.append((rest, False))
        ids: list[int] = []
        labels: list[int] = []
        for piece, learned in pieces:
            for token in tokenizer(piece).input_ids:
                kind = PLACEHOLDERS.get(tokenizer.convert_ids_to_tokens(token))
                repeated = [token] * (next(media).num_tokens if kind else 1)
                ids += repeated
                labels += repeated if learned else [-100] * len(repeated)
        rows.append((ids, labels))
    longest = max(len(ids) for ids, _ in rows)
    shape = len(rows), longest
    batch = {
        "input_ids": torch.full(shape, tokenizer.pad_token_id),
        "labels": torch.full(shape, -100),
        "attention_mask": torch.zeros(shape, dtype=torch.long),
    }
    for row, (ids, labels) in enumerate(rows):
        batch["input_ids"][row, : len(ids)] = torch.tensor(ids)
        batch["labels"][row, : len(ids)] = torch.tensor(labels)
        batch["attention_mask"][row, : len(ids)] = 1
    return batch | stack([seen for example in examples for seen in example.media])


def stack(media: list[Seen]) -> dict[str, torch.Tensor]:
    """The towers' inputs of all media of a batch."""
    out: dict[str, torch.Tensor] = {}
    for name in ("pixel_values", "image_grid_thw", "pixel_values_videos", "video_grid_thw"):
        found = [seen.tensors[name] for seen in media if name in seen.tensors]
        if found:
            out[name] = torch.cat(found)
    if "video_grid_thw" in out:
        out["video_second_per_grid"] = torch.ones(len(out["video_grid_thw"]))  # two frames at two a second
    mels = [seen.tensors["input_features"] for seen in media if seen.scene.kind == "audio"]
    if mels:
        longest = max(mel.shape[-1] for mel in mels)
        out["input_features"] = torch.cat(
            [torch.nn.functional.pad(m, (0, longest - m.shape[-1])) for m in mels]
        )
        lengths = torch.tensor([mel.shape[-1] for mel in mels])
        out["feature_attention_mask"] = (torch.arange(longest) < lengths[:, None]).long()
    return out


def train(model: Any, processor: Any, arguments: argparse.Namespace) -> None:
    """Learn until the time is up, keeping the weights that did best on held-out files."""
    rng = np.random.default_rng(arguments.seed)
    begin = time.monotonic()
    pool = Pool(processor, POOL, arguments.seed)
    log.info("drew the pool in %.0f s", time.monotonic() - begin)
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() <= 1]
    groups = [{"params": matrices, "weight_decay": 0.05}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=arguments.rate, betas=(0.9, 0.98))
    best, next_check = (-1.0, -1.0), 0.5
    smooth: dict[str, float] = {}
    begin = time.monotonic()
    for step in itertools.count():
        share = (time.monotonic() - begin) / arguments.seconds
        if share >= 1:
            break
        rate = (
            arguments.rate * min(1, (step + 1) / 30) * (0.02 + 0.98 * (0.5 + 0.5 * math.cos(math.pi * share)))
        )
        for group in optimizer.param_groups:
            group["lr"] = rate
        pool.refresh(REPLACED_PER_STEP)
        batches: dict[str, list[Example]] = {
            kind: [about_one(rng, pool, kind) for _ in range(count)] for kind, count in BATCH.items()
        }
        batches |= {
            "two": [about_two(rng, pool) for _ in range(2)],
            "text": [small_talk(rng) for _ in range(4)],
        }
        for name, examples in batches.items():
            model.model.rope_deltas = None
            loss = model(**collate(processor, examples), use_cache=False).loss
            (loss * WEIGHTS[name]).backward()
            smooth[name] = 0.97 * smooth.get(name, loss.item()) + 0.03 * loss.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step % 50 == 0:
            losses = {name: round(value, 4) for name, value in smooth.items()}
            log.info("step %d, %.0f s, %s", step, time.monotonic() - begin, losses)
        if share >= next_check:
            next_check += 0.2
            best = keep_if_better(model, processor, arguments.out, best)
    keep_if_better(model, processor, arguments.out, best)


def keep_if_better(model: Any, processor: Any, out: Path, best: tuple[float, float]) -> tuple[float, float]:
    """Save the weights when the worst kind, then the mean, of held-out files is no worse than before."""
    model.eval()
    model.model.rope_deltas = None
    shares = {kind: 1 - len(misses(model, processor, kind, range(60), 20)) / 60 for kind in MODALITIES}
    score = min(shares.values()), sum(shares.values())
    log.info("held out: %s", {kind: round(share, 3) for kind, share in shares.items()})
    if score >= best:
        model.save_pretrained(out)
    model.train()
    return max(score, best)


def main() -> None:
    """Train, and write a complete Hugging Face model folder."""
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("out", type=Path, help="folder to write")
    options.add_argument("--seconds", type=float, default=1500, help="how long to learn")
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--rate", type=float, default=2e-3, help="peak learning rate")
    options.add_argument("--resume", type=Path, help="folder of an earlier run to go on from")
    options.add_argument("--threads", type=int, default=1)
    arguments = options.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(arguments.seed)

    template = (Path(__file__).parent / "chat_template.jinja").read_text()
    processor = build_processor(template)
    processor.save_pretrained(arguments.out)
    model = build_model(processor.tokenizer)
    if arguments.resume:
        resume(model, processor.tokenizer, arguments.resume)
    log.info("%.2f million parameters", sum(p.numel() for p in model.parameters()) / 1e6)
    model.train()
    train(model, processor, arguments)


if __name__ == "__main__":
    main()
