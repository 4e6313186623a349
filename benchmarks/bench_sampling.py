"""Sampling against `generate` of transformers: SmolLM2-135M, bfloat16, temperature 1, the whole vocabulary.

    python benchmarks/bench_sampling.py
    python benchmarks/bench_sampling.py --only "batch 32"

`full`: every response has 64 tokens. `varied`: lengths uniform in 8 to 256, the same for both sides, each row ending
at its own (ours: a limit a prompt; transformers: a stopping criterion that says which rows are done). `groups`: the
prompts come in groups of 8, as in training, and our side encodes each once. Weights are random to the sampler in no
other way: both draw from the model's own distribution, each response with draws of its own.
The peer appears twice: as it comes, and under our allocator setting. Each process warms up on 16 tokens. About an hour
on two cores.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import floors
import harness
import models

PROMPT, FULL, SHORTEST, LONGEST = 44, 64, 8, 256
GROUP = 8
CASES = (
    (1, "full"),
    (8, "full"),
    (32, "full"),
    (64, "full"),
    (32, "groups"),
    (64, "groups"),
    (1, "varied"),
    (8, "varied"),
    (32, "varied"),
    (64, "varied"),
)


def prompts_and_limits(told: Mapping[str, Any]) -> tuple[list[list[int]], list[int]]:
    """Return the prompt and the length of every response, the same for both sides."""
    generator = random.Random(told["batch"])
    vocabulary = floors.Sizes.of(models.FOLDER / told["model"]).vocabulary
    rows, group = told["batch"], told["group"]
    distinct = [
        [generator.randrange(4, min(vocabulary, 40000)) for _ in range(told["prompt"])] for _ in range(rows // group)
    ]
    prompts = [prompt for prompt in distinct for _ in range(group)]
    low, high = told["lengths"]
    return prompts, [generator.randint(low, high) for _ in range(rows)]


def ours(told: Mapping[str, Any]) -> dict[str, Any]:
    """Sample with tepo."""
    import inspect

    from tepo.policy import PolicyConfig, load_policy
    from tepo.rollout import SamplingConfig, sample

    prompts, limits = prompts_and_limits(told)
    group, longest = told["group"], max(limits)
    policy = load_policy(PolicyConfig(path=str(models.FOLDER / told["model"]), dtype="bfloat16"))
    distinct = prompts[::group]
    more: dict[str, Any] = {}
    if told["varied"]:
        assert "limits" in inspect.signature(sample).parameters, "sample() takes no limit a prompt"
        more["limits"] = limits
    counted: list[int] = []

    def once(most: int = longest) -> None:
        draws, config = range(len(distinct)), SamplingConfig(max_tokens=most, rows=told["batch"])
        found = sample(policy, distinct, samples=group, config=config, seed=0, purpose="bench", draws=draws, **more)
        counted.append(sum(len(one.token_ids) for responses in found for one in responses))

    once(min(16, longest))
    seconds = harness.median_seconds(once, told["repeats"], warm_up=0)
    assert counted[-1] == sum(limits), f"{counted[-1]} tokens sampled, {sum(limits)} asked for"
    return {"seconds": seconds, "tokens": counted[-1], "peak_mb": harness.memory_mb()}


def transformers(told: Mapping[str, Any]) -> dict[str, Any]:
    """Sample with transformers' own loop."""
    import torch
    from transformers import AutoModelForCausalLM, StoppingCriteria, StoppingCriteriaList

    prompts, limits = prompts_and_limits(told)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(models.FOLDER / told["model"], dtype=torch.bfloat16).eval()
    ids = torch.tensor(prompts)
    ends = torch.tensor(limits) + ids.shape[1]

    class AtItsOwnLength(StoppingCriteria):
        def __call__(self, input_ids: Any, scores: Any, **rest: Any) -> Any:
            return input_ids.shape[1] >= ends

    more = {"stopping_criteria": StoppingCriteriaList([AtItsOwnLength()])} if told["varied"] else {}
    longest = max(limits)
    made: list[int] = []

    @torch.inference_mode()
    def once(most: int = longest) -> None:
        out = model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=most,
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            pad_token_id=2,
            **more,
        )
        made.append(out.shape[1] - ids.shape[1])

    once(min(16, longest))
    seconds = harness.median_seconds(once, told["repeats"], warm_up=0)
    assert made[-1] == longest, f"generate() stopped after {made[-1]} tokens of {longest}"
    return {"seconds": seconds, "tokens": sum(limits), "peak_mb": harness.memory_mb()}


def floor(told: Mapping[str, Any], rates: floors.Rates) -> dict[str, Any]:
    """Return the floor: prompts once a group, then each decoding step with the rows that are left."""
    sizes = floors.Sizes.of(models.FOLDER / told["model"])
    _, limits = prompts_and_limits(told)
    layers, head = sizes.layer() * sizes.layers, [(sizes.hidden, sizes.vocabulary)]
    groups = told["batch"] // told["group"]
    prefill = floors.forward(groups * told["prompt"], layers)
    done = floors.operations(prefill)
    seconds = rates.seconds(prefill)
    weight_bytes = 2 * sizes.weights
    full = floors.forward(told["batch"], layers + head)
    for step in range(max(limits)):
        share = sum(limit > step for limit in limits) / told["batch"]
        seconds += max(share * rates.seconds(full), weight_bytes / rates.bandwidth)
        done += share * floors.operations(full)
    return {
        "seconds": seconds,
        "operations": done,
        "bytes": weight_bytes * max(limits),
        "dtype": "bfloat16",
        "bandwidth_gb_s": rates.bandwidth / 1e9,
    }


def case(batch: int, kind: str, quick: bool) -> harness.Case:
    model = "tiny-endless" if quick else "smollm2-endless"
    models.ensure(model)
    lengths = (SHORTEST, LONGEST) if kind == "varied" else (FULL, FULL)
    shape = {
        "batch": batch,
        "prompt": PROMPT,
        "lengths": [value // 8 for value in lengths] if quick else list(lengths),
        "group": GROUP if kind == "groups" else 1,
        "varied": kind == "varied",
        "model": model,
        "repeats": 1 if quick or kind == "varied" else 2,
    }
    sides = [
        harness.Side(harness.OURS, {**shape, "side": "ours"}, harness.ALLOCATOR),
        harness.Side("generate, our allocator", {**shape, "side": "transformers"}, harness.ALLOCATOR),
        harness.Side("generate as it comes", {**shape, "side": "transformers"}),
    ]
    return harness.Case(f"batch {batch}, {kind}", shape, sides)


def work(told: dict[str, Any]) -> dict[str, Any]:
    return ours(told) if told["side"] == "ours" else transformers(told)


def main() -> None:
    chosen = harness.parser(__doc__).parse_args()
    report = harness.Report("sampling", chosen)
    for batch, kind in ((8, "full"), (8, "groups"), (8, "varied")) if chosen.quick else CASES:
        made = case(batch, kind, chosen.quick)

        def add_floor(found: dict[str, Any], shape: Mapping[str, Any] = made.shape) -> None:
            sizes = floors.Sizes.of(models.FOLDER / shape["model"])
            layers, head = sizes.layer() * sizes.layers, [(sizes.hidden, sizes.vocabulary)]
            prefill = floors.forward(shape["batch"] // shape["group"] * shape["prompt"], layers)
            found["floor"] = floor(
                shape, floors.measure([*prefill, *floors.forward(shape["batch"], layers + head)], "bfloat16")
            )

        report.run(__file__, made, add_floor)
    report.note("tokens/s counts response tokens that are kept; peak is resident memory, the model included")
    report.show()


if __name__ == "__main__":
    harness.child(work)
    main()
