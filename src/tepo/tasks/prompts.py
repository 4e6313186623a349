"""From a question to the messages the policy sees."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from tepo.tasks.config import Example, PromptConfig

MATH_TEMPLATE = "{question}\n\nPlease reason step by step, and put your final answer within \\boxed{}."


@dataclass(frozen=True)
class Prompter:
    """A prompt configuration with its template and worked examples settled.

    With `chat` True, worked examples are turns of the conversation; otherwise they are lines of one text, and
    with `chat` False the system message is that text's first paragraph.
    """

    config: PromptConfig
    template: str
    examples: tuple[Example, ...]
    chat: bool | Literal["auto"]

    def messages(self, question: str) -> tuple[Mapping[str, str], ...]:
        """Return the messages that ask `question`."""
        system = [{"role": "system", "content": self.config.system}] if self.config.system else []
        if self.chat is True:
            turns = [
                {"role": role, "content": content}
                for example in self.examples
                for role, content in (("user", self._asked(example.question)), ("assistant", example.answer))
            ]
            return (*system, *turns, {"role": "user", "content": self._asked(question)})
        lines = [
            self.config.example_template.replace("{answer}", example.answer).replace(
                "{question}", self._asked(example.question)
            )
            for example in self.examples
        ]
        text = self.config.separator.join([*lines, self._asked(question)])
        if self.chat is False:
            text = "\n\n".join([*(message["content"] for message in system), text])
            return ({"role": "user", "content": text},)
        return (*system, {"role": "user", "content": text})

    def continued(self, messages: Sequence[Mapping[str, str]]) -> tuple[Mapping[str, str], ...]:
        """Return messages that the data brings ready-made, with the configured system message and template."""
        ready = [{"role": str(message["role"]), "content": str(message["content"])} for message in messages]
        if self.config.template is not None and ready and ready[-1]["role"] == "user":
            ready[-1]["content"] = self._asked(ready[-1]["content"])
        if self.config.system and not any(message["role"] == "system" for message in ready):
            ready.insert(0, {"role": "system", "content": self.config.system})
        return tuple(ready)

    def _asked(self, question: str) -> str:
        return self.template.replace("{question}", question)
