"""The messages on the wire: frozen dataclasses, packed with msgpack and validated on arrival.

There is one module for each receiver; read them to know the system. Times are Unix seconds (float) unless a name states otherwise;
sizes carry their unit in the name. Tensors never travel in these messages: they follow as raw bytes (`Frame`), described by
`TensorHeader`.
"""

from __future__ import annotations

from types import ModuleType

from mmd_workers.wire.messages import decode, encoder, every_pod, gateway, message_parts, prefill


def _messages_of(module: ModuleType) -> list[type]:
    return [
        kind
        for kind in vars(module).values()
        if isinstance(kind, type) and kind.__module__ == module.__name__
    ]


MESSAGES: tuple[type, ...] = tuple(
    kind
    for module in (message_parts, encoder, prefill, decode, gateway, every_pod)
    for kind in _messages_of(module)
)
"""Every message, and the parts of messages."""
