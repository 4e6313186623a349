"""The two sides of the training-step benchmark, each run in a process of its own by bench_step.py.

Both get the same model folder, the same problems, the same reward, dapo without KL, temperature 1, a constant
learning rate so small that lengths stay what they are, and no files but what they insist on. A step is one rollout
batch with all its optimizer updates; its time is from the end of the step before to its own end.
"""

from __future__ import annotations

import contextlib
import io
import json
import statistics
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import harness

LEARNING_RATE = 1e-6
SUFFIX = " Answer with the number only."
HERE = Path(__file__).resolve().parent


def problems(model: str) -> list[dict[str, str]]:
    """Return the questions: sums and differences of digits, in words for a chat model, bare for a tiny one."""
    asked = "State the final answer to the following arithmetic problem: {} {} {} =" + SUFFIX
    template = asked if model == "smollm2" else "{}{}{}="
    pairs = [(a, operator, b) for a in range(10) for b in range(10) for operator in "+-"]
    return [
        {"question": template.format(a, operator, b), "answer": str(a + b if operator == "+" else a - b)}
        for a, operator, b in pairs
    ]


def ours(told: Mapping[str, Any]) -> dict[str, Any]:
    """Train with tepo."""
    import tepo

    folder = Path(told["folder"])
    source = folder / "problems.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in problems(told["model"])), encoding="utf-8")
    chat = told["model"] == "smollm2"
    config = {
        "name": "bench",
        "runs": str(folder),
        "model": {"path": told["path"], "dtype": told.get("dtype", "auto")},
        "task": {
            "source": str(source),
            "held_out": 0,
            "chat": chat,
            "prompt": {"few_shot": 0, "template": "{question}"},
        },
        "reward": {"kind": f"{HERE / 'step_rewards.py'}:score"},
        "sampling": {"max_tokens": told["length"]},
        "objective": {"name": told.get("objective", "dapo")},
        "optim": {"lr": LEARNING_RATE},
        "train": {
            "steps": told["warm_up"] + told["steps"],
            "prompts": told["prompts"],
            "group_size": told["group"],
            "mini_batches": told["updates"],
            "preflight": 0,
            **told.get("train", {}),
        },
        "eval": {"at_start": False, "at_end": False},
        "checkpoint": {"every": 0, "at_end": False},
        "log": {"rollouts": 0, "sample_every": 0},
    }
    marks: list[float] = []
    seen: list[tuple[int, int]] = []
    lines: list[Mapping[str, Any]] = []
    peak: list[float] = []

    class Steps(tepo.Callback):
        def on_experience(self, step: int, experience: Any) -> None:
            responses = [one for group in experience.drawn for one in group.responses]
            seen.append((sum(len(one.token_ids) for one in responses), sum(len(one.prompt_ids) for one in responses)))

        def on_step(self, step: int, metrics: Mapping[str, Any]) -> None:
            marks.append(time.perf_counter())
            lines.append(metrics)
            peak.append(harness.family_peak_mb())  # now, before the final model is written

    tepo.train(config, callbacks=[Steps()])
    assert all(line["updates"] == told["updates"] for line in lines), "fewer updates than asked for"
    phases = {name for line in lines for name in line if name.startswith("time/")}
    split = {name: statistics.median(line.get(name, 0.0) for line in lines[told["warm_up"] :]) for name in phases}
    return {**timed(marks, seen, told), "peak_mb": peak[-1], "split_s": split}


def trl(told: Mapping[str, Any]) -> dict[str, Any]:
    """Train with TRL's GRPOTrainer.

    More than one update: a generation batch is cut into as many optimizer steps (`steps_per_generation`), each on
    its own responses, which is what `train.mini_batches` is to tepo. TRL then scores old log-probabilities itself.
    """
    from datasets import Dataset
    from step_rewards import trl_reward
    from transformers import AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    chat = told["model"] == "smollm2"
    rows = [
        {"prompt": [{"role": "user", "content": row["question"]}] if chat else row["question"]}
        for row in problems(told["model"])
    ]
    responses, updates = told["prompts"] * told["group"], told["updates"]
    marks: list[float] = []
    seen: list[tuple[int, int]] = []
    peak: list[float] = []

    class Counting(GRPOTrainer):
        def _generate_single_turn(self, prompt_ids: Any, *rest: Any, **named: Any) -> Any:
            out = super()._generate_single_turn(prompt_ids, *rest, **named)
            seen.append((sum(map(len, out[0])), sum(map(len, prompt_ids))))
            return out

    class Steps(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
            if state.global_step % updates == 0:
                marks.append(time.perf_counter())
                peak.append(harness.family_peak_mb())

    settings = told["settings"]  # those of the side: empty is what GRPOConfig has by itself, 8 rows at once included
    rows_at_once = responses // updates if settings else min(8, responses // updates)
    accumulated = responses // updates // rows_at_once
    config = GRPOConfig(
        output_dir=told["folder"],
        use_cpu=True,
        per_device_train_batch_size=rows_at_once,
        gradient_accumulation_steps=accumulated,
        steps_per_generation=updates * accumulated,
        num_generations=told["group"],
        max_completion_length=told["length"],
        max_steps=(told["warm_up"] + told["steps"]) * updates,
        learning_rate=LEARNING_RATE,
        lr_scheduler_type="constant",
        loss_type="dapo",
        beta=0.0,
        temperature=1.0,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        **settings,
    )
    trainer = Counting(
        model=told["path"],
        reward_funcs=trl_reward,
        args=config,
        train_dataset=Dataset.from_list(rows),
        processing_class=AutoTokenizer.from_pretrained(told["path"]),
        callbacks=[Steps()],
    )
    with contextlib.redirect_stdout(io.StringIO()):
        trainer.train()
    return {**timed(marks, seen, told), "peak_mb": peak[-1]}


def timed(marks: list[float], seen: list[tuple[int, int]], told: Mapping[str, Any]) -> dict[str, Any]:
    """Return the median step after warm-up, and the mean tokens of those steps."""
    first = told["warm_up"]
    steps = [after - before for before, after in zip(marks[first - 1 :], marks[first:], strict=False)]
    counted = seen[first : first + told["steps"]]
    # With lengths as they fall steps differ in work: the mean belongs to the mean of tokens.
    middle = statistics.median if told["ends"] == "full" else statistics.fmean
    return {
        "seconds": middle(steps),
        "tokens": statistics.fmean(tokens for tokens, _ in counted),
        "prompt_tokens": statistics.fmean(tokens for _, tokens in counted),
        "step_seconds": steps,
    }
