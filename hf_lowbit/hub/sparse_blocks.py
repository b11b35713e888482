"""What a card says of block-sparse weights: the measured sparsity, the blocks, and what is stored of them."""

from __future__ import annotations

from . import markdown
from .facts import Facts, Group


def sparsity_of(groups: list[Group]) -> float:
    """Measured share of dead blocks over all weights in blocks, weighted by their parameters."""
    parameters = sum(group.parameters for group in groups)
    return sum(group.blocks.sparsity * group.parameters for group in groups) / max(parameters, 1)


def title_of(groups: list[Group]) -> str:
    return f"{sparsity_of(groups):.0%} block-sparse"


def summary_of(measured: Facts) -> str:
    share = sum(group.parameters for group in measured.sparse) / max(measured.parameters, 1)
    return (
        f" whose weights are block-sparse for {share:.1%} of its parameters: {sparsity_of(measured.sparse):.1%} of "
        "their blocks were removed by training (BLaST) with `hf_lowbit`."
    )


def numbers_of(measured: Facts) -> list[tuple[str, str]]:
    """Rows of the card's first table; none for a model without blocks."""
    if not measured.sparse:
        return []
    parameters, size = (sum(getattr(group, what) for group in measured.sparse) for what in ("parameters", "bytes"))
    return [
        ("Block-sparse", f"{parameters:,} parameters in {markdown.size(size)}"),
        ("Measured sparsity of these", f"{sparsity_of(measured.sparse):.2%} of blocks"),
    ]


def table_of(groups: list[Group]) -> str:
    """One row for each kind of blocks."""
    rows = []
    for group in groups:
        (height, width), bits = group.blocks.block, group.blocks.bits
        live = "float" if bits is None else f"{bits} bits" if isinstance(bits, int) else bits
        rows.append(
            (f"{height} x {width}", f"{group.blocks.sparsity:.2%}", live, f"{group.count:,}", f"{group.parameters:,}",
             markdown.size(group.bytes), ", ".join(markdown.code(name) for name in sorted(group.names)[:8]))
        )  # fmt: skip
    return markdown.table(("Blocks", "Dead", "Live ones", "#Weights", "#Parameters", "#Size", "Where"), rows)
