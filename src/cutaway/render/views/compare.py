"""A comparison as a document: two answers, then what each side thought of both of them. Read next: `score.py`."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from cutaway.experiments.compare import Comparison, Divergence, Forced, Side
from cutaway.render.document import (
    Block,
    Cell,
    Code,
    Column,
    Document,
    Heading,
    Language,
    LinePlot,
    Series,
    Table,
    Text,
)
from cutaway.render.plain import visible
from cutaway.render.words import chosen

__all__ = ["compare", "divergence_table"]

Say = Callable[[str, str], str]


def compare(result: Comparison, language: Language = "en") -> Document:
    """Warnings, the two answers, then divergence and the end of the turn on the same forced tokens."""
    say = chosen(language)
    blocks: list[Block] = [Text(line, "warning") for line in result.warnings]
    blocks += [Code(result.prompt, caption=say("Prompt", "提示")), _sides(result, say)]
    for side in (result.a, result.b):
        blocks.append(Code(side.text, caption=f"{side.label}: {say('answer', '回答')} ({side.finish_reason})"))
    blocks += [Text(line, "note") for line in result.notes]
    blocks.append(Heading(say("On the same tokens", "在相同的 token 上")))
    if result.divergence is not None:
        blocks.append(divergence_table(result.divergence, result.a.label, result.b.label, language))
    blocks += [plot for plot in (_divergence_plot(result, say), _end_plot(result, say)) if plot is not None]
    for run in result.forced:
        blocks += [Heading(say(f"The answer of {run.source}", f"{run.source} 的回答"), 3), _tokens(run, result, say)]
    title = say("Two answers side by side", "两个回答并排")
    return Document(title, blocks, f"A: {result.a.label}   B: {result.b.label}", language)


def _sides(result: Comparison, say: Say) -> Table:
    a, b = result.a, result.b

    def row(name: str, of: Callable[[Side], Cell]) -> list[Cell]:
        return [name, of(a), of(b)]

    def ends(tokens: object) -> str:
        return " ".join(tokens.values()) if isinstance(tokens, dict) and tokens else "–"

    rows = [
        row(say("model", "模型"), lambda s: s.model),
        row(say("prompt", "提示"), lambda s: say("chat template", "对话模板") if s.chat else say("raw", "原文")),
        row(say("prompt tokens", "提示 token"), lambda s: s.prompt_tokens),
        row(say("answer tokens", "回答 token"), lambda s: len(s.ids)),
        row(say("finish reason", "结束原因"), lambda s: s.finish_reason),
        row(say("stop set", "停止 token"), lambda s: ends(s.stop_tokens)),
        row(say("template ends a turn with", "模板的轮次结束 token"), lambda s: ends(s.template_end)),
    ]
    if result.perplexity_a is not None and result.perplexity_b is not None:
        found = (result.perplexity_a, result.perplexity_b)
        if result.same_vocabulary:
            rows.append([say("perplexity", "困惑度"), *(f"{p.ppl:.4f} +/- {p.ppl_error:.4f}" for p in found)])
        rows.append([say("bits per byte", "每字节比特数"), *(f"{p.bits_per_byte:.4f}" for p in found)])
    columns: list[Column | str] = ["", Column(f"A: {a.label}", wrap=True), Column(f"B: {b.label}", wrap=True)]
    note = ""
    if result.same_vocabulary:
        note = say(
            f"The answers share their first {result.same_ids} tokens.",
            f"两个回答开头相同的 token 有 {result.same_ids} 个。",
        )
    return Table(columns, rows, note=note)


def divergence_table(found: Divergence, a: str, b: str, language: Language = "en") -> Table:
    """The summary by llama-perplexity's names."""
    say = chosen(language)
    rows: list[list[Cell]] = [
        ["Mean KLD", f"{found.mean_kld:.6f}"],
        ["Median KLD", f"{found.median_kld:.6f}"],
        ["99.9% KLD", f"{found.kld_99_9:.6f}"],
        ["Maximum KLD", f"{found.max_kld:.6f}"],
        ["Same top p", f"{100 * found.same_top:.3f} %"],
        ["Mean Δp", f"{100 * found.mean_delta_p:.3f} %"],
        ["RMS Δp", f"{100 * found.rms_delta_p:.3f} %"],
    ]
    caption = say(f"{b} against {a}, {found.positions:,} positions", f"{b} 相对 {a}，共 {found.positions:,} 个位置")
    note = say(
        "KLD is in nats. Δp is B's probability of the token that is there minus A's.",
        "KLD 的单位是 nats。Δp 是 B 给实际 token 的概率减去 A 的。",
    )
    return Table([say("measure", "指标"), say("value", "数值")], rows, caption, note)


def _divergence_plot(result: Comparison, say: Say) -> LinePlot | None:
    series = [
        Series(say(f"on the answer of {run.source}", f"在 {run.source} 的回答上"), run.kl_ab.tolist(), _steps(run))
        for run in result.forced
        if run.kl_ab is not None
    ]
    if not series:
        return None
    return LinePlot(
        say("How far apart the two distributions are", "两个分布相距多远"),
        say("step", "步"),
        "KL(A ‖ B)",
        series,
        y_unit="nats",
    )


def _end_plot(result: Comparison, say: Say) -> LinePlot | None:
    series = []
    for run in result.forced:
        for label, side in ((result.a.label, run.a), (result.b.label, run.b)):
            if side is not None:
                name = say(f"{label}, reading {run.source}", f"{label} 读 {run.source} 的回答")
                series.append(Series(name, side.end_probability.tolist(), _steps(run)))
    if not series:
        return None
    return LinePlot(
        say("P(end of turn)", "P(结束)"),
        say("step", "步"),
        say("probability", "概率"),
        series,
        y_format="percent",
        note=say(
            "The probability of any token of the stop set, or of the template's own end, at each step.",
            "每一步上，停止 token 或模板结束 token 的总概率。",
        ),
    )


def _steps(run: Forced) -> list[float]:
    return [float(at) for at in range(1, len(run.ids) + 1)]


def _tokens(run: Forced, result: Comparison, say: Say) -> Table:
    """Token by token: what each side gave it, and what the side that did not write it would have said."""
    columns: list[Column | str] = [say("step", "步"), Column(say("token", "token"), wrap=True)]
    both = run.a is not None and run.b is not None
    sides = [(label, side) for label, side in (("A", run.a), ("B", run.b)) if side is not None]
    for label, _ in sides:
        columns.append(Column(f"p {label}", format="percent"))
    other = run.b if run.source == result.a.label else run.a
    if both:
        columns.append(Column("KL(A‖B)", format=".3f"))
        columns.append(Column(say("the other would say", "另一方会说"), wrap=True))
    rows: list[list[Cell]] = []
    for at, text in enumerate(run.texts):
        row: list[Cell] = [at + 1, visible(text)]
        row += [float(np.exp(side.logprob[at])) for _, side in sides]
        if both and other is not None and run.kl_ab is not None:
            row.append(float(run.kl_ab[at]))
            row.append(visible(other.best_texts[at]) if other.rank[at] != 1 else say("the same", "相同"))
        rows.append(row)
    return Table(columns, rows)
