"""Token text that can be seen: spaces, newlines and control characters as signs.

Used where whitespace carries meaning (tokens, labels); running text is left as it is. Read next: `terminal.py`.
"""

from __future__ import annotations

import unicodedata

__all__ = ["harmless", "shorten", "visible"]

_SIGNS = {" ": "·", "\n": "⏎", "\t": "→", "\r": "␍", "\u00a0": "⍽", "\u3000": "□", "\u2028": "⏎", "\u2029": "⏎"}
_STEERING = {"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"}
_HIDDEN = {"Cc", "Cf", "Cs", "Co", "Cn"}  # control, format (bidi, zero width), surrogate, private, unassigned


def visible(text: str) -> str:
    """`text` with a sign for each whitespace at its edges or beside other whitespace, and for hidden characters.

    A single space between letters stays a space, so sentences keep their look.
    """
    shown = []
    last = len(text) - 1
    for i, c in enumerate(text):
        inner = c == " " and 0 < i < last and not text[i - 1].isspace() and not text[i + 1].isspace()
        if inner:
            shown.append(c)
        elif c in _SIGNS:
            shown.append(_SIGNS[c])
        elif c < " ":
            shown.append(chr(0x2400 + ord(c)))
        elif c != "\u200d" and unicodedata.category(c) in _HIDDEN:
            shown.append(f"\\u{{{ord(c):x}}}")
        else:
            shown.append(c)
    return "".join(shown)


def harmless(text: str) -> str:
    """Running text without characters that could steer a terminal or turn its neighbours around; layout stays."""
    return "".join(c if c in "\n\t\u200d" or unicodedata.category(c) not in _STEERING else visible(c) for c in text)


def shorten(text: str, length: int) -> str:
    """At most `length` characters, the last an ellipsis where something was cut."""
    return text if len(text) <= length else text[: max(length - 1, 0)] + "…"
