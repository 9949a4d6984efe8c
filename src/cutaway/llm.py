"""The Python API: text in, text out.

    from cutaway import LLM

    llm = LLM("qwen2.5-coder-0.5b")
    print(llm.chat([{"role": "user", "content": "What is a Transformer?"}], max_tokens=64).text)

    for piece in llm.stream("The capital of France is", temperature=0.7, seed=1):
        print(piece, end="", flush=True)

`LLM` joins the rooms below: files to a checkpoint, the Program with an interpreter, an Engine, and text at both ends.
It decides nothing that an engine or a tokenizer could; what a finished answer says of itself is in `results.py`.
Read next: `forward/decoder.py`.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from os import PathLike
from typing import Any, cast

import numpy as np

from cutaway.config import ModelConfig
from cutaway.engine.engine import Engine, Interpreter
from cutaway.engine.kv_cache import KVCache
from cutaway.engine.sampling import SamplingParams
from cutaway.errors import RequestError, TemplateError
from cutaway.files import checkpoint as checkpoints
from cutaway.files import store
from cutaway.forward.decoder import decoder
from cutaway.forward.program import Program
from cutaway.forward.taps import Patch, Recording, Taps
from cutaway.results import Answer, Chunk, Result, Stats
from cutaway.text.chat import ChatTemplate
from cutaway.text.tokenizer import Tokenizer

__all__ = ["LLM", "Chunk", "Result", "SamplingParams", "Stats", "Stream"]

Messages = Sequence[Mapping[str, Any]]
Prompt = str | Sequence[int]

DEFAULT_MAX_CONTEXT = 4096
BLOCK_SIZE = 32


class LLM:
    """A model, ready to answer.

    `name` is a path, a catalogue name or a hub id (see `files/store.py`).
    `activations`: what meets quantised weights, "int8" (fast) or "f32" (no rounding of activations).
    `kv_type`, or `k_type` and `v_type` apart: "f16", "f32" or "q8_0".
    `max_context`: tokens one sequence may hold; None is 4,096, or less if the model was trained for less.
    `kv_tokens`: tokens the KV cache holds, for all sequences together; None is `max_context`.
    `interpreter`: "native" (C++ kernels) or "reference" (NumPy, the definition of every operation).

    Attributes: `name`, `config`, `checkpoint`, `program`, `interpreter`, `tokenizer`, `chat_template`, `engine`,
    `max_context`, `k_type`, `v_type`, `load_s`.

    Several threads may use one LLM; their sequences share steps. Taps are for one thread at a time.

    Raises: LoadError if there is no such model or its files are not sound; RequestError for an argument.
    """

    def __init__(
        self,
        name: str | PathLike[str] = "qwen2.5-coder-0.5b",
        *,
        activations: str = "int8",
        kv_type: str = "f16",
        k_type: str | None = None,
        v_type: str | None = None,
        threads: int | None = None,
        max_context: int | None = None,
        kv_tokens: int | None = None,
        max_seqs: int = 16,
        chunk: int = 256,
        prefix_cache: bool = True,
        kv_cache: bool = True,
        interpreter: str = "native",
    ) -> None:
        started = time.perf_counter()
        self.checkpoint = checkpoints.load(store.resolve(str(name)))
        self.name = self.checkpoint.name
        self.config: ModelConfig = self.checkpoint.config
        self.program: Program = decoder(self.config)
        self.max_context = min(self.config.max_context, DEFAULT_MAX_CONTEXT) if max_context is None else max_context
        self.k_type, self.v_type = k_type or kv_type, v_type or kv_type
        self.tokenizer = Tokenizer.from_vocabulary(self.checkpoint.vocabulary)
        self.chat_template = self.checkpoint.chat_template
        self._template = ChatTemplate(self.chat_template, self.tokenizer.special_tokens) if self.chat_template else None
        self.interpreter: Interpreter = self._interpreter(interpreter, activations, threads)
        self.engine = Engine(
            self.interpreter,
            self.config,
            max_context=self.max_context,
            num_blocks=-(-max(kv_tokens or 0, self.max_context) // BLOCK_SIZE),
            block_size=BLOCK_SIZE,
            k_type=self.k_type,
            v_type=self.v_type,
            eos_ids=self.checkpoint.eos_ids | self.tokenizer.eos_ids,
            chunk=chunk,
            max_seqs=max_seqs,
            prefix_cache=prefix_cache,
            kv_cache=kv_cache,
        )
        self._taps: Taps | None = None
        self._lock = threading.RLock()  # held by the thread that runs a step
        self._answers: dict[int, Answer] = {}  # those not finished, by sequence number
        self.load_s = time.perf_counter() - started

    def _interpreter(self, kind: str, activations: str, threads: int | None) -> Interpreter:
        if activations not in ("int8", "f32"):
            raise RequestError("activations", found=repr(activations), expected="int8 or f32", param="activations")
        weights = self.checkpoint.weights
        if kind == "reference":
            from cutaway.forward.reference import ReferenceProgram

            return ReferenceProgram(self.program, weights, activations)
        if kind == "native":
            from cutaway.forward.native import NativeProgram

            return NativeProgram(
                self.program, weights, activations=activations, threads=threads, max_context=self.max_context
            )
        raise RequestError("interpreter", found=repr(kind), expected="native or reference", param="interpreter")

    # -- answers ----------------------------------------------------------------------------------------------------

    def generate(
        self,
        prompt: Prompt | Sequence[Prompt],
        params: SamplingParams | None = None,
        *,
        record: bool = False,
        **settings: Any,
    ) -> Any:
        """Continue a prompt (text or token ids), or several at once.

        Settings are those of SamplingParams, by name or as `params` (names win). `record` keeps how each token was
        chosen. Gives a Result; with n > 1 a list of n of them; for a list of prompts a list with one entry each.
        """
        params = _params(params, settings)
        several = not isinstance(prompt, str) and len(prompt) > 0 and not _is_id(prompt[0])
        prompts = cast(Sequence[Prompt], prompt) if several else [cast(Prompt, prompt)]
        results = self._results([self._encoded(one) for one in prompts], params, record)
        return results if several else results[0]

    def chat(
        self,
        messages: Messages,
        params: SamplingParams | None = None,
        *,
        record: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **settings: Any,
    ) -> Any:
        """Answer a conversation, through the model's own chat template. Gives a Result, or a list of n.

        Raises: TemplateError if the model has no template or it refuses the messages.
        """
        params = _params(params, settings)
        return self._results([_timed(self.chat_ids, messages, tools=tools)], params, record)[0]

    def stream(
        self,
        prompt: Prompt | Messages,
        params: SamplingParams | None = None,
        *,
        record: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **settings: Any,
    ) -> Stream:
        """Continue a prompt, or answer messages, piece by piece as tokens are drawn."""
        params = _params(params, settings)
        if params.n != 1:
            raise RequestError("stream gives one answer", found=f"n={params.n}", expected="n=1", param="n")
        return self.submit(prompt, params, record=record, tools=tools)[0]

    def submit(
        self,
        prompt: Prompt | Messages,
        params: SamplingParams,
        *,
        record: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> list[Stream]:
        """Start `params.n` answers and give back their streams, choice 0 first. They advance while one is read."""
        if not isinstance(prompt, str) and len(prompt) > 0 and isinstance(prompt[0], Mapping):
            return self._submit(_timed(self.chat_ids, cast(Messages, prompt), tools=tools), params, record)
        return self._submit(self._encoded(cast(Prompt, prompt)), params, record)

    def _encoded(self, prompt: Prompt) -> tuple[list[int], float]:
        return _timed(self.tokenize, prompt) if isinstance(prompt, str) else (list(prompt), 0.0)

    def _submit(self, encoded: tuple[list[int], float], params: SamplingParams, record: bool) -> list[Stream]:
        ids, tokenize_s = encoded
        with self._lock:
            answers = [
                Answer(sequence, self.tokenizer, self.load_s, tokenize_s)
                for sequence in self.engine.add(ids, params, record=record)
            ]
            self._answers |= {answer.sequence.number: answer for answer in answers}
        return [Stream(self, answer) for answer in answers]

    def _results(self, prompts: list[tuple[list[int], float]], params: SamplingParams, record: bool) -> list[Any]:
        streams: list[list[Stream]] = []
        try:
            for encoded in prompts:
                streams.append(self._submit(encoded, params, record))
            results = [[stream.result for stream in choices] for choices in streams]
        except BaseException:
            for choices in streams:
                for stream in choices:
                    stream.cancel()
            raise
        return [choices[0] if params.n == 1 else choices for choices in results]

    def _advance(self) -> None:
        """One step of the engine, its tokens handed to the answers they belong to."""
        try:
            for answer in [a for a in self._answers.values() if a.abandoned]:
                self.engine.cancel(answer.sequence)
            for event in self.engine.step(self._taps):
                if event.sequence.number in self._answers:
                    answer = self._answers[event.sequence.number]
                    if event.token is not None and answer.take(event.token, event.record):
                        self.engine.stop(event.sequence)
        finally:
            for answer in [a for a in self._answers.values() if a.sequence.finished]:
                answer.close()
                del self._answers[answer.sequence.number]

    # -- looking inside -----------------------------------------------------------------------------------------------

    def forward(self, ids: Iterable[int], last_only: bool = False) -> np.ndarray:
        """Logits for each token of `ids`: float32 [num_tokens, vocab]; `last_only` gives [1, vocab]."""
        with self._lock:
            return self.engine.forward(ids, last_only=last_only, taps=self._taps)

    @contextlib.contextmanager
    def tap(self, names: Iterable[str] | str, patch: Mapping[str, Patch] | None = None) -> Iterator[Recording]:
        """Record tensors of the Program, by name or shell pattern, while the block runs; `patch` replaces tensors.

            with llm.tap("layers.*.residual") as recording:
                llm.forward(llm.tokenize("hello"))
            recording["layers.0.residual"]   # [num_tokens, hidden]

        Nothing stays behind, also after an error: what a patched run computed is not kept in the prefix cache.
        """
        taps = Taps(self.program, [names] if isinstance(names, str) else names, patch)
        before, self._taps = self._taps, taps
        try:
            yield taps.recording
        finally:
            self._taps = before

    # -- text ---------------------------------------------------------------------------------------------------------

    def tokenize(self, text: str, *, special: bool = False) -> list[int]:
        """Token ids of a text, after a beginning-of-sequence token where the model's files ask for one.

        Control tokens spelled in the text stay text, unless `special`.
        """
        ids = self.tokenizer.encode(text, special=special)
        bos = self.checkpoint.bos_id if self.checkpoint.add_bos else None
        return ids if bos is None or ids[:1] == [bos] else [bos, *ids]

    def detokenize(self, ids: Iterable[int], *, skip_special: bool = False) -> str:
        """The text of token ids."""
        return self.tokenizer.decode(ids, skip_special=skip_special)

    def chat_ids(self, messages: Messages, *, tools: Sequence[Mapping[str, Any]] | None = None) -> list[int]:
        """Token ids of a conversation in the model's chat template, ready for its answer."""
        return self._chat().render_ids(self.tokenizer, messages, tools=tools)

    def chat_prompt(self, messages: Messages, *, tools: Sequence[Mapping[str, Any]] | None = None) -> str:
        """The same as text, for people to read."""
        return self._chat().render(messages, tools=tools)

    def _chat(self) -> ChatTemplate:
        if self._template is None:
            raise TemplateError("this model has no chat template", hint="give a raw prompt", param="messages")
        return self._template

    # -- the rest -----------------------------------------------------------------------------------------------------

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of the KV cache that one token takes."""
        return KVCache.bytes_per_token(self.config, self.k_type, self.v_type)

    def close(self) -> None:
        """End every answer and let the prefix cache go. The memory goes with the object."""
        with self._lock:
            for answer in self._answers.values():
                self.engine.cancel(answer.sequence)
                answer.close()
            self._answers.clear()
            self.engine.pool.clear()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"LLM({self.name!r}, max_context={self.max_context})"


class Stream:
    """An answer on its way: an iterator of Chunks, one a token. Reading it is what makes the engine step.

    `result` is the finished answer (reading it first runs what is left); `cancel()` ends it where it is. A stream
    that nobody holds any more is cancelled at the next step; an exception while reading it cancels it at once.
    """

    def __init__(self, llm: LLM, answer: Answer) -> None:
        self._llm, self._answer = llm, answer

    def __iter__(self) -> Stream:
        return self

    def __next__(self) -> Chunk:
        try:
            while not self._answer.chunks:
                with self._llm._lock:
                    if self._answer.chunks:  # another thread's step brought it
                        break
                    if self._answer.closed:
                        raise StopIteration
                    self._llm._advance()
            return self._answer.chunks.popleft()
        except StopIteration:
            raise
        except BaseException:
            self.cancel()
            raise

    @property
    def result(self) -> Result:
        """The whole answer."""
        for _ in self:
            pass
        return self._answer.result()

    def cancel(self) -> None:
        """End the answer; what has been said so far is the result, and its finish reason "cancelled"."""
        with self._llm._lock:
            self._llm.engine.cancel(self._answer.sequence)
            self._llm._answers.pop(self._answer.sequence.number, None)
            self._answer.close()

    def __del__(self) -> None:
        self._answer.abandoned = True


def _params(params: SamplingParams | None, settings: Mapping[str, Any]) -> SamplingParams:
    unknown = next((name for name in settings if name not in SamplingParams.__dataclass_fields__), None)
    if unknown is not None:
        known = ", ".join(SamplingParams.__dataclass_fields__)
        raise RequestError("no such setting", found=unknown, expected=f"one of {known}", param=unknown)
    return SamplingParams(**settings) if params is None else replace(params, **settings) if settings else params


def _is_id(value: object) -> bool:
    return not isinstance(value, (str, Sequence, Mapping, np.ndarray))


def _timed(encode: Callable[..., list[int]], *arguments: Any, **more: Any) -> tuple[list[int], float]:
    started = time.perf_counter()
    return encode(*arguments, **more), time.perf_counter() - started
