"""Token ids to text while they stream.

Holds `Detokenizer`, one for each answer. What it gives out is final: never half a character, never a part of a stop
string that may still complete. It knows no model and no reason to stop but strings; the ids that end an answer are
`engine/`'s. Read next: `llm.py`, which puts it at the end of the loop.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from cutaway.errors import RequestError
from cutaway.text.tokenizer import Tokenizer

__all__ = ["Detokenizer"]


class Detokenizer:
    """Turns one answer's ids into text, up to the first stop string.

    All pieces joined are the text of all ids, however they were pushed: bytes are joined before they are read as
    UTF-8, and become U+FFFD only once no later byte can complete them. Reading character by character, the stop
    string that completes first ends the text (of two that complete together, the longer); it is not part of it.
    Time is linear in the text.

    `stopped`: a stop string completed; `stop_match` is that string. From then on every piece is empty.
    Raises: RequestError, where a stop string is empty or no string.
    """

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = (), skip_special: bool = True) -> None:
        self._tokenizer, self._skip_special = tokenizer, skip_special
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._dummy_prefix = tokenizer.dummy_prefix
        self._stops = [_Stop(text) for text in ((stop,) if isinstance(stop, str) else stop)]
        self._held = ""  # text that may be the start of a stop string
        self.stop_match: str | None = None

    @property
    def stopped(self) -> bool:
        return self.stop_match is not None

    def push(self, token_id: int) -> str:
        """Take one more id; the text that is now safe to show."""
        if self._skip_special and self._tokenizer.is_special(token_id):
            return ""
        return self._take(self._decoder.decode(self._tokenizer.token_bytes(token_id)))

    def finish(self) -> str:
        """The answer is over: the text that was held back."""
        shown = self._take(self._decoder.decode(b"", final=True))
        shown, self._held = shown + self._held, ""
        return shown

    def _take(self, new: str) -> str:
        if self.stopped or not new:
            return ""
        if self._dummy_prefix:
            new, self._dummy_prefix = new.removeprefix(" "), False
        text = self._held + new
        for end, char in enumerate(new, start=len(self._held) + 1):
            complete = [stop.text for stop in self._stops if stop.advance(char)]
            if complete:
                self.stop_match, self._held = max(complete, key=len), ""
                return text[: end - len(self.stop_match)]
        safe = len(text) - max((stop.matched for stop in self._stops), default=0)
        self._held = text[safe:]
        return text[:safe]


class _Stop:
    """A stop string, and how many of its characters the text ends with. Source: Knuth, Morris and Pratt, 1977."""

    def __init__(self, text: str) -> None:
        if not isinstance(text, str) or not text:
            raise RequestError("stop", found=repr(text), expected="strings that are not empty", param="stop")
        self.text, self.matched = text, 0
        self._shorter = [0] * (len(text) + 1)  # for each count of matched characters: the next shorter that also fits
        for count in range(1, len(text)):
            self._shorter[count + 1] = self._after(self._shorter[count], text[count])

    def _after(self, matched: int, char: str) -> int:
        while matched and (matched == len(self.text) or self.text[matched] != char):
            matched = self._shorter[matched]
        return matched + (self.text[matched] == char)

    def advance(self, char: str) -> bool:
        """Take one more character of the text; whether the stop string is now complete."""
        self.matched = self._after(self.matched, char)
        return self.matched == len(self.text)
