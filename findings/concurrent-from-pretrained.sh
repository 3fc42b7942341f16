#!/usr/bin/env bash
# transformers 5.23.0 (torch 2.13.0): two `from_pretrained` that overlap in threads leave the process unable to tie weights.
#
# While a model is built, `from_pretrained` replaces `PreTrainedModel.tie_weights` by a function that does nothing, for the whole process,
# and afterwards puts back what it found there. Of two loads that overlap, the second finds the replacement; if it also ends last, it
# puts that back for good. Every model that is loaded later, by whatever thread, then has a random output layer where its
# checkpoint ties it to the embedding: no error is raised, its answers are noise. The default dtype of torch is exchanged the same way.
#
# Seen: before, the tied layer is the embedding; afterwards it is another tensor with other values, and
# `PreTrainedModel.tie_weights` is not the library's own. Exit status 1 if that changes. Needs about 5 GB of disk.
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


def is_tied() -> bool:
    model = LlamaForCausalLM.from_pretrained(folder)
    return torch.equal(model.lm_head.weight, model.model.embed_tokens.weight)


own, tied_before = PreTrainedModel.tie_weights, is_tied()
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

tied_after, restored = is_tied(), PreTrainedModel.tie_weights is own
print(f"tied before: {tied_before}; after two loads that overlapped: {tied_after}; tie_weights restored: {restored}")
sys.exit((tied_before, tied_after, restored) != (True, False, False))
PYTHON
"$folder/venv/bin/python" "$folder/overlap.py" "$folder/model" 2>/dev/null
