"""Rules by which media share a run of a tower and one medium is divided between runs. Independent of architectures.

Inputs are joined, never padded: every row of a run belongs to a medium, and the memory of a run grows with its work alone. A medium
is divided where no attention, convolution or pooling crosses: its parts, one after the other, give the same rows as the whole.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import torch

Inputs = Mapping[str, torch.Tensor]


class TowerRun:
    """Runs of media whose inputs have one shape, without dividing any of them: valid for every architecture.

    `reads_single_frames`: the tower reads each frame of a video alone, so that its result depends on no other frame.
    """

    reads_single_frames = False

    def key(self, inputs: Inputs, num_tokens: int) -> Hashable:
        """Media with equal keys may share a run. `num_tokens`: rows of the feature."""
        return num_tokens, *sorted((name, tuple(tensor.shape)) for name, tensor in inputs.items())

    def join(self, media: Sequence[Inputs]) -> dict[str, Any]:
        """The inputs of one run over all the media."""
        return {name: torch.cat([inputs[name] for inputs in media]) for name in media[0]}

    def part_tokens(self, inputs: Inputs, num_tokens: int) -> tuple[int, ...]:
        """Rows of each part of a medium with this many rows, in order."""
        del inputs
        return (num_tokens,)

    def part(self, inputs: Inputs, first: int, last: int) -> dict[str, Any]:
        """Inputs of the parts [first, last). It is not called for a medium of one part."""
        raise NotImplementedError


class Along(TowerRun):
    """Joins media along one dimension of each input, in which they may differ."""

    def __init__(self, dims: Mapping[str, int], divided: bool = False) -> None:
        """`dims`: dimension by input; other inputs are joined along their first and have one shape.

        `divided`: each index in these dimensions is a part.
        """
        self._dims = dims
        self._divided = divided
        self.reads_single_frames = divided

    def key(self, inputs: Inputs, num_tokens: int) -> Hashable:
        """The key does not depend on the size in the joined dimensions."""
        del num_tokens
        return tuple(sorted((name, self._fixed(name, tensor)) for name, tensor in inputs.items()))

    def _fixed(self, name: str, tensor: torch.Tensor) -> tuple[int, ...]:
        return tuple(size for dim, size in enumerate(tensor.shape) if dim != self._dims.get(name))

    def join(self, media: Sequence[Inputs]) -> dict[str, Any]:
        """Join the inputs without padding."""
        return {name: torch.cat([m[name] for m in media], self._dims.get(name, 0)) for name in media[0]}

    def part_tokens(self, inputs: Inputs, num_tokens: int) -> tuple[int, ...]:
        """Each part has the same number of rows."""
        if not self._divided:
            return (num_tokens,)
        (parts,) = {inputs[name].shape[dim] for name, dim in self._dims.items()}
        return (num_tokens // parts,) * parts

    def part(self, inputs: Inputs, first: int, last: int) -> dict[str, Any]:
        """Views of the inputs."""
        return {
            name: tensor.narrow(self._dims[name], first, last - first) if name in self._dims else tensor
            for name, tensor in inputs.items()
        }


class Patches(Along):
    """Packed patches [patches, values] with their grid [1, 3]: frames, rows, columns. Frames are parts: attention ends with each."""

    def __init__(self, patches: str, grid: str) -> None:
        super().__init__({patches: 0})
        self._patches = patches
        self._grid = grid

    def part_tokens(self, inputs: Inputs, num_tokens: int) -> tuple[int, ...]:
        """Each frame has the same number of rows."""
        frames = int(inputs[self._grid][0, 0])
        return (num_tokens // frames,) * frames

    def part(self, inputs: Inputs, first: int, last: int) -> dict[str, Any]:
        """Views of the patches, with a grid of their own."""
        patches, grid = inputs[self._patches], inputs[self._grid].clone()
        rows = patches.shape[0] // int(grid[0, 0])
        grid[0, 0] = last - first
        chosen = {self._patches: patches.narrow(0, first * rows, (last - first) * rows), self._grid: grid}
        return {**inputs, **chosen}


class Tiles(Along):
    """Tiles [1, tiles, channels, height, width] of each image, joined as [tiles, channels, height, width]."""

    def __init__(self, pixels: str) -> None:
        super().__init__({pixels: 1})
        self._pixels = pixels

    def join(self, media: Sequence[Inputs]) -> dict[str, Any]:
        """Join the tiles; the model splits them by the sizes of the images."""
        joined = super().join(media)
        return joined | {self._pixels: joined[self._pixels].flatten(0, 1)}
