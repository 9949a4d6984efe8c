"""A diff as a document: the first tap that departs, and the way of the difference through the model.

Read next: `compare.py`.
"""

from __future__ import annotations

from cutaway.experiments.diff import Diff
from cutaway.render.document import Block, Column, Document, Language, LinePlot, Reference, Series, Table, Text
from cutaway.render.numbers import number
from cutaway.render.words import chosen

__all__ = ["diff"]


def diff(result: Diff, language: Language = "en") -> Document:
    """One line that answers, then the plot and the table."""
    say = chosen(language)
    first, first_bit = result.first, result.first_bit
    tolerance = number(result.tolerance, ".3g")
    if first is not None and first.shape_a != first.shape_b:
        answer = say(
            f"{first.name} has another shape: {first.shape_a} against {first.shape_b}.",
            f"{first.name} 的形状不同：{first.shape_a} 与 {first.shape_b}。",
        )
    elif first is not None and first.nans:
        answer = say(
            f"{first.name} holds {first.nans} NaN values, first in token {first.worst_row}.",
            f"{first.name} 含有 {first.nans} 个 NaN，首先出现在第 {first.worst_row} 个 token。",
        )
    elif first is not None:
        answer = say(
            f"The first tap that departs is {first.name}: {first.relative:.3g} relative (tolerance {tolerance}), "
            f"at most {first.max_abs:.3g}, in token {first.worst_row}.",
            f"最先偏离的是 {first.name}：相对差 {first.relative:.3g}（容差 {tolerance}），"
            f"最大绝对差 {first.max_abs:.3g}，在第 {first.worst_row} 个 token。",
        )
    elif first_bit is None:
        answer = say("Every tap is the same, bit for bit.", "所有张量逐位相同。")
    else:
        worst = max(result.taps, key=lambda tap: tap.relative)
        answer = say(
            f"No tap departs by more than {tolerance}; the largest difference is {worst.relative:.3g}, in "
            f"{worst.name}; the first that is not the same bits is {first_bit.name}.",
            f"没有超过容差 {tolerance} 的张量；最大相对差 {worst.relative:.3g}，在 {worst.name}；"
            f"最先不逐位相同的是 {first_bit.name}。",
        )
    blocks: list[Block] = [Text(answer, "warning" if first is not None else "body")]
    drawn = [(at, tap.relative) for at, tap in enumerate(result.taps) if 0 < tap.relative < float("inf")]
    if len(drawn) > 1:
        blocks.append(
            LinePlot(
                say("Difference along the pass", "沿前向计算的差异"),
                say("tap, in order of execution", "张量（按执行顺序）"),
                "‖B - A‖ / ‖A‖",
                [Series(f"{result.label_b} - {result.label_a}", [y for _, y in drawn], [float(at) for at, _ in drawn])],
                y_log=True,
                references=[Reference(say("tolerance", "容差"), result.tolerance)] if result.tolerance > 0 else [],
            )
        )
    rows = [
        [
            tap.name,
            tap.relative,
            tap.worst_relative,
            tap.max_abs,
            None if tap.cosine != tap.cosine else 1 - tap.cosine,
            say("bits equal", "逐位相同") if tap.equal_bits else say("departs", "偏离") if tap.departs else "",
        ]
        for tap in result.taps
    ]
    columns: list[Column | str] = [
        Column(say("tensor", "张量"), wrap=True),
        Column(say("relative", "相对差"), format=".2e"),
        Column(say("worst row", "最差一行"), format=".2e"),
        Column(say("largest", "最大"), format=".2e"),
        Column(say("1 - cosine", "1 - 余弦"), format=".1e"),
        "",
    ]
    strong = frozenset(at for at, tap in enumerate(result.taps) if tap is first)
    blocks.append(Table(columns, rows, strong=strong))
    for label, names in ((result.label_a, result.only_a), (result.label_b, result.only_b)):
        if names:
            shown = ", ".join(names[:8]) + ("" if len(names) <= 8 else f" + {len(names) - 8}")
            blocks.append(Text(say(f"Only {label} has: {shown}", f"只有 {label} 有：{shown}"), "note"))
    return Document(
        say("Two runs, tap by tap", "两次运行，逐个张量比较"),
        blocks,
        f"A: {result.label_a}   B: {result.label_b}",
        language,
    )
