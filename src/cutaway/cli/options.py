"""What verbs share: groups of options, what is judged before anything is opened, and the origin of every setting.

A verb's parameter annotated with one of the dataclasses below stands for all its fields: `command` unfolds them for
typer, folds the values back and lets each group `check` itself. Knows no verb. Read next: `faults.py`, then `run.py`.
"""

from __future__ import annotations

import functools
import inspect
import math
import sys
import typing
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass
from typing import Annotated, Any

import typer

from cutaway.cli.faults import faults, usage
from cutaway.errors import RequestError

__all__ = [
    "MAX_COUNT",
    "MAX_THREADS",
    "JsonFlag",
    "ModelOptions",
    "SamplingOptions",
    "Setting",
    "bias",
    "carried_settings",
    "command",
    "unescape",
    "whole",
]

Verb = Callable[..., None]

JsonFlag = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]

MAX_THREADS = 1024
MAX_COUNT = 2**31 - 1  # of tokens, rows, times: what no use comes near to


def command(function: Verb) -> Verb:
    """Make a verb of `function`: unfold its option groups, judge what was given, tell known errors in one line.

    Wrong usage (status 2) is found before a file is opened: numbers that are none or that nothing has so many of, text
    that is not UTF-8, and whatever the groups refuse in their `check`. For the rest see `faults`.
    """
    hints = typing.get_type_hints(function, include_extras=True)
    groups: dict[str, type] = {
        name: hint for name, hint in hints.items() if is_dataclass(hint) and isinstance(hint, type)
    }
    parameters: list[inspect.Parameter] = []
    for parameter in inspect.signature(function).parameters.values():
        if parameter.name in groups:
            parameters.extend(_unfold(groups[parameter.name]))
        else:
            parameters.append(parameter.replace(annotation=hints[parameter.name], kind=parameter.KEYWORD_ONLY))

    @functools.wraps(function)
    def verb(**values: Any) -> None:
        with faults():
            for parameter in parameters:
                _judge(parameter, values.get(parameter.name))
            for name, group in groups.items():
                values[name] = group(**{field.name: values.pop(field.name) for field in fields(group)})
                if hasattr(group, "check"):
                    with usage():
                        values[name].check()
            function(**values)
            sys.stdout.flush()

    verb.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    verb.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return verb


def _judge(parameter: inspect.Parameter, value: Any) -> None:
    """Raises BadParameter for what no option of any verb can mean."""
    for one in value if isinstance(value, (list, tuple)) else [value]:
        fault = None
        if isinstance(one, float) and not math.isfinite(one):
            fault = f"{one} is not a finite number"
        elif isinstance(one, int) and parameter.name != "seed" and abs(one) > MAX_COUNT:
            fault = f"{one} is more than {MAX_COUNT}"
        elif isinstance(one, str):
            try:
                one.encode()
            except UnicodeEncodeError as error:
                before = len(one[: error.start].encode("utf-8", "surrogateescape"))
                fault = f"it is not UTF-8: a wrong byte at offset {before}"
        if fault is not None:
            raise typer.BadParameter(fault, param_hint=_spelling(parameter))


def _spelling(parameter: inspect.Parameter) -> str:
    """How a user writes it: `--max-tokens`, or PROMPT."""
    info = typing.get_args(parameter.annotation)[1]
    names = [name for name in (info.default, *(info.param_decls or ())) if isinstance(name, str)]
    return next((name for name in names if name.startswith("--")), names[0] if names else parameter.name.upper())


def whole(name: str, text: str, low: int, high: int = MAX_COUNT) -> int:
    """A whole number within bounds. Raises BadParameter (usage) that names the option."""
    try:
        number = int(text)
    except ValueError:
        raise typer.BadParameter(f"{text!r} is not a whole number", param_hint=name) from None
    if not low <= number <= high:
        raise typer.BadParameter(f"{text} is not in the range {low} to {high}", param_hint=name)
    return number


def _unfold(group: type) -> list[inspect.Parameter]:
    hints = typing.get_type_hints(group, include_extras=True)
    unfolded = []
    for field in fields(group):
        default = field.default if field.default_factory is MISSING else field.default_factory()
        unfolded.append(
            inspect.Parameter(field.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=hints[field.name])
        )
    return unfolded


def _model(*names: str, help: str, **more: Any) -> Any:
    return typer.Option(*names, help=help, rich_help_panel="Model and memory", **more)


def _sampling(*names: str, help: str, **more: Any) -> Any:
    return typer.Option(*names, help=help, rich_help_panel="Sampling", **more)


def _stopping(*names: str, help: str, **more: Any) -> Any:
    return typer.Option(*names, help=help, rich_help_panel="Length and stopping", **more)


@dataclass(frozen=True)
class ModelOptions:
    """Which model, and how it is held in memory."""

    model: Annotated[
        str | None,
        _model("--model", "-m", envvar="CUTAWAY_MODEL", help="A path, a catalogue name, or a hub id such as org/name."),
    ] = None
    threads: Annotated[
        int | None,
        _model(
            "--threads",
            envvar="CUTAWAY_THREADS",
            min=1,
            max=MAX_THREADS,
            help="Threads that compute. Default: the physical cores allowed.",
        ),
    ] = None
    max_context: Annotated[
        int | None,
        _model("--max-context", "-c", min=2, help="Tokens a sequence may hold, prompt and answer together."),
    ] = None
    kv_type: Annotated[str | None, _model("--kv-type", help="Type of the KV cache: f16, f32 or q8_0.")] = None
    k_type: Annotated[str | None, _model("--k-type", help="Type of the keys alone.")] = None
    v_type: Annotated[str | None, _model("--v-type", help="Type of the values alone.")] = None
    activations: Annotated[
        str | None, _model("--activations", help="What meets quantised weights: int8 (fast) or f32 (no rounding).")
    ] = None
    interpreter: Annotated[
        str | None, _model("--interpreter", help="What computes: native (C++), or reference (NumPy, slow, readable).")
    ] = None
    no_kv_cache: Annotated[
        bool, _model("--no-kv-cache", help="Recompute the whole sequence at every step. Same text, slower.")
    ] = False
    no_prefix_cache: Annotated[
        bool, _model("--no-prefix-cache", help="Do not share blocks between prompts that begin alike.")
    ] = False

    def check(self) -> None:
        """Raises: RequestError for a value that no model takes."""
        from cutaway.engine.kv_cache import KV_TYPES

        for param in ("kv_type", "k_type", "v_type"):
            _one_of(param, getattr(self, param), KV_TYPES)
        _one_of("activations", self.activations, ("int8", "f32"))
        _one_of("interpreter", self.interpreter, ("native", "reference"))

    def arguments(self) -> dict[str, Any]:
        """Keyword arguments of `LLM`: only what was asked for, so that LLM's own defaults hold for the rest."""
        asked = {
            name: getattr(self, name)
            for name in ("threads", "max_context", "kv_type", "k_type", "v_type", "activations", "interpreter")
            if getattr(self, name) is not None
        }
        if self.no_kv_cache:
            asked["kv_cache"] = False
        if self.no_prefix_cache:
            asked["prefix_cache"] = False
        return asked


def _one_of(param: str, value: str | None, known: tuple[str, ...]) -> None:
    if value is not None and value not in known:
        raise RequestError(f"--{param.replace('_', '-')}", found=repr(value), expected=" or ".join(known), param=param)


@dataclass(frozen=True)
class Setting:
    """One sampling setting and where it came from: "flag", "model" (the model's files) or "default"."""

    value: Any
    origin: str


@dataclass(frozen=True)
class SamplingOptions:
    """How the next token is chosen, and when to stop. None stands for: not given."""

    temperature: Annotated[
        float | None, _sampling("--temperature", "--temp", help="0 is greedy. Divides the logits.")
    ] = None
    top_k: Annotated[int | None, _sampling("--top-k", help="Keep the k likeliest tokens; 0 is off.")] = None
    top_p: Annotated[float | None, _sampling("--top-p", help="Keep the likeliest tokens up to this mass, 0 to 1.")] = (
        None
    )
    min_p: Annotated[
        float | None, _sampling("--min-p", help="Keep tokens at least this share as likely as the likeliest.")
    ] = None
    repetition_penalty: Annotated[
        float | None,
        _sampling("--repetition-penalty", "--repeat-penalty", help="Over prompt and answer; 1 is off."),
    ] = None
    presence_penalty: Annotated[
        float | None, _sampling("--presence-penalty", help="Off each token already in the answer; 0 is off.")
    ] = None
    frequency_penalty: Annotated[
        float | None, _sampling("--frequency-penalty", help="Off each token, times its count; 0 is off.")
    ] = None
    logit_bias: Annotated[
        list[str] | None, _sampling("--logit-bias", metavar="ID=BIAS", help="Add to one token's logit. Repeatable.")
    ] = None
    seed: Annotated[
        int | None, _sampling("--seed", min=-(2**63), max=2**64 - 1, help="The same seed draws the same text.")
    ] = None
    dialect: Annotated[
        str | None,
        _sampling("--dialect", help="Whose order of stages: cutaway, hf, vllm, llama.cpp or mlx."),
    ] = None
    settings_from: Annotated[
        str | None,
        _sampling("--settings-from", metavar="model", help="Apply the settings that the model's files carry."),
    ] = None
    n: Annotated[int | None, _stopping("--n", "-n", min=1, help="Answers to the same prompt.")] = None
    max_tokens: Annotated[int | None, _stopping("--max-tokens", "--predict", help="Tokens to answer with at most.")] = (
        None
    )
    stop: Annotated[
        list[str] | None,
        _stopping("--stop", help=r"End before this text. Repeatable. \n, \t and \\ are understood."),
    ] = None
    stop_token_id: Annotated[list[int] | None, _stopping("--stop-token-id", help="End at this token. Repeatable.")] = (
        None
    )
    ignore_eos: Annotated[bool, _stopping("--ignore-eos", help="Go on past the end-of-sequence tokens.")] = False

    def check(self) -> None:
        """Raises: RequestError for a value out of range, naming it."""
        from cutaway.engine.sampling import SamplingParams

        _one_of("settings_from", self.settings_from, ("model",))
        SamplingParams(**self._flags())

    def resolve(self, generation: Mapping[str, Any]) -> dict[str, Setting]:
        """Every setting with its origin. `generation` is what the model's files carry.

        The files' settings are used only with `--settings-from model`, and never over a flag.
        """
        from cutaway.engine.sampling import SamplingParams

        given = self._flags()
        carried = carried_settings(generation) if self.settings_from else {}
        default = SamplingParams()
        resolved = {}
        for name in (field.name for field in fields(SamplingParams)):
            if name in given:
                resolved[name] = Setting(given[name], "flag")
            elif name in carried:
                resolved[name] = Setting(carried[name], "model")
            else:
                resolved[name] = Setting(getattr(default, name), "default")
        return resolved

    def _flags(self) -> dict[str, Any]:
        flags: dict[str, Any] = {name: getattr(self, name) for name in _PLAIN if getattr(self, name) is not None}
        if self.logit_bias:
            flags["logit_bias"] = dict(map(bias, self.logit_bias))
        if self.stop:
            flags["stop"] = tuple(map(unescape, self.stop))
        if self.stop_token_id:
            flags["stop_token_ids"] = tuple(self.stop_token_id)
        if self.ignore_eos:
            flags["ignore_eos"] = True
        return flags


_PLAIN = [
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "seed",
    "dialect",
    "n",
    "max_tokens",
]
_CARRIED = {  # the names in generation_config.json, and of general.sampling.* in GGUF
    "temperature": "temperature",
    "temp": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "penalty_repeat": "repetition_penalty",
    "penalty_present": "presence_penalty",
    "penalty_freq": "frequency_penalty",
}


def carried_settings(generation: Mapping[str, Any]) -> dict[str, Any]:
    """The sampling settings among what a model's files carry, under our names. `do_sample: false` is temperature 0."""
    carried = {}
    for key, value in generation.items():
        name = _CARRIED.get(key.removeprefix("general.sampling."))
        if name is not None and value is not None:
            carried[name] = value
    if generation.get("do_sample") is False:
        carried["temperature"] = 0.0
    return carried


def bias(text: str) -> tuple[int, float]:
    """ID=BIAS as a pair."""
    token, separator, amount = text.partition("=")
    try:
        if not separator:
            raise ValueError
        return int(token), float(amount)
    except ValueError:
        raise RequestError(
            "a logit bias", found=repr(text), expected="ID=BIAS such as 151645=-5", param="logit_bias"
        ) from None


def unescape(text: str) -> str:
    r"""Text in which \n, \t, \r and \\ stand for one character each."""
    escapes = {"n": "\n", "t": "\t", "r": "\r", "\\": "\\"}
    parts = []
    rest = iter(text)
    for character in rest:
        if character != "\\":
            parts.append(character)
            continue
        following = next(rest, "")
        parts.append(escapes.get(following, "\\" + following))
    return "".join(parts)
