"""`tepo sample`: talk to a model, a run or a checkpoint."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tepo.cli.models import MODEL_HELP

if TYPE_CHECKING:
    from tepo.policy import Policy
    from tepo.rollout import Response, SamplingConfig


def sample(
    model: Annotated[str, typer.Argument(metavar="MODEL", help=MODEL_HELP)],
    prompt: Annotated[
        str | None, typer.Argument(metavar="PROMPT", help="Without it: standard input, or a conversation.")
    ] = None,
    samples: Annotated[int, typer.Option("--samples", "-n", min=1, help="Responses to the prompt.")] = 1,
    temperature: Annotated[float, typer.Option(min=0, help="0 takes the most probable token.")] = 1.0,
    top_p: Annotated[float, typer.Option(help="Smallest set of tokens with this mass.")] = 1.0,
    top_k: Annotated[int, typer.Option(min=0, help="Most probable tokens kept; 0 keeps all.")] = 0,
    max_tokens: Annotated[int, typer.Option(min=1, help="Longest response.")] = 256,
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
    from tepo.core.errors import InputError

    talking = prompt is None and sys.stdin.isatty()
    if talking and as_json:
        raise InputError("--json needs a PROMPT, as an argument or on standard input")
    text = sys.stdin.read() if prompt is None and not talking else prompt
    config = _sampling(temperature=temperature, top_p=top_p, top_k=top_k, max_tokens=max_tokens, stop=stop or [])
    say = speaker()
    policy = load(resolve(model, say), {"device": device, "dtype": dtype}, say)
    chat = policy.has_chat_template and not raw
    if text is None:
        _talk(policy, config, seed=seed, system=system, chat=chat)
        return
    responses = _respond(policy, _messages(system, [text]), config, samples=samples, seed=seed, draw=0, chat=chat)
    if as_json:
        print_json([_record(response) for response in responses])
    else:
        _show(responses)


def _sampling(**values: Any) -> SamplingConfig:
    """Return the checked sampling settings; a value out of range is an `InputError`."""
    from tepo.rollout import SamplingConfig
    from tepo.tasks.config import checked

    return checked(SamplingConfig, values, "sampling")


def _messages(system: str | None, turns: Sequence[str]) -> list[dict[str, str]]:
    """Return alternating turns, the user's first, as chat messages."""
    start = [{"role": "system", "content": system}] if system else []
    return start + [{"role": "assistant" if index % 2 else "user", "content": turn} for index, turn in enumerate(turns)]


def _respond(
    policy: Policy,
    messages: Sequence[Mapping[str, str]],
    config: SamplingConfig,
    *,
    samples: int,
    seed: int,
    draw: int,
    chat: bool,
) -> list[Response]:
    """Sample responses to one conversation."""
    from tepo.rollout import sample as sample_responses

    ids = policy.encode(messages, chat=chat)
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


def _talk(policy: Policy, config: SamplingConfig, *, seed: int, system: str | None, chat: bool) -> None:
    """Hold a conversation until end of input; without a chat template every line is continued on its own."""
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
        turns = [*turns, line] if chat else [line]
        messages = _messages(system, turns)
        response = _respond(policy, messages, config, samples=1, seed=seed, draw=draw, chat=chat)[0]
        draw += 1
        turns.append(response.text)
        out.print(plain(response.text), style="bold", soft_wrap=True)
