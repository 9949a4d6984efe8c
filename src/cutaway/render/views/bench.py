"""The benchmark, shown: llama-bench's table and its machine formats, with what llama-bench leaves out.

Read next: `profile.py`.
"""

from __future__ import annotations

import csv as csv_module
import io
import json
from collections.abc import Sequence
from typing import Any

from cutaway.experiments.bench import Bench, BenchRow
from cutaway.render.document import Block, Cell, Column, Document, Language, Table, Text
from cutaway.render.json import plain
from cutaway.render.numbers import size
from cutaway.render.words import chosen

__all__ = ["bench", "csv", "jsonl"]


def bench(result: Bench, language: Language = "en", compact: bool = False) -> Document:
    """The rates under llama-bench's column names, and the rest beside them.

    `compact` leaves out the columns that are alike in every row: the model stands above the table.
    """
    t = chosen(language)
    about = t(
        "Timed like llama-bench: the forward pass alone, {} repetitions, mean ± standard deviation; {}. Tokenising and "
        "sampling are not in these rates; their times stand below. The tokens before a test (@ d) are computed outside "
        "the clock.",
        "计时方式与 llama-bench 相同：只计前向计算，重复 {} 次，平均值 ± 标准差；{}。速率不含分词与采样，其耗时见下表。"
        "测试之前的 token（@ d）在计时之外计算。",
    ).format(
        result.repetitions,
        t("a warm-up went before", "之前有一次预热") if result.warm_up else t("without a warm-up", "没有预热"),
    )
    blocks: list[Block] = [_rates(result.rows, language, compact), Text(about, "note"), _rest(result.rows, language)]
    return Document(
        "Benchmark" if language == "en" else "基准测试", blocks, f"{_model_line(result)}{result.cpu_info}", language
    )


def _model_line(result: Bench) -> str:
    model, held, params, backend = _model(result.rows[0])
    return f"{result.model} ({model}, {held}, {params} parameters, {backend}), "


def _rates(rows: Sequence[BenchRow], language: Language, compact: bool) -> Table:
    optional = [  # shown where they vary or are not what they are by default
        ("n_batch", "n_batch", 2048),
        ("n_ubatch", "n_ubatch", 512),
        ("type_k", "type_k", "f16"),
        ("type_v", "type_v", "f16"),
        ("head_top_k", "head", None),
    ]
    shown = [(name, title) for name, title, usual in optional if any(getattr(row, name) != usual for row in rows)]
    columns: list[Column | str] = [] if compact else [Column("model", wrap=True), "size", "params", "backend"]
    columns += ["threads", *(title for _, title in shown), "test", "t/s"]
    columns.append(Column(chosen(language)("of bandwidth", "占带宽"), "%", ".1f"))
    return Table(
        columns,
        [
            [*([] if compact else _model(row)), row.n_threads, *(_option(row, name) for name, _ in shown), *_rate(row)]
            for row in rows
        ],
    )


def _model(row: BenchRow) -> list[Cell]:
    params = f"{row.model_n_params / 1e9:.2f} B" if row.model_n_params >= 1e9 else f"{row.model_n_params / 1e6:.2f} M"
    return [row.model_type, size(row.model_size), params, row.backends]


def _option(row: BenchRow, name: str) -> Cell:
    if name == "head_top_k":
        return "all" if row.head_top_k is None else f"top {row.head_top_k}"
    value: Cell = getattr(row, name)
    return value


def _rate(row: BenchRow) -> list[Cell]:
    return [row.test, f"{row.avg_ts:.2f} ± {row.stddev_ts:.2f}", row.bandwidth_percent]


def _rest(rows: Sequence[BenchRow], language: Language) -> Table:
    t = chosen(language)
    bandwidths = sorted({(row.n_threads, row.bandwidth_bytes_s) for row in rows})
    return Table(
        [
            "test",
            "threads",
            Column(t("time", "耗时"), format="seconds"),
            Column(t("bytes a token", "每 token 字节"), format="bytes"),
            Column(t("tokenising", "分词"), format="seconds"),
            Column(t("sampling a token", "采样一个 token"), format="seconds"),
        ],
        [
            [row.test, row.n_threads, row.avg_ns / 1e9, row.bytes_per_token, row.tokenize_s, row.sample_s]
            for row in rows
        ],
        caption=t("What llama-bench leaves out", "llama-bench 未包含的部分"),
        note=t(
            "Bytes are weights and KV cache, each read once in a step. Memory read bandwidth measured in this run: {}. "
            "Tokenising: a text as long as the prompt; sampling: greedy.",
            "字节数为权重与 KV cache，每步各读一次。本次运行测得的内存读带宽：{}。"
            "分词：与提示词等长的文本；采样：贪心。",
        ).format(
            ", ".join(
                t("{1:.1f} GB/s by {0} thread(s)", "{0} 线程 {1:.1f} GB/s").format(n, b / 1e9) for n, b in bandwidths
            )
        ),
    )


def jsonl(result: Bench) -> str:
    """One JSON object a line, a test each."""
    return "".join(json.dumps(plain(row), allow_nan=False) + "\n" for row in result.rows)


def csv(result: Bench) -> str:
    """Comma-separated values with a heading; lists of samples are left to JSON."""
    out = io.StringIO()
    names = [name for name in BenchRow.__dataclass_fields__ if not name.startswith("samples_")]
    writer = csv_module.writer(out, quoting=csv_module.QUOTE_ALL, lineterminator="\n")
    writer.writerow(names)
    for row in result.rows:
        writer.writerow([_flat(getattr(row, name)) for name in names])
    return out.getvalue()


def _flat(value: Any) -> Any:
    if isinstance(value, bool):
        return int(value)
    return "" if value is None else value
