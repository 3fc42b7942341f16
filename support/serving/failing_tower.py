"""Towers of worker processes whose device has memory for few tokens of a medium.

Python imports `sitecustomize` at its start, from a folder in a pod's variable PYTHONPATH. The tower is
changed when the worker imports it.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

_CODE = """
import importlib.machinery
import sys
import threading

MODULE = "mmd_workers.model.encoder"
MOST = {most!r}


class Finder:
    def find_spec(self, name, path=None, target=None):
        if name != MODULE:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        run = spec.loader.exec_module

        def exec_module(module):
            run(module)
            limit(module.HfEncoderModel)

        spec.loader.exec_module = exec_module
        return spec


def limit(model):
    encode = model.encode

    def limited(self, batch):
        import torch

        serves = threading.current_thread().name.startswith("tower")
        if serves and any(medium.num_tokens > MOST[medium.modality] for medium in batch):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 60.00 GiB")
        return encode(self, batch)

    model.encode = limited


sys.meta_path.insert(0, Finder())
"""


def with_little_memory(folder: Path, **most_tokens: int) -> dict[str, Any]:
    """Fields of a pool whose towers run out of memory on media with more than `most_tokens`, by modality."""
    folder.mkdir(exist_ok=True)
    most = {"image": 1 << 20, "video": 1 << 20, "audio": 1 << 20} | most_tokens
    (folder / "sitecustomize.py").write_text(_CODE.format(most=most))
    # A value that begins with a folder of the container, such as /tmp, would be taken for a path in it.
    path = os.pathsep.join([os.devnull, str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {"template": {"env": [{"name": "PYTHONPATH", "value": path}]}}
