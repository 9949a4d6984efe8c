"""Running a template that nobody has read.

A chat template is a program that came with a model's files. jinja2's sandbox keeps it from reaching Python; `Sandbox`
also keeps it from eating time and memory: every loop turn and call, and all text it makes, is paid for out of a budget
before it happens. It knows nothing of chats. Read next: `chat.py`.
"""

from __future__ import annotations

import functools
import re
import time
from collections.abc import Callable
from contextvars import ContextVar
from types import BuiltinMethodType, CodeType, GeneratorType
from typing import Any

from jinja2 import Template, nodes
from jinja2.ext import Extension, LoopControlExtension
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment, SecurityError

__all__ = ["Sandbox"]

BUDGET = 1 << 25  # characters made and elements visited, in one rendering
STEP = 16  # what a loop turn or a call costs: some two million of them in one rendering
CPU_SECONDS = 1.0

# What these make can be as long as the product of what they are given.
_GROWING = {
    "batch",
    "center",
    "expandtabs",
    "format",
    "format_map",
    "indent",
    "join",
    "ljust",
    "replace",
    "rjust",
    "slice",
}
_GROWING |= {"tojson", "translate", "zfill"}

# Filters no template needs, whose time is not bounded by what they make.
_REFUSED = ("pprint", "striptags", "urlize", "wordwrap", "xmlattr")


class _Meter:
    """What one rendering may still spend."""

    def __init__(self) -> None:
        self.left = BUDGET
        self.deadline = time.thread_time() + CPU_SECONDS

    def spend(self, amount: int) -> None:
        self.left -= amount
        if self.left < 0:
            raise SecurityError("the template asks for more work than a template may do")
        if time.thread_time() > self.deadline:
            raise SecurityError("the template takes too long")

    def length(self, value: Any, widths: bool = False) -> int:
        """Characters in `value`, at any depth, numbers as that many with `widths`. Visiting elements is itself work."""
        total, pending = 0, [value]
        while pending:
            value = pending.pop()
            if isinstance(value, str):
                total += len(value)
            elif isinstance(value, dict):
                self.spend(STEP * len(value))
                pending += [*value, *value.values()]
            elif isinstance(value, list | tuple | set | frozenset):
                self.spend(STEP * len(value))
                pending += value
            elif widths and isinstance(value, int):
                total += abs(value)
            total += 1
        return total

    def growth(self, name: str, values: list[Any]) -> int:
        """At most how much `name` can make of these values, the first being what it is applied to."""
        if name in ("format", "format_map", "%") and values and isinstance(values[0], str):
            widths = sum(map(int, re.findall(r"\d{1,20}", values[0])))
            outside = re.search(r"\*|:[^{}]*\{", values[0]) is not None  # widths that are given as values
            sizes = [len(values[0]) + widths, *(self.length(v, widths=outside) for v in values[1:])]
        else:
            sizes = [abs(v) if isinstance(v, int) else self.length(v) for v in values]
        return sizes[0] * (1 + sum(sizes[1:])) if sizes else 0


_METER: ContextVar[_Meter] = ContextVar("meter")


class Sandbox(ImmutableSandboxedEnvironment):
    """jinja2 as chat templates expect it (`trim_blocks`, `lstrip_blocks`, loop controls), on a budget.

    Raises: jinja2's own errors; `SecurityError` where a template does what it must not.
    """

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self) -> None:
        extensions = [LoopControlExtension, _Generation]
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=extensions, finalize=self.printed)
        for name in _REFUSED:
            del self.filters[name]
        for name, function in list(self.filters.items()):
            self.add_filter(name, function)
        del self.globals["lipsum"]

    def add_filter(self, name: str, function: Callable[..., Any]) -> None:
        @functools.wraps(function)  # keeps jinja2's marks on it
        def metered(*args: Any, **kwargs: Any) -> Any:
            meter = _METER.get()
            skip = 1 if hasattr(function, "jinja_pass_arg") else 0
            given = [_bounded(meter, arg) for arg in args]
            self._charge(meter, name, [*given[skip:], *kwargs.values()])
            return function(*given, **kwargs)

        self.filters[name] = metered

    def compile_metered(self, source: str) -> CodeType:
        """The template's code, with a charge in every loop and macro. Raises: TemplateSyntaxError."""
        tree = self.parse(source)
        repeated: list[Any] = [*tree.find_all((nodes.For, nodes.Macro, nodes.CallBlock))]
        for node in repeated:
            literal = sum(len(text.data) for text in node.find_all(nodes.TemplateData))
            turn = nodes.Call(nodes.EnvironmentAttribute("turn"), [nodes.Const(literal)], [], None, None)
            node.body.insert(0, nodes.ExprStmt(turn, lineno=node.lineno))
        return self.compile(_calls_for_concat(tree))

    def render_metered(self, code: CodeType, values: dict[str, Any], max_chars: int) -> str:
        """Render within the budget."""
        token = _METER.set(_Meter())
        try:
            pieces, left = [], max_chars
            template = Template.from_code(self, code, self.make_globals(None))
            for piece in template.root_render_func(template.new_context(values)):
                left -= len(piece)
                if left < 0:
                    raise SecurityError(f"the template writes more than {max_chars} characters")
                pieces.append(piece)
            return "".join(pieces)
        finally:
            _METER.reset(token)

    # -- what compiled templates call --------------------------------------------------------------------------------

    @staticmethod
    def turn(literal: int) -> None:
        """Once round a loop, or into a macro, which writes that many characters of its own."""
        _METER.get().spend(STEP + literal)

    @staticmethod
    def concat_metered(*values: Any) -> str:
        return "".join(map(str, values))

    @staticmethod
    def printed(value: Any) -> Any:
        meter = _METER.get()
        meter.spend(meter.length(value))
        return value

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        meter = _METER.get()
        if operator == "**":
            meter.spend(abs(right) * abs(left).bit_length() if isinstance(left, int) and isinstance(right, int) else 1)
        elif operator == "*" and isinstance(left, int) and isinstance(right, int):
            meter.spend(left.bit_length() + right.bit_length())
        elif operator == "*" or (operator == "%" and isinstance(left, str)):
            meter.spend(meter.growth(operator, [left, right]))
        else:
            meter.spend(STEP + meter.length(left) + meter.length(right))
        return super().call_binop(context, operator, left, right)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        meter = _METER.get()
        given = [_bounded(meter, arg) for arg in args]
        values = [value for key, value in kwargs.items() if not key.startswith("_")]
        if isinstance(__obj, BuiltinMethodType):
            __self._charge(meter, __obj.__name__, [__obj.__self__, *given, *values])
        elif __obj is not __self.turn:
            __self._charge(meter, "", [*given, *values])
        return super().call(__context, __obj, *given, **kwargs)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        checked = super().wrap_str_format(value)
        if checked is None:
            return None

        def metered(*args: Any, **kwargs: Any) -> str:
            self._charge(_METER.get(), "format", [value.__self__, *args, *kwargs.values()])
            return checked(*args, **kwargs)

        return metered

    @staticmethod
    def _charge(meter: _Meter, name: str, values: list[Any]) -> None:
        meter.spend(STEP + (meter.growth(name, values) if name in _GROWING else sum(map(meter.length, values))))


def _bounded(meter: _Meter, value: Any) -> Any:
    """`value`, a generator as the list of what it yields: paid for one by one."""
    if not isinstance(value, GeneratorType):
        return value
    items = []
    for item in value:
        meter.spend(STEP + meter.length(item))
        items.append(item)
    return items


def _calls_for_concat(node: nodes.Template) -> nodes.Template:
    """`a ~ b` becomes a call, which the sandbox sees; the operator itself it does not."""

    def replaced(value: Any) -> Any:
        if isinstance(value, nodes.Node):
            visit(value)
        if isinstance(value, nodes.Concat):
            function = nodes.EnvironmentAttribute("concat_metered")
            return nodes.Call(function, value.nodes, [], None, None, lineno=value.lineno)
        return value

    def visit(parent: nodes.Node) -> None:
        for name, value in parent.iter_fields():
            setattr(parent, name, [replaced(v) for v in value] if isinstance(value, list) else replaced(value))

    visit(node)
    node.set_environment(node.environment)  # type: ignore[arg-type]
    return node


class _Generation(Extension):
    """`{% generation %}` marks an assistant's words for training; here it is only its body."""

    tags = {"generation"}  # noqa: RUF012  (jinja2 declares it so)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)
