"""An update holds the graph of one micro-batch at a time, however many responses it learns from."""

from __future__ import annotations

import pytest
import torch

from tepo.objectives import TokenBatch, objective
from tepo.policy import PolicyConfig, TokenSequence, load_policy
from tepo.training.config import OptimConfig
from tepo.training.learner import Learner
from tepo.training.micro import Budget
from tepo.training.update import Material, make_updates

PROMPT, RESPONSE = 5, 7


class Saved:
    """A tensor that a graph keeps for its backward pass; the class counts the entries of all that are alive."""

    alive = 0
    most = 0

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        Saved.alive += tensor.numel()
        Saved.most = max(Saved.most, Saved.alive)

    def __del__(self) -> None:
        Saved.alive -= self.tensor.numel()


def kept_by(responses: int, *, layout: dict[str, str], updates: int = 1) -> int:
    """Return the most entries that graphs kept at once while learning from so many responses, four to a prompt."""
    config = {"path": "builtin:tiny", "device": "cpu"} | layout
    policy = load_policy(PolicyConfig.model_validate(config))
    generator = torch.Generator().manual_seed(0)

    def draw(size: int) -> tuple[int, ...]:
        return tuple(torch.randint(4, 90, (size,), generator=generator).tolist())

    prompts = [draw(PROMPT) for _ in range(responses // 4)]
    rows = [TokenSequence(prompts[row // 4], draw(RESPONSE)) for row in range(responses)]
    method = objective("tepo")
    shape = (responses, RESPONSE)
    batch = TokenBatch(
        logp=torch.full(shape, -4.0),
        old_logp=torch.full(shape, -4.0),
        old_entropy=torch.full(shape, 4.0),
        entropy=torch.full(shape, 4.0),
        mask=torch.ones(shape, dtype=torch.bool),
        rewards=(torch.arange(responses) % 2).float(),
        group=torch.arange(responses) // 4,
        row_id=torch.arange(responses),
        truncated=torch.zeros(responses, dtype=torch.bool),
    )
    learner = Learner(policy, method, OptimConfig(), updates_per_step=updates, steps=1)
    material = Material(method.prepare(batch), rows, [[range(responses)]] * updates, 1.0)
    Saved.alive = Saved.most = 0
    with torch.autograd.graph.saved_tensors_hooks(Saved, lambda saved: saved.tensor):
        make_updates(learner, material, budget=Budget(8 * (PROMPT + RESPONSE), "x", lambda text: None))
    assert Saved.alive == 0
    return Saved.most


@pytest.mark.parametrize(("packing", "share_prompts"), [("never", "never"), ("always", "never"), ("always", "always")])
def test_graphs_do_not_grow_with_the_responses_or_updates(packing: str, share_prompts: str) -> None:
    layout = {"packing": packing, "share_prompts": share_prompts}
    few = kept_by(32, layout=layout)
    assert few > 0
    assert kept_by(128, layout=layout, updates=2) <= 1.1 * few
