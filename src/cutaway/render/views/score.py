"""A scored text and a perplexity as documents. Read next: `trace.py`."""

from __future__ import annotations

import math

from cutaway.experiments.score import Perplexity, Score, TokenScore
from cutaway.render.document import (
    Block,
    Column,
    Document,
    Language,
    LinePlot,
    Reference,
    Series,
    Table,
    Text,
    Token,
    Tokens,
)
from cutaway.render.numbers import number
from cutaway.render.plain import visible
from cutaway.render.words import chosen

__all__ = ["perplexity", "score"]

_LEAST_LIKELY = -10.0  # log-probability at which a token's colour is as strong as it gets
_SHOWN = 10


def score(result: Score, language: Language = "en") -> Document:
    """The text coloured by how expected each token was, its sums, and the most surprising tokens."""
    say = chosen(language)

    def tooltip(token: TokenScore) -> str:
        if token.logprob is None:
            return say("the first token: nothing comes before it", "第一个 token：前面没有内容")
        p, best = number(math.exp(token.logprob), "percent"), number(math.exp(token.best_logprob or 0.0), "percent")
        return say(
            f"p = {p}, rank {token.rank}, entropy {token.entropy:.2f} nats; best: {token.best_text!r} ({best})",
            f"p = {p}，名次 {token.rank}，熵 {token.entropy:.2f} nats；概率最高：{token.best_text!r}（{best}）",
        )

    coloured = Tokens(
        [Token(token.text, token.logprob, tooltip(token)) for token in result.tokens],
        say("log-probability (nats)", "对数概率 (nats)"),
        low=_LEAST_LIKELY,
        high=0.0,
        format=".2f",
        caption=say("The text, token by token", "逐 token 的文本"),
    )
    judged = result.judged
    blocks: list[Block] = [coloured]
    if judged:
        on_top = sum(token.rank == 1 for token in judged) / len(judged)
        sums: list[list[str | float | int]] = [
            [say("tokens judged", "计分的 token"), f"{len(judged):,} / {len(result.tokens):,}"],
            [say("log-probability (nats)", "对数概率 (nats)"), f"{result.logprob:.3f}"],
            [say("perplexity", "困惑度"), f"{result.perplexity:.4f}"],
            [say("bits per byte", "每字节比特数"), f"{result.bits_per_byte:.4f}"],
            [say("the model's first choice", "恰为模型首选"), number(on_top, "percent")],
        ]
        blocks.append(Table([say("measure", "指标"), Column(say("value", "数值"))], sums))
        worst = sorted(judged, key=lambda token: token.logprob or 0.0)[:_SHOWN]
        columns = [
            Column(say("token", "token"), wrap=True),
            Column(say("probability", "概率"), format="percent"),
            Column(say("rank", "名次")),
            Column(say("expected", "模型首选"), wrap=True),
            Column(say("its probability", "首选的概率"), format="percent"),
        ]
        rows = [
            [
                visible(t.text),
                math.exp(t.logprob or 0.0),
                t.rank,
                visible(t.best_text or ""),
                math.exp(t.best_logprob or 0.0),
            ]
            for t in worst
        ]
        blocks.append(Table(columns, rows, say("The most surprising tokens", "最出乎意料的 token")))
    else:
        blocks.append(Text(say("One token: nothing to judge it by.", "只有一个 token，没有可依据的上文。"), "note"))
    return Document(say("How expected the text was", "这段文本有多在意料之中"), blocks, result.model, language)


def perplexity(result: Perplexity, language: Language = "en") -> Document:
    """The estimate with its error, how it was windowed, and how it settled."""
    say = chosen(language)
    rows: list[list[str | float | int]] = [
        ["PPL", f"{result.ppl:.4f} +/- {result.ppl_error:.5f}"],
        [say("bits per byte", "每字节比特数"), f"{result.bits_per_byte:.4f}"],
        [say("negative log-likelihood (nats)", "负对数似然 (nats)"), f"{result.nll:.3f}"],
        [say("tokens judged", "计分的 token"), f"{result.judged_tokens:,} / {result.num_tokens:,}"],
        [say("bytes of those", "对应字节"), f"{result.judged_bytes:,}"],
        [say("window, stride (tokens)", "窗口与步长（token）"), f"{result.window:,}, {result.stride:,}"],
    ]
    if result.rule == "llama.cpp":
        rule = say(
            "Windows lie end to end and only the second half of each is judged: the rule of llama-perplexity.",
            "窗口首尾相接，每个窗口只计后一半：与 llama-perplexity 的规则相同。",
        )
    else:
        rule = say(
            "Windows overlap; each token but the first is judged once, by the first window that reaches it, with at "
            f"least {result.window - result.stride:,} tokens before it after the first window.",
            "窗口相互重叠；除第一个 token 外，每个 token 只在最先到达它的窗口里计一次，"
            f"第一个窗口之后，前面至少有 {result.window - result.stride:,} 个 token。",
        )
    blocks: list[Block] = [Table([say("measure", "指标"), Column(say("value", "数值"))], rows, note=rule)]
    if len(result.running) > 1:
        x = [float(at) for at in range(1, len(result.running) + 1)]
        blocks.append(
            LinePlot(
                say("The estimate as it settles", "估计值的收敛"),
                say("windows read", "已读窗口数"),
                say("perplexity so far", "目前的困惑度"),
                [Series("PPL", list(result.running), x)],
                y_from_zero=False,
                references=[Reference(say("final", "最终"), result.ppl)],
            )
        )
    return Document(say("Perplexity", "困惑度"), blocks, result.model, language)
