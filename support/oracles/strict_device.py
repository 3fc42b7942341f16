"""A second device for tests on machines without a GPU.

It is a backend in Python whose data lies in host memory and never mixes with it. `install()` registers it in
PyTorch's dispatcher as `strict:0`, for the whole process: call it in a separate process. Operators refuse
operands of two devices, as CUDA does, so code that passes here copies between host and device explicitly
wherever it must.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

NAME = "strict"
_MOVES = {"aten::_to_copy", "aten::copy_"}
_host_tensor = torch.tensor
_libraries: list[torch.library.Library] = []


def install() -> torch.device:
    """Register the device in this process."""
    _setup_privateuseone_for_python_backend(NAME)
    library = torch.library.Library("_", "IMPL")
    library.fallback(_kernel, "PrivateUse1")
    _libraries.append(library)  # the registration ends with the object
    torch.tensor = _tensor  # PyTorch's own `tensor` excludes backends in Python while it copies to the device
    return torch.device(NAME, 0)


def _tensor(data: Any, *, device: torch.device | str | None = None, **options: Any) -> torch.Tensor:
    tensor = _host_tensor(data, **options)
    return tensor if device is None else tensor.to(device)


class StrictTensor(torch.Tensor):
    """A tensor of the device; `host` holds its data."""

    host: torch.Tensor

    @staticmethod
    def of(host: torch.Tensor) -> StrictTensor:
        tensor = torch.Tensor._make_wrapper_subclass(
            StrictTensor,
            host.shape,
            strides=host.stride(),
            storage_offset=host.storage_offset(),
            dtype=host.dtype,
            device=torch.device(NAME, 0),
        )
        tensor.host = host
        return tensor

    def tolist(self) -> Any:
        return self.host.tolist()

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        parts = func.decompose(
            *args, **(kwargs or {})
        )  # in inference mode composite operators arrive undivided
        return _kernel(func, *args, **(kwargs or {})) if parts is NotImplemented else parts


def _kernel(op: Any, *args: Any, **kwargs: Any) -> Any:
    """Run an operator on host memory, if all its operands are on this device."""
    tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    strangers = [t for t in tensors if not isinstance(t, StrictTensor) and t.dim()]
    if strangers and op._schema.name not in _MOVES:
        raise RuntimeError(
            f"Expected all tensors to be on the same device, but {op._schema.name} got {NAME}:0 and {strangers[0].device}"
        )
    target = kwargs.get("device")
    to_host = target is not None and target.type == "cpu"
    if target is not None:
        kwargs = kwargs | {"device": torch.device("cpu"), "pin_memory": False}
    hosts: dict[int, StrictTensor] = {}

    def lower(leaf: Any) -> Any:
        if isinstance(leaf, StrictTensor):
            hosts[id(leaf.host)] = leaf
            return leaf.host
        return leaf

    def lift(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor) or to_host:
            return leaf
        tensor = hosts.get(id(leaf))
        return tensor if tensor is not None else StrictTensor.of(leaf)

    host_args, host_kwargs = pytree.tree_map(lower, (args, kwargs))
    with torch.inference_mode(False), torch.no_grad():  # a view of a normal tensor must be a normal tensor
        result = op(*host_args, **host_kwargs)
        if op._schema.name == "aten::copy_" and not isinstance(args[0], StrictTensor):
            return args[0]  # a copy to the host
        return pytree.tree_map(lift, result)
