"""What layers do differently in training: dropout, switched off for good, and recomputed activations."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

from torch import nn


def disable_dropout(model: nn.Module) -> None:
    """Set every dropout probability that modules hold to 0; the configuration, and so what is saved, stays as it was.

    The policy's ratio compares a token's probability in two passes, so a pass must not be random. Evaluation mode
    already skips dropout; this covers layers that are put in training mode to recompute activations.
    """
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0
        for name, value in vars(module).items():
            if "drop" in name and isinstance(value, float):
                setattr(module, name, 0.0)


def enable_recomputation(model: Any) -> list[nn.Module]:
    """Switch gradient checkpointing on and return the modules that look at their training mode for it.

    Raises:
        ValueError: the model does not support gradient checkpointing.
    """
    if hasattr(model, "activation_checkpointing_enable"):  # its name in newer versions of transformers
        model.activation_checkpointing_enable(activation_checkpointing_kwargs={"use_reentrant": False})
    else:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return [module for module in model.modules() if getattr(module, "gradient_checkpointing", False)]


@contextlib.contextmanager
def recomputing(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Put the given modules, and not what is inside them, in training mode for one forward pass.

    Elsewhere they stay in evaluation mode: some versions of transformers drop the key/value cache of a model whose
    layers checkpoint, which would break sampling.
    """
    for module in modules:
        module.training = True
    try:
        yield
    finally:
        for module in modules:
            module.training = False
