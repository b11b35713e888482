"""What an export returns: where it is, how each module is stored, and where it is only close."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class Export:
    """`stored` maps each low-bit module to its form in the file. `rounded` maps modules whose numbers are not exactly
    ours to the reason; everything else holds the very numbers of the model."""

    folder: Path
    format: str
    stored: dict[str, str]
    rounded: dict[str, str] = field(default_factory=dict)

    @property
    def exact(self) -> bool:
        """Whether every weight of the file is bit for bit the model's."""
        return not self.rounded

    @property
    def bytes(self) -> int:
        """Size of the files."""
        return sum(path.stat().st_size for path in self.folder.rglob("*") if path.is_file())

    def __str__(self) -> str:
        forms = ", ".join(f"{count} modules as {form}" for form, count in Counter(self.stored.values()).most_common())
        lines = [f"{self.format} in {self.folder}: {self.bytes / 1e6:.1f} MB, {forms}"]
        for reason, count in Counter(self.rounded.values()).most_common():
            lines.append(f"{count} of them close, not exact: {reason}")
        return "\n".join(lines)
