"""What quantised arithmetic costs: divergence from the float32 forward of the same dequantised weights.

Cutaway (activations quantised to int8, as decoding does it) and llama.cpp run on the same file and the same token
ids; both are held against one reference that computes in float32 throughout: Cutaway's own float32 mode, or with
`--oracle transformers` an engine that shares no code with it. Names follow llama.cpp's perplexity tool.

    python benchmarks/quality.py --llama-python /path/to/python --oracle transformers

Read next: `engines.py`.
"""

from __future__ import annotations

import argparse
import datetime
import json
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import engines
import machine
import numpy as np
from engines import Contender, EngineError

MODELS = ("qwen2.5-coder-0.5b", "smollm2-135m")
LIMIT_KLD, LIMIT_TOP = 0.01, 0.95


# -- the arithmetic -----------------------------------------------------------------------------------------------


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """log p_i = x_i - max - log sum exp(x - max), over the last dimension, in float64."""
    x = logits.astype(np.float64)
    x -= x.max(axis=-1, keepdims=True)
    return x - np.log(np.exp(x).sum(axis=-1, keepdims=True))


@dataclass
class Divergence:
    """What one engine's distributions differ from the reference's, one value a position.

    `kld` [n] is KL(reference || engine) in nats, `same_top` [n] whether both put the same token first, `delta_p` and
    the two `log_p` [m] belong to the token that really came next (the last position of a window has none).
    """

    kld: np.ndarray
    same_top: np.ndarray
    delta_p: np.ndarray
    log_p: np.ndarray
    log_p_base: np.ndarray

    @classmethod
    def of(cls, base: np.ndarray, other: np.ndarray, ids: list[int]) -> Divergence:
        """base, other: logits [n, vocab]; ids [n] the tokens that were read."""
        kld, top, log_p, log_p_base = [], [], [], []
        for row in range(len(ids)):  # a row at a time: [n, vocab] in float64 would take gigabytes
            p, q = log_softmax(base[row]), log_softmax(other[row])
            kld.append(float(np.sum(np.exp(p) * (p - q))))
            top.append(bool(base[row].argmax() == other[row].argmax()))
            if row + 1 < len(ids):
                log_p_base.append(p[ids[row + 1]])
                log_p.append(q[ids[row + 1]])
        q_next, p_next = np.array(log_p), np.array(log_p_base)
        return cls(np.array(kld), np.array(top), np.exp(q_next) - np.exp(p_next), q_next, p_next)

    @classmethod
    def joined(cls, parts: list[Divergence]) -> Divergence:
        names = ("kld", "same_top", "delta_p", "log_p", "log_p_base")
        return cls(*(np.concatenate([getattr(part, name) for part in parts]) for name in names))

    def summary(self) -> dict[str, float]:
        return {
            "Mean PPL(Q)": float(np.exp(-self.log_p.mean())),
            "Mean PPL(base)": float(np.exp(-self.log_p_base.mean())),
            "Mean KLD": float(self.kld.mean()),
            "Mean KLD standard error": float(self.kld.std(ddof=1) / np.sqrt(len(self.kld))),
            "Median KLD": float(np.median(self.kld)),
            "99.0% KLD": float(np.quantile(self.kld, 0.99)),
            "Maximum KLD": float(self.kld.max()),
            "Mean Δp": float(self.delta_p.mean()),
            "RMS Δp": float(np.sqrt((self.delta_p**2).mean())),
            "Same top p": float(self.same_top.mean()),
            "positions": float(len(self.kld)),
        }


def windows(ids: list[int], count: int, length: int) -> list[list[int]]:
    """Windows of `length` ids, spread evenly over the text, `count` positions in all."""
    pieces = []
    remaining = count
    number = -(-count // length)
    stride = max(length, (len(ids) - length) // max(1, number))
    for index in range(number):
        start = index * stride
        piece = ids[start : start + min(length, remaining)]
        if len(piece) < min(length, remaining):
            raise SystemExit(f"the text has only {len(ids)} tokens: too few for {count} positions (--text)")
        pieces.append(piece)
        remaining -= len(piece)
    return pieces


# -- the engines --------------------------------------------------------------------------------------------------


def start(name: str, args: argparse.Namespace, path: str) -> tuple[str, Contender]:
    """Start and load one engine by its label here; gives back its version too."""
    common: dict[str, Any] = {"path": path, "threads": args.threads}
    room = args.window + 64
    if name.startswith("cutaway"):
        worker = engines.start("cutaway", args)
        exact = name.endswith("f32")
        options = {"activations": "f32", "kv_type": "f32"} if exact else {"activations": "int8", "kv_type": "f16"}
        answer = worker.ask("load", **common, max_context=room, **options)
        return answer["version"], Contender(name, "cutaway", worker)
    if name.startswith("llama.cpp"):
        worker = engines.start("llama.cpp", args)
        answer = worker.ask("load", **common, max_context=(room + 255) // 256 * 256)
        return answer["version"], Contender(name, "llama.cpp", worker, {"flash": name.endswith("on")})
    worker = engines.start("transformers", args)
    answer = worker.ask("load", **common, dtype="float32", attention="eager")
    return answer["version"], Contender(name, "transformers", worker)


def logits(one: Contender, ids: list[int], folder: Path) -> np.ndarray:
    """Logits [n, vocab] of one window, memory-mapped from a file the worker wrote."""
    path = folder / f"{one.label.replace(' ', '-')}.npy"
    one.ask("logits", ids=ids, save=str(path))
    found: np.ndarray = np.load(path, mmap_mode="r")
    return found


def compare(name: str, args: argparse.Namespace, text: str) -> dict[str, Any]:
    """One model: every engine against the reference, over the same positions."""
    path = engines.model_path(name)
    base_name = "cutaway f32" if args.oracle == "cutaway" else "transformers f32"
    labels = ["cutaway int8", "llama.cpp fa off", "llama.cpp fa on"]
    if args.oracle == "transformers":
        labels.append("cutaway f32")  # the engine's own exact mode, held against the independent one
    versions: dict[str, str] = {}
    failures: dict[str, str] = {}
    contenders: list[Contender] = []
    for label in [base_name, *labels]:
        if label.split()[0].replace(".cpp", "") in args.skip:
            continue
        engines.progress(f"{name}: loading {label}")
        try:
            versions[label], one = start(label, args, path)
            contenders.append(one)
        except EngineError as error:
            failures[label] = str(error)
            if label == base_name:
                raise SystemExit(f"the reference could not be loaded: {error}") from None
    base, others = contenders[0], contenders[1:]
    tokenizer = next(one for one in contenders if one.engine != "transformers")
    ids = list(tokenizer.worker.ask("tokenize", text=text[: 40 * args.positions])["ids"])
    parts: dict[str, list[Divergence]] = {one.label: [] for one in others}
    try:
        with tempfile.TemporaryDirectory() as folder:
            for number, window in enumerate(windows(ids, args.positions, args.window)):
                engines.progress(f"{name}: window {number + 1}, {base.label}")
                exact = logits(base, window, Path(folder))
                for one in others:
                    engines.progress(f"{name}: window {number + 1}, {one.label}")
                    if one.label in failures:
                        continue
                    try:
                        found = logits(one, window, Path(folder))
                    except EngineError as error:
                        failures[one.label] = str(error)
                        continue
                    width = min(exact.shape[1], found.shape[1])
                    parts[one.label].append(Divergence.of(exact[:, :width], found[:, :width], window))
    finally:
        for one in contenders:
            one.worker.close()
    joined = {label: Divergence.joined(found) for label, found in parts.items() if found and label not in failures}
    result: dict[str, Any] = {
        "base": base_name,
        "versions": versions,
        "failures": failures,
        "summary": {label: found.summary() for label, found in joined.items()},
        "kld": {label: found.kld.tolist() for label, found in joined.items()},
    }
    ours = joined.get("cutaway int8")
    peers = {label: found for label, found in joined.items() if label.startswith("llama.cpp")}
    if ours is not None:
        result["within_limits"] = bool(ours.kld.mean() < LIMIT_KLD and ours.same_top.mean() >= LIMIT_TOP)
    if ours is not None and peers:
        best = min(peers, key=lambda label: float(peers[label].kld.mean()))
        difference = ours.kld - peers[best].kld
        result["against"] = best
        result["difference"] = float(difference.mean())
        result["difference_standard_error"] = float(difference.std(ddof=1) / np.sqrt(len(difference)))
    return result


# -- the table ----------------------------------------------------------------------------------------------------


def _cell(name: str, value: float) -> str:
    if name in ("Same top p",):
        return f"{value:.2%}"
    if name == "positions":
        return f"{value:.0f}"
    if "PPL" in name:
        return f"{value:.4f}"
    return f"{value:.3e}" if abs(value) < 1e-3 else f"{value:.5f}"


def render(saved: dict[str, Any]) -> str:
    lines = [machine.markdown(saved["machine"]), ""]
    for model, held in saved["models"].items():
        lines += [f"## {model}: divergence from {held['base']}, same dequantised weights", ""]
        lines += [f"- {label}: {version}" for label, version in held["versions"].items()]
        summaries = held["summary"]
        if summaries:
            lines += ["", "| | " + " | ".join(summaries) + " |", "|---|" + "---|" * len(summaries)]
            for name in next(iter(summaries.values())):
                lines.append(f"| {name} | " + " | ".join(_cell(name, one[name]) for one in summaries.values()) + " |")
            lines.append("")
        if "within_limits" in held:
            verdict = "held" if held["within_limits"] else "**missed**"
            lines.append(f"- Cutaway int8 below {LIMIT_KLD} nats and same top ≥ {LIMIT_TOP:.0%}: {verdict}")
        if "difference" in held:
            mean, error = held["difference"], held["difference_standard_error"]
            word = "no worse" if mean <= 2 * error else "**worse**"
            lines.append(
                f"- mean KLD minus that of {held['against']}, position by position: {mean:+.2e} ± {error:.1e} "
                f"(standard error): {word}"
            )
        lines += [f"- not measured: {what}: {reason}" for what, reason in held["failures"].items()]
        lines.append("")
    settings = saved["settings"]
    lines.append(
        f"{settings['positions']} positions in windows of {settings['window']} tokens of {settings['text']}; "
        f"{saved['date']}. Perplexities compare only with one another."
    )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description="KL divergence from the float32 forward of the same weights")
    engines.shared_options(parser)
    parser.add_argument("--models", nargs="+", default=list(MODELS), help="catalogue names or GGUF files")
    parser.add_argument("--oracle", choices=["cutaway", "transformers"], default="cutaway")
    parser.add_argument("--positions", type=int, default=500)
    parser.add_argument("--window", type=int, default=125, help="tokens a window")
    parser.add_argument("--skip", nargs="+", default=[], choices=["cutaway", "llama"])
    args = parser.parse_args()
    text, source = engines.prompt_text(args.text)
    saved: dict[str, Any] = {
        "date": datetime.date.today().isoformat(),
        "machine": machine.describe(args.threads),
        "settings": {"positions": args.positions, "window": args.window, "text": source, "oracle": args.oracle},
        "models": {},
    }
    for name in args.models:
        saved["models"][Path(name).stem if name.endswith(".gguf") else name] = compare(name, args, text)
        engines.progress("")
        if args.output:
            Path(args.output).write_text(json.dumps(saved, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    print(json.dumps(saved, indent=1, ensure_ascii=False) if args.json else render(saved))


if __name__ == "__main__":
    main()
