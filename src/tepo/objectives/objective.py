"""The objective: one choice of each part, and the three steps that turn a token batch into a loss."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from tepo.core.errors import InputError, nearest
from tepo.objectives.advantages import Advantage, GroupNormalized, with_signal
from tepo.objectives.batch import (
    SCORER_FIELDS,
    TokenBatch,
    at_least_float32,
    check_finite,
    check_rewards,
    clean,
    group_index,
    require,
)
from tepo.objectives.checks import check_parts
from tepo.objectives.metrics import policy_metrics
from tepo.objectives.ratios import Ratio, TokenRatio, TunedRatio
from tepo.objectives.reducers import Reducer, TokenMean
from tepo.objectives.regularizers import Regularizer, State, Tuned
from tepo.objectives.row_weights import EvenRows, RowWeight
from tepo.objectives.selectors import Selector
from tepo.objectives.shaping import Shaping, TunedShaping
from tepo.objectives.sums import Parts, Sums, extremes, over
from tepo.objectives.surrogates import PPOClip, Surrogate
from tepo.objectives.transforms import Transform
from tepo.objectives.value import foresight, value_metrics
from tepo.objectives.weights import ImportanceWeight, NoWeight


@dataclass(frozen=True)
class Needs:
    """What an objective asks of whoever calls it.

    `batch`: fields of the token batch beside logp and mask · `scores`: statistics of the scorer · `reference`:
    a reference policy · `old_logp`: the old log-probs even before the first update · `old_entropy`: entropies of
    the sampling policy · `critic`: a value model, its values before (`old_values`) and during (`values`) the
    updates · `fine_clip`: clips finer than 1e-2, so old values must come from the scorer's own path ·
    `mini_statistics`: current values of the whole mini-batch before its backward pass · `each_reward`: rewards
    `[B, K]`, one column a reward, where there are several; their sum `[B]` would hide what it compares.
    """

    batch: frozenset[str]
    scores: frozenset[str]
    reference: bool
    old_logp: bool
    old_entropy: bool
    critic: bool
    fine_clip: bool
    mini_statistics: bool
    each_reward: bool = False


@dataclass(frozen=True, eq=False)
class Prepared:
    """A rollout batch with its advantages `[B, T]`, and the metrics of its groups."""

    batch: TokenBatch
    metrics: Sums


@dataclass(frozen=True, eq=False)
class Statistics:
    """The mini-batch-wide numbers that its micro-batches share.

    `advantage` and `weights` (one per term) are `[B, T]`, aligned with the mini-batch's rows; `denominators` are
    scalars of the whole mini-batch. Several processes add their denominators up before `partial`.
    """

    advantage: Tensor
    weights: Mapping[str, Tensor]
    denominators: Mapping[str, Tensor]

    def take(self, rows: Tensor, width: int | None = None) -> Statistics:
        """Return the share of the given rows, cut to the first `width` columns, like `TokenBatch.take`."""
        weights = {name: value.index_select(0, rows)[:, :width] for name, value in self.weights.items()}
        return Statistics(self.advantage.index_select(0, rows)[:, :width], weights, self.denominators)

    def replace(self, **fields: Mapping[str, Tensor]) -> Statistics:
        """Return a copy with some fields replaced, e.g. denominators summed over processes."""
        return dataclasses.replace(self, **fields)  # type: ignore[arg-type]


@dataclass(frozen=True, eq=False)
class Selection:
    """Which tokens carry a term, and which of the mini-batch's tokens its denominator counts; bool `[B, T]`."""

    selected: Tensor
    counted: Tensor

    def less(self, chosen: Tensor, counts: bool) -> Selection:
        """Return the selection without the tokens that are not chosen; `counts`: they leave the count too."""
        return Selection(self.selected & chosen, self.counted & chosen if counts else self.counted)


@dataclass(frozen=True, eq=False)
class Output:
    """`loss`: scalar with gradient; `metrics`: {name: float}; `parts`: the sums behind them."""

    loss: Tensor
    metrics: dict[str, float]
    parts: Parts


@dataclass(frozen=True)
class Objective:
    """A frozen composition of parts; `objective(batch)` is `prepare`, `statistics` and `partial` in one.

    loss = reduce(selector * weight * surrogate(ratio, A)) + sum of coef * reduce(regulariser). Every reduction is
    a sum of token weights over a mini-batch-wide denominator, so the loss, its gradient and its metrics do not
    depend on padding, row order or the split into micro-batches.
    """

    name: str
    shaping: tuple[Shaping, ...] = ()
    advantage: Advantage = GroupNormalized()
    transforms: tuple[Transform, ...] = ()
    ratio: Ratio = TokenRatio()
    surrogate: Surrogate = PPOClip()
    selectors: tuple[Selector, ...] = ()
    weight: ImportanceWeight = NoWeight()
    row_weight: RowWeight = EvenRows()
    regularizers: tuple[Regularizer, ...] = ()
    reducer: Reducer = TokenMean()
    log_ratio_clamp: float = 20.0
    learnable: tuple[str, ...] = field(default=())
    ptx_coef: float = 0.0
    """Coefficient of the mean log-likelihood of pre-training text; it is no part of a batch: the trainer adds it."""
    partner: Objective | None = None
    """What a second policy learns by from the same responses; its batch's `rollout_logp` is the sampling policy's."""

    def __post_init__(self) -> None:
        names = [regularizer.name for regularizer in self.regularizers]
        if len(set(names)) < len(names) or "policy" in names:
            raise InputError(f"regularizers are named {names}: names must differ from each other and from 'policy'")
        check_parts(self, f"objective {self.name!r}")
        if not self.log_ratio_clamp > 0:
            raise InputError(f"log_ratio_clamp={self.log_ratio_clamp}: expected a number > 0")
        state = self.init_state()
        for name in self.learnable:
            if name not in state:
                raise InputError(f"learnable names {name!r}, which no part keeps in its state.{nearest(name, state)}")

    @property
    def needs(self) -> Needs:
        """Everything the parts declare, together."""
        rewards = self.advantage.needs
        for shape in reversed(self.shaping):  # what one makes needs not be given, unless an earlier one reads it
            rewards = (rewards - shape.makes) | shape.needs
        reading = [
            rewards,
            *(part.needs for part in self.transforms),
            *(part.needs for part in self.selectors),
            *(part.needs for part in self.regularizers),
            self.surrogate.needs,
            self.weight.needs,
            self.row_weight.needs,
            self.reducer.needs,
        ]
        batch = frozenset[str]().union(*reading)
        scores = [
            batch & SCORER_FIELDS,
            *(part.scores for part in self.transforms),
            self.surrogate.scores,
            *(part.scores for part in self.regularizers),
        ]
        current = [
            *(part.current for part in self.transforms),
            *(part.current for part in self.selectors),
            *(part.current for part in self.regularizers),
        ]
        return Needs(
            batch=batch,
            scores=frozenset[str]().union(*scores),
            reference=bool(batch & {"ref_logp", "kl_full"}),
            old_logp="old_logp" in batch,
            old_entropy="old_entropy" in batch,
            critic=bool(batch & {"values", "old_values"}),
            fine_clip=self.surrogate.fine or bool(getattr(self.ratio, "fine", False)),
            mini_statistics=any(current),
            each_reward=self._each_reward,
        )

    def init_state(self) -> State:
        """Return what the method learns or tunes on the way, at the start of a run."""
        state: dict[str, Tensor] = {}
        for part in self._tuned:
            state |= part.init_state()
        return state

    def update(self, state: State, metrics: Mapping[str, float]) -> State:
        """Return the state after one optimizer step with these metrics."""
        updated = dict(state)
        for part in self._tuned:
            updated |= part.update(state, metrics)
        return updated

    @property
    def _each_reward(self) -> bool:
        """Whether the advantage looks at each reward by itself."""
        return bool(getattr(self.advantage, "per_reward", False))

    @property
    def _tuned(self) -> tuple[Tuned, ...]:
        """The parts that may keep a state."""
        ratio = (self.ratio,) if isinstance(self.ratio, TunedRatio) else ()
        shaping = (part for part in self.shaping if isinstance(part, TunedShaping))
        return (*shaping, *ratio, self.row_weight, *self.regularizers)

    def prepare(self, batch: TokenBatch, state: State | None = None) -> Prepared:
        """Shape the rewards and estimate the advantages, once per rollout batch.

        Returns the batch with `advantage` `[B, T]`; a batch that brings its advantages keeps them.
        """
        batch = self.row_weight.prepare(batch)
        view = clean(batch)
        metrics = Sums()
        check_rewards(view)
        shaped = judged = view  # of `judged`, the rewards say which groups have a signal
        if view.advantage is None:
            state = self.init_state() if state is None else state
            for shape in self.shaping:
                shaped = (shape.tuned(state) if isinstance(shape, TunedShaping) else shape)(shaped)
                judged = shaped if "rewards" in shape.makes else judged
        if judged.rewards is not None and judged.group is not None:
            informative = with_signal(judged.rewards, judged.group, each=self._each_reward)
            metrics = group_metrics(informative, judged.group)
            view, batch = view.replace(informative=informative), batch.replace(informative=informative)
        if view.advantage is None:
            view = clean(view.replace(advantage=self.advantage(shaped).to(view.logp.dtype)))
        value = require(view, "advantage", "prepare").detach()
        if self.needs.critic:
            returns = value + require(view, "old_values", "the critic's target").detach()
            batch, metrics = batch.replace(returns=returns), metrics + foresight(returns, value, view.mask)
        for transform in self.transforms:
            if not transform.current:
                value = transform(value, view).detach()
        high, low = extremes(value, view.mask)
        row = Sums(maxima={"advantage/max": high}, minima={"advantage/min": low})
        return Prepared(batch.replace(advantage=value), metrics + row)

    def statistics(self, mini: TokenBatch, state: State | None = None) -> Statistics:
        """Fix the token weights and denominators of one mini-batch, without gradient.

        `mini` is a slice of the prepared batch. Its `logp` and `entropy` matter only where
        `needs.mini_statistics` is true; then they are the current policy's (at the first update, the old ones).
        """
        with torch.no_grad():
            batch = clean(mini)
            given = require(batch, "advantage", "statistics (call prepare first)")
            filters = [selector for selector in self.selectors if selector.terms == "all"]
            whole = select(filters, batch, Selection(batch.mask, batch.mask))
            # What no term carries has no say in the statistics of the rest.
            kept = clean(batch.replace(mask=whole.selected))
            advantage = require(kept, "advantage", "statistics")
            for transform in self.transforms:
                if transform.current:
                    advantage = transform(advantage, kept)
            kept = kept.replace(advantage=advantage)
            policy = select([selector for selector in self.selectors if selector.terms == "policy"], kept, whole)
            advantage = torch.where(whole.selected, advantage, given)
            reduced = self.reducer(policy.counted, batch)
            weights = {"policy": torch.where(policy.selected, reduced.tokens, torch.zeros_like(reduced.tokens))}
            denominators = {"policy": reduced.rows.sum()}
            over_all = self.reducer(whole.counted, batch)
            for part in self.regularizers:
                own = whole.selected & part.tokens(kept) if part.current else whole.selected
                term = self.reducer(own, batch) if part.norm == "masked" else over_all
                weights[part.name] = torch.where(own, term.tokens, torch.zeros_like(term.tokens))
                denominators[part.name] = term.rows.sum()
            return Statistics(advantage, weights, denominators)

    def idle(self, statistics: Statistics) -> Tensor:
        """Return which rows of a mini-batch can change nothing, bool `[B]`: their share of loss and gradient is 0
        whatever the current policy says of them. They count in denominators all the same.

        No token of such a row carries a regulariser, and none carries both the policy term and an advantage, of a
        surrogate that says its loss scales with it. Parts that say nothing (`scales_with_advantage`, `only_positive`)
        are taken to act on every token they weigh.
        """
        moving = statistics.weights["policy"] != 0
        if getattr(self.surrogate, "scales_with_advantage", False):
            moving = moving & (statistics.advantage != 0)
        for part in self.regularizers:
            carried = statistics.weights[part.name] != 0
            if getattr(part, "only_positive", False):
                carried = carried & (statistics.advantage > 0)
            moving = moving | carried
        return ~moving.any(dim=1)

    def partial(self, micro: TokenBatch, statistics: Statistics, state: State | None = None) -> Parts:
        """Return one micro-batch's share of the loss, with gradient, and of the metrics.

        `micro` carries the current policy's `logp` (and `entropy`); `statistics` is the same rows' slice of the
        mini-batch's. The shares of all micro-batches add up to the mini-batch's loss.
        """
        state = self.init_state() if state is None else state
        batch = clean(micro).replace(advantage=statistics.advantage)
        level = self.ratio.tuned(state) if isinstance(self.ratio, TunedRatio) else self.ratio
        ratio = level(batch, self.log_ratio_clamp)
        surrogate = self.surrogate(ratio, statistics.advantage, batch)
        tokens = surrogate.loss * self.weight(batch, self.log_ratio_clamp) * self.row_weight(batch, state)
        terms = {"policy": share(tokens, statistics.weights["policy"], statistics.denominators["policy"])}
        carried = {"policy": statistics.weights["policy"] > 0}
        for part in self.regularizers:
            weight = statistics.weights[part.name]
            if not part.current:
                weight = torch.where(part.tokens(batch), weight, torch.zeros_like(weight))
            carried[part.name] = weight > 0
            term = share(part.values(batch, self.log_ratio_clamp), weight, statistics.denominators[part.name])
            terms[part.name] = part.coefficient(state) * term
        loss = torch.stack(list(terms.values())).sum()
        totals = {f"loss/{name}": term.detach() for name, term in terms.items()} | {"loss": loss.detach()}
        sums = policy_metrics(batch, ratio, surrogate, carried, self.regularizers, self.log_ratio_clamp)
        if self.selectors:
            sums = sums + Sums(means={"mask/policy": over(carried["policy"].to(batch.logp.dtype), batch.mask)})
        return Parts(loss, Sums(totals=totals) + sums + value_metrics(batch))

    def __call__(self, batch: TokenBatch, state: State | None = None) -> Output:
        """Return the loss of a whole mini-batch, with gradient, and its metrics."""
        check_finite(batch)
        prepared = self.prepare(batch, state)
        statistics = self.statistics(prepared.batch, state)
        parts = self.partial(prepared.batch, statistics, state)
        parts = Parts(parts.loss, prepared.metrics + parts.sums)
        return Output(parts.loss, parts.metrics(), parts)


def select(selectors: Sequence[Selector], batch: TokenBatch, selection: Selection) -> Selection:
    """Return the selection less what each selector leaves out."""
    for selector in selectors:
        selection = selection.less(selector(batch), selector.denominator == "selected")
    return selection


def share(values: Tensor, weight: Tensor, denominator: Tensor) -> Tensor:
    """Return sum(weight * values) / denominator; tokens of weight 0 reach neither value nor gradient.

    With nothing to count (denominator 0) the result is 0, with zero gradient.
    """
    used = torch.where(weight != 0, values * weight, torch.zeros_like(values)).sum()
    return used / torch.where(denominator > 0, denominator, torch.ones_like(denominator))


def group_metrics(informative: Tensor, group: Tensor) -> Sums:
    """Return the share of groups whose rewards are all equal (no learning signal)."""
    index, n = group_index(group)
    speaking = torch.zeros(n, dtype=torch.long, device=index.device).index_add(0, index, informative.long()) > 0
    return Sums(means={"group/zero_std": ((~speaking).sum(), torch.ones_like(speaking).sum())})


def credit(objective: Objective, batch: TokenBatch, state: State | None = None) -> Tensor:
    """Return what each token is pushed by: -d loss / d logp, `[B, T]`, zero outside the mask.

    Log-probs move alone: entropy and other statistics of the batch are held fixed, so a loss made of those alone
    credits nothing here. The result is float32 or better, whatever the batch's dtype.
    """
    logp = at_least_float32(batch.logp.detach()).clone().requires_grad_(True)
    held = {name: value.detach() for name, value in batch.present() if name != "logp"}
    output = objective(TokenBatch(logp=logp, **held), state)
    if not output.loss.requires_grad:  # no term reads the log-probs
        return torch.zeros_like(logp)
    (gradient,) = torch.autograd.grad(output.loss, logp, materialize_grads=True)
    return -gradient
