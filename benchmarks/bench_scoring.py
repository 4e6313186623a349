"""Log-probability and entropy of tokens: from hidden states, forward and backward, and from given logits.

    python benchmarks/bench_scoring.py
    python benchmarks/bench_scoring.py --only logits

From hidden states: 4096 tokens of width 576 through a head of 49,152 or 151,936 tokens; gradients in hidden states
and head, through log-probability and entropy. Sides: ours; dense (logits, log-softmax, entropy in plain torch);
TRL's fused head; verl's functions on logits and its fused head (in their own environment); Liger's chunked GRPO loss,
which gives no entropy and so does less. From given logits, (6, 256, 151,936) float32: ours against TRL's two
functions. `peak` is memory beyond what inputs and gradients take. All sides run under our allocator setting, TRL's
functions on given logits also without it. About an hour on two cores; the dense side needs 20 GB at the larger
vocabulary.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import floors
import harness

HIDDEN, TOKENS = 576, 4096
VOCABULARIES = (49_152, 151_936)
LOGITS = (6, 256, 151_936)
VERL = Path(__file__).resolve().parents[1] / ".venv-verl" / "bin" / "python"


def ours(hidden: Any, weight: Any, targets: Any) -> Any:
    import torch

    from tepo.policy.head import Head
    from tepo.policy.statistics import Request, token_statistics

    linear = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    linear.weight = weight
    head = Head(linear, dtype=hidden.dtype)
    found = token_statistics(hidden, Request(head=head, targets=targets, entropy=True, entropy_grad=True))
    return found.logp.sum() + found.entropy.sum()


def dense(hidden: Any, weight: Any, targets: Any) -> Any:
    import torch

    log_p = torch.nn.functional.linear(hidden, weight.to(hidden.dtype)).float().log_softmax(-1)
    entropy = -(log_p.exp() * log_p).sum(-1)
    return log_p.gather(-1, targets[:, None]).sum() + entropy.sum()


def trl_head(hidden: Any, weight: Any, targets: Any) -> Any:
    """Call what TRL's fused head calls, in its own chunk of the vocabulary; it casts the weights itself."""
    import torch
    from trl.kernels import ChunkedLogProbFunction
    from trl.trainer import utils

    with torch.autocast("cpu", torch.bfloat16, enabled=hidden.dtype == torch.bfloat16):
        logp, entropy, *_ = ChunkedLogProbFunction.apply(
            hidden, weight, None, targets, 1.0, utils._CHUNKED_LOGPROB_CHUNK_SIZE, None, 1.0, ("log_probs", "entropy")
        )
    return logp.sum() + entropy.sum()


def verl_logits(hidden: Any, weight: Any, targets: Any) -> Any:
    import torch
    from verl.utils.torch_functional import entropy_from_logits_with_chunking, logprobs_from_logits

    logits = torch.nn.functional.linear(hidden, weight.to(hidden.dtype))
    return logprobs_from_logits(logits, targets).float().sum() + entropy_from_logits_with_chunking(logits).sum()


def verl_head(hidden: Any, weight: Any, targets: Any) -> Any:
    from verl.utils.experimental.torch_functional import FusedLinearForPPO

    logp, entropy = FusedLinearForPPO()(hidden, weight.to(hidden.dtype), targets)
    return logp.sum() + entropy.float().sum()


def liger(hidden: Any, weight: Any, targets: Any) -> Any:
    """Score rows of 256 tokens; its loss is a sum of log-probabilities here, since every ratio is 1."""
    import torch
    from liger_kernel.chunked_loss import LigerFusedLinearGRPOLoss

    rows = max(1, len(targets) // 256)
    shape = (rows, len(targets) // rows)
    loss = LigerFusedLinearGRPOLoss(beta=0.0, use_ref_model=False)
    return loss(
        hidden.view(*shape, -1),
        weight.to(hidden.dtype),
        targets.view(shape),
        attention_mask=torch.ones(shape),
        advantages=torch.ones(rows),
    )[0]


def ours_logits(logits: Any, targets: Any) -> Any:
    from tepo.policy.logits import token_statistics_from_logits

    return token_statistics_from_logits(logits, targets, temperature=1.0)


def trl_logits(logits: Any, targets: Any) -> Any:
    from trl.trainer.utils import entropy_from_logits, selective_log_softmax

    return selective_log_softmax(logits, targets), entropy_from_logits(logits)


HEADS: dict[str, tuple[Callable[..., Any], tuple[str, ...], bool]] = {
    harness.OURS: (ours, (), False),
    "dense": (dense, (), False),
    "trl fused head": (trl_head, ("trl",), False),
    "verl logits": (verl_logits, ("verl",), True),
    "verl fused head": (verl_head, ("verl",), True),
    "liger (no entropy)": (liger, ("liger-kernel",), False),
}
GIVEN: dict[str, tuple[Callable[..., Any], tuple[str, ...], bool]] = {
    harness.OURS: (ours_logits, (), False),
    "trl as it comes": (trl_logits, ("trl",), False),
    "trl, our allocator": (trl_logits, ("trl",), False),
}


def work(told: dict[str, Any]) -> dict[str, Any]:
    """Measure one side's time, and the memory a call adds."""
    import torch

    torch.manual_seed(0)
    dtype = getattr(torch, told["dtype"])
    vocabulary = told["vocabulary"]
    if told["kind"] == "logits":
        function = GIVEN[told["side"]][0]
        logits = torch.empty(*told["logits"]).normal_(std=3.0)
        targets = torch.randint(vocabulary, logits.shape[:-1])

        def once() -> None:
            with torch.no_grad():
                function(logits, targets)
    else:
        function = HEADS[told["side"]][0]
        weight = torch.nn.Parameter(torch.empty(vocabulary, told["hidden"]).normal_(std=told["hidden"] ** -0.5))
        hidden = torch.randn(told["tokens"], told["hidden"]).to(dtype).requires_grad_(True)
        targets = torch.randint(vocabulary, (told["tokens"],))
        weight.grad, hidden.grad = torch.zeros_like(weight), torch.zeros_like(hidden)  # not counted as extra

        def once() -> None:
            function(hidden, weight, targets).backward()

    extra = harness.extra_mb(once)
    return {"seconds": harness.median_seconds(once, told["repeats"], warm_up=0), "extra_mb": max(extra, 0.1)}


def sides(shape: Mapping[str, Any], table: Mapping[str, Any]) -> list[harness.Side]:
    found = []
    for name, (_, needs, verl) in table.items():
        allocator = {} if name.endswith("as it comes") else harness.ALLOCATOR
        environment = {**allocator, "CUDA_VISIBLE_DEVICES": ""}
        python = str(VERL) if verl and VERL.exists() else sys.executable
        found.append(harness.Side(name, {**shape, "side": name}, environment, needs, python))
    return found


def main() -> None:
    parser = harness.parser(__doc__)
    parser.add_argument("--dtype", nargs="+", choices=["float32", "bfloat16"], default=["bfloat16", "float32"])
    chosen = parser.parse_args()
    report = harness.Report("scoring", chosen)
    tokens, repeats = (256, 1) if chosen.quick else (TOKENS, 2)
    for vocabulary in (2_048,) if chosen.quick else VOCABULARIES:
        for dtype in chosen.dtype:
            shape: dict[str, Any] = {"kind": "head", "tokens": tokens, "hidden": HIDDEN, "vocabulary": vocabulary}
            shape |= {"dtype": dtype, "repeats": repeats}
            name = f"from hidden states, {tokens} x {vocabulary:,}, {dtype}"

            def add_floor(found: dict[str, Any], shape: dict[str, Any] = shape) -> None:
                head = [(shape["hidden"], shape["vocabulary"])]
                products = [*floors.forward(shape["tokens"], head), *floors.backward(shape["tokens"], head)]
                found["floor"] = {
                    "seconds": floors.measure(products, shape["dtype"]).seconds(products),
                    "operations": floors.operations(products),
                    "bytes": 3 * 4 * shape["vocabulary"] * shape["hidden"],
                }

            report.run(__file__, harness.Case(name, shape, sides(shape, HEADS)), add_floor)
    logits = [2, 16, 2_048] if chosen.quick else list(LOGITS)
    given = {"kind": "logits", "logits": logits, "vocabulary": logits[-1], "dtype": "float32", "repeats": repeats}
    size = 4 * logits[0] * logits[1] * logits[2]

    def reading(found: dict[str, Any]) -> None:
        found["floor"] = {"seconds": size / floors.measure([], "float32").bandwidth, "bytes": size}

    name = "from given logits, " + " x ".join(map(str, logits))
    report.run(__file__, harness.Case(name, given, sides(given, GIVEN)), reading)
    report.note("peak: memory that one call adds to inputs and gradients; the ratio of memory is peer / ours")
    report.note("floor: 6 N H V operations at the measured rates (recomputed logits not counted), or one reading")
    report.show()


if __name__ == "__main__":
    harness.child(work)
    main()
