"""TRL's trainers without model, data or generation: the tensors are given, everything between is TRL's own code.

The real `_generate_and_score_completions` turns rewards into advantages and token counts, the real `_compute_loss`
turns those into the loss; only what would ask a model, a sampler or a reward function answers from a token batch.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import torch
from random_batches import Result, differentiate, leaf
from torch import Tensor
from trl.experimental.gmpo.gmpo_trainer import GMPOTrainer
from trl.trainer.grpo_trainer import GRPOTrainer
from trl.trainer.rloo_trainer import RLOOTrainer

from tepo.objectives import TokenBatch

Inputs = dict[str, Tensor]

# The defaults of a comparison; a test names what it changes. Where TRL's own default is another, docs/differences.md
# says so.
ARGUMENTS: dict[str, Any] = {
    "steps_per_generation": 1,
    "gradient_accumulation_steps": 1,
    "num_iterations": 2,  # more than one update a generation, so that old log-probs are computed
    "per_device_train_batch_size": 1,
    "gradient_checkpointing_kwargs": None,
    "report_to": [],
    "use_bias_correction_kl": False,
    "delta": None,
    "sapo_temperature_pos": 1.0,
    "sapo_temperature_neg": 1.05,
    "vespo_k_pos": 2.0,
    "vespo_lambda_pos": 3.0,
    "vespo_k_neg": 3.0,
    "vespo_lambda_neg": 2.0,
}
SETTINGS: dict[str, Any] = {
    "loss_type": "grpo",
    "importance_sampling_level": "token",
    "epsilon_low": 0.2,
    "epsilon_high": 0.2,
    "beta": 0.0,
    "scale_rewards": "group",
    "multi_objective_aggregation": "sum_then_normalize",
    "max_completion_length": 64,
    "mask_truncated_completions": False,
    "use_vllm": False,
    "vllm_importance_sampling_correction": True,
    "vllm_importance_sampling_mode": "token_truncate",
    "vllm_importance_sampling_clip_min": None,
    "vllm_importance_sampling_clip_max": None,
    "entropy_coef": 0.0,
    "use_adaptive_entropy": False,
    "top_entropy_quantile": 1.0,
    "off_policy_mask_threshold": None,
    "reward_clip_range": None,
    "normalize_advantages": False,
}
EOS, TOKEN, PAD = 2, 1, 0


class _StandIn:
    """The attributes that both trainers read, and the three methods that would need a model."""

    def __init__(self, batch: TokenBatch, **settings: Any) -> None:  # the trainer's own __init__ is not wanted
        chosen = {**ARGUMENTS, **SETTINGS, **settings}
        unknown = settings.keys() - ARGUMENTS.keys() - SETTINGS.keys()
        assert not unknown, f"unknown settings {unknown}"
        self.batch = batch
        self.args = SimpleNamespace(**{name: chosen[name] for name in ARGUMENTS})
        for name in SETTINGS:
            setattr(self, name, chosen[name])
        assert batch.group is not None
        assert batch.rewards is not None
        self.num_generations = int((batch.group == batch.group[0]).sum())
        self.num_iterations = self.args.num_iterations
        self.current_gradient_accumulation_steps = self.args.gradient_accumulation_steps
        self._entropy_bonus_enabled = chosen["entropy_coef"] != 0
        self.aux_loss_enabled = False
        self.pad_to_multiple_of = None
        self.model = SimpleNamespace(training=True, is_gradient_checkpointing=False)
        self.ref_model = SimpleNamespace()
        self.accelerator = _accelerator()
        self.state = SimpleNamespace(global_step=0)
        self._tokenizer = SimpleNamespace(pad_token_id=PAD)
        self.eos_token_ids = [EOS]
        rewards = batch.rewards[:, None] if batch.rewards.dim() == 1 else batch.rewards
        self.rewards_per_func = rewards
        self.reward_funcs = self.reward_func_names = [f"reward_{k}" for k in range(rewards.shape[1])]
        self.reward_weights = torch.ones(rewards.shape[1])
        self.environment_factories = self.environments = None
        self.tools: list[Any] = []
        self._metrics: dict[str, Any] = {"train": defaultdict(list)}
        self._logs: dict[str, Any] = defaultdict(list, rewards=defaultdict(list), extra=defaultdict(list))
        self._pending_extra_logs: dict[str, Any] = {}
        self._pending_metrics: dict[str, Any] = {}
        self.current: tuple[Tensor, Tensor] | None = None

    def _calculate_rewards(self, inputs: Any, prompts: Any, completions: Any, ids: Any) -> Tensor:
        return self.rewards_per_func.clone()

    def _get_per_token_logps_and_entropies(self, model: Any, *_: Any, **__: Any) -> tuple[Tensor | None, ...]:
        if model is self.ref_model:
            return self.batch.ref_logp, None, None
        if torch.is_grad_enabled():
            assert self.current is not None
            return *self.current, None
        return self.batch.old_logp, None, None

    def _completions(self) -> tuple[list[list[int]], list[list[int]]]:
        """Return token ids, one list a response as long as its last counted token, and whether each counts."""
        width = self.batch.mask.shape[1]
        position = torch.arange(1, width + 1)
        length = (self.batch.mask * position).amax(dim=1).clamp_min(1)
        length[0] = width  # TRL pads to the longest response; holes keep the tensors' width
        truncated = self.batch.truncated
        assert truncated is not None
        last = [TOKEN if cut else EOS for cut in truncated.tolist()]
        ids = [[TOKEN] * (int(n) - 1) + [end] for n, end in zip(length, last, strict=True)]
        counts = [row[: int(n)].long().tolist() for row, n in zip(self.batch.mask, length, strict=True)]
        return ids, counts

    def generate(self) -> Inputs:
        """Return what TRL hands from generation to the loss: masks, advantages, old and reference log-probs."""
        inputs: Inputs = self._generate_and_score_completions([{"prompt": "p"}] * len(self.batch.mask))  # type: ignore[attr-defined]
        return inputs

    def loss(self, inputs: Mapping[str, Tensor], rows: slice = slice(None)) -> Result:
        """Return TRL's loss of some rows (a micro-batch) and its gradients, all of their shape."""
        assert self.batch.entropy is not None
        logp, entropy = leaf(self.batch.logp[rows]), leaf(self.batch.entropy[rows])
        self.current = (logp, entropy)
        own = {name: value[rows] if value.dim() else value for name, value in inputs.items()}
        loss = self._compute_loss(self.model, own)  # type: ignore[attr-defined]
        metrics = {name: float(values[-1]) for name, values in self._metrics["train"].items()}
        return differentiate(loss, logp, entropy, metrics)


class GRPOStandIn(_StandIn, GRPOTrainer):
    """GRPOTrainer on a token batch. Holes and empty rows travel as TRL's tool mask."""

    def _generate(self, prompts: list[Any]) -> tuple[Any, ...]:
        ids, counts = self._completions()
        sampled = None
        if self.use_vllm:
            assert self.batch.rollout_logp is not None
            sampled = [row[: len(own)].tolist() for row, own in zip(self.batch.rollout_logp, ids, strict=True)]
        return [[TOKEN]] * len(ids), ids, counts, [""] * len(ids), sampled, {}, None, None


class GMPOStandIn(GRPOStandIn, GMPOTrainer):
    """TRL's experimental GMPOTrainer on a token batch: GRPOTrainer with another loss."""


class RLOOStandIn(_StandIn, RLOOTrainer):
    """RLOOTrainer on a token batch; it knows no tool mask, so responses have no holes."""

    def _generate(self, prompts: list[Any]) -> tuple[Any, ...]:
        ids, _ = self._completions()
        return [[TOKEN]] * len(ids), ids, [""] * len(ids)

    def _completions(self) -> tuple[list[list[int]], list[list[int]]]:
        mask = self.batch.mask
        length = mask.sum(dim=1)
        assert bool((mask == (torch.arange(mask.shape[1])[None] < length[:, None])).all()), "holes"
        assert self.batch.truncated is not None
        last = [TOKEN if cut else EOS for cut in self.batch.truncated.tolist()]
        return [[TOKEN] * (int(n) - 1) + [end] for n, end in zip(length, last, strict=True)], []


def _accelerator() -> SimpleNamespace:
    """Return one process: gathering and reducing change nothing."""
    return SimpleNamespace(
        device=torch.device("cpu"),
        num_processes=1,
        process_index=0,
        is_main_process=True,
        sync_gradients=True,
        gather=lambda value: value,
        gather_for_metrics=lambda value: value,
        reduce=lambda value, reduction="sum": value,
        pad_across_processes=lambda value, dim=0, pad_index=0: value,
    )


def loss_of(trainer: _StandIn) -> Result:
    """Return TRL's loss of the whole batch in one micro-batch."""
    return trainer.loss(trainer.generate())


def accumulated(batch: TokenBatch, split: int, **settings: Any) -> Result:
    """Return the sum of TRL's losses of two micro-batches, cut at row `split`, that make one optimizer step."""
    trainer = GRPOStandIn(batch, gradient_accumulation_steps=2, steps_per_generation=2, **settings)
    inputs = trainer.generate()
    first, second = trainer.loss(inputs, slice(0, split)), trainer.loss(inputs, slice(split, None))
    logp, entropy = torch.cat([first.logp, second.logp]), torch.cat([first.entropy, second.entropy])
    return Result(first.loss + second.loss, logp, entropy)
