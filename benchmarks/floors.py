"""The least time a piece of work could take here: its useful operations and bytes over this machine's measured rates.

Useful means: no recomputation, no padding, a prompt computed once for its whole group, the head on response tokens
only. Rates are those of plain torch matrix products of the same shapes and precision, measured in the same run.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import harness

LARGEST_M = 2048
SECONDS_A_SHAPE = 0.3
Product = tuple[int, int, int]


@dataclass(frozen=True)
class Sizes:
    """Widths of a Llama-like model."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int

    @classmethod
    def of(cls, folder: Path) -> Sizes:
        """Read them from a model folder."""
        config: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        heads = config["num_attention_heads"]
        return cls(
            hidden=config["hidden_size"],
            intermediate=config["intermediate_size"],
            layers=config["num_hidden_layers"],
            heads=heads,
            kv_heads=config.get("num_key_value_heads") or heads,
            head_dim=config.get("head_dim") or config["hidden_size"] // heads,
            vocabulary=config["vocab_size"],
        )

    def layer(self) -> list[tuple[int, int]]:
        """Return (inputs, outputs) of a layer's matrices, those that share an input joined."""
        attention = self.heads * self.head_dim
        return [
            (self.hidden, attention + 2 * self.kv_heads * self.head_dim),
            (attention, self.hidden),
            (self.hidden, 2 * self.intermediate),
            (self.intermediate, self.hidden),
        ]

    @property
    def weights(self) -> int:
        """Parameters that a token's computation reads: the layers' matrices and the head."""
        return self.layers * sum(k * n for k, n in self.layer()) + self.hidden * self.vocabulary

    def attention(self, pairs: float) -> float:
        """Return the operations of attention over this many (query, key) pairs, all layers."""
        return 4.0 * pairs * self.heads * self.head_dim * self.layers


def forward(m: int, matrices: Iterable[tuple[int, int]]) -> list[Product]:
    """Return the products of a forward pass over m tokens."""
    return [(m, k, n) for k, n in matrices]


def backward(m: int, matrices: Iterable[tuple[int, int]]) -> list[Product]:
    """Return the products of a backward pass: the gradients of inputs and of weights."""
    return [shape for k, n in matrices for shape in ((m, n, k), (n, m, k))]


def operations(products: Iterable[Product]) -> float:
    """Return the floating-point operations of products."""
    return float(sum(2 * m * k * n for m, k, n in products))


class Rates:
    """This machine's rates in one precision: operations a second by shape, and bytes a second of reading memory."""

    def __init__(self, found: Mapping[str, float]) -> None:
        self.found = found
        self.bandwidth = found["bandwidth"]

    def seconds(self, products: Iterable[Product]) -> float:
        """Return the time of products at the rates measured for them."""
        return sum(operations([shape]) / self.found[key(shape)] for shape in products)


def key(shape: Product) -> str:
    """Return the name under which a shape's rate is kept; long products have the rate of a shorter one."""
    m, k, n = shape
    return f"{min(m, 2 * LARGEST_M)}x{min(k, 2 * LARGEST_M)}x{min(n, 2 * LARGEST_M)}"


def measure(products: Iterable[Product], dtype: str) -> Rates:
    """Measure the rates in a process of its own, with the allocator setting that the contestants have."""
    names = sorted({key(shape) for shape in products})
    work = {"products": names, "dtype": dtype}
    found = harness.run_side(__file__, harness.Side("rates", work, harness.ALLOCATOR))
    if "failed" in found:
        raise SystemExit(f"the machine's rates could not be measured: {found['failed']}")
    return Rates(found)


def work(told: Mapping[str, Any]) -> dict[str, float]:
    """Measure every shape, and reading."""
    import torch

    dtype = getattr(torch, told["dtype"])
    found: dict[str, float] = {}
    for name in told["products"]:
        m, k, n = map(int, name.split("x"))
        a, b = torch.randn(m, k).to(dtype), torch.randn(n, k).to(dtype)
        once = harness.median_seconds(lambda a=a, b=b: torch.nn.functional.linear(a, b), 3)
        repeats = max(3, min(50, int(SECONDS_A_SHAPE / max(once, 1e-6))))
        taken = harness.median_seconds(lambda a=a, b=b: torch.nn.functional.linear(a, b), repeats)
        found[name] = operations([(m, k, n)]) / taken
    large = torch.ones(1 << 27)
    found["bandwidth"] = large.numel() * 4 / harness.median_seconds(large.sum, 5)
    return found


def step(
    sizes: Sizes,
    *,
    groups: int,
    prompt: float,
    rows: int,
    tokens: float,
    longest: int,
    updates: int,
    dtype: str,
) -> dict[str, Any]:
    """Return the floor of a training step: sampling, then updates that go over the rollout batch once.

    `tokens` are all response tokens of the step, `prompt` the tokens of a prompt, `longest` the decoding steps.
    """
    layers = sizes.layer() * sizes.layers
    head = [(sizes.hidden, sizes.vocabulary)]
    bytes_each = 2 if dtype == "bfloat16" else 4
    alive = max(1, round(tokens / longest))
    length = tokens / rows
    pairs = {
        "prompt": groups * prompt**2 / 2,
        "response": rows * (prompt * length + length**2 / 2),
    }
    prefill = forward(round(groups * prompt), layers)
    decode = forward(alive, layers + head)  # one decoding step
    trained = round((groups * prompt + tokens) / updates)
    scored = round(tokens / updates)
    learn = forward(trained, layers) + backward(trained, layers) + forward(scored, head) + backward(scored, head)
    rates = measure([*prefill, *decode, *learn], dtype)
    best = max(rates.found[key(shape)] for shape in learn)
    attention = sizes.attention(pairs["prompt"] + pairs["response"])
    weight_bytes = sizes.weights * bytes_each
    optimizer_bytes = 7 * 4 * sizes.weights  # AdamW reads weight, gradient and two moments, writes three of them
    sampling = (
        rates.seconds(prefill) + longest * max(rates.seconds(decode), weight_bytes / rates.bandwidth) + attention / best
    )
    updating = updates * (rates.seconds(learn) + optimizer_bytes / rates.bandwidth) + 3 * attention / best
    return {
        "seconds": sampling + updating,
        "sampling_seconds": sampling,
        "updating_seconds": updating,
        "operations": operations(prefill) + longest * operations(decode) + updates * operations(learn) + 4 * attention,
        "bytes": longest * weight_bytes + updates * optimizer_bytes,
        "dtype": dtype,
        "rates_gflops": {name: rate / 1e9 for name, rate in rates.found.items() if name != "bandwidth"},
        "bandwidth_gb_s": rates.bandwidth / 1e9,
    }


def passes(sizes: Sizes, *, prompts: int, prompt: int, rows: int, response: int, dtype: str) -> dict[str, Any]:
    """Return the floor of one forward and backward pass over `rows` responses to `prompts` different prompts."""
    layers = sizes.layer() * sizes.layers
    head = [(sizes.hidden, sizes.vocabulary)]
    through, scored = prompts * prompt + rows * response, rows * response
    products = forward(through, layers) + backward(through, layers) + forward(scored, head) + backward(scored, head)
    rates = measure(products, dtype)
    attention = 3 * sizes.attention(prompts * prompt**2 / 2 + rows * (prompt * response + response**2 / 2))
    return {
        "seconds": rates.seconds(products) + attention / max(rates.found[key(shape)] for shape in products),
        "operations": operations(products) + attention,
        "dtype": dtype,
        "rates_gflops": {name: rate / 1e9 for name, rate in rates.found.items() if name != "bandwidth"},
    }


if __name__ == "__main__":
    harness.child(work)
