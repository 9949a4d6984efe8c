"""A trace as a document: what is computed and what it costs, the residual stream, the logit lens, attention maps.

Read next: `diff.py`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from cutaway.experiments.attention import AttentionMap
from cutaway.experiments.table import OperationRow
from cutaway.experiments.trace import Trace
from cutaway.render.document import (
    BarPlot,
    Block,
    Cell,
    Column,
    Document,
    Heading,
    HeatMap,
    Language,
    LinePlot,
    Series,
    Table,
    Text,
    Token,
    Tokens,
)
from cutaway.render.numbers import number
from cutaway.render.plain import visible
from cutaway.render.words import chosen

__all__ = ["attention_maps", "cost_table", "lens_blocks", "next_tokens", "prompt_tokens", "residual_plot", "trace"]

Say = Callable[[str, str], str]

_LAYER = re.compile(r"(?<=\blayers\.)\d+(?=\.|$)")
_SMALLEST_SHOWN = 1e-4  # of an attention weight on the log scale


def trace(result: Trace, language: Language = "en", all_layers: bool = False) -> Document:
    """The whole trace. `all_layers` gives every layer rows of its own; otherwise alike layers share them."""
    say = chosen(language)
    blocks: list[Block] = [prompt_tokens(result, language), next_tokens(result, language)]
    blocks += [Heading(say("What is computed", "计算了什么"))]
    blocks += [shape_table(result.table, language, all_layers)]
    blocks += [Heading(say("What it costs", "代价"))]
    blocks += [cost_table(result.table, language, all_layers)]
    blocks += [share_plot(result.table, language)]
    blocks += [Heading(say("The residual stream", "残差流")), residual_plot(result, language)]
    if result.lens is not None:
        blocks += [Heading(say("Logit lens", "对数几率透镜")), *lens_blocks(result, language)]
    if result.attention:
        blocks += [Heading(say("Attention", "注意力")), *attention_maps(result, language)]
    if result.statistics:
        blocks += [Heading(say("Tapped tensors", "抽取的张量")), statistics_table(result, language)]
    tokens = say(f"{len(result.ids)} token" + "s" * (len(result.ids) > 1), f"{len(result.ids)} 个 token")
    return Document(say("One forward pass", "一次前向计算"), blocks, f"{result.model}, {tokens}", language)


def prompt_tokens(result: Trace, language: Language = "en") -> Tokens:
    say = chosen(language)
    tokens = [
        Token(text, None, say(f"position {at}, id {token}", f"位置 {at}，编号 {token}"))
        for at, (token, text) in enumerate(zip(result.ids, result.texts, strict=True))
    ]
    return Tokens(tokens, caption=say("The prompt as tokens", "token 化之后的提示"))


def next_tokens(result: Trace, language: Language = "en") -> Table:
    say = chosen(language)
    rows: list[list[Cell]] = [[visible(c.text), c.id, float(np.exp(c.logprob)), c.logprob] for c in result.next_tokens]
    columns = [
        Column(say("token", "token"), wrap=True),
        Column(say("id", "编号"), format="id"),
        Column(say("probability", "概率"), format="percent"),
        Column(say("log-probability", "对数概率"), "nats", ".3f"),
    ]
    return Table(columns, rows, caption=say("The next token, as the model sees it", "模型认为的下一个 token"))


# -- the table ---------------------------------------------------------------------------------------------------------


def _together(rows: Sequence[OperationRow], all_layers: bool) -> list[tuple[str, list[OperationRow]]]:
    """Rows under one name: alike operations of all layers as `layers.*.attn.q`, unless told apart.

    What an operation is told stands behind its name, and layers told different things have rows of their own.
    """
    groups: dict[str, list[OperationRow]] = {}
    for row in rows:
        told = ", ".join(f"{key}={value}" for key, value in row.attributes)
        name = row.name if all_layers else _LAYER.sub("*", row.name)
        groups.setdefault(f"{name} ({told})" if told else name, []).append(row)
    return list(groups.items())


def _shape(shape: Iterable[int]) -> str:
    return "[" + ", ".join(map(str, shape)) + "]"


def _module(row: OperationRow, all_layers: bool) -> str:
    """The module's path; inside its layer where the layers share a row."""
    if all_layers or row.layer is None:
        return row.module
    return row.module.removeprefix(f"model.layers.{row.layer}").removeprefix(".") or (row.module and "model.layers.*")


def shape_table(rows: Sequence[OperationRow], language: Language = "en", all_layers: bool = False) -> Table:
    """Operation, the Hugging Face module that makes the same tensor, and the shapes in and out."""
    say = chosen(language)
    body = []
    for name, group in _together(rows, all_layers):
        first = group[0]
        inputs = " ".join(_shape(shape) for shape in dict.fromkeys(first.input_shapes))
        body.append([name, _module(first, all_layers) or None, inputs, _shape(first.output_shape)])
    layers = len({row.layer for row in rows if row.layer is not None})
    columns = [
        Column(say("operation", "运算"), wrap=True),
        Column(say("Hugging Face module", "Hugging Face 模块"), wrap=True),
        Column(say("in", "输入"), wrap=True),
        Column(say("out", "输出")),
    ]
    note = (
        ""
        if all_layers
        else say(
            f"* stands for layers 0 to {layers - 1}; their modules are in model.layers.*",
            f"* 代表第 0 到第 {layers - 1} 层，其模块位于 model.layers.* 之下",
        )
    )
    return Table(columns, body, note=note)


def cost_table(rows: Sequence[OperationRow], language: Language = "en", all_layers: bool = False) -> Table:
    """Bytes read (weights and KV cache), work and time; alike operations of all layers summed."""
    say = chosen(language)
    total_ns = sum(row.time_ns or 0 for row in rows)
    body: list[list[Cell]] = []
    for name, group in [*_together(rows, all_layers), (say("all", "合计"), list(rows))]:
        formats = ", ".join(dict.fromkeys(row.dtype for row in group if row.weight_bytes))
        nbytes = sum(row.weight_bytes + row.kv_bytes for row in group)
        times = [row.time_ns for row in group if row.time_ns is not None]
        line: list[Cell] = [name, formats or None, nbytes or None, sum(row.flops for row in group) / 1e6]
        if total_ns:
            line += [sum(times) / 1e9, sum(times) / total_ns] if times else [None, None]
        body.append(line)
    body[-1][1] = None
    columns = [
        Column(say("operation", "运算"), wrap=True),
        Column(say("format", "格式"), wrap=True),
        Column(say("bytes", "字节"), format="bytes"),
        Column(say("work", "运算量"), "MFLOP", ",.2f"),
    ]
    note = say(
        "Bytes are the weights read, and for attention the KV cache read and written. A multiply-add is 2 FLOP.",
        "字节指读取的权重；注意力一行指读写的 KV cache。一次乘加算 2 FLOP。",
    )
    if total_ns:
        columns += [Column(say("time", "时间"), format="seconds"), Column(say("share", "占比"), format="percent")]
        note += say(
            " Fused operations are timed together; the time stands at the last of them.",
            "融合的运算一起计时，时间写在其中最后一个运算上。",
        )
    return Table(columns, body, note=note, strong=frozenset({len(body) - 1}))


def _part(row: OperationRow, say: Say) -> str:
    if row.name in ("embed", "logits"):
        return say("embedding", "嵌入") if row.name == "embed" else say("output head", "输出头")
    if row.kind == "attention":
        return say("attention itself", "注意力本身")
    if row.kind == "linear":
        return say("attention matrices", "注意力矩阵") if ".attn." in row.name else say("MLP matrices", "MLP 矩阵")
    return say("norms, RoPE, adds", "归一化、RoPE、加法")


def share_plot(rows: Sequence[OperationRow], language: Language = "en") -> BarPlot:
    """Where the bytes, the work and the time of the pass go."""
    say = chosen(language)
    by_name = {row.name: row for row in rows}
    parts = list(dict.fromkeys(_part(row, say) for row in rows))

    def share(amounts: Iterable[tuple[OperationRow, int]]) -> list[float]:
        sums = dict.fromkeys(parts, 0)
        for row, amount in amounts:
            sums[_part(row, say)] += amount
        total = sum(sums.values())
        return [amount / total if total else 0.0 for amount in sums.values()]

    def heaviest(row: OperationRow) -> OperationRow:
        """Of operations timed together, the one that does the work."""
        return max((by_name[name] for name in row.fused), key=lambda one: one.flops, default=row)

    series = [
        Series(say("bytes", "字节"), share((row, row.weight_bytes + row.kv_bytes) for row in rows)),
        Series(say("work", "运算量"), share((row, row.flops) for row in rows)),
    ]
    if any(row.time_ns for row in rows):
        series.append(Series(say("time", "时间"), share((heaviest(row), row.time_ns or 0) for row in rows)))
    title = say("Where it goes", "去向")
    return BarPlot(title, say("share of the pass", "占整次计算的比例"), parts, series, format="percent")


# -- the residual stream and the lens ------------------------------------------------------------------------------


def _state(name: str, say: Say) -> str:
    if name == "embed":
        return say("embedding", "嵌入")
    layer, half = name.split(".")[1:]
    return f"{layer} " + (say("attention", "注意力") if half == "attn_residual" else "MLP")


def _height(name: str) -> float:
    """Where a state stands on the axis of layers: the embedding at 0, layer i's end at i + 1."""
    if name == "embed":
        return 0.0
    return int(name.split(".")[1]) + (0.5 if name.endswith("attn_residual") else 1.0)


def residual_plot(result: Trace, language: Language = "en") -> LinePlot:
    """Length of the residual vectors after each half layer."""
    say = chosen(language)
    x = [_height(name) for name in result.residual.states]
    norms = result.residual.norms
    series = [Series(say("last token", "最后一个 token"), norms[:, -1].tolist(), x)]
    if norms.shape[1] > 1:
        series.append(Series(say("first token", "第一个 token"), norms[:, 0].tolist(), x))
    if norms.shape[1] > 2:
        series.append(Series(say("mean of the others", "其余的平均"), norms[:, 1:-1].mean(axis=1).tolist(), x))
    return LinePlot(
        say("Length of the residual vector", "残差向量的长度"),
        say("layers passed", "经过的层数"),
        say("Euclidean norm", "欧几里得范数"),
        series,
        y_log=True,
        note=say(
            "Half steps are after a layer's attention, whole steps after its MLP; 0 is the embedding.",
            "半步是该层注意力之后，整步是该层 MLP 之后，0 是嵌入。",
        ),
    )


def lens_blocks(result: Trace, language: Language = "en") -> list[Block]:
    """The lens: a sentence, the way of the last token's answer as a plot and a table, and a map of all positions."""
    found, say = result.lens, chosen(language)
    if found is None:
        return []
    last = len(found.positions) - 1
    answer = result.lens_texts[int(found.answers[last])]
    first, settled = found.first[last], found.settled[last]
    if first is None or settled is None:
        story = say(f"The model does not end on {answer!r}.", f"模型最终的答案不是 {answer!r}。")
    else:
        story = say(
            f"{answer!r} is first on top after: {_state(found.states[first], say)}; "
            f"it stays on top from: {_state(found.states[settled], say)}.",
            f"{answer!r} 首次居首：{_state(found.states[first], say)} 之后；"
            f"此后一直居首：{_state(found.states[settled], say)} 起。",
        )
    rows: list[list[Cell]] = []
    for at, state in enumerate(found.states):
        top = int(found.ids[at, last, 0])
        probability, own = float(np.exp(found.logprobs[at, last, 0])), float(np.exp(found.answer_logprob[at, last]))
        rows.append(
            [_state(state, say), visible(result.lens_texts[top]), probability, own, int(found.answer_rank[at, last])]
        )
    columns = [
        Column(say("after layer", "经过")),
        Column(say("top token", "首位 token"), wrap=True),
        Column(say("probability", "概率"), format="percent"),
        Column(say("of the answer", "答案的概率"), format="percent"),
        Column(say("its rank", "答案的名次")),
    ]
    strong = frozenset(at for at in (first, settled) if at is not None)
    x = [_height(name) for name in found.states]
    plot = LinePlot(
        say("Rank of the answer", "答案的名次"),
        say("layers passed", "经过的层数"),
        say("rank", "名次"),
        [Series(answer, found.answer_rank[:, last].tolist(), x)],
        y_log=True,
        note=say(
            "1 is the most probable. Every state is read through the model's own final norm and head.",
            "1 为概率最高。每个状态都经过模型自己的最终归一化与输出头。",
        ),
    )
    blocks: list[Block] = [Text(story), plot]
    blocks.append(
        Table(columns, rows, say("The last position, state by state", "最后一个位置，逐个状态"), strong=strong)
    )
    if len(found.positions) > 1:
        blocks.append(_lens_map(result, say))
    return blocks


def _lens_map(result: Trace, say: Say) -> HeatMap:
    found = result.lens
    assert found is not None
    ends = [at for at, name in enumerate(found.states) if not name.endswith("attn_residual")]
    answers = [result.lens_texts[int(token)] for token in found.answers]
    columns = [
        f"{result.texts[position]} → {answer}" for position, answer in zip(found.positions, answers, strict=True)
    ]
    return HeatMap(
        say("When each answer appears", "每个答案何时出现"),
        say("after layer", "经过"),
        say("token → its answer", "token → 对它的回答"),
        say("probability of the answer", "答案的概率"),
        [_state(found.states[at], say) for at in ends],
        columns,
        np.exp(found.answer_logprob[ends]).tolist(),
        low=0.0,
        high=1.0,
        format="percent",
    )


# -- attention, tensors ------------------------------------------------------------------------------------------------


def attention_maps(result: Trace, language: Language = "en") -> list[Block]:
    """One map a head, on a log scale; the first token's column can be hidden."""
    say = chosen(language)
    blocks: list[Block] = []
    for found in result.attention:
        for index, head in enumerate(found.heads):
            blocks.append(_attention_map(result, found, index, head, say))
    return blocks


def _attention_map(result: Trace, found: AttentionMap, index: int, head: int, say: Say) -> HeatMap:
    labels = [f"{at} {text}" for at, text in enumerate(result.texts)]
    values: list[list[float | None]] = [
        [float(weight) if key <= row else None for key, weight in enumerate(found.weights[index, line])]
        for line, row in enumerate(found.rows)
    ]
    sink = float(np.mean([row[0] or 0.0 for row in values]))
    return HeatMap(
        say(f"Layer {found.layer}, head {head}", f"第 {found.layer} 层，第 {head} 头"),
        say("token that looks", "查询 token"),
        say("token looked at", "被注意的 token"),
        say("attention weight", "注意力权重"),
        [labels[row] for row in found.rows],
        labels,
        values,
        scale="log",
        low=_SMALLEST_SHOWN,
        high=1.0,
        format="percent",
        can_hide_first=True,
        note=say(
            f"The first token takes {number(sink, 'percent')} on average.",
            f"第一个 token 平均占 {number(sink, 'percent')}。",
        ),
    )


def statistics_table(result: Trace, language: Language = "en") -> Table:
    say = chosen(language)
    rows: list[list[Cell]] = [
        [s.name, _shape(s.shape), s.mean, s.std, s.min, s.max, s.norm, s.nans] for s in result.statistics
    ]
    columns: list[Column | str] = [
        Column(say("tensor", "张量"), wrap=True),
        Column(say("shape", "形状"), wrap=True),
        Column(say("mean", "均值"), format=".3g"),
        Column(say("std", "标准差"), format=".3g"),
        Column(say("min", "最小"), format=".3g"),
        Column(say("max", "最大"), format=".3g"),
        Column(say("norm", "范数"), format=".4g"),
        "NaN",
    ]
    return Table(columns, rows)
