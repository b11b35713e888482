"""A folder that is written whole or not at all."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import mkdtemp


def check_output(output_dir: str | os.PathLike) -> Path:
    """The path, if it is free: it does not exist yet, or is an empty folder. Raises FileExistsError else."""
    output = Path(output_dir)
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise FileExistsError(f"`output_dir`={str(output)!r} exists and is not an empty folder; name another.")
    return output


@contextmanager
def whole_folder(output: Path) -> Iterator[Path]:
    """A temporary folder to write into, which becomes `output` at the end and is deleted after an error."""
    output.parent.mkdir(parents=True, exist_ok=True)
    # beside the goal, so that it gets there in one step and never in part
    temporary = Path(mkdtemp(dir=output.parent, prefix=f".{output.name}."))
    try:
        yield temporary
        # mkdtemp's folders are private
        temporary.chmod(0o777 & ~_umask())
        if output.exists():
            output.rmdir()
        temporary.replace(output)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
