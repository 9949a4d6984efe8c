"""`run` and `chat` over an LLM that says what a script tells it."""

from __future__ import annotations

import codecs
import contextlib
import io
import json
import os
import select
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from cutaway.cli import application
from cutaway.cli.conversation import Conversation
from cutaway.cli.options import SamplingOptions
from cutaway.errors import RequestError, TemplateError
from cutaway.results import Result, Stats

CUT = object()  # in a script: Ctrl-C is pressed here


class ScriptStream:
    def __init__(self, script, params, prompt_tokens):
        self.pieces, self.said, self.reason = iter(script), "", None
        self.params, self.prompt_tokens = params, prompt_tokens

    def __iter__(self):
        return self

    def __next__(self):
        piece = next(self.pieces, None) if self.reason is None else None
        if piece is CUT:
            raise KeyboardInterrupt
        if piece is None:
            self.reason = self.reason or "stop"
            raise StopIteration
        self.said += piece
        return piece

    def cancel(self):
        self.reason = self.reason or "cancelled"

    @property
    def result(self):
        for _ in self:
            pass
        stats = Stats(0.1, 0.001, 0.2, 0.3, 0.01, 0.2, self.prompt_tokens, 3, 4, 50.0, 10.0)
        seed = 7 if self.params.seed is None else self.params.seed
        return Result(self.said, (1, 2), self.reason, (0,) * self.prompt_tokens, stats, seed)


class ScriptLLM:
    """A conversation costs a token a character of its contents."""

    name, k_type, v_type, kv_bytes_per_token, chat_template = "script", "f16", "f16", 12288, "{{ messages }}"

    def __init__(self, *scripts, max_context=1000, generation=None):
        self.scripts, self.max_context, self.asked, self.params = list(scripts), max_context, [], []
        self.checkpoint = SimpleNamespace(generation=generation or {})
        self.interpreter = None
        self.tokenizer = SimpleNamespace(token_text=lambda token: f"<{token}>")
        self.engine = SimpleNamespace(kv_cache=SimpleNamespace(nbytes=48 << 20))

    def chat_ids(self, messages):
        if any(message["content"] == "refuse me" for message in messages):
            raise TemplateError("the template refuses", found="this")
        return [0] * sum(len(message["content"]) for message in messages)

    def chat_prompt(self, messages):
        return "".join(f"<{m['role']}>{m['content']}" for m in messages)

    def submit(self, prompt, params):
        self.asked.append(prompt)
        self.params.append(params)
        return [ScriptStream(self.scripts.pop(0), params, 5) for _ in range(params.n)]


def conversation(*scripts, system=None, options=None, **more):
    return Conversation(ScriptLLM(*scripts, **more), options or SamplingOptions(), system)


def cutaway(monkeypatch, llm, *arguments, stdin=""):
    monkeypatch.setattr("cutaway.cli.loading.open_model", lambda options: llm)
    return CliRunner().invoke(application(arguments[0]), list(arguments), input=stdin)


# -- run -----------------------------------------------------------------------------------------------------------


def test_run_streams_the_answer_to_stdout_and_nothing_else(monkeypatch):
    llm = ScriptLLM(["He", "llo", ""])
    result = cutaway(monkeypatch, llm, "run", "hi", "--system", "be short", "--temp", "0.5")
    assert (result.exit_code, result.stdout, result.stderr) == (0, "Hello\n", "")
    assert llm.asked == [[{"role": "system", "content": "be short"}, {"role": "user", "content": "hi"}]]
    assert llm.params[0].temperature == 0.5


@pytest.mark.parametrize("arguments", [["run", "--raw"], ["run", "-", "--raw"]])
def test_run_reads_stdin_but_for_one_final_newline(monkeypatch, arguments):
    llm = ScriptLLM(["x"])
    assert cutaway(monkeypatch, llm, *arguments, stdin="线\n\n").exit_code == 0
    assert llm.asked == ["线\n"]


def test_run_refuses_bytes_that_are_not_utf_8(monkeypatch):
    result = cutaway(monkeypatch, ScriptLLM(), "run", stdin=b"ab\xff")
    assert result.exit_code == 1
    assert result.stderr == "cutaway: error: the prompt is not UTF-8: found a wrong byte at offset 2\n"


def test_run_shows_the_prompt_and_the_stats_on_stderr(monkeypatch):
    llm = ScriptLLM(["ok"], generation={"temperature": 0.7})
    result = cutaway(
        monkeypatch, llm, "run", "hi", "--show-prompt", "--stats", "--seed", "5", "--temp", "1", "--top-k", "4"
    )
    assert result.stdout == "ok\n"
    assert result.stderr.startswith("<user>hi\n")
    for words in ("seed 5", "prefill", "50.0", "KV cache 48 MiB", "3 prompt tokens were found in the prefix cache"):
        assert words in result.stderr
    rows = {row.split()[0]: row.split()[1:] for row in result.stderr.splitlines() if row.strip()}
    assert rows["top_k"] == ["4", "flag"]
    assert rows["temperature"] == ["1.0", "flag"]
    assert rows["top_p"] == ["1.0", "default"]
    assert "Not applied: the model's files carry temperature 0.7" in result.stderr


def test_run_json_has_everything(monkeypatch):
    result = cutaway(monkeypatch, ScriptLLM(["a"], ["b"]), "run", "hi", "--json", "-n", "2", "--stop", "x")
    said = json.loads(result.stdout)
    assert [answer["text"] for answer in said["answers"]] == ["a", "b"]
    assert said["answers"][0]["stats"]["prefill_rate"] == 50.0
    assert said["settings"]["stop"] == {"value": ["x"], "origin": "flag"}
    assert result.stderr == ""


def test_run_numbers_several_answers(monkeypatch):
    result = cutaway(monkeypatch, ScriptLLM(["a"], ["b"]), "run", "hi", "-n", "2")
    assert result.stdout == "[1]\na\n[2]\nb\n"


def test_ctrl_c_ends_the_answer_and_exits_130(monkeypatch):
    monkeypatch.setattr("signal.signal", lambda number, handler: None)
    result = cutaway(monkeypatch, ScriptLLM(["He", CUT, "llo"]), "run", "hi")
    assert (result.exit_code, result.stdout, result.stderr) == (130, "He\n", "cutaway: stopped\n")


def test_a_setting_out_of_range_is_named(monkeypatch):
    result = cutaway(monkeypatch, ScriptLLM(["x"]), "run", "hi", "--temp", "-1")
    assert result.exit_code == 2
    assert result.stdout == ""
    assert "temperature" in result.stderr


def test_run_wants_a_prompt_and_no_system_turn_without_template(monkeypatch):
    result = cutaway(monkeypatch, ScriptLLM(["x"]), "run", stdin="")
    assert (result.exit_code, result.stdout) == (2, "")
    assert "no prompt" in result.stderr
    result = cutaway(monkeypatch, ScriptLLM(["x"]), "run", "hi", "--raw", "--system", "s")
    assert (result.exit_code, result.stdout) == (2, "")


def test_text_cannot_steer_a_terminal(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    from cutaway.cli.screen import write

    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    write("a\x1b[2Jb\n\tc\x9b")
    assert "\x1b" not in terminal.getvalue()
    assert "\x9b" not in terminal.getvalue()
    assert "\n\tc" in terminal.getvalue()


# -- chat ----------------------------------------------------------------------------------------------------------


def test_chat_keeps_the_turns(monkeypatch):
    llm = ScriptLLM(["one"], ["two"])
    result = cutaway(monkeypatch, llm, "chat", "--system", "s", stdin='hi\n"""a\nb"""\n/bye\nnever\n')
    assert (result.exit_code, result.stdout, result.stderr) == (0, "one\ntwo\n", "")
    assert llm.asked[1] == [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "one"},
        {"role": "user", "content": "a\nb"},
    ]


def test_chat_ends_with_its_input(monkeypatch):
    result = cutaway(monkeypatch, ScriptLLM(["one"]), "chat", stdin="\n\nhi")
    assert (result.exit_code, result.stdout) == (0, "one\n")


def test_ctrl_c_stops_the_answer_and_the_conversation_goes_on(capsys):
    talk = conversation(["He", CUT, "llo"], ["again"])
    assert talk.take("hi")
    assert talk.take("go on")
    assert talk.messages[1] == {"role": "assistant", "content": "He"}
    assert capsys.readouterr().out == "He\nagain\n"


def test_a_refused_turn_is_told_and_leaves_no_trace(capsys):
    talk = conversation(["ok"])
    assert talk.take("refuse me")
    assert talk.messages == []
    assert talk.take("hi")
    assert [m["content"] for m in talk.messages] == ["hi", "ok"]
    assert capsys.readouterr().err == "cutaway: error: the template refuses: found this\n"


def test_a_full_context_drops_the_oldest_turns_says_so_and_keeps_the_system_turn(capsys):
    talk = conversation(["b" * 30], ["d" * 30], ["f"], system="s" * 10, max_context=100)
    talk.take("a" * 20)
    talk.take("c" * 5)
    assert capsys.readouterr().err == ""
    talk.take("e" * 20)  # 10 + 20 + 30 + 5 + 30 + 20 = 115 of 100
    said = capsys.readouterr()
    assert said.err == (
        "(the conversation has 115 tokens and the context 100: leaving out the 2 oldest messages, "
        "keeping the system turn; 65 tokens stay)\n"
    )
    assert [m["content"][0] for m in talk.llm.asked[2]] == ["s", "c", "d", "e"]
    assert [m["content"][0] for m in talk.messages] == ["s", "c", "d", "e", "f"]


def test_room_is_kept_for_max_tokens(capsys):
    talk = conversation(["b"], ["d"], options=SamplingOptions(max_tokens=50), max_context=100)
    talk.take("a" * 40)
    talk.take("c" * 40)  # 81 tokens fit, 81 + 50 do not
    assert [m["content"][0] for m in talk.llm.asked[1]] == ["c"]
    assert "leaving out the 2 oldest messages; 40 tokens stay" in capsys.readouterr().err


def test_one_message_that_is_too_long_is_refused_with_both_counts(capsys):
    talk = conversation(["b"], ["never"], max_context=100)
    talk.take("hi")
    before = list(talk.messages)
    talk.take("x" * 100)
    assert "found 100 tokens, expected fewer than 100" in capsys.readouterr().err
    assert talk.messages == before


def test_set_changes_a_setting_and_says_where_it_is_from(capsys):
    talk = conversation(["x"])
    for line in (
        "/set temperature 0.7",
        "/set parameter top-k 20",
        r"/set stop a\nb",
        "/set ignore_eos on",
        "/set logit_bias 5=1 6=-1",
    ):
        assert talk.take(line)
    talk.take("hi")
    params = talk.llm.params[0]
    assert (params.temperature, params.top_k, params.stop, params.ignore_eos) == (0.7, 20, ("a\nb",), True)
    assert dict(params.logit_bias) == {5: 1.0, 6: -1.0}
    assert capsys.readouterr().err == ""
    talk.take("/show")
    rows = {row.split()[0]: row.split()[1:] for row in capsys.readouterr().err.splitlines() if row.strip()}
    assert rows["temperature"] == ["0.7", "/set"]
    assert rows["min_p"] == ["0.0", "default"]


@pytest.mark.parametrize(
    "line", ["/set", "/set temperature", "/set temperature hot", "/set temperature -1", "/set n 2"]
)
def test_a_wrong_set_changes_nothing(capsys, line):
    talk = conversation()
    before = dict(talk.settings)
    assert talk.take(line)
    assert capsys.readouterr().err.startswith("cutaway: error: ")
    assert talk.settings == before


def test_system_and_clear():
    talk = conversation(["x"], system="old")
    talk.take("/system new")
    talk.take("hi")
    assert [m["content"] for m in talk.messages] == ["new", "hi", "x"]
    talk.take("/clear")
    assert [m["content"] for m in talk.messages] == ["new"]
    talk.take("/system")
    assert talk.messages == []


def test_save_and_load_bring_everything_back(tmp_path, capsys):
    file = tmp_path / "talk.json"
    talk = conversation(["答"], system="s")
    talk.take("/set temperature 0.7")
    talk.take("/set logit_bias 5=1")
    talk.take("/set stop x")
    talk.take("问")
    talk.take(f"/save {file}")

    other = conversation()
    other.take(f"/load {file}")
    assert other.messages == talk.messages
    assert {n: s.value for n, s in other.settings.items()} == {n: s.value for n, s in talk.settings.items()}
    assert other.settings["temperature"].origin == "/load"
    assert "问" in file.read_text("utf-8")


@pytest.mark.parametrize("text", ["{", "[]", '{"messages": 1}', '{"messages": [{"role": 1, "content": "x"}]}', "\x00"])
def test_a_file_that_is_no_conversation_is_refused(tmp_path, capsys, text):
    file = tmp_path / "talk.json"
    file.write_text(text)
    talk = conversation(system="s")
    talk.take(f"/load {file}")
    assert capsys.readouterr().err.startswith("cutaway: error: ")
    assert [m["content"] for m in talk.messages] == ["s"]


def test_show_and_help(capsys):
    talk = conversation(["x"], system="sys")
    talk.take("hi")
    capsys.readouterr()
    for line, words in {
        "/show messages": "assistant: x",
        "/show system": "sys",
        "/show prompt": "<system>sys<user>hi<assistant>x",
        "/show template": "{{ messages }}",
        "/help": "/save FILE",
        "/?": "/bye",
        "/show nothing": "expected settings, messages",
        "/nothing": "no command /nothing",
    }.items():
        assert talk.take(line)
        assert words in capsys.readouterr().err, line


def test_bye_ends_it():
    assert not conversation().take("/bye")


TERMINAL = """
import sys, time
sys.path.insert(0, {tests!r}), sys.path.insert(0, {unit!r})
import cutaway.cli.loading
from test_cli_chat import ScriptLLM
class Slow(ScriptLLM):
    def submit(self, prompt, params):
        [stream] = super().submit(prompt, params)
        def pieces(pieces=stream.pieces):
            for piece in pieces:
                time.sleep(0.05)
                yield piece
        stream.pieces = pieces()
        return [stream]
cutaway.cli.loading.open_model = lambda options: Slow(["word "] * 1000, ["done"])
from cutaway.cli import main
main(["chat"])
"""


@pytest.mark.skipif(os.name != "posix", reason="needs a pseudo-terminal")
def test_chat_in_a_terminal(tmp_path):
    """Ctrl-C ends the answer, then leaves with 130; lines are in the history file, answers are on the screen."""
    import pty

    tests = Path(__file__).parents[1]
    code = TERMINAL.format(tests=str(tests), unit=str(tests / "unit"))
    pid, terminal = pty.fork()
    if pid == 0:
        os.environ.update(XDG_STATE_HOME=str(tmp_path), TERM="xterm")
        os.execv(sys.executable, [sys.executable, "-c", code])
    screen, decode = "", codecs.getincrementaldecoder("utf-8")().decode  # a read may end within a character

    def until(words: str) -> None:
        nonlocal screen
        deadline = time.monotonic() + 60
        while words not in screen:
            ready, _, _ = select.select([terminal], [], [], deadline - time.monotonic())
            assert ready, screen
            screen += decode(os.read(terminal, 4096))
        screen = screen.partition(words)[2]

    try:
        until(">>> ")
        os.write(terminal, b"first line\n")
        until("word word")
        os.write(terminal, b"\x03")
        until("(stopped)")
        until(">>> ")
        os.write(terminal, '"""多\n行"""\n'.encode())
        until("... ")
        until("done")
        until(">>> ")
        deadline, ended = time.monotonic() + 60, 0
        while not ended:  # a Ctrl-C that comes while an answer still ends only stops that answer: press again
            assert time.monotonic() < deadline, screen
            with contextlib.suppress(OSError):  # the other end is closed
                os.write(terminal, b"\x03")
                if select.select([terminal], [], [], 0.5)[0]:
                    os.read(terminal, 4096)
            ended, status = os.waitpid(pid, os.WNOHANG)
    finally:
        os.close(terminal)
    assert os.waitstatus_to_exitcode(status) == 130
    assert "first line" in (tmp_path / "cutaway" / "history").read_text("utf-8")


def test_chat_refuses_several_answers():
    with pytest.raises(RequestError, match="one answer"):
        conversation(options=SamplingOptions(n=2))
