"""Finds inputs of an architecture's decoder that the split does not provide, in the architecture's own source. Runs nothing.

An architecture is served without a line of code if its outer model only puts features in the places of placeholders and calls the
decoder. An architecture that passes anything else to its decoder would give wrong answers: it is refused here.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterator
from typing import Any

import torch

from mmd_api.contract.errors import UnsupportedModelError
from mmd_workers.model.adapters.base import Adapter

PROVIDED = frozenset(
    {"self", "input_ids", "inputs_embeds", "position_ids", "attention_mask", "past_key_values", "use_cache"}
)
DEEPSTACK = frozenset({"visual_pos_masks", "deepstack_visual_embeds"})
NO_INPUTS = frozenset(
    {
        "cache_position",
        "labels",
        "logits_to_keep",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "return_dict",
    }
)
"""Parameters that change no logit, or follow from the provided ones."""
OF_OTHER_TASKS = frozenset({"encoder_hidden_states", "encoder_attention_mask", "token_type_ids"})
"""Parameters of text models that plain generation leaves out."""
TOKEN_TYPES = ("token_type_ids", "mm_token_type_ids")


def check(model: Any, adapter: Adapter) -> None:
    """Check that the split provides everything that the decoder of `model` needs.

    Raises:
        UnsupportedModelError: it does not; the message names the inputs and the remedy.
    """
    missing = missing_inputs(model, adapter)
    if missing:
        raise UnsupportedModelError(
            f"spec.model.id: the decoder of {adapter.config.model_type} needs {', '.join(missing)}, which the split of encoder and "
            "language model does not provide, so its answers would be wrong; choose an architecture of docs/models.md, or add an "
            "adapter in workers/mmd_workers/model/adapters that provides it"
        )


def missing_inputs(model: Any, adapter: Adapter) -> list[str]:
    """Inputs that the decoder needs and does not get, sorted. Each is a parameter's name or a phrase."""
    base, decoder = model.base_model, model.get_decoder()
    provided = PROVIDED | (DEEPSTACK if adapter.provides_deepstack() else frozenset())
    parameters = inspect.signature(decoder.forward).parameters.values()
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    accepted = {p.name for p in parameters if p.kind not in variable} - NO_INPUTS
    missing: set[str] = set()
    if base is decoder:
        missing |= accepted - provided - OF_OTHER_TASKS
    else:
        missing |= accepted - provided
        missing |= _passed_inputs(model, base, decoder) - provided - NO_INPUTS
        if any(_writes_embeddings(outer) for outer in (base, model)):
            missing.add("separate embeddings for tokens other than the placeholders")
        if adapter.bidirectional == "nothing" and any(_makes_masks(outer) for outer in (base, model)):
            missing.add("a mask in which the tokens of a medium see each other (bidirectional attention)")
    if adapter.bidirectional != "prompt" and any(_is_bidirectional(module) for module in decoder.modules()):
        missing.add("a mask in which tokens see later ones (bidirectional attention)")
    return sorted(missing)


def uses(model: Any, setting: str) -> bool:
    """Whether the forward of `model` reads this setting of its text model.

    Some multimodal models leave out what their text model does to the logits.
    """
    try:
        return setting in inspect.getsource(inspect.unwrap(type(model).forward))
    except (OSError, TypeError):
        return True


def _is_bidirectional(module: torch.nn.Module) -> bool:
    return getattr(module, "layer_idx", None) is not None and getattr(module, "is_causal", True) is False


def _passed_inputs(model: Any, base: Any, decoder: Any) -> set[str]:
    """Names of the arguments with which the outer model calls its decoder, or the text model that has it.

    A phrase stands for arguments that cannot be read.
    """
    names: set[str] = set()
    callers, called = [base] if base is model else [base, model], False
    for outer in callers:  # the list grows meanwhile
        inside = {name: child for name, child in outer.named_modules() if _has(child, decoder)}
        for call in _calls(outer):
            child = inside.get(_name(call))
            if child is None or child is base or child is outer:
                continue
            names |= _arguments(call, child, outer)
            if child is decoder:
                called = True
            elif child not in callers:
                callers.append(child)
    if not called:
        names.add("an unknown input (the source of its outer model shows no call of it)")
    return names


def _has(module: Any, decoder: Any) -> bool:
    return any(child is decoder for child in module.modules())


def _arguments(call: ast.Call, child: Any, outer: Any) -> set[str]:
    """Names of the arguments with which the forward of `outer` calls `child`; positional ones are named after its parameters."""
    outer_parameters = inspect.signature(type(outer).forward).parameters.values()
    passed_on = {p.name for p in outer_parameters if p.kind is inspect.Parameter.VAR_KEYWORD}
    unknown = (
        "an unknown input (the source of its outer model gives it by *args or **kwargs of its own making)"
    )
    names = {keyword.arg for keyword in call.keywords if keyword.arg is not None}
    for keyword in call.keywords:
        if keyword.arg is None and ast.unparse(keyword.value) not in passed_on:
            names.add(unknown)
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = [
        p.name for p in inspect.signature(child.forward).parameters.values() if p.kind in positional
    ]
    for position, value in enumerate(call.args):
        is_named = not isinstance(value, ast.Starred) and position < len(parameters)
        names.add(parameters[position] if is_named else unknown)
    # Arguments that the forward itself adds to those it passes on.
    for node in _nodes(outer):
        for target in node.targets if isinstance(node, ast.Assign) else ():
            if isinstance(target, ast.Subscript) and ast.unparse(target.value) in passed_on:
                key = target.slice
                names.add(str(key.value) if isinstance(key, ast.Constant) else unknown)
    return names


def _makes_masks(outer: Any) -> bool:
    """Whether the forward of `outer` uses the modality of tokens for anything but their positions."""
    for call in _calls(outer):
        name = _name(call)
        # `model` is its own outer forward, which passes everything on.
        if "rope" in name or "position" in name or name == "model":
            continue
        values = [*call.args, *(keyword.value for keyword in call.keywords)]
        names = {node.id for value in values for node in ast.walk(value) if isinstance(node, ast.Name)}
        if names & set(TOKEN_TYPES):
            return True
    return False


def _writes_embeddings(outer: Any) -> bool:
    """Whether the forward of `outer` assigns rows of the embeddings one by one; features are scattered in one call."""
    return any(
        isinstance(target, ast.Subscript) and ast.unparse(target.value) == "inputs_embeds"
        for node in _nodes(outer)
        if isinstance(node, ast.Assign)
        for target in node.targets
    )


def _name(call: ast.Call) -> str:
    """The called function without `self.`: `language_model`, `torch.where`."""
    return ast.unparse(call.func).removeprefix("self.")


def _calls(outer: Any) -> Iterator[ast.Call]:
    yield from (node for node in _nodes(outer) if isinstance(node, ast.Call))


def _nodes(outer: Any) -> Iterator[ast.AST]:
    """The syntax of the forward of `outer`."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(type(outer).forward))))
    except (OSError, TypeError, SyntaxError):  # no source: then no call of the decoder is found either
        return
    yield from ast.walk(tree)
