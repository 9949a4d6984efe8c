"""Sampling, shown: the chain step by step, temperatures, dialects, origins of settings. Read next: `report.py`."""

from __future__ import annotations

import math

from cutaway.experiments.loops import Loop
from cutaway.experiments.sampler import Dialects, Sampled, Step, Temperatures
from cutaway.render.document import (
    BarPlot,
    Block,
    Cell,
    Code,
    Column,
    Document,
    Heading,
    Language,
    Series,
    Table,
    Text,
    Token,
    Tokens,
)
from cutaway.render.numbers import number
from cutaway.render.plain import shorten, visible
from cutaway.render.words import chosen

__all__ = [
    "dialects",
    "dialects_blocks",
    "sampled",
    "sampled_blocks",
    "temperatures",
    "temperatures_blocks",
]

BAR = 30  # characters of a cumulative bar


def sampled(result: Sampled, language: Language = "en", steps: int | None = None) -> Document:
    """One continuation, token by token; the chain of the first `steps` of them (default: all)."""
    title = chosen(language)("How each token was chosen", "每个 token 是怎样选出来的")
    return Document(title, sampled_blocks(result, language, steps), result.model, language)


def sampled_blocks(s: Sampled, language: Language = "en", steps: int | None = None) -> list[Block]:
    t = chosen(language)
    shown = s.steps if steps is None else s.steps[:steps]
    blocks: list[Block] = [
        Code(s.prompt, caption=t("Prompt", "提示词")),
        Table(
            [Column(t("setting", "设置")), Column(t("value", "值"), wrap=True), Column(t("from", "来源"))],
            [[name, _value(o.value), o.origin] for name, o in s.settings.items()],
            caption=t("Settings, and where each came from", "各项设置及其来源"),
            note=t("Chain: ", "处理链：") + (" → ".join(s.chain) or t("none", "无")) + f"; seed {s.seed}",
        ),
        Tokens(
            [
                Token(
                    step.text,
                    step.probability_raw,
                    f"{number(step.probability_raw, 'percent')}, {t('rank', '名次')} {step.rank}",
                )
                for step in s.steps
            ],
            value_title=t("the model's own probability of the token", "模型给该 token 的概率"),
            low=0.0,
            high=1.0,
            format="percent",
            caption=t("Sampled", "采样结果"),
        ),
        Tokens([Token(text) for text in s.greedy_tokens], caption=t("Greedy", "贪心结果")),
        *_greedy_note(s, language),
        Text(_fork(s, language)),
        *_loops(s, language),
        _summary(s, language),
    ]
    for number_, step in enumerate(shown, 1):
        blocks += _step(step, number_, language)
    return blocks


def _value(value: object) -> Cell:
    return None if value in (None, {}, (), []) else str(value)


def _greedy_note(s: Sampled, language: Language) -> list[Block]:
    if any(step.draw is not None for step in s.steps):
        return []
    t = chosen(language)
    return [
        Text(
            t(
                "Nothing is drawn at temperature 0; try --temperature 0.8.",
                "温度为 0 时不抽样；可试 --temperature 0.8。",
            ),
            "note",
        )
    ]


def _fork(s: Sampled, language: Language) -> str:
    t = chosen(language)
    if s.fork is None:
        return t("Greedy and sampled text are the same.", "贪心与采样的文本相同。")
    return t("Greedy and sampled text part at token {}.", "贪心与采样的文本从第 {} 个 token 开始不同。").format(
        s.fork + 1
    )


def _loop(loop: Loop, language: Language) -> str:
    return chosen(language)(
        "from token {} on a span of {} tokens comes {:.3g} times in a row",
        "从第 {} 个 token 起，{} 个 token 的片段连续出现 {:.3g} 次",
    ).format(loop.start + 1, loop.period, loop.copies)


def _loops(s: Sampled, language: Language) -> list[Block]:
    t = chosen(language)
    found = ((t("Sampled", "采样"), s.loop), (t("Greedy", "贪心"), s.greedy_loop))
    return [
        Text(t("{}: a loop, {}.", "{}：出现循环，{}。").format(name, _loop(loop, language)), "warning")
        for name, loop in found
        if loop is not None
    ]


def _summary(s: Sampled, language: Language) -> Table:
    t = chosen(language)
    rows: list[list[Cell]] = [
        [
            i,
            visible(step.text),
            step.rank,
            step.probability_raw,
            step.probability_processed,
            step.stages[-1].kept,
            step.entropy_raw_nats,
            step.draw,
        ]
        for i, step in enumerate(s.steps, 1)
    ]
    return Table(
        [
            Column("#"),
            Column(t("token", "token"), wrap=True),
            Column(t("rank", "名次")),
            Column(t("raw", "原始概率"), format="percent"),
            Column(t("drawn from", "抽样概率"), format="percent"),
            Column(t("kept", "保留")),
            Column(t("entropy", "熵"), "nat", ".2f"),
            Column(t("draw", "随机数"), format=".4f"),
        ],
        rows,
        caption=t("Every step", "每一步"),
        note=t(
            "raw: softmax of the model's logits; drawn from: after the whole chain; kept: candidates left.",
            "原始概率：模型 logits 的 softmax；抽样概率：经过整条处理链之后；保留：剩余的候选数。",
        ),
    )


def _step(step: Step, index: int, language: Language) -> list[Block]:
    t = chosen(language)
    names = [c.text for c in step.stages[0].candidates[:8]]
    ids = [c.id for c in step.stages[0].candidates[:8]]
    if step.token not in ids:
        names, ids = [*names, step.text], [*ids, step.token]
    rows: list[list[Cell]] = []
    for name, token in zip(names, ids, strict=True):
        found = [next((c.probability for c in stage.candidates if c.id == token), None) for stage in step.stages]
        rows.append([("▶ " if token == step.token else "") + visible(name), *found])
    rows.append([t("candidates", "候选数"), *(f"{stage.kept:,}" for stage in step.stages)])
    rows.append([t("mass removed", "去掉的概率"), *(number(stage.removed_mass, "percent") for stage in step.stages)])
    columns = [Column(t("token", "token"), wrap=True)]
    columns += [Column(_stage_name(stage.name, language), format="percent") for stage in step.stages]
    title = t("Step {}: {}", "第 {} 步：{}").format(index, visible(step.text))
    return [Heading(title, 3), Table(columns, rows, strong=frozenset({ids.index(step.token)})), _draw(step, language)]


def _stage_name(name: str, language: Language) -> str:
    return chosen(language)("model", "模型") if name == "model" else name.replace("_", " ")


def _draw(step: Step, language: Language) -> Block:
    """The cumulative bar of the last stage with the draw on it."""
    t = chosen(language)
    if step.draw is None:
        return Text(t("Greedy: the most probable candidate is taken.", "贪心：直接取概率最大的候选。"), "note")
    low, high = step.interval
    first, last = int(low * BAR), max(int(high * BAR), int(low * BAR) + 1)
    at = min(int(step.draw * BAR), BAR - 1)
    bar = "".join("█" if first <= i < last else "░" for i in range(BAR))
    text = f"0 {bar} 1\n  {' ' * at}▲ {step.draw:.6f}"
    caption = t(
        "The draw {:.4f} falls between {:.4f} and {:.4f}, the place of {}",
        "随机数 {:.4f} 落在 {:.4f} 与 {:.4f} 之间，即 {} 的区间",
    ).format(step.draw, low, high, visible(step.text))
    return Code(text, caption=caption)


# -- temperatures -----------------------------------------------------------------------------------------------------


def temperatures(result: Temperatures, language: Language = "en") -> Document:
    """Several temperatures told apart."""
    title = chosen(language)("What the temperature does", "温度的作用")
    return Document(title, temperatures_blocks(result, language), result.model, language)


def temperatures_blocks(r: Temperatures, language: Language = "en") -> list[Block]:
    t = chosen(language)
    rows: list[list[Cell]] = [
        [
            row.temperature,
            f"{row.different_texts} / {len(row.texts)}",
            row.distinct_1,
            row.distinct_2,
            row.entropy_nats,
            row.greedy_probability,
            row.greedy_share,
            row.rank,
            row.loops,
        ]
        for row in r.rows
    ]
    tokens = [visible(c.text) for c in r.rows[0].first]
    blocks: list[Block] = [
        Text(
            t(
                "Dividing the logits by a temperature below 1 sharpens the distribution, above 1 flattens it. "
                "{} continuations of up to {} tokens at each, seed {}.",
                "logits 除以小于 1 的温度会让分布更尖锐，大于 1 则更平坦。"
                "每个温度生成 {} 段，每段至多 {} 个 token，seed {}。",
            ).format(r.continuations, r.max_tokens, r.seed)
        ),
        Code(r.prompt, caption=t("Prompt", "提示词")),
        Table(
            [
                Column(t("T", "温度"), format=".3g"),
                Column(t("texts", "不同文本")),
                Column("distinct-1", format=".2f"),
                Column("distinct-2", format=".2f"),
                Column(t("entropy", "熵"), "nat", ".2f"),
                Column(t("p(top)", "p(首选)"), format="percent"),
                Column(t("took top", "取首选"), format="percent"),
                Column(t("rank", "名次"), format=".1f"),
                Column(t("loops", "循环")),
            ],
            rows,
            caption=t("Told apart by numbers", "用数字区分"),
            note=t(
                "Means over all steps. p(top): probability of the model's most probable token, after the chain; "
                "took top: steps that took it; distinct-n: different n-grams over all n-grams.",
                "均为所有步的平均。p(首选)：模型最可能的 token 在处理链之后的概率；"
                "取首选：取了它的步数占比；distinct-n：不同 n 元组占全部 n 元组的比例。",
            ),
        ),
        BarPlot(
            t("The first token's distribution", "第一个 token 的分布"),
            t("probability", "概率"),
            tokens,
            [Series(f"T = {row.temperature:g}", [c.probability for c in row.first]) for row in r.rows],
            format="percent",
        ),
    ]
    for row in r.rows:
        blocks.append(Heading(f"T = {row.temperature:g}", 3))
        blocks += [Code(text) for text in row.texts]
    return blocks


# -- dialects ---------------------------------------------------------------------------------------------------------


def dialects(result: Dialects, language: Language = "en") -> Document:
    """The same settings through other engines' rules."""
    title = chosen(language)("The same settings in other engines", "同样的设置在其他引擎中")
    return Document(title, dialects_blocks(result, language), result.model, language)


def dialects_blocks(d: Dialects, language: Language = "en") -> list[Block]:
    t = chosen(language)
    asked = ", ".join(f"{k} {v}" for k, v in d.settings.items() if v not in (None, {}) and k != "dialect")
    rows: list[list[Cell]] = [
        [
            row.dialect,
            row.refused or " → ".join(row.chain) or t("none", "无"),
            None if row.refused else row.kept,
            None if math.isnan(row.entropy_nats) else row.entropy_nats,
        ]
        for row in d.rows
    ]
    return [
        Code(d.prompt, caption=t("Prompt", "提示词")),
        Text(t("Settings: ", "设置：") + asked),
        Table(
            [
                Column(t("dialect", "方言")),
                Column(t("chain", "处理链"), wrap=True),
                Column(t("kept", "保留")),
                Column(t("entropy", "熵"), "nat", ".3f"),
            ],
            rows,
            caption=t("Order of the stages, and what they leave", "各阶段的顺序与剩余候选"),
        ),
        Table(
            [Column(t("token", "token")), *(Column(name, format="percent") for name in d.probabilities)],
            [
                [shorten(visible(token), 16), *(values[i] or None for values in d.probabilities.values())]
                for i, token in enumerate(d.tokens)
            ],
            caption=t("Probability each would draw with", "各自抽样时的概率"),
            note=t("– : removed, or not among the 50 most probable.", "–：已被去掉，或不在最可能的 50 个之中。"),
        ),
    ]
