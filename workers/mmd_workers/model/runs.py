"""Which media may share a run of a tower, how their inputs become those of one run, and where one medium may be divided between runs.

Inputs are joined, never padded: no row of a run belongs to nobody, and the memory of a run grows with its work alone. A medium is divided
where no attention, convolution or pooling crosses: so what its parts give, one after the other, is what it gives whole. Independent of
architectures.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import torch

Inputs = Mapping[str, torch.Tensor]


class TowerRun:
    """Of media whose inputs have one shape, none of them divided: what holds for every architecture.

    `reads_single_frames`: of a video, each frame alone, so that what the tower makes of one depends on no other.
    """

    reads_single_frames = False

    def key(self, inputs: Inputs, num_tokens: int) -> Hashable:
        """Media with equal keys may share a run. `num_tokens`: rows of the feature."""
        return num_tokens, *sorted((name, tuple(tensor.shape)) for name, tensor in inputs.items())

    def join(self, media: Sequence[Inputs]) -> dict[str, Any]:
        """The inputs of one run over all the media."""
        return {name: torch.cat([inputs[name] for inputs in media]) for name in media[0]}

    def part_tokens(self, inputs: Inputs, num_tokens: int) -> tuple[int, ...]:
        """Rows of each of the parts, in order, of a medium with this many rows."""
        del inputs
        return (num_tokens,)

    def part(self, inputs: Inputs, first: int, last: int) -> dict[str, Any]:
        """Inputs of the parts [first, last). A medium of one part is not asked."""
        raise NotImplementedError


class Along(TowerRun):
    """Joined along one dimension of each input, in which media may differ."""

    def __init__(self, dims: Mapping[str, int], divided: bool = False) -> None:
        """`dims`: by input; others are joined along their first and have one shape. `divided`: each index in these is a part."""
        self._dims = dims
        self._divided = divided
        self.reads_single_frames = divided

    def key(self, inputs: Inputs, num_tokens: int) -> Hashable:
        """Whatever the size in the dimensions that are joined."""
        del num_tokens
        return tuple(sorted((name, self._fixed(name, tensor)) for name, tensor in inputs.items()))

    def _fixed(self, name: str, tensor: torch.Tensor) -> tuple[int, ...]:
        return tuple(size for dim, size in enumerate(tensor.shape) if dim != self._dims.get(name))

    def join(self, media: Sequence[Inputs]) -> dict[str, Any]:
        """Without padding."""
        return {name: torch.cat([m[name] for m in media], self._dims.get(name, 0)) for name in media[0]}

    def part_tokens(self, inputs: Inputs, num_tokens: int) -> tuple[int, ...]:
        """The same number in each."""
        if not self._divided:
            return (num_tokens,)
        (parts,) = {inputs[name].shape[dim] for name, dim in self._dims.items()}
        return (num_tokens // parts,) * parts

    def part(self, inputs: Inputs, first: int, last: int) -> dict[str, Any]:
        """Views."""
        return {
            name: tensor.narrow(self._dims[name], first, last - first) if name in self._dims else tensor
            for name, tensor in inputs.items()
        }


class Patches(Along):
    """Packed patches [patches, values] and the grid [1, 3] that they make: frames, rows, columns. Frames are parts: attention ends with each."""

    def __init__(self, patches: str, grid: str) -> None:
        super().__init__({patches: 0})
        self._patches = patches
        self._grid = grid

    def part_tokens(self, inputs: Inputs, num_tokens: int) -> tuple[int, ...]:
        """The same number in each frame."""
        frames = int(inputs[self._grid][0, 0])
        return (num_tokens // frames,) * frames

    def part(self, inputs: Inputs, first: int, last: int) -> dict[str, Any]:
        """Views of the patches, and another grid."""
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
        """The model splits them by the sizes of the images."""
        joined = super().join(media)
        return joined | {self._pixels: joined[self._pixels].flatten(0, 1)}
