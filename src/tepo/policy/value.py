"""A value model: what a critic expects of a response, before each of its tokens."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tepo.core.errors import InputError
from tepo.policy.activations import disable_dropout, enable_recomputation, recomputing
from tepo.policy.attention_interface import use_attention
from tepo.policy.batching import PADDED, Layout
from tepo.policy.config import PolicyConfig
from tepo.policy.layers import fuse_layers
from tepo.policy.layouts import find_layout
from tepo.policy.load import Say, no_progress_bars, quiet
from tepo.policy.policy import Policy
from tepo.policy.sequences import TokenSequence, check_sequences, scored_tokens, spread
from tepo.policy.source import similar_folders
from tepo.policy.trained import Trained


class ValueModel(Trained):
    """A causal transformer with a scalar head on its hidden states.

    The value of a token is that of the state before it: the head sees the hidden state that predicts the token.
    """

    def __init__(
        self,
        backbone: nn.Module,
        head: nn.Linear,
        *,
        device: torch.device,
        vocabulary: int,
        max_positions: int,
        context: Callable[[], AbstractContextManager[Any]],
        layout: Layout = PADDED,
    ) -> None:
        self.model: Any = nn.ModuleDict({"backbone": backbone, "head": head}).eval()
        self.device = device
        self.layout = layout
        self._vocabulary = vocabulary
        self._max_positions = max_positions
        self._context = context
        self._recomputed = [module for module in backbone.modules() if getattr(module, "gradient_checkpointing", False)]

    def values(self, sequences: Sequence[TokenSequence], *, width: int | None = None) -> Tensor:
        """Return the values [B, T] of the response tokens, float32 or better, zero elsewhere; T is `width` or the
        longest response. They carry a gradient unless torch.no_grad() is on."""
        check_sequences(sequences, vocabulary=self._vocabulary, max_positions=self._max_positions)
        from tepo.policy.passes import predicting_states

        scored = scored_tokens(sequences, width=width, device=self.device)
        recomputed = self._recomputed if torch.is_grad_enabled() else ()
        with self._context(), recomputing(recomputed):
            states = predicting_states(self.model["backbone"], sequences, scored, self.layout)
        head = self.model["head"]
        return spread(head(states.to(head.weight.dtype)).squeeze(-1), scored)


def value_of_policy(policy: Policy) -> ValueModel:
    """Return a value model on a copy of the policy's backbone, adapter layers included, whose values are all 0 at
    first: its head starts at zero, and the first update moves the head alone."""
    backbone = copy.deepcopy(policy.model.base_model)
    embedding = policy.model.get_input_embeddings().weight
    head = nn.Linear(_hidden_size(policy.model.config), 1, device=policy.device, dtype=embedding.dtype)
    nn.init.zeros_(head.weight)
    nn.init.zeros_(head.bias)
    return _like(policy, backbone, head, policy.layout)


def load_value_model(path: str, policy: Policy, config: PolicyConfig, *, say: Say = quiet) -> ValueModel:
    """Return a value model that starts from a sequence-classification model (a reward model) or a causal language
    model in a folder; without a scalar head there, the head starts at zero. All of it is trained. `say` gets a line
    where it computes in a slower way than it could.

    Raises:
        InputError: there is no such model, or it does not share the policy's tokens.
    """
    import transformers

    if not Path(path).is_dir():
        hint = similar_folders(Path(path))
        raise InputError(f"critic.path={path!r}: expected 'start', or a model's folder; there is no such folder.{hint}")
    with no_progress_bars():
        try:
            model, report = transformers.AutoModelForSequenceClassification.from_pretrained(
                path, num_labels=1, dtype=torch.float32, output_loading_info=True, local_files_only=True
            )
        except (OSError, ValueError, RuntimeError, KeyError) as error:
            raise InputError(f"critic.path={path!r} cannot be loaded as a value model: {error}") from error
    head = getattr(model, "score", None)
    if not isinstance(head, nn.Linear) or head.out_features != 1:
        raise InputError(f"critic.path={path!r}: expected a causal model with one score a position (a layer `score`)")
    missing = sorted(key for key in report["missing_keys"] if not key.startswith("score."))
    if missing:
        raise InputError(f"critic.path={path!r} lacks {len(missing)} weights, first {missing[0]!r}")
    if any(key.startswith("score.") for key in report["missing_keys"]):
        nn.init.zeros_(head.weight)
    found = int(model.get_input_embeddings().weight.shape[0])
    if found != policy.vocabulary:
        raise InputError(
            f"critic.path={path!r} has {found} token ids, the policy {policy.vocabulary}: they must share a tokenizer"
        )
    if config.fused_layers:
        fuse_layers(model)
    use_attention(model, blocks=config.fused_layers)
    disable_dropout(model.eval())
    model.to(device=policy.device, dtype=policy.model.get_input_embeddings().weight.dtype).requires_grad_(True)
    if config.gradient_checkpointing:
        enable_recomputation(model)
    settings = config.model_copy(update={"path": path})
    layout = find_layout(
        model.base_model, settings, dtype=policy.compute_dtype, context=policy.compute_context, say=say
    )
    return _like(policy, model.base_model, head, layout)


def _like(policy: Policy, backbone: Any, head: nn.Linear, layout: Layout) -> ValueModel:
    return ValueModel(
        backbone,
        head,
        device=policy.device,
        vocabulary=policy.vocabulary,
        max_positions=policy.max_positions,
        context=policy.compute_context,
        layout=layout,
    )


def _hidden_size(config: Any) -> int:
    return int(config.get_text_config().hidden_size)
