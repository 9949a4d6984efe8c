"""Answers, streamed: what `run` and `chat` share, and the tables of where the time went and the settings came from.

Read next: `src/cutaway/llm.py`, which is asked here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from cutaway.cli.options import Setting, carried_settings

if TYPE_CHECKING:
    from cutaway.engine.sampling import SamplingParams
    from cutaway.llm import LLM
    from cutaway.render.document import Block, Document
    from cutaway.results import Result

__all__ = ["sampling_params", "settings_table", "stats_document", "stream_answers"]


def sampling_params(settings: Mapping[str, Setting]) -> SamplingParams:
    """Raises: RequestError for a value out of range, naming it."""
    from cutaway.engine.sampling import SamplingParams

    return SamplingParams(**{name: setting.value for name, setting in settings.items()})


def stream_answers(
    llm: LLM,
    prompt: str | Sequence[Mapping[str, Any]],
    settings: Mapping[str, Setting],
    write: Callable[[str], None],
) -> tuple[list[Result], bool]:
    """Continue a raw prompt (text) or answer a conversation (messages); `write` gets the text piece by piece.

    With n > 1 the answers, computed together, follow one another, each under its number. Gives the results and
    whether Ctrl-C ended them: it ends the answer, not the program.
    """
    streams = llm.submit(prompt, sampling_params(settings))
    interrupted = False
    try:
        for number, stream in enumerate(streams, 1):
            if len(streams) > 1:
                write(f"[{number}]\n")
            for piece in stream:
                write(piece)
            write("\n")
    except KeyboardInterrupt:
        interrupted = True
        for stream in streams:
            stream.cancel()
        write("\n")
    return [stream.result for stream in streams], interrupted


def stats_document(llm: LLM, results: Sequence[Result], settings: Mapping[str, Setting]) -> Document:
    """Where the time of the answers went, the memory, and where each setting came from."""
    from cutaway.render.document import Column, Document, Table, Text
    from cutaway.render.numbers import size

    columns = [
        Column("Phase"),
        Column("Tokens"),
        Column("Time", format="seconds"),
        Column("Rate", unit="tokens/s", format=".1f"),
    ]
    blocks: list[Block] = []
    for result in results:
        s = result.stats
        title = f"Answer {result.index + 1}, " if len(results) > 1 else ""
        seed = f"seed {result.seed}, " if settings["temperature"].value else ""
        blocks.append(
            Table(
                columns,
                [
                    ("load", None, s.load_s, None),
                    ("tokenise", s.prompt_tokens, s.tokenize_s, _rate(s.prompt_tokens, s.tokenize_s)),
                    ("prefill", s.prompt_tokens - s.cached_tokens, s.prefill_s, s.prefill_rate),
                    ("decode", max(s.output_tokens - 1, 0), s.decode_s, s.decode_rate),
                    ("of these, sample", s.output_tokens, s.sample_s, _rate(s.output_tokens, s.sample_s)),
                ],
                caption=f"{title}{seed}ended by {_end(llm, result)}",
                note=f"{s.cached_tokens:,} prompt tokens were found in the prefix cache." if s.cached_tokens else "",
            )
        )
    longest = max(r.stats.prompt_tokens + r.stats.output_tokens for r in results)
    memory = f"Context {longest:,} of {llm.max_context:,} tokens. KV cache {size(llm.engine.kv_cache.nbytes)} "
    memory += f"({llm.k_type}/{llm.v_type}, {size(llm.kv_bytes_per_token)} a token)"
    peak = _peak_bytes()
    blocks.append(Text(memory + (f"; the process at most {size(peak)}." if peak else ".")))
    blocks += settings_table(llm, settings)
    return Document(llm.name, blocks, subtitle=_machinery(llm))


def settings_table(llm: LLM, settings: Mapping[str, Setting]) -> list[Block]:
    """Every setting, its value and where it came from; and what the model's files carry that is not applied."""
    from cutaway.render.document import Column, Table, Text

    rows = [(name, _text(setting.value), setting.origin) for name, setting in settings.items()]
    blocks: list[Block] = [Table(["Setting", Column("Value", wrap=True), "From"], rows)]
    carried = carried_settings(llm.checkpoint.generation)
    ignored = [f"{name} {value}" for name, value in carried.items() if settings[name].origin != "model"]
    if ignored:
        blocks.append(Text(f"Not applied: the model's files carry {', '.join(ignored)} (--settings-from model)."))
    return blocks


def _machinery(llm: LLM) -> str:
    """What computed: `avx2 kernels, 2 threads, int8 activations`."""
    from cutaway.forward.native import NativeProgram

    interpreter = llm.interpreter
    if not isinstance(interpreter, NativeProgram):
        return "NumPy reference"
    return f"{interpreter.isa} kernels, {interpreter.threads} threads, {interpreter.activations} activations"


def _rate(tokens: int, time_s: float) -> float | None:
    return tokens / time_s if tokens and time_s else None


def _end(llm: LLM, result: Result) -> str:
    if result.stop_string is not None:
        return f"the stop string {result.stop_string!r}"
    if result.stop_token is not None:
        return f"token {result.stop_token} {llm.tokenizer.token_text(result.stop_token)}"
    return {"length": "the length limit", "cancelled": "Ctrl-C"}.get(result.finish_reason, result.finish_reason)


def _text(value: Any) -> str:
    if value is None or (not value and isinstance(value, (tuple, Mapping))):
        return "none"
    if isinstance(value, Mapping):
        return ", ".join(f"{token}={amount:g}" for token, amount in value.items())
    return ", ".join(map(repr, value)) if isinstance(value, tuple) else str(value)


def _peak_bytes() -> int | None:
    """The most memory this process held at once (Linux counts it in KiB)."""
    try:
        import resource
    except ImportError:
        return None
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
