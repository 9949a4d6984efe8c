"""Messages to text and ids, by the template that came with the model.

Holds `ChatTemplate`. The template is a stranger's program (see `sandbox.py`) and the messages are a stranger's text:
neither may do more than its part. It knows no model and no default conversation. Read next: `detokenizer.py`.

**Foreign text cannot forge a turn.** Before rendering, wherever a control token is spelled, or begun at the very end,
in anything that comes from outside (contents, names, tool calls, tools), a shield is put inside it: twenty random
digits after its first character. What then reads as a control token in the rendered text was written by the template.
Digits pass every case change and escape a template applies. `Tokenizer.encode` takes the shields out again. Texts
without control tokens, nearly all, are rendered as they are.
"""

from __future__ import annotations

import datetime
import json
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import jinja2

from cutaway.errors import RequestError, TemplateError
from cutaway.text.sandbox import Sandbox
from cutaway.text.tokenizer import Tokenizer

__all__ = ["ChatTemplate"]

MAX_SOURCE_CHARS = 1 << 18  # the longest templates in use hold some 2**15
MAX_TEXT_CHARS = 1 << 24
ROLES = ("system", "developer", "user", "assistant", "tool", "function")

Message = Mapping[str, Any]


class ChatTemplate:
    """A chat template, compiled.

    `special_tokens` are the names a template may use, such as `bos_token` (`Tokenizer.special_tokens` has them).
    A template sees, as everywhere in this field: `messages`, `tools`, `documents`, `add_generation_prompt`, what the
    caller adds, `raise_exception(text)`, `strftime_now(format)` and a `tojson` that escapes no HTML.
    Raises: TemplateError, where the template is broken (with the line) or too large.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str] | None = None) -> None:
        self.source = source
        self._special_tokens = dict(special_tokens or {})
        if len(source) > MAX_SOURCE_CHARS:
            raise TemplateError("chat template too long", found=len(source), expected=f"{MAX_SOURCE_CHARS} characters")
        self._sandbox = Sandbox()
        self._sandbox.add_filter("tojson", _tojson)
        self._sandbox.globals |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
        try:
            self._code = self._sandbox.compile_metered(source)
        except jinja2.TemplateSyntaxError as error:
            raise TemplateError(f"chat template, line {error.lineno}", found=error.message) from None
        except (RecursionError, MemoryError, SyntaxError, ValueError) as error:
            raise TemplateError("chat template nests too deeply", found=type(error).__name__) from None

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **more: Any,
    ) -> str:
        """The prompt as text, for people to read: to a model give `render_ids`, which keeps foreign text foreign.

        Raises: RequestError (messages of the wrong form), TemplateError (the template refuses them: its own words).
        """
        return self._render(self._values(messages, tools, documents, add_generation_prompt, more))

    def render_ids(
        self,
        tokenizer: Tokenizer,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **more: Any,
    ) -> list[int]:
        """The prompt as token ids. Control ids come from the template alone; no BOS is added to what it writes.

        Raises: as `render`.
        """
        values = self._values(messages, tools, documents, add_generation_prompt, more)
        shield = _Shield(tokenizer.control_tokens)
        return tokenizer.encode(self._render(shield.over(values)), special=True, shield=shield.text)

    def _values(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None,
        documents: Sequence[Mapping[str, Any]] | None,
        add_generation_prompt: bool,
        more: Mapping[str, Any],
    ) -> dict[str, Any]:
        values = {"tools": tools, "documents": documents, "add_generation_prompt": add_generation_prompt, **more}
        return {"messages": self._checked(messages), **{name: _plain(value, name) for name, value in values.items()}}

    def _render(self, values: dict[str, Any]) -> str:
        try:
            return self._sandbox.render_metered(self._code, self._special_tokens | values, MAX_TEXT_CHARS)
        except _Refused as error:
            raise TemplateError(str(error), param="messages") from None
        except Exception as error:  # a template may fail in any way a program can
            cause = str(error) or type(error).__name__
            raise TemplateError("the chat template failed on these messages", found=cause, param="messages") from None

    # -- messages ----------------------------------------------------------------------------------------------------

    def _checked(self, messages: Sequence[Message]) -> list[dict[str, Any]]:
        if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Sequence):
            raise _wrong("messages", messages, "a list of messages")
        if not messages:
            raise RequestError("messages", found="an empty list", expected="one message at least", param="messages")
        return [self._message(message, f"messages[{index}]") for index, message in enumerate(messages)]

    def _message(self, message: Message, where: str) -> dict[str, Any]:
        if not isinstance(message, Mapping):
            raise _wrong(where, message, "an object with role and content")
        plain: dict[str, Any] = _plain(message, where)
        role = plain.get("role")
        if not isinstance(role, str) or not (role in ROLES or self._names(role)):
            raise _wrong(f"{where}.role", role, "one of " + ", ".join(ROLES))
        if role == "developer" and not self._names(role):  # OpenAI's newer name for it
            plain["role"] = "system"
        if isinstance(plain.get("tool_calls"), list):
            plain["tool_calls"] = [_with_arguments(call) for call in plain["tool_calls"]]
        plain["content"] = _text(plain, f"{where}.content")
        return plain

    def _names(self, role: str) -> bool:
        return f"'{role}'" in self.source or f'"{role}"' in self.source


def _text(message: dict[str, Any], where: str) -> str | None:
    """A content as one text: parts are joined with nothing between them."""
    content = message.get("content")
    if content is None and message.get("tool_calls"):
        return None
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise _wrong(where, content, "a text or a list of text parts")
    for index, part in enumerate(content):
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise _wrong(f"{where}[{index}]", part, 'a part {"type": "text", "text": ...}')
    return "".join(part["text"] for part in content)


def _with_arguments(call: Any) -> Any:
    """A tool call with its arguments as an object, which templates write as JSON; OpenAI's clients send a text."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"])
    except ValueError:
        return call
    return {**call, "function": {**function, "arguments": arguments}} if isinstance(arguments, dict) else call


def _plain(value: Any, where: str, depth: int = 0) -> Any:
    """A copy made of dicts, lists, texts and numbers only: nothing else is shown to a template."""
    if value is None or isinstance(value, str | int | float | bool):
        return value
    if depth > 64:
        raise RequestError(where, found="more than 64 levels", param=where.partition("[")[0])
    if isinstance(value, Mapping):
        return {str(key): _plain(item, where, depth + 1) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, bytes):
        return [_plain(item, where, depth + 1) for item in value]
    raise _wrong(where, value, "what JSON can hold")


def _wrong(where: str, value: Any, expected: str) -> RequestError:
    kinds = {
        dict: "an object",
        list: "a list",
        str: "a text",
        int: "a number",
        float: "a number",
        type(None): "nothing",
    }
    found = repr(value) if isinstance(value, str) and len(value) <= 40 else kinds.get(type(value), type(value).__name__)
    return RequestError(where, found=found, expected=expected, param=where.partition("[")[0])


# -- foreign text ----------------------------------------------------------------------------------------------------


class _Shield:
    """Breaks every control token that is spelled in a text, or begun at its end, after its first character."""

    def __init__(self, tokens: Mapping[str, int]) -> None:
        self.text = f"{secrets.randbelow(10**20):020}"
        rests: dict[str, list[str]] = {}
        for token in sorted(tokens):
            rests.setdefault(token[0], []).append(re.escape(token[1:]))
        # one look-ahead a first character, so that a text full of them costs little
        self._spelled = re.compile("|".join(f"{re.escape(c)}(?={'|'.join(r)})" for c, r in rests.items()) or "(?!)")
        self._begun = {token[:end] for token in tokens for end in range(1, len(token))}
        self._longest = max(map(len, self._begun), default=0)

    def over(self, value: Any) -> Any:
        """`value` with all its texts shielded, at any depth."""
        if isinstance(value, dict):
            return {self.over(key): self.over(item) for key, item in value.items()}
        if isinstance(value, list):
            return [self.over(item) for item in value]
        if not isinstance(value, str):
            return value
        starts = {match.start() for match in self._spelled.finditer(value)}
        starts |= {i for i in range(max(0, len(value) - self._longest), len(value)) if value[i:] in self._begun}
        cuts = [0, *(i + 1 for i in sorted(starts)), len(value)]
        return self.text.join(value[a:b] for a, b in pairwise(cuts)) if starts else value


# -- what templates call ---------------------------------------------------------------------------------------------


class _Refused(jinja2.TemplateError):
    """The template's own words."""


def _raise_exception(message: Any) -> None:
    raise _Refused(str(message))


def _strftime_now(form: str) -> str:
    return datetime.datetime.now().strftime(form)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    dump: Callable[..., str] = json.dumps
    return dump(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
