"""The sweep over numbers of threads, shown. Read next: `report.py`."""

from __future__ import annotations

from cutaway.experiments.tune import Cores, ThreadTuning
from cutaway.render.document import Block, Cell, Column, Document, Language, LinePlot, Series, Table, Text
from cutaway.render.words import chosen

__all__ = ["threads"]


def threads(result: ThreadTuning, language: Language = "en") -> Document:
    """Rates by number of threads, the best marked, the default explained."""
    t = chosen(language)
    rows: list[list[Cell]] = []
    for row in result.rows:
        marks = []
        if row.threads == result.best_prefill:
            marks.append(t("best prefill", "prefill 最佳"))
        if row.threads == result.best_decode:
            marks.append(t("best decode", "decode 最佳"))
        if row.threads == result.cores.default:
            marks.append(t("default", "默认"))
        rows.append([row.threads, row.prefill_tokens_s, row.decode_tokens_s, ", ".join(marks)])
    best = {i for i, row in enumerate(result.rows) if row.threads in (result.best_prefill, result.best_decode)}
    counts = [float(row.threads) for row in result.rows]
    blocks: list[Block] = [
        Table(
            [
                Column(t("threads", "线程")),
                Column("prefill", "token/s", ",.1f"),
                Column("decode", "token/s", ",.1f"),
                Column(""),
            ],
            rows,
            note=t(
                "A prompt of {} tokens, then {} tokens one by one; medians of {} rounds that try the numbers in turn, "
                "after one that warms up. Forward pass alone, greedy.",
                "{} 个 token 的提示词，再逐个计算 {} 个 token；"
                "各线程数轮流测试 {} 轮取中位数，之前预热一轮。只计前向计算，贪心。",
            ).format(result.prompt, result.tokens, result.rounds),
            strong=frozenset(best),
        ),
        Text(_default(result.cores, language)),
    ]
    if len(counts) > 1:
        blocks.append(
            LinePlot(
                t("Rate by number of threads", "速率与线程数"),
                t("threads", "线程"),
                t("rate", "速率"),
                [
                    Series("prefill", [row.prefill_tokens_s for row in result.rows], counts),
                    Series("decode", [row.decode_tokens_s for row in result.rows], counts),
                ],
                y_unit="token/s",
                y_log=True,
            )
        )
    title = t("How many threads", "用多少线程")
    return Document(title, blocks, f"{result.model}, {result.processor}", language)


def _default(c: Cores, language: Language) -> str:
    t = chosen(language)
    physical = t("unknown", "未知") if c.physical is None else str(c.physical)
    quota = t("no limit", "无限制") if c.quota is None else f"{c.quota:g}"
    return t(
        "The default is {} thread(s): the physical cores this process may use. Logical CPUs of the machine: {}; "
        "allowed by the affinity: {}; physical cores among them: {}; CPUs of time granted by the control group: {}. "
        "Two hardware threads of a core share its arithmetic, and decoding is bound by memory, so more rarely helps. "
        "--threads N (or CUTAWAY_THREADS) sets another number.",
        "默认 {} 个线程：本进程可用的物理核数。机器的逻辑 CPU：{}；亲和性允许：{}；"
        "其中物理核：{}；控制组给予的 CPU 时间：{}。"
        "同一核的两个硬件线程共用算力，而 decode 受内存限制，更多线程很少有益。"
        "可用 --threads N（或 CUTAWAY_THREADS）另行指定。",
    ).format(c.default, c.logical, c.allowed, physical, quota)
