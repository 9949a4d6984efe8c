"""The report: the article, figure by figure, with what each one shows and the command that makes it again.

Read next: `trace.py`, `kv.py`, `sampler.py`, `compare.py`, whose blocks it is put together from.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from cutaway.experiments.report import Report
from cutaway.render.document import Block, Cell, Code, Column, Document, Heading, Language, Table, Text
from cutaway.render.numbers import number, size
from cutaway.render.views import compare as compare_view
from cutaway.render.views import kv, sampler
from cutaway.render.views import trace as trace_view
from cutaway.render.words import chosen

__all__ = ["report"]

Say = Callable[[str, str], str]


def report(r: Report, language: Language = "en") -> Document:
    """The whole report as a document."""
    t = chosen(language)
    blocks: list[Block] = [
        _opening(r, t),
        Code(r.prompt, caption=t("The prompt", "提示词")),
        *_found(r, t),
        Heading(t("One forward pass", "一次前向计算")),
        *_forward(r, t, language),
        Heading(t("How the answer forms, layer by layer", "答案如何逐层形成")),
        *_layers(r, t, language),
        Heading(t("What the KV cache takes", "KV cache 占多少内存")),
        *kv.plan_blocks(r.plan, language),
        _again(r, "plan", t),
        Heading(t("What the KV cache saves", "KV cache 省了什么")),
        *kv.bench_blocks(r.bench, language),
        _again(r, "bench", t),
        Heading(t("What a smaller KV cache costs", "更小的 KV cache 的代价")),
        Text(
            t(
                "Keys and values can be stored in fewer bits. The text here is the prompt and the model's own greedy "
                "continuation.",
                "键和值可以用更少的位来存。这里用的文本是提示词加模型自己的贪心续写。",
            )
        ),
        *kv.quality_blocks(r.quality, language),
        _again(r, "quality", t),
        Heading(t("Greedy decoding repeats itself exactly", "贪心解码可精确重现")),
        *_greedy(r, t),
        Heading(t("How each token was chosen", "每个 token 是怎样选出来的")),
        *_sampled(r, t, language),
        Heading(t("What the temperature does", "温度的作用")),
        *_temperatures(r, t, language),
        Heading(t("The same settings in other engines", "同样的设置在其他引擎中")),
        Text(
            t(
                "Temperature, top-p and min-p do not commute: an engine that cuts before it scales keeps fewer tokens "
                "than one that scales first, from the same numbers.",
                "温度、top-p 与 min-p 的次序不能交换：先截断后缩放的引擎，"
                "用同样的数值会比先缩放后截断的引擎保留更少的 token。",
            )
        ),
        *sampler.dialects_blocks(r.dialects, language),
        _again(r, "dialects", t),
    ]
    if r.comparison is not None:
        blocks += [
            Heading(t("With and without the chat template", "有无对话模板")),
            Text(
                t(
                    "An instruct model was trained on text in its template. Given the bare prompt it continues the "
                    "text instead of answering, as a base model does.",
                    "指令模型是在模板格式的文本上训练的。只给它裸提示词，它会像基座模型一样续写，而不是回答。",
                )
            ),
            *map(_lower, compare_view.compare(r.comparison, language=language).blocks),
            _again(r, "compare", t),
        ]
    blocks += [Heading(t("The machine", "机器")), _machine(r, t)]
    title = t("A model with its side cut open: {}", "剖开一个模型：{}").format(r.model.name)
    return Document(title, blocks, f"{r.machine.processor}, {r.made}", language)


def _lower(block: Block) -> Block:
    """A heading of another document, one level down."""
    return replace(block, level=block.level + 1) if isinstance(block, Heading) else block


def _again(r: Report, part: str, t: Say) -> Code:
    return Code(r.commands[part], "sh", t("The command that makes this again", "重做这一部分的命令"))


def _opening(r: Report, t: Say) -> Text:
    text = t(
        "Every number below was measured or counted on this machine in one run of {}; each part ends with the command "
        "that makes it again.",
        "下面的每个数字都是在本机上用 {} 的一次运行测得或数出的；每一部分的结尾都有重做它的命令。",
    )
    return Text(text.format(number(r.seconds, "seconds")))


def _found(r: Report, t: Say) -> list[Block]:
    """The findings in one table."""
    p, b, first, last = r.plan, r.bench, r.bench.rows[0], r.bench.rows[-1]
    cold, hot = r.temperatures.rows[0], r.temperatures.rows[-1]
    grows = t("{:.3g} times at {} tokens, {:.3g} times at {}", "{1} 个 token 时 {0:.3g} 倍，{3} 个时 {2:.3g} 倍")
    rows: list[list[Cell]] = [
        [
            t("layers, all of one shape", "层数，各层形状相同"),
            f"{r.model.num_layers} x (1, {len(r.trace.ids)}, {r.model.hidden})",
        ],
        [t("KV cache of a token", "每个 token 的 KV cache"), size(p.bytes_per_token)],
        [t("KV cache of {:,} tokens", "{:,} 个 token 的 KV cache").format(p.context), size(p.kv_bytes)],
        [
            t("time without the cache against with it", "无缓存与有缓存的耗时之比"),
            grows.format(first.ratio, first.length, last.ratio, last.length),
        ],
        [t("the same tokens with and without", "有无缓存 token 相同"), t("yes", "是") if b.same else t("NO", "否")],
        [
            t("greedy text the same in {} runs", "{} 次贪心运行文本相同").format(r.stability.runs),
            t("yes", "是") if r.stability.same else t("NO", "否"),
        ],
        [
            t("entropy at T = {:g} and {:g}", "T = {:g} 与 {:g} 的熵").format(cold.temperature, hot.temperature),
            f"{cold.entropy_nats:.2f} / {hot.entropy_nats:.2f} nat",
        ],
        [
            t("different 2-grams there", "其不同 2 元组占比"),
            f"{number(cold.distinct_2, '.2f')} / {number(hot.distinct_2, '.2f')}",
        ],
        [
            t("prefill and decode", "prefill 与 decode"),
            f"{b.rates.prefill_tokens_s:,.0f} / {number(b.rates.decode_tokens_s, ',.1f')} token/s",
        ],
    ]
    return [
        Table(
            [Column(t("finding", "结果"), wrap=True), Column(t("value", "数值"), wrap=True)],
            rows,
            t("In short", "概要"),
        )
    ]


def _forward(r: Report, t: Say, language: Language) -> list[Block]:
    m, n = r.model, len(r.trace.ids)
    shapes: list[list[Cell]] = [
        [t("token ids", "token 编号"), f"(1, {n})"],
        [t("embedding", "嵌入"), f"(1, {n}, {m.hidden})"],
        [t("after each of {} layers", "{} 层中每一层之后").format(m.num_layers), f"(1, {n}, {m.hidden})"],
        [t("queries", "查询 Q"), f"(1, {m.num_heads}, {n}, {m.head_dim})"],
        [t("keys, values", "键 K、值 V"), f"(1, {m.num_kv_heads}, {n}, {m.head_dim})"],
        ["logits", f"(1, {n}, {m.vocab})"],
    ]
    return [
        Text(
            t(
                "The prompt becomes token ids, each id a vector of {} numbers. Every layer gives back a tensor of the "
                "shape it was given; only the last step widens it to one number for each of the {:,} tokens.",
                "提示词先变成 token 编号，每个编号取出一个 {} 维向量。每一层的输出与输入形状相同；"
                "只有最后一步把它变成 {:,} 个 token 各一个分数。",
            ).format(m.hidden, m.vocab)
        ),
        trace_view.prompt_tokens(r.trace, language=language),
        Table([Column(t("tensor", "张量")), Column(t("shape", "形状"))], shapes, t("Shapes", "形状")),
        trace_view.shape_table(r.trace.table, language=language),
        Text(
            t(
                "What it costs: weights are read once a pass however many tokens it computes, so a prompt of many "
                "tokens is bound by arithmetic and a single token by memory.",
                "代价：一次前向不论计算多少 token，权重只读一遍；因此长提示词受算力限制，单个 token 受内存带宽限制。",
            )
        ),
        trace_view.cost_table(r.trace.table, language=language),
        trace_view.share_plot(r.trace.table, language=language),
        trace_view.next_tokens(r.trace, language=language),
        _again(r, "trace", t),
    ]


def _layers(r: Report, t: Say, language: Language) -> list[Block]:
    return [
        trace_view.residual_plot(r.trace, language=language),
        Text(
            t(
                "The logit lens reads the residual stream after every half layer as if it were the last: which token "
                "would the model say if it stopped there?",
                "logit lens 把每半层之后的残差流当作最后一层来读：如果模型在这里停下，它会说哪个 token？",
            )
        ),
        *trace_view.lens_blocks(r.trace, language=language),
        Text(
            t(
                "Attention of two heads. Most of the weight often rests on the first token, a resting place that says "
                "little; hide its column to see the rest.",
                "两个注意力头的权重。大部分权重常常停在第一个 token 上，"
                "那只是一个没有多少含义的停靠点；隐藏它那一列即可看清其余部分。",
            )
        ),
        *trace_view.attention_maps(r.trace, language=language),
    ]


def _greedy(r: Report, t: Say) -> list[Block]:
    s = r.stability
    if s.same:
        text = t(
            "{} greedy runs gave the same {} tokens: nothing is drawn, and the sums are added in a fixed order.",
            "{} 次贪心运行得到了相同的 {} 个 token：没有随机抽取，求和的次序也固定不变。",
        )
        first: Block = Text(text.format(s.runs, s.tokens))
    else:
        first = Text(t("The greedy runs differ. This must not happen.", "贪心运行的结果不同。这不应发生。"), "warning")
    return [first, Code(s.text, caption=t("The text", "文本")), _again(r, "greedy", t)]


def _sampled(r: Report, t: Say, language: Language) -> list[Block]:
    blocks = sampler.sampled_blocks(r.sampled, language, steps=3)
    return [*blocks, _again(r, "sampled", t)]


def _temperatures(r: Report, t: Say, language: Language) -> list[Block]:
    cold, hot = r.temperatures.rows[0], r.temperatures.rows[-1]
    text = t(
        "At T = {:g} the model takes its most probable token in {} of the steps and the distribution it draws from has "
        "an entropy of {:.2f} nat; at T = {:g} it is {} and {:.2f} nat.",
        "T = {:g} 时，{} 的步取了最可能的 token，抽样分布的熵为 {:.2f} nat；T = {:g} 时分别为 {} 与 {:.2f} nat。",
    ).format(
        cold.temperature,
        number(cold.greedy_share, "percent"),
        cold.entropy_nats,
        hot.temperature,
        number(hot.greedy_share, "percent"),
        hot.entropy_nats,
    )
    return [*sampler.temperatures_blocks(r.temperatures, language), Text(text), _again(r, "temperatures", t)]


def _machine(r: Report, t: Say) -> Table:
    m = r.machine
    versions: list[list[Cell]] = [[name, version] for name, version in m.versions.items()]
    rows: list[list[Cell]] = [
        [t("processor", "处理器"), m.processor],
        [t("threads", "线程"), m.threads],
        [t("memory", "内存"), number(m.memory.total_bytes, "bytes")],
        [t("memory available", "可用内存"), number(m.memory.available_bytes, "bytes")],
        [t("system", "系统"), m.system],
        ["Python", m.python],
        ["Cutaway", m.cutaway],
        *versions,
        [t("model", "模型"), f"{r.model.name}: {', '.join(r.model.files)}"],
        [t("parameters", "参数量"), f"{r.model.params:,}"],
        [t("weights", "权重"), size(r.model.nbytes)],
        [t("seed", "随机种子"), r.settings.seed],
    ]
    return Table([Column(t("what", "项目")), Column(t("value", "值"), wrap=True)], rows)
