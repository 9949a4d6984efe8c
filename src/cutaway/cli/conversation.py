"""A conversation: its turns, its settings, and the commands that begin with a slash.

Knows no terminal but `screen.py`: it is given one text at a time and says whether to go on. Read next: `answer.py`,
how an answer is streamed.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cutaway.cli.answer import sampling_params, settings_table, stats_document, stream_answers
from cutaway.cli.options import SamplingOptions, Setting, bias, unescape
from cutaway.cli.screen import note, show, write
from cutaway.errors import ContextLengthError, CutawayError, FormatError, NotFoundError, RequestError
from cutaway.render.document import Document

if TYPE_CHECKING:
    from cutaway.llm import LLM

__all__ = ["Conversation"]

Message = dict[str, str]

HELP = """\
/set NAME VALUE    a sampling setting, such as /set temperature 0.7; /set verbose, /set quiet: times after each answer
/system TEXT       the system turn from now on; without TEXT none
/clear             forget the conversation, keep the system turn
/save FILE         write the conversation and its settings as JSON
/load FILE         read them back
/show [WHAT]       settings (default), messages, prompt, template or system
/bye               leave; Ctrl-D does too
\"\"\"                begins and ends a message of several lines"""


class Conversation:
    """The turns so far and how the next is answered. `take` is the way in."""

    def __init__(self, llm: LLM, sampling: SamplingOptions, system: str | None = None, verbose: bool = False) -> None:
        self.llm = llm
        self.settings: dict[str, Setting] = sampling.resolve(llm.checkpoint.generation)
        self.verbose = verbose
        self.messages: list[Message] = []
        if self.settings["n"].value != 1:
            raise RequestError("chat gives one answer", found=f"--n {self.settings['n'].value}", param="n")
        sampling_params(self.settings)  # refuses a value out of range before the first turn
        if system is not None:
            self._system(system)
        self._commands: dict[str, Callable[[str], bool | None]] = {
            "help": lambda rest: note(HELP),
            "?": lambda rest: note(HELP),
            "set": self._set,
            "system": self._system,
            "clear": self._clear,
            "save": self._save,
            "load": self._load,
            "show": self._show,
            "bye": lambda rest: False,
            "exit": lambda rest: False,
            "quit": lambda rest: False,
        }

    def take(self, text: str) -> bool:
        """Answer one message, or do what a slash command says. False: the conversation is over.

        A known error is told in one line and changes nothing.
        """
        try:
            if text.startswith("/"):
                word, _, rest = text[1:].partition(" ")
                if word not in self._commands:
                    raise RequestError(f"no command /{word}", hint="/help lists them")
                return self._commands[word](rest.strip()) is not False
            self._answer(text)
        except CutawayError as error:
            note(f"cutaway: error: {error}")
        return True

    def _answer(self, text: str) -> None:
        messages = self._fitted([*self.messages, {"role": "user", "content": text}])
        (result,), interrupted = stream_answers(self.llm, messages, self.settings, write)
        self.messages = [*messages, {"role": "assistant", "content": result.text}]
        if interrupted:
            note("(stopped)")
        elif result.finish_reason == "length":
            note("(cut: max_tokens or the end of the context is reached)")
        if self.verbose:
            show(stats_document(self.llm, [result], self.settings), None, as_json=False, to="stderr")

    def _fitted(self, messages: list[Message]) -> list[Message]:
        """`messages` without as many of the oldest turns as the context demands; says so. The system turn stays.

        Room is kept for an answer: max_tokens, or an eighth of the context where none is set.

        Raises: ContextLengthError if the last message alone is too long.
        """
        limit = self.llm.max_context
        reserve = min(self.settings["max_tokens"].value or limit // 8, limit // 2)
        head = messages[:1] if messages[0]["role"] == "system" else []
        turns = messages[len(head) :]
        counted = total = len(self.llm.chat_ids([*head, *turns]))
        while counted + reserve > limit and len(turns) > 1:
            following = (i for i in range(1, len(turns)) if turns[i]["role"] == "user")
            turns = turns[next(following, len(turns) - 1) :]
            counted = len(self.llm.chat_ids([*head, *turns]))
        if counted >= limit:
            raise ContextLengthError(
                "the message does not fit the context", found=f"{counted:,} tokens", expected=f"fewer than {limit:,}"
            )
        if counted < total:
            dropped = len(messages) - len(head) - len(turns)
            note(
                f"(the conversation has {total:,} tokens and the context {limit:,}: leaving out the {dropped} oldest "
                f"messages{', keeping the system turn' if head else ''}; {counted:,} tokens stay)"
            )
        return [*head, *turns]

    # -- slash commands --------------------------------------------------------------------------------------------

    def _set(self, rest: str) -> None:
        name, _, value = rest.removeprefix("parameter ").strip().partition(" ")
        name = name.replace("-", "_")
        if name in ("verbose", "quiet") and not value:
            self.verbose = name == "verbose"
        elif name == "system":
            self._system(value)
        elif name in self.settings and name != "n" and value:
            changed = {**self.settings, name: Setting(_parsed(name, value.strip()), "/set")}
            sampling_params(changed)  # refuses a value out of range
            self.settings = changed
        else:
            expected = "NAME VALUE with one of " + ", ".join(key for key in self.settings if key != "n")
            raise RequestError("/set", found=rest or "nothing", expected=expected)

    def _system(self, text: str) -> None:
        rest = self.messages[1:] if self.messages and self.messages[0]["role"] == "system" else self.messages
        self.messages = [{"role": "system", "content": text}, *rest] if text else rest

    def _clear(self, rest: str) -> None:
        self.messages = [message for message in self.messages[:1] if message["role"] == "system"]

    def _save(self, rest: str) -> None:
        if not rest:
            raise RequestError("/save", found="nothing", expected="the name of a file")
        kept = {name: setting.value for name, setting in self.settings.items() if setting.origin != "default"}
        saved = {"model": self.llm.name, "messages": self.messages, "settings": kept}
        try:
            Path(rest).expanduser().write_text(json.dumps(saved, ensure_ascii=False, indent=2) + "\n", encoding="utf-8")
        except OSError as error:
            raise RequestError(f"cannot write {rest}", found=error.strerror) from None
        note(f"(saved {len(self.messages)} messages to {rest})")

    def _load(self, rest: str) -> None:
        try:
            saved = json.loads(Path(rest).expanduser().read_text(encoding="utf-8"))
        except OSError as error:
            raise NotFoundError(f"cannot read {rest or 'nothing'}", found=error.strerror) from None
        except ValueError:
            raise FormatError(f"{rest} is not JSON") from None
        messages = saved.get("messages") if isinstance(saved, dict) else None
        if not isinstance(messages, list) or not all(
            isinstance(m, dict) and isinstance(m.get("role"), str) and isinstance(m.get("content"), str)
            for m in messages
        ):
            raise FormatError(
                f"{rest} is not a saved conversation", expected='{"messages": [{"role", "content"}, ...]}'
            )
        changed = dict(self.settings)
        for name, value in (saved.get("settings") or {}).items():
            if name in changed:
                changed[name] = Setting(_restored(name, value), "/load")
        sampling_params(changed)
        self.settings = changed
        self.messages = [{"role": m["role"], "content": m["content"]} for m in messages]
        note(f"(loaded {len(messages)} messages)")

    def _show(self, rest: str) -> None:
        if rest in ("", "settings", "parameters", "info"):
            show(Document(self.llm.name, settings_table(self.llm, self.settings)), None, as_json=False, to="stderr")
        elif rest == "messages":
            note("\n".join(f"{m['role']}: {m['content']}" for m in self.messages) or "(none)")
        elif rest == "system":
            note(next((m["content"] for m in self.messages[:1] if m["role"] == "system"), "(none)"))
        elif rest == "prompt":
            note(self.llm.chat_prompt(self.messages) if self.messages else "(none)")
        elif rest == "template":
            note(self.llm.chat_template or "(none)")
        else:
            raise RequestError("/show", found=rest, expected="settings, messages, prompt, template or system")


def _parsed(name: str, value: str) -> Any:
    """The value typed after `/set NAME`."""
    try:
        if name in ("top_k", "seed", "max_tokens"):
            return int(value)
        if name == "stop":
            return (unescape(value),)
        if name == "stop_token_ids":
            return tuple(int(part) for part in value.replace(",", " ").split())
        if name == "logit_bias":
            return dict(bias(part) for part in value.split())
        if name == "ignore_eos":
            return {"true": True, "1": True, "on": True, "false": False, "0": False, "off": False}[value.lower()]
        return value if name == "dialect" else float(value)
    except (ValueError, KeyError):
        raise RequestError(f"/set {name}", found=value) from None


def _restored(name: str, value: Any) -> Any:
    """A setting as JSON keeps it, in its own type again."""
    if name == "logit_bias" and isinstance(value, dict):
        return {int(token): float(amount) for token, amount in value.items()}
    return tuple(value) if isinstance(value, list) else value
