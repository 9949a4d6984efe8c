"""The command line: `cutaway VERB`, one small module a verb.

Holds the table of verbs and the way in. A verb is a function `verb(...)` (or a `typer.Typer` for a verb with
sub-commands) in its own module, named in VERBS; only the module of the verb asked for is imported, and whatever is
heavy waits inside the function. To add one, write the module and a line of VERBS; the page docs/cli.md is made from it.
Knows nothing of arrays and kernels: it calls `cutaway.llm` and `cutaway.files`. Read next: `options.py`, the options
verbs share; `faults.py`, what happens to errors; then `run.py`.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import typer

__all__ = ["VERBS", "application", "main"]

VERBS: dict[str, str] = {  # verb -> module; in the order of --help
    "run": "cutaway.cli.run",
    "chat": "cutaway.cli.chat",
    "inspect": "cutaway.cli.inspect",
    "tokenize": "cutaway.cli.tokenize",
    "pull": "cutaway.cli.pull",
    "models": "cutaway.cli.models",
    "trace": "cutaway.cli.trace",
    "diff": "cutaway.cli.diff",
    "compare": "cutaway.cli.compare",
    "kv": "cutaway.cli.kv",
    "sample": "cutaway.cli.sample",
    "bench": "cutaway.cli.bench",
    "profile": "cutaway.cli.profile",
    "tune": "cutaway.cli.tune",
    "perplexity": "cutaway.cli.perplexity",
    "score": "cutaway.cli.score",
    "report": "cutaway.cli.report",
}


def application(verb: str | None = None) -> typer.Typer:
    """The typer application: with one verb's module imported, or with all of them."""
    import typer

    app = typer.Typer(
        name="cutaway",
        help="An LLM inference engine with its side cut open.",
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )

    @app.callback()
    def root(version: bool = typer.Option(False, "--version", help="Print the version and exit.")) -> None:
        pass  # `main` answers --version before anything is imported

    for name in [verb] if verb in VERBS else VERBS:
        found = getattr(importlib.import_module(VERBS[name]), name.replace("-", "_"))
        if isinstance(found, typer.Typer):
            app.add_typer(found, name=name)
        else:
            app.command(name)(found)
    return app


def version() -> str:
    """One line: the version, the Python and the machine."""
    import platform

    from cutaway import __version__

    return f"cutaway {__version__} (Python {platform.python_version()}, {platform.system()} {platform.machine()})"


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit: 0 done, 1 a known error, 2 wrong usage, 130 Ctrl-C, 141 the reader has left."""
    from cutaway.cli.faults import faults
    from cutaway.cli.streams import prepare

    arguments = list(sys.argv[1:] if arguments is None else arguments)
    prepare()
    with faults():
        if arguments[:1] == ["--version"]:
            sys.stdout.write(version() + "\n")
            sys.stdout.flush()
            return
        status = _run(arguments)
        sys.stdout.flush()
    raise SystemExit(status)


def _run(arguments: list[str]) -> int:
    """The verb that the arguments name. Wrong usage is one line too, and status 2."""
    import typer

    from cutaway.cli.faults import told

    failure: type[Exception] = next(c for c in typer.BadParameter.__mro__ if c.__name__ == "ClickException")
    try:
        done = application(arguments[0] if arguments else None)(
            args=arguments, prog_name="cutaway", standalone_mode=False
        )
        return done if isinstance(done, int) else 0
    except failure as error:
        context = getattr(error, "ctx", None)
        if type(error).__name__ == "NoArgsIsHelpError":
            return 2  # making the error has shown the help
        path = context.command_path if context is not None else " ".join(["cutaway", *_verb(arguments)])
        told(f"{error.format_message()} (hint: {path} --help)")  # type: ignore[attr-defined]
        return int(getattr(error, "exit_code", 2))


def _verb(arguments: list[str]) -> list[str]:
    return arguments[:1] if arguments and arguments[0] in VERBS else []
