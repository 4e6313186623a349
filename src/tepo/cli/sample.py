"""`tepo sample`: talk to a model, a run or a checkpoint."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tepo.cli.models import MODEL_HELP, NamedModel
from tepo.core.errors import InputError

if TYPE_CHECKING:
    from tepo.policy import Policy
    from tepo.rollout import Response, SamplingConfig
    from tepo.tasks import Problem

MAX_TOKENS = 256


def sample(
    model: Annotated[str, typer.Argument(metavar="MODEL", help=MODEL_HELP)],
    prompt: Annotated[
        str | None, typer.Argument(metavar="PROMPT", help="Without it: standard input, or a conversation.")
    ] = None,
    ask: Annotated[
        bool,
        typer.Option("--ask", help="Ask it as the run's task asks its questions: template, examples, stops, length."),
    ] = False,
    samples: Annotated[int, typer.Option("--samples", "-n", min=1, help="Responses to the prompt.")] = 1,
    temperature: Annotated[float, typer.Option(min=0, help="0 takes the most probable token.")] = 1.0,
    top_p: Annotated[float, typer.Option(help="Smallest set of tokens with this mass.")] = 1.0,
    top_k: Annotated[int, typer.Option(min=0, help="Most probable tokens kept; 0 keeps all.")] = 0,
    max_tokens: Annotated[
        int | None, typer.Option(min=1, help=f"Longest response. Default: {MAX_TOKENS}, with --ask the run's.")
    ] = None,
    stop: Annotated[list[str] | None, typer.Option(help="Text that ends a response; may be repeated.")] = None,
    system: Annotated[str | None, typer.Option(help="System message.")] = None,
    raw: Annotated[bool, typer.Option("--raw", help="Continue the text as it is: no chat template.")] = False,
    seed: Annotated[int, typer.Option(help="Seed of the draws.")] = 0,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, mps.")] = "auto",
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16.")] = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, tokens included.")] = False,
) -> None:
    """Talk to a model or a checkpoint."""
    from tepo.cli.process import prepare

    prepare()
    from tepo.cli.models import load, resolve
    from tepo.cli.terminal import print_json, speaker

    talking = prompt is None and sys.stdin.isatty()
    if talking and as_json:
        raise InputError("--json needs a PROMPT, as an argument or on standard input")
    if ask and (raw or system):
        raise InputError("--ask takes template and system message from the run: leave --raw and --system out")
    text = sys.stdin.read() if prompt is None and not talking else prompt
    say = speaker()
    named = resolve(model, say)
    limits = {"max_tokens": max_tokens or MAX_TOKENS, "stop": stop or []}
    if ask:
        limits = {**_limits_of(named), **({"max_tokens": max_tokens} if max_tokens else {})}
    config = _sampling(temperature=temperature, top_p=top_p, top_k=top_k, **limits)
    policy = load(named, {"device": device, "dtype": dtype}, say)
    manner = _asking(named, policy, say) if ask else Manner(policy.has_chat_template and not raw, system)
    if text is None:
        _talk(policy, manner, config, seed=seed)
        return
    responses = _respond(policy, manner, [text], config, samples=samples, seed=seed, draw=0)
    if as_json:
        print_json([_record(response) for response in responses])
    else:
        _show(responses)


@dataclass(frozen=True)
class Manner:
    """How what a person types becomes a prompt: as a conversation, as bare text, or like a task's question."""

    chat: bool
    system: str | None = None
    example: Problem | None = None
    """A problem whose question the typed text replaces."""

    def messages(self, turns: Sequence[str]) -> list[dict[str, str]]:
        """Return the messages for alternating turns, the person's first; only a conversation remembers."""
        if self.example is not None:
            return asked_like(self.example, turns[-1])
        start = [{"role": "system", "content": self.system}] if self.system else []
        kept = turns if self.chat else turns[-1:]
        roles = ("user", "assistant")
        return start + [{"role": roles[index % 2], "content": turn} for index, turn in enumerate(kept)]


def asked_like(problem: Problem, question: str) -> list[dict[str, str]]:
    """Return a problem's messages with its question, which stands last in them, replaced."""
    messages = [dict(message) for message in problem.messages]
    before, found, after = messages[-1]["content"].rpartition(problem.question)
    if not found:
        raise InputError("the run's task does not show its questions word for word, so --ask cannot replace one")
    messages[-1]["content"] = f"{before}{question}{after}"
    return messages


def _limits_of(named: NamedModel) -> dict[str, Any]:
    """Return where responses end in the run a model comes from."""
    if named.run is None:
        raise InputError("--ask needs a run or RUN@STEP: only a run has a task")
    return {"max_tokens": named.run.sampling.max_tokens, "stop": named.run.sampling.stop}


def _asking(named: NamedModel, policy: Policy, say: Callable[[str], None]) -> Manner:
    """Return the manner in which the run's task asks."""
    from tepo.tasks import load_task

    assert named.run is not None
    task = load_task(named.run.task, seed=named.run.train.seed, say=say)
    chat = policy.has_chat_template if task.chat == "auto" else task.chat
    return Manner(chat, example=task.held_out[0] if task.held_out else task.train.problem(0))


def _sampling(**values: Any) -> SamplingConfig:
    """Return the checked sampling settings; a value out of range is an `InputError`."""
    from tepo.rollout import SamplingConfig
    from tepo.tasks.config import checked

    return checked(SamplingConfig, values, "sampling")


def _respond(
    policy: Policy,
    manner: Manner,
    turns: Sequence[str],
    config: SamplingConfig,
    *,
    samples: int,
    seed: int,
    draw: int,
) -> list[Response]:
    """Sample responses to one conversation."""
    from tepo.rollout import sample as sample_responses

    ids = policy.encode(manner.messages(turns), chat=manner.chat)
    return sample_responses(policy, [ids], samples=samples, config=config, seed=seed, purpose="sample", draws=[draw])[0]


def _record(response: Response) -> dict[str, Any]:
    """Return a response as plain values."""
    return {
        "text": response.text,
        "stop_reason": response.stop_reason,
        "tokens": len(response.token_ids),
        "token_ids": response.token_ids,
        "logp": response.logp,
        "entropy": response.entropy,
    }


def _show(responses: Sequence[Response]) -> None:
    """Print responses, numbered where there are several; a note tells those that were cut."""
    from tepo.cli.terminal import console, plain

    out = console()
    for number, response in enumerate(responses, 1):
        if len(responses) > 1:
            out.print(f"[{number}] {response.stop_reason}, {len(response.token_ids)} tokens", style="dim")
        out.print(plain(response.text), soft_wrap=True)
        if response.stop_reason == "length":
            console(stderr=True).print("(cut at the length limit: --max-tokens)", style="dim")


def _talk(policy: Policy, manner: Manner, config: SamplingConfig, *, seed: int) -> None:
    """Hold a conversation until end of input."""
    from tepo.cli.terminal import console, plain

    out = console()
    out.print("an empty line or Ctrl-D ends; /new forgets the conversation", style="dim")
    turns: list[str] = []
    draw = 0
    while True:
        try:
            line = input("you> ").rstrip()
        except EOFError:
            out.print()
            return
        if not line:
            return
        if line == "/new":
            turns = []
            continue
        turns.append(line)
        response = _respond(policy, manner, turns, config, samples=1, seed=seed, draw=draw)[0]
        draw += 1
        turns.append(response.text)
        out.print(plain(response.text), style="bold", soft_wrap=True)
