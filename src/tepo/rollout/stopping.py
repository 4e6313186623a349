"""Stop texts: when a response has completed one, and where its text is cut."""

from __future__ import annotations

from collections.abc import Callable, Sequence


class StopTexts:
    """The texts that end a response, found across token borders."""

    def __init__(self, texts: Sequence[str], decode: Callable[[Sequence[int]], str]) -> None:
        """Keep the texts and the tokenizer's `decode`.

        A token stands for one byte or more, so a text of n bytes ends within its last n tokens; a few more cover
        characters cut at the window's left border and leading spaces that a decoder strips.
        """
        self._texts = tuple(texts)
        self._decode = decode
        self._window = max((len(text.encode()) for text in texts), default=0) + 4

    def completed(self, token_ids: Sequence[int]) -> bool:
        """Whether the response contains a stop text, given that it did not before its last token."""
        if not self._texts or not self._found(self._decode(token_ids[-self._window :])):
            return False
        return len(token_ids) <= self._window or self._found(self._decode(token_ids))

    def cut(self, text: str) -> str:
        """Return `text` before the first stop text in it."""
        starts = [start for start in map(text.find, self._texts) if start >= 0]
        return text[: min(starts)] if starts else text

    def _found(self, text: str) -> bool:
        return any(stop in text for stop in self._texts)
