"""Token text that can be seen: spaces, newlines and control characters as signs.

Used where whitespace carries meaning (tokens, labels); running text is left as it is. Read next: `terminal.py`.
"""

from __future__ import annotations

import unicodedata

__all__ = ["harmless", "shorten", "signs", "visible"]

_SIGNS = {" ": "·", "\n": "⏎", "\t": "→", "\r": "␍", "\u00a0": "⍽", "\u3000": "□", "\u2028": "⏎", "\u2029": "⏎"}
_STEERING = {"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"}
_HIDDEN = {"Cc", "Cf", "Cs", "Co", "Cn"}  # control, format (bidi, zero width), surrogate, private, unassigned


def signs(text: str, every_space: bool = False) -> list[tuple[str, str | None]]:
    """Each character with the sign that stands for it, None where it can be seen as it is.

    A single space between letters is left alone, so that sentences keep their look, unless `every_space`.
    """
    found: list[tuple[str, str | None]] = []
    last = len(text) - 1
    for i, c in enumerate(text):
        inner = c == " " and 0 < i < last and not text[i - 1].isspace() and not text[i + 1].isspace()
        if inner and not every_space:
            found.append((c, None))
        elif c in _SIGNS:
            found.append((c, _SIGNS[c]))
        elif c < " ":
            found.append((c, chr(0x2400 + ord(c))))
        elif c != "\u200d" and unicodedata.category(c) in _HIDDEN:
            found.append((c, f"\\u{{{ord(c):x}}}"))
        else:
            found.append((c, None))
    return found


def visible(text: str) -> str:
    """`text` with a sign for each whitespace at its edges or beside other whitespace, and for hidden characters."""
    return "".join(sign or c for c, sign in signs(text))


def harmless(text: str) -> str:
    """Running text without characters that could steer a terminal or turn its neighbours around; layout stays."""
    return "".join(c if c in "\n\t\u200d" or unicodedata.category(c) not in _STEERING else visible(c) for c in text)


def shorten(text: str, length: int) -> str:
    """At most `length` characters, the last an ellipsis where something was cut."""
    return text if len(text) <= length else text[: max(length - 1, 0)] + "…"
