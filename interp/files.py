"""How files are written: beside their final place first, then renamed, so that nobody ever sees a half."""

import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from interp.errors import UserError


@contextmanager
def atomic_path(path: str | Path) -> Iterator[Path]:
    """Yield a temporary file path beside `path`; rename it to `path` on success, remove it on any exception.

    Raises `UserError` where the folder cannot be created or written.
    """
    target = Path(path)
    temporary = _beside(target)
    try:
        yield temporary
        os.replace(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def atomic_dir(path: str | Path) -> Iterator[Path]:
    """Yield a new temporary folder beside `path`; on success it replaces `path`, on any exception it is removed."""
    target = Path(path)
    temporary = _beside(target)
    temporary.mkdir()
    replaced = _beside(target)
    try:
        yield temporary
        if target.exists():
            os.replace(target, replaced)
        os.replace(temporary, target)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
        shutil.rmtree(replaced, ignore_errors=True)


def check_writable(folder: str | Path) -> Path:
    """Create `folder` if needed and prove that a file can be written there; `UserError` otherwise."""
    folder = Path(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / f".write-{uuid.uuid4().hex}"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise UserError(f"Cannot write to {folder}: {error.strerror or error}; choose another output folder.") from None
    return folder


def cache_dir() -> Path:
    """The folder for converted models and caches: `INTERP_CACHE`, or the platform's user cache folder."""
    named = os.environ.get("INTERP_CACHE")
    if named:
        return Path(named).expanduser()
    import platformdirs

    return Path(platformdirs.user_cache_dir("interp"))


def _beside(target: Path) -> Path:
    check_writable(target.parent)
    return target.parent / f".{target.name}.{uuid.uuid4().hex[:8]}.partial"
