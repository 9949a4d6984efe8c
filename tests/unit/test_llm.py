"""The Python API over scripted tokens: text, streams, stop strings, several answers at once, threads, interrupts."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import script
import tiny

import cutaway
from cutaway import LLM, Chunk, Result, SamplingParams
from cutaway.errors import NotFoundError, RequestError, TemplateError

PIECES = ["Hello ", "EN", "D", " more", "a", "\nQ", ": b", "xENDy", "<|end|>", "é", "b", "c", "d"]
SPLIT = [20, 21, 22]  # the three bytes of one Han character
END = PIECES.index("<|end|>")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model with a toy tokenizer: a few whole pieces, and single bytes."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    path = tiny.save(tmp_path_factory.mktemp("toy"))
    alphabet = {byte: char for char, byte in _byte_alphabet().items()}
    spelled = ["".join(alphabet[byte] for byte in piece.encode()) for piece in PIECES]
    spelled[END] = PIECES[END]
    tokens = [*spelled, *(f"<unused{i}>" for i in range(len(spelled), 20)), *(alphabet[b] for b in "汉".encode())]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(PIECES[END], special=True)])
    tokenizer.save(str(path / "tokenizer.json"))
    (path / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}a")
    (path / "generation_config.json").write_text(f'{{"eos_token_id": [{END}]}}')
    return path


def _byte_alphabet() -> dict[str, int]:
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(b): b for b in printable} | {chr(256 + n): b for n, b in enumerate(others)}


@pytest.fixture
def scripted(folder: Path) -> Callable[..., LLM]:
    def make(ids: Sequence[int], **settings) -> LLM:
        llm = LLM(folder, interpreter="reference", **{"max_context": 64, "kv_tokens": 1024, **settings})
        llm.engine.interpreter = script.Script(ids)
        return llm

    return make


def ids_of(*pieces: str) -> list[int]:
    return [PIECES.index(piece) for piece in pieces]


# -- text and stops ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pieces", "stop", "text", "count"),
    [
        (["Hello ", "EN", "D", " more"], ["END"], "Hello ", 3),
        (["a", "\nQ", ": b"], ["\nQ:"], "a", 3),
        (["xENDy", "a"], "END", "x", 1),
        (["a", "b", "c", "d"], ["d", "bc"], "a", 3),
    ],
)
def test_stop_string_across_tokens(scripted, pieces, stop, text, count):
    llm = scripted(ids_of(*pieces))
    result = llm.generate([4], stop=stop, max_tokens=10)
    assert (result.text, result.finish_reason, result.stats.output_tokens) == (text, "stop", count)
    assert result.stop_string in ([stop] if isinstance(stop, str) else stop)
    chunks = list(llm.stream([4], stop=stop, max_tokens=10))
    assert "".join(chunks) == text
    assert len(chunks) == count
    assert [chunk.finish_reason for chunk in chunks] == [None] * (count - 1) + ["stop"]
    assert llm.engine.pool.num_held == 0
    assert not llm.engine.has_work


def test_stop_finish_reason(scripted):
    llm = scripted(ids_of("a", "b", "c", "d", "a"))
    for max_tokens, stop, reason, text in (
        (3, (), "length", "abc"),
        (3, "c", "stop", "ab"),
        (None, "zz", "length", None),
    ):
        result = llm.generate([4], max_tokens=max_tokens, stop=stop)
        assert result.finish_reason == reason
        *before, last = llm.stream([4], max_tokens=max_tokens, stop=stop)
        assert {chunk.finish_reason for chunk in before} <= {None}
        assert last.finish_reason == reason
        assert "".join([*before, last]) == result.text
        assert text in (None, result.text)


def test_text_held_back_for_a_stop_string_comes_at_the_end(scripted):
    result = scripted(ids_of("Hello ", "EN", "a")).generate([4], max_tokens=2, stop="END")
    assert (result.text, result.finish_reason) == ("Hello EN", "length")


def test_the_end_token_is_no_text(scripted):
    llm = scripted([*ids_of("a", "b"), END, *ids_of("c")])
    result = llm.generate([4])
    assert (result.text, result.finish_reason, result.stop_token) == ("ab", "stop", END)
    assert (result.token_ids, result.stats.output_tokens) == (tuple(ids_of("a", "b")), 3)
    assert llm.generate([4], stop_token_ids=ids_of("b")).text == "a"
    assert llm.generate([4], ignore_eos=True, max_tokens=4).text == "abc"


def test_tok_utf8_split_in_stream(scripted):
    llm = scripted([*ids_of("a"), *SPLIT, *ids_of("b"), END])
    chunks = list(llm.stream([4]))
    assert "".join(chunks) == "a汉b" == llm.generate([4]).text
    assert not any("�" in chunk for chunk in chunks)
    assert [str(chunk) for chunk in chunks] == ["a", "", "", "汉", "b", ""]
    assert [chunk.token_id for chunk in chunks] == [*ids_of("a"), *SPLIT, *ids_of("b"), END]
    assert llm.generate([4], max_tokens=2).text == "a�"


def test_an_id_without_a_token_is_counted_and_has_no_text(scripted):
    result = scripted([*ids_of("a"), 96, *ids_of("b"), END]).generate([4])
    assert (result.text, result.stats.output_tokens) == ("ab", 4)


# -- asking -----------------------------------------------------------------------------------------------------------


def test_prompts_of_every_form(scripted):
    llm = scripted([*ids_of("a"), END])
    one = llm.generate("a")
    assert isinstance(one, Result)
    assert one.prompt_ids == tuple(llm.tokenize("a"))
    assert llm.generate(np.array(one.prompt_ids)).prompt_ids == one.prompt_ids
    several = llm.generate(["a", "b"])
    assert [result.prompt_ids for result in several] == [tuple(llm.tokenize("a")), tuple(llm.tokenize("b"))]
    assert [result.prompt_ids for result in llm.generate([[1, 2], [3]])] == [(1, 2), (3,)]
    assert [result.index for result in llm.generate("a", n=3, temperature=1)] == [0, 1, 2]
    assert [[r.index for r in choices] for choices in llm.generate(["a", "b"], n=2)] == [[0, 1], [0, 1]]
    chat = llm.chat([{"role": "user", "content": "b"}])
    assert chat.prompt_ids == tuple(llm.tokenize("ba")) == tuple(llm.chat_ids([{"role": "user", "content": "b"}]))
    assert llm.chat_prompt([{"role": "user", "content": "b"}]) == "ba"
    assert llm.stream([{"role": "user", "content": "b"}]).result.prompt_ids == chat.prompt_ids


@pytest.mark.parametrize("empty", ["", [], ()])
def test_an_empty_prompt(scripted, empty):
    with pytest.raises(RequestError) as refused:
        scripted([4]).generate(empty)
    assert refused.value.param == "prompt"


def test_settings_by_name_and_as_params(scripted):
    llm = scripted(ids_of("a"))
    params = SamplingParams(max_tokens=5)
    assert llm.generate([4], params).text == "aaaaa"
    assert llm.generate([4], params, max_tokens=2).text == "aa"
    assert params.max_tokens == 5
    with pytest.raises(RequestError) as refused:
        llm.generate([4], temprature=1)
    assert refused.value.param == "temprature"
    with pytest.raises(RequestError) as refused:
        llm.stream([4], n=2)
    assert refused.value.param == "n"


def test_nothing_asked_for(scripted):
    llm = scripted(ids_of("a"))
    result = llm.generate([4], max_tokens=0)
    assert (result.text, result.finish_reason, result.stats.output_tokens) == ("", "length", 0)
    assert [chunk.finish_reason for chunk in llm.stream([4], max_tokens=0)] == ["length"]


def test_a_refused_prompt_among_good_ones_leaves_nothing_running(scripted):
    llm = scripted(ids_of("a"))
    with pytest.raises(RequestError):
        llm.generate([[1], [2], [999]], max_tokens=3)
    assert not llm.engine.has_work
    assert llm.engine.pool.num_held == 0


def test_what_a_result_tells(scripted):
    llm = scripted(ids_of("a"))
    result = llm.generate("ab", max_tokens=4, temperature=1, logprobs=2, record=True)
    assert len(result.logprobs) == len(result.record) == 4
    assert [told.token for told in result.logprobs] == list(result.token_ids)
    stats = result.stats
    assert (stats.prompt_tokens, stats.cached_tokens, stats.output_tokens) == (2, 0, 4)
    assert stats.load_s > 0
    assert stats.tokenize_s > 0
    assert stats.prefill_s + stats.decode_s >= stats.sample_s > 0
    assert llm.generate("ab", max_tokens=4, temperature=1, seed=result.seed).token_ids == result.token_ids
    assert str(result) == result.text


# -- streams ----------------------------------------------------------------------------------------------------------


def test_streams_side_by_side(scripted):
    llm = scripted(ids_of("a", "b", "c"))
    first, second = (llm.stream([i], max_tokens=3) for i in (1, 2))
    assert next(first) == "a"
    assert [*second] == ["a", "b", "c"]
    assert [*first] == ["b", "c"]
    assert llm.engine.interpreter.steps == 3  # the steps were shared
    assert first.result.text == second.result.text == "abc"


def test_cancel_a_stream(scripted):
    llm = scripted(ids_of("a"))
    stream = llm.stream([1])
    assert isinstance(next(stream), Chunk)
    next(stream)
    stream.cancel()
    result = stream.result
    assert (result.text, result.finish_reason) == ("aa", "cancelled")
    stream.cancel()
    assert not llm.engine.has_work
    assert llm.engine.pool.num_held == 0


def test_an_interrupt_cancels_the_stream(scripted):
    llm = scripted(ids_of("a"))
    stream = llm.stream([1])
    next(stream)

    def interrupt(batch):
        raise KeyboardInterrupt

    llm.engine.interpreter.before = interrupt
    with pytest.raises(KeyboardInterrupt):
        next(stream)
    llm.engine.interpreter.before = None
    assert (stream.result.text, stream.result.finish_reason) == ("a", "cancelled")
    assert not llm.engine.has_work
    assert llm.generate([1], max_tokens=2).text == "aa"


def test_an_interrupt_ends_every_answer_of_generate(scripted):
    llm = scripted(ids_of("a"))

    def interrupt(batch):
        if llm.engine.interpreter.steps > 2:
            raise KeyboardInterrupt

    llm.engine.interpreter.before = interrupt
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["a", "b"])
    assert not llm.engine.has_work
    assert llm.engine.pool.num_held == 0


def test_a_stream_nobody_holds_is_cancelled(scripted):
    llm = scripted(ids_of("a"))
    for _ in llm.stream([1]):
        break
    gc.collect()
    assert llm.generate([2], max_tokens=1).text == "a"
    assert not llm.engine.has_work


def test_a_failing_step_ends_streams_with_its_error(scripted):
    llm = scripted(ids_of("a"))
    first, second = llm.stream([1]), llm.stream([2])

    def fail(batch):
        raise RuntimeError("no luck")

    llm.engine.interpreter.before = fail
    with pytest.raises(RuntimeError, match="no luck"):
        next(first)
    assert [chunk.finish_reason for chunk in second] == ["error"]
    assert second.result.error == "no luck"
    llm.engine.interpreter.before = None
    assert llm.generate([1], max_tokens=1).text == "a"


def test_threads_share_steps_and_nothing_else(scripted):
    llm = scripted(ids_of("a", "b", "c", "d"))
    llm.engine.interpreter = script.Hash()
    settings = [{"temperature": 1.0, "seed": seed, "max_tokens": 12, "ignore_eos": True} for seed in range(8)]
    alone = [llm.generate([i], **one).token_ids for i, one in enumerate(settings)]
    found: dict[int, tuple[int, ...]] = {}

    def ask(i: int) -> None:
        found[i] = llm.generate([i], **settings[i]).token_ids

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [found[i] for i in range(8)] == alone
    assert llm.engine.pool.num_held == 0


# -- looking inside ---------------------------------------------------------------------------------------------------


def test_forward_and_tap(folder):
    llm = LLM(folder, interpreter="reference")
    ids = llm.tokenize("ab")
    logits = llm.forward(ids)
    assert logits.shape == (2, llm.config.vocab)
    np.testing.assert_array_equal(llm.forward(ids, last_only=True)[0].argmax(), logits[-1].argmax())
    with llm.tap("layers.*.residual") as recording:
        llm.forward(ids)
    assert recording.names == ["layers.0.residual", "layers.1.residual"]
    assert recording["layers.1.residual"].shape == (2, llm.config.hidden)
    with llm.tap([], patch={"embed": lambda tensor: tensor * 0}):
        assert not np.array_equal(llm.forward(ids), logits)
    with pytest.raises(ZeroDivisionError), llm.tap("embed", patch={"embed": lambda tensor: 1 / 0}):
        llm.generate(ids, max_tokens=2)
    np.testing.assert_array_equal(llm.forward(ids), logits)
    with pytest.raises(RequestError), llm.tap("layers.9.residual"):
        pass


def test_models_that_cannot_be(folder, tmp_path):
    with pytest.raises(NotFoundError):
        LLM(tmp_path / "nothing.gguf")
    for settings in ({"interpreter": "cuda"}, {"activations": "f16"}, {"kv_type": "f8"}, {"max_context": 10**6}):
        with pytest.raises(RequestError):
            LLM(folder, **{"interpreter": "reference", **settings})


def test_a_model_without_a_template(folder, tmp_path):
    for file in folder.iterdir():
        if file.name != "chat_template.jinja":
            (tmp_path / file.name).symlink_to(file)
    with pytest.raises(TemplateError, match="no chat template"):
        LLM(tmp_path, interpreter="reference").chat([{"role": "user", "content": "a"}])


def test_close_ends_what_runs(scripted):
    with scripted(ids_of("a")) as llm:
        stream = llm.stream([1])
        next(stream)
    assert stream.result.finish_reason == "cancelled"
    assert llm.engine.pool.num_held == 0


def test_memory_is_what_was_asked_for(folder):
    llm = LLM(folder, interpreter="reference", max_context=64, k_type="f32", v_type="f16")
    assert llm.engine.kv_cache.nbytes == 64 * llm.kv_bytes_per_token
    assert LLM(folder, interpreter="reference", max_context=64, kv_tokens=640).engine.pool.num_blocks == 20
    assert LLM(folder, interpreter="reference").max_context == 2048


# -- the package ------------------------------------------------------------------------------------------------------


def test_names_of_the_package():
    for name in cutaway.__all__:
        assert getattr(cutaway, name) is not None
    assert sorted(dir(cutaway)) == sorted(cutaway.__all__)
    with pytest.raises(AttributeError):
        _ = cutaway.nothing


def test_import_loads_nothing_heavy():
    heavy = ("numpy", "tokenizers", "jinja2", "typer", "rich", "torch")
    code = f"import sys, cutaway; print([name for name in {heavy} if name in sys.modules])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"
