"""What training asks of any model: trained weights by name, to save and to load."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from tepo.core.errors import InputError


class Trained:
    """A model some of whose weights are trained.

    Attributes:
        model: the torch module; always in evaluation mode.
        device: where it computes.
    """

    model: Any
    device: torch.device

    def trainable_parameters(self) -> list[nn.Parameter]:
        """Return the parameters that training changes; tied ones once."""
        return [parameter for parameter in self.model.parameters() if parameter.requires_grad]

    def state_tensors(self) -> dict[str, Tensor]:
        """Return the trained weights by name, sharing memory with the model."""
        return {n: parameter.detach() for n, parameter in self.model.named_parameters() if parameter.requires_grad}

    def load_state_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy trained weights, as `state_tensors` names them, into the model.

        Raises:
            InputError: a name is missing or unknown, or a shape differs.
        """
        own = self.state_tensors()
        for name in sorted(own.keys() ^ tensors.keys()):
            state = "lacks" if name in own else "has an unknown"
            raise InputError(f"the checkpoint {state} tensor {name!r}; it was written for another model or adapter")
        for name, value in tensors.items():
            if own[name].shape != value.shape:
                found, wanted = tuple(value.shape), tuple(own[name].shape)
                raise InputError(f"tensor {name!r} of the checkpoint is {found}, the model's is {wanted}")
        for name, value in tensors.items():
            own[name].copy_(value)
