"""The profile, shown: each kind of operation beside the memory roof, the phases' totals, every operation if asked.

Read next: `tune.py`.
"""

from __future__ import annotations

from collections.abc import Callable

from cutaway.experiments.profile import OperationProfile, PhaseProfile, Profile
from cutaway.render.document import BarPlot, Block, Cell, Column, Document, Heading, Language, Series, Table, Text
from cutaway.render.words import chosen

__all__ = ["profile"]

Words = Callable[[str, str], str]


def profile(result: Profile, language: Language = "en", every: bool = False) -> Document:
    """Both steps; with `every` a row for each operation of each layer besides."""
    t = chosen(language)
    blocks: list[Block] = [_totals(result, t), Text(_roof(result, t), "note")]
    for phase in result.phases:
        blocks += [Heading(_title(phase, t)), _kinds(phase, t), _plot(phase, t)]
        blocks.append(_bytes(phase, result.head_top_k, t))
        if every:
            rows = [_row(operation, str(operation.layer) if operation.layer is not None else None) for operation in
                    phase.operations]  # fmt: skip
            caption = t("Every operation, in order of execution", "所有操作，按执行顺序")
            blocks.append(Table(_columns(t, t("layer", "层")), rows, caption=caption))
    title = t("Where the time of a step goes", "一步的时间花在哪里")
    return Document(title, blocks, f"{result.model}, {result.processor}", language)


def _title(phase: PhaseProfile, t: Words) -> str:
    if phase.depth:
        words = t("{}: {:,} token(s) behind {:,} others", "{}：{:,} 个 token，前面有 {:,} 个")
        return words.format(phase.phase, phase.num_tokens, phase.depth)
    return t("{}: {:,} token(s)", "{}：{:,} 个 token").format(phase.phase, phase.num_tokens)


def _totals(result: Profile, t: Words) -> Table:
    rows: list[list[Cell]] = [
        [
            phase.phase,
            phase.num_tokens,
            phase.depth,
            phase.wall_ns / 1e9,
            phase.tokens_s,
            phase.total.nbytes,
            phase.total.bytes_s / 1e9,
            phase.total.bandwidth_share,
        ]
        for phase in result.phases
    ]
    return Table(
        [
            Column(t("step", "步骤")),
            "token",
            Column(t("behind", "前面")),
            Column(t("time", "耗时"), format="seconds"),
            Column(t("rate", "速率"), "token/s", ",.1f"),
            Column(t("bytes", "字节"), format="bytes"),
            Column("GB/s", format=".1f"),
            Column(t("of roof", "占上限"), format="percent"),
        ],
        rows,
        caption=t("Two steps", "两个步骤"),
    )


def _roof(result: Profile, t: Words) -> str:
    settings = t("{} threads, {}, {} activations, KV cache {}/{}.", "{} 线程，{}，{} 激活值，KV cache {}/{}。").format(
        result.threads, result.isa, result.activations, result.k_type, result.v_type
    )
    roof = t(
        " The roof is the memory read bandwidth of these threads, measured in this run: {:.1f} GB/s before and "
        "{:.1f} after; the better counts. A short operation whose bytes stay in a cache can pass it. Prefill reads its "
        "weights once for many tokens: arithmetic bounds it, and its share of the roof is low by nature.",
        " 上限为这些线程的内存读带宽，在本次运行中测得：之前 {:.1f} GB/s，之后 {:.1f} GB/s，取较大者。"
        "数据留在缓存里的短操作可能超过它。prefill 读一次权重供许多 token 使用，受算力限制，占比自然很低。",
    ).format(result.bandwidth_before / 1e9, result.bandwidth_after / 1e9)
    return settings + roof


def _columns(t: Words, first: str) -> list[Column | str]:
    return [
        Column(t("operation", "操作"), wrap=True),
        first,
        Column(t("time", "耗时"), format="seconds"),
        Column(t("share", "占比"), format="percent"),
        Column("GB/s", format=".1f"),
        Column(t("of roof", "占上限"), format="percent"),
        Column("GFLOP/s", format=",.1f"),
    ]


def _row(o: OperationProfile, second: Cell) -> list[Cell]:
    return [
        o.name,
        second,
        o.ns / 1e9,
        o.share,
        o.bytes_s / 1e9 if o.nbytes else None,
        o.bandwidth_share if o.nbytes else None,
        o.flops_s / 1e9 if o.flops else None,
    ]


def _kinds(phase: PhaseProfile, t: Words) -> Table:
    rows = [_row(kind, kind.count) for kind in (*phase.kinds, phase.total)]
    return Table(
        _columns(t, t("times", "次数")),
        rows,
        caption=t("By kind, all layers together", "按种类，所有层合计"),
        note=t(
            "Medians of {} runs; the operations of one row are fused into one phase.",
            "{} 次运行的中位数；同一行的操作融合为一个阶段。",
        ).format(phase.repeats),
        strong=frozenset({len(rows) - 1}),
    )


def _bytes(phase: PhaseProfile, head_top_k: int | None, t: Words) -> Table:
    kinds = [kind for kind in (*phase.kinds, phase.total) if kind.nbytes]
    return Table(
        [
            Column(t("operation", "操作"), wrap=True),
            Column(t("weights", "权重"), format="bytes"),
            Column("KV", format="bytes"),
            Column(t("tensors", "张量"), format="bytes"),
            Column(t("total", "合计"), format="bytes"),
        ],
        [[k.name, k.weight_bytes or None, k.kv_bytes or None, k.activation_bytes or None, k.nbytes] for k in kinds],
        caption=t("The bytes behind it", "对应的字节数"),
        note=_note(phase, head_top_k, t),
        strong=frozenset({len(kinds) - 1}),
    )


def _note(phase: PhaseProfile, head_top_k: int | None, t: Words) -> str:
    note = t(
        "The least that must move: weights as packed in memory, keys and values, tensors in and out.",
        "至少要移动的量：内存中打包的权重、键和值、输入输出张量。",
    )
    if phase.head_rows_finished:
        note += t(
            " The output head was screened (top {}): it read the high bits of every row (176 of 272 bytes), bounds of "
            "the low ones, and finished {:,} rows; only these bytes are counted. The logits kept are the full head's.",
            " 输出头经过筛选（前 {} 个）：读取每行的高位（272 字节中的 176 字节）和低位的界，并完整计算了 {:,} 行；"
            "只计这些字节。保留的 logits 与完整输出头相同。",
        ).format(head_top_k, phase.head_rows_finished)
    elif head_top_k:
        note += t(" The output head was read as a whole.", " 输出头被完整读取。")
    return note


def _plot(phase: PhaseProfile, t: Words) -> BarPlot:
    kinds = [kind for kind in phase.kinds if kind.share >= 0.005]
    return BarPlot(
        t("Time of the step by kind", "各种类的耗时"),
        t("share of the time", "时间占比"),
        [kind.name for kind in kinds],
        [Series(t("share", "占比"), [kind.share for kind in kinds])],
        format="percent",
    )
