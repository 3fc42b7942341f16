#!/usr/bin/env bash
# transformers 5.23.0 (torch 2.13.0): two `from_pretrained` that overlap in threads leave the process unable to tie weights.
#
# While a model is built, `from_pretrained` replaces `PreTrainedModel.tie_weights` by a function that does nothing, for the whole process,
# and afterwards puts back what it found there. Of two loads that overlap, the second finds the replacement; if it also ends last, it
# puts that back for good. A model whose checkpoint ties its output layer to the embedding, loaded later by whatever thread, then has an
# output layer without values, on the meta device. `from_pretrained` raises nothing.
#
# Seen: before, the output layer is the embedding, on the CPU; afterwards it is another tensor on the meta device, and
# `PreTrainedModel.tie_weights` is not the library's own. Exit status 1 if that changes. Needs about 6 GB of disk for a while.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 transformers==5.23.0
cat >"$folder/overlap.py" <<'PYTHON'
import sys
import threading

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

folder = sys.argv[1]
config = LlamaConfig(
    vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, tie_word_embeddings=True
)
LlamaForCausalLM(config).save_pretrained(folder)


def loaded() -> tuple[bool, str]:
    """Whether the output layer of a model that is loaded now is its embedding, and where that layer is."""
    model = LlamaForCausalLM.from_pretrained(folder)
    return model.lm_head.weight is model.model.embed_tokens.weight, model.lm_head.weight.device.type


own, before = PreTrainedModel.tie_weights, loaded()
second_has_begun, first_has_ended = threading.Event(), threading.Event()


class First(LlamaForCausalLM):
    def __init__(self, config):
        super().__init__(config)
        second_has_begun.wait(60)


class Second(LlamaForCausalLM):
    def __init__(self, config):
        super().__init__(config)
        second_has_begun.set()
        first_has_ended.wait(60)


def load_first():
    First.from_pretrained(folder)
    first_has_ended.set()


threads = [threading.Thread(target=load_first), threading.Thread(target=Second.from_pretrained, args=(folder,))]
threads[0].start()
while PreTrainedModel.tie_weights is own:  # the first is building its model
    pass
threads[1].start()
for thread in threads:
    thread.join()

after, restored = loaded(), PreTrainedModel.tie_weights is own
print(f"before: {before}; after two loads that overlapped: {after}; tie_weights restored: {restored}; default device {torch.get_default_device()}")
sys.exit((before, after, restored) != ((True, "cpu"), (False, "meta"), False))
PYTHON
"$folder/venv/bin/python" "$folder/overlap.py" "$folder/model" 2>/dev/null
