"""One forward and backward pass of the policy over responses, SmolLM2-135M: what an update is made of.

    python benchmarks/bench_update.py

Two questions. How near is it to what the machine can do (share of the floor, for responses of 64 and 256 tokens)?
What does computing a prompt once for its group save: 8 responses of 64 tokens to one prompt of 256, against the same
responses to 8 different prompts of that length, where nothing can be shared. About 6 minutes on two cores.
"""

from __future__ import annotations

import random
from typing import Any

import floors
import harness
import models

CASES = (
    ("16 responses", {"prompts": 2, "prompt": 52, "rows": 16, "response": 64}),
    ("16 long responses", {"prompts": 2, "prompt": 52, "rows": 16, "response": 256}),
    ("long prompt", {"prompts": 1, "prompt": 256, "rows": 8, "response": 64}),
)


def work(told: dict[str, Any]) -> dict[str, Any]:
    """Score with gradient and go back; `apart` gives every response a prompt of its own."""
    from tepo.policy import PolicyConfig, TokenSequence, load_policy

    policy = load_policy(PolicyConfig(path=told["path"]))
    generator = random.Random(0)

    def tokens(count: int) -> tuple[int, ...]:
        return tuple(generator.randrange(4, min(policy.vocabulary, 40_000)) for _ in range(count))

    distinct = [tokens(told["prompt"]) for _ in range(told["rows"] if told["apart"] else told["prompts"])]
    each = told["rows"] // len(distinct)
    sequences = [
        TokenSequence(prompt=prompt, response=tokens(told["response"])) for prompt in distinct for _ in range(each)
    ]
    parameters = policy.trainable_parameters()

    def once() -> None:
        policy.score(sequences, statistics=frozenset({"entropy"})).logp.sum().backward()
        for parameter in parameters:
            parameter.grad = None

    seconds = harness.median_seconds(once, told["repeats"])
    return {"seconds": seconds, "tokens": told["rows"] * told["response"], "peak_mb": harness.memory_mb()}


def main() -> None:
    chosen = harness.parser(__doc__).parse_args()
    report = harness.Report("update", chosen)
    folder = models.ensure("tiny-endless" if chosen.quick else "smollm2-endless")
    dtype = "float32" if chosen.quick else "bfloat16"
    for name, sizes in CASES:
        shape: dict[str, Any] = {**sizes, "path": str(folder), "repeats": 1 if chosen.quick else 3}
        if chosen.quick:
            shape |= {"prompt": 16, "response": 4}
        found = [
            harness.Side(harness.OURS, {**shape, "apart": False}, harness.ALLOCATOR),
            harness.Side("a prompt for each response", {**shape, "apart": True}, harness.ALLOCATOR),
        ]

        def add_floor(result: dict[str, Any], shape: dict[str, Any] = shape) -> None:
            counts = {key: shape[key] for key in ("prompts", "prompt", "rows", "response")}
            result["floor"] = floors.passes(floors.Sizes.of(folder), **counts, dtype=dtype)

        of = f"{shape['rows']} x ({shape['prompt']} + {shape['response']}), {shape['prompts']} prompts"
        report.run(__file__, harness.Case(f"{name}: {of}", shape, found), add_floor)
    report.note("floor: prompts once a group, 6 operations a weight and token, the head on response tokens only")
    report.show()


if __name__ == "__main__":
    harness.child(work)
    main()
