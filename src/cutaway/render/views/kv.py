"""The KV cache, shown: the plan, the cache on and off, the types compared. Read next: `sampler.py`."""

from __future__ import annotations

from collections.abc import Callable

from cutaway.experiments.kv import KVPlan
from cutaway.experiments.kv_bench import KVBench
from cutaway.experiments.kv_quality import KVQuality
from cutaway.render.document import (
    BarPlot,
    Block,
    Code,
    Column,
    Document,
    Language,
    LinePlot,
    Series,
    Table,
    Text,
)
from cutaway.render.numbers import number, size
from cutaway.render.words import chosen

__all__ = ["bench", "bench_blocks", "plan", "plan_blocks", "quality", "quality_blocks"]


def plan(result: KVPlan, language: Language = "en") -> Document:
    """Memory of a model at a context length."""
    t = chosen(language)
    title = t("Memory for a context of {:,} tokens", "{:,} 个 token 的上下文需要多少内存").format(result.context)
    return Document(title, plan_blocks(result, language), result.model, language)


def plan_blocks(p: KVPlan, language: Language = "en") -> list[Block]:
    t = chosen(language)
    available = p.memory.available_bytes
    rows: list[list[str | int | float | None]] = [
        [t("weights", "权重"), p.weights_bytes, t("as the file holds them", "与文件中相同")],
        ["KV cache", p.kv_bytes, f"{p.allocated_tokens:,} x {p.bytes_per_token:,} B"],
        [t("scratch", "临时缓冲"), p.scratch_bytes, _scratch(p, t)],
        [t("total", "合计"), p.total_bytes, None],
    ]
    if available is not None:
        rows.append([t("available", "可用内存"), available, p.memory.source])
    blocks: list[Block] = [
        Text(
            t(
                "Every token keeps one key and one value in every layer, for every key/value head: "
                "layers x key/value heads x head_dim x (bytes of a key value + of a value value).",
                "每个 token 在每一层、每个键值头上各保存一个键向量和一个值向量："
                "层数 x 键值头数 x head_dim x（键的字节数 + 值的字节数）。",
            )
        ),
        Code(f"{p.formula} = {size(p.bytes_per_token)}", caption=t("Bytes a token", "每个 token 的字节数")),
        Table(
            [Column(t("part", "部分")), Column(t("size", "大小"), format="bytes"), Column(t("how", "说明"), wrap=True)],
            rows,
            caption=t("Memory", "内存"),
            strong=frozenset({3}),
        ),
    ]
    if p.fits is False:
        blocks.append(Text(t("This does not fit the memory available.", "可用内存不足。"), "warning"))
    if p.fits_tokens is not None:
        fits = t(
            "{:,} tokens would fit the memory available; the model was trained for {:,}.",
            "可用内存最多容纳 {:,} 个 token；模型训练时的上下文为 {:,}。",
        )
        blocks.append(Text(fits.format(p.fits_tokens, p.trained_context)))
    blocks += [_variants(p, language), _variant_plot(p, language)]
    if p.num_heads != p.num_kv_heads:
        blocks.append(Text(_gqa(p, language), "note"))
    return blocks


def _scratch(p: KVPlan, t: Callable[[str, str], str]) -> str:
    if p.scratch_estimated:
        return t("one step's tensors, estimated", "一步计算的张量（估计）")
    return t("one step's tensors, allocated", "一步计算的张量（已分配）")


def _variants(p: KVPlan, language: Language) -> Table:
    t = chosen(language)
    return Table(
        [
            Column(t("stored as", "存储方式")),
            Column(t("heads", "键值头")),
            Column(t("a token", "每 token"), format="bytes"),
            Column(t("in all", "总计"), format="bytes"),
            Column(t("ratio", "倍数"), format=".3g"),
            Column(t("formula", "公式"), wrap=True),
        ],
        [[v.name, v.num_kv_heads, v.bytes_per_token, v.nbytes, v.ratio, v.formula] for v in p.variants],
        caption=t("The same context, stored otherwise", "同样的上下文，换一种存法"),
        strong=frozenset(i for i, v in enumerate(p.variants) if (v.k_type, v.v_type, v.num_kv_heads) == _own(p)),
    )


def _own(p: KVPlan) -> tuple[str, str, int]:
    return (p.k_type, p.v_type, p.num_kv_heads)


def _variant_plot(p: KVPlan, language: Language) -> BarPlot:
    t = chosen(language)
    names = [v.name for v in p.variants]
    return BarPlot(
        t("Weights and KV cache", "权重与 KV cache"),
        t("memory", "内存"),
        names,
        [
            Series(t("weights", "权重"), [float(p.weights_bytes)] * len(names)),
            Series("KV cache", [float(v.nbytes) for v in p.variants]),
        ],
        format="bytes",
        stacked=True,
    )


def _gqa(p: KVPlan, language: Language) -> str:
    """What one key/value head a query head (MHA) would take, in units that are named."""
    mha = next(v for v in p.variants if v.num_kv_heads == p.num_heads and v.name.startswith("MHA"))
    mib, gib, gb = mha.nbytes / 2**20, mha.nbytes / 2**30, mha.nbytes / 1e9
    text = chosen(language)(
        "{heads} query heads share {kv} key/value heads (GQA). With one key/value head a query head (MHA) the KV cache "
        "would be {ratio:g} times as large: {mib:,.0f} MiB = {gib:.4g} GiB = {gb:.3g} GB. (Dividing the MiB by 1000 "
        "gives {mixed:.1f}, which is neither GiB nor GB.)",
        "{heads} 个查询头共用 {kv} 个键值头（GQA）。若每个查询头都有自己的键值头（MHA），KV cache 会大到 {ratio:g} 倍："
        "{mib:,.0f} MiB = {gib:.4g} GiB = {gb:.3g} GB。（把 MiB 数除以 1000 得 {mixed:.1f}，那既不是 GiB 也不是 GB。）",
    )
    ratio = p.num_heads / p.num_kv_heads
    return text.format(
        heads=p.num_heads, kv=p.num_kv_heads, ratio=ratio, mib=mib, gib=gib, gb=gb, mixed=int(mib / 100 + 0.5) / 10
    )


# -- on and off -------------------------------------------------------------------------------------------------------


def bench(result: KVBench, language: Language = "en") -> Document:
    """The same greedy text with the KV cache on and off."""
    title = chosen(language)("The KV cache on and off", "开启与关闭 KV cache")
    return Document(title, bench_blocks(result, language), result.model, language)


def bench_blocks(b: KVBench, language: Language = "en") -> list[Block]:
    t = chosen(language)
    estimated = any(row.off_estimated for row in b.rows)
    columns = [
        Column(t("tokens", "token 数")),
        Column(t("cache on", "开启"), format="seconds"),
        Column(t("cache off", "关闭"), format="seconds"),
        Column(t("off / on", "关闭/开启"), format=".3g"),
        Column(t("last step on", "末步 开启"), format="seconds"),
        Column(t("last step off", "末步 关闭"), format="seconds"),
    ]
    rows = [[r.length, r.on_s, r.off_s, r.ratio, r.on_step_s, r.off_step_s] for r in b.rows]
    note = ""
    if estimated:
        note = t(
            "Without the cache {} of {} steps were run; the time of the others is interpolated between them.",
            "关闭缓存时实际运行了 {} / {} 步，其余各步的时间由插值得到。",
        ).format(len(b.off_measured), len(b.off_step_s))
    lengths = [float(r.length) for r in b.rows]
    blocks: list[Block] = [
        Text(
            t(
                "The same greedy text twice: once each step computes the new token only, once it computes every token "
                "from the first on, through the same kernels.",
                "同一段贪心生成的文本跑两遍：一遍每步只计算新 token，"
                "另一遍每步都从第一个 token 重新算起，使用同样的内核。",
            )
        ),
        _same(b, language),
        Table(columns, rows, caption=t("Time to generate", "生成耗时"), note=note),
        LinePlot(
            t("Total time", "总耗时"),
            t("generated tokens", "生成的 token 数"),
            t("time", "时间"),
            [
                Series(t("cache on", "开启缓存"), [r.on_s for r in b.rows], lengths),
                Series(t("cache off", "关闭缓存"), [r.off_s for r in b.rows], lengths),
            ],
            y_unit="s",
        ),
        _step_plot(b, language),
        _work(b, language),
        Text(
            t(
                "Why the gap grows: a step with the cache computes one token, whatever came before; a step without it "
                "computes all of them. Summed over n steps that is n against n x n / 2.",
                "差距为何越来越大：有缓存时一步只算一个 token，与前文长短无关；"
                "没有缓存时一步要算全部 token。n 步加起来就是 n 对 n x n / 2。",
            )
        ),
        Text(
            t(
                "Why Q is not cached: a token's query is used in the one step that computes the token. Its key and its "
                "value are asked for again by every token that follows.",
                "为什么不缓存 Q：一个 token 的查询向量只在计算它自己的那一步用到；"
                "它的键和值则会被之后的每个 token 再次用到。",
            )
        ),
        _rates(b, language),
        Code(b.text, caption=t("The text", "生成的文本")),
    ]
    return blocks


def _same(b: KVBench, language: Language) -> Text:
    t = chosen(language)
    if b.same:
        text = t(
            "The tokens are the same: all {} steps that were run without the cache chose the token chosen with it.",
            "两遍的 token 完全相同：关闭缓存实际运行的 {} 步，每步都选中了与开启缓存时相同的 token。",
        )
        return Text(text.format(b.steps_compared))
    return Text(
        t("The tokens differ. This must not happen (law 1).", "两遍的 token 不同。这不应发生（定律 1）。"), "warning"
    )


def _step_plot(b: KVBench, language: Language) -> LinePlot:
    """Time a token against length, thinned to about 60 points; the first step is the prompt and is left out."""
    t = chosen(language)
    total = len(b.on_step_s)
    width = max(1, total // 60)
    starts = range(1, total, width)

    def thin(values: tuple[float, ...]) -> list[float | None]:
        return [1000 * sorted(values[i : i + width])[len(values[i : i + width]) // 2] for i in starts]

    xs = [float(i + 1) for i in starts]
    return LinePlot(
        t("Time per token", "每个 token 的耗时"),
        t("generated tokens so far", "已生成的 token 数"),
        t("time of the step", "该步耗时"),
        [
            Series(t("cache on", "开启缓存"), thin(b.on_step_s), xs),
            Series(t("cache off", "关闭缓存"), thin(b.off_step_s), xs),
        ],
        y_unit="ms",
    )


def _work(b: KVBench, language: Language) -> Table:
    t = chosen(language)
    return Table(
        [
            Column(t("context", "上下文")),
            Column(t("cache", "缓存")),
            Column(t("tokens computed", "计算的 token")),
            Column(t("work", "计算量"), "GFLOP", ".3f"),
            Column(t("weights read", "读取权重"), format="bytes"),
            Column(t("KV cache", "KV cache"), format="bytes"),
        ],
        [
            [
                w.context,
                t("on", "开启") if w.cached else t("off", "关闭"),
                w.num_tokens,
                w.flops / 1e9,
                w.weight_bytes,
                w.kv_bytes,
            ]
            for w in b.work
        ],
        caption=t("One step, counted from the Program", "一步的工作量（由 Program 计数得到）"),
        note=t("A multiply-add counts as two.", "一次乘加计为两次运算。"),
    )


def _rates(b: KVBench, language: Language) -> Table:
    t = chosen(language)
    r = b.rates
    return Table(
        [
            Column(t("phase", "阶段")),
            Column("token"),
            Column(t("rate", "速率"), "token/s", ",.1f"),
            Column(t("what", "说明"), wrap=True),
        ],
        [
            [
                "prefill",
                r.prompt_tokens,
                r.prefill_tokens_s,
                t("the prompt, up to the first token: ", "提示词，直到第一个 token：")
                + number(r.first_token_s, "seconds"),
            ],
            ["decode", r.decode_tokens, r.decode_tokens_s, t("after the first token", "第一个 token 之后")],
        ],
        caption=t("Prefill and decode, apart (cache on)", "prefill 与 decode 分开计（开启缓存）"),
        note=t(
            "A warm-up came before and is not counted; no prefix was found in a cache.",
            "之前有一次不计入的预热；没有命中前缀缓存。",
        ),
    )


# -- types compared ---------------------------------------------------------------------------------------------------


def quality(result: KVQuality, language: Language = "en") -> Document:
    """KV cache types against float32."""
    title = chosen(language)("What a smaller KV cache costs", "更小的 KV cache 的代价")
    return Document(title, quality_blocks(result, language), result.model, language)


def quality_blocks(q: KVQuality, language: Language = "en") -> list[Block]:
    t = chosen(language)
    names = [f"{r.k_type} / {r.v_type}" for r in q.rows]
    rows = [
        [
            name,
            r.bytes_per_token,
            1 / r.decode_s if r.decode_s > 0 else None,
            r.perplexity,
            r.kl_mean,
            r.kl_999,
            r.same_top,
        ]
        for name, r in zip(names, q.rows, strict=True)
    ]
    layers = [float(i) for i in range(len(q.rows[0].layer_errors))]
    note = t(
        "{} tokens of text; KL divergence of the next-token distribution from float32 keys and values, in nats.",
        "共 {} 个 token 的文本；KL 散度是下一个 token 的分布相对于 float32 键值的散度，单位 nat。",
    ).format(q.num_tokens)
    if q.num_tokens < q.text_tokens:
        note += t(" The text has {}.", " 全文有 {} 个 token。").format(q.text_tokens)
    if q.activations == "int8":
        note += t(
            " Activations are rounded to int8 here, which turns the smallest change into a change of roundings; "
            "--activations f32 shows the KV cache alone.",
            " 此处激活值舍入为 int8，极小的变化也会改变舍入结果；用 --activations f32 可单独看 KV cache 的影响。",
        )
    shown = [(n, r) for n, r in zip(names, q.rows, strict=True) if (r.k_type, r.v_type) != ("f32", "f32")]
    return [
        Table(
            [
                Column(t("K / V", "K / V")),
                Column(t("a token", "每 token"), format="bytes"),
                Column(t("decode", "decode"), "token/s", ",.1f"),
                Column(t("perplexity", "困惑度"), format=".4f"),
                Column(t("KL mean", "KL 均值"), format=".2e"),
                Column("KL 99.9 %", format=".2e"),
                Column(t("same top", "首选相同"), format="percent"),
            ],
            rows,
            caption=t("Types of keys and values", "键与值的存储类型"),
            note=note,
        ),
        LinePlot(
            t("Error of each layer", "各层误差"),
            t("layer", "层"),
            t("relative error of the attention output", "注意力输出的相对误差"),
            [Series(n, [v if v > 0 else None for v in r.layer_errors], layers) for n, r in shown],
            y_log=True,
            note=t(
                "Every layer is given the residual of the float32 run, so each shows its own error only. Layers whose "
                "keys carry a large bias stand out where K is quantised.",
                "每一层都以 float32 运行的残差为输入，因此各层只显示自己的误差。"
                "键带有大偏置的层，在 K 被量化时会凸显出来。",
            ),
        ),
        BarPlot(
            t("Distance from float32", "与 float32 的距离"),
            t("mean KL divergence", "平均 KL 散度"),
            [n for n, _ in shown],
            [Series("KL", [r.kl_mean for _, r in shown])],
            unit="nat",
            format=".2g",
        ),
    ]
