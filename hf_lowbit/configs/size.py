"""What a user says about size: an average of bits, or a budget in bytes.

3.2                             bits a weight on average, scales and zero points included
"60MB", "2GiB", 60_000_000      bytes of all parameters, scales included
"40%", 0.4                      a share of the dense model's bytes
"""

from __future__ import annotations

import re


UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "kib": 2**10, "mib": 2**20, "gib": 2**30}
# averages between these have a plan, except that scales take room of their own
LEAST_AVERAGE, MOST_AVERAGE = 2.0, 8.0


def check_average(bits: float) -> None:
    """Raise ValueError for a float `bits` that no plan averages to; NaN is none either."""
    if not LEAST_AVERAGE <= bits <= MOST_AVERAGE:
        raise ValueError(
            f"`bits`={bits!r} is an average, which must lie between {LEAST_AVERAGE:g} and {MOST_AVERAGE:g}; whole "
            'numbers (2, 3, 4, 8) and "ternary" give every weight the same.'
        )


def parse_budget(budget: str | int | float, dense_bytes: int) -> int:
    """Bytes of `budget`. Raises TypeError and ValueError when it is none."""
    if isinstance(budget, bool) or not isinstance(budget, (int, float, str)):
        raise TypeError(
            f'`budget`={budget!r} must be bytes, a share such as 0.4, or a text such as "60MB", "2GiB" or "40%".'
        )
    if isinstance(budget, float):
        if not 0 < budget < 1:
            raise ValueError(
                f"`budget`={budget!r} is a share of the dense bytes, which must lie between 0 and 1; bytes are whole "
                'numbers or a text such as "60MB".'
            )
        size = int(budget * dense_bytes)
    elif isinstance(budget, int):
        size = budget
    else:
        found = re.fullmatch(r"\s*([0-9]*\.?[0-9]+)\s*(%|[kmg]i?b|b|)\s*", budget.lower())
        if found is None:
            raise ValueError(f'`budget`={budget!r} is no size; write bytes, a share, "60MB", "2GiB" or "40%".')
        number, unit = float(found[1]), found[2]
        size = int(number / 100 * dense_bytes) if unit == "%" else int(number * UNITS[unit])
    if size <= 0:
        raise ValueError(f"`budget`={budget!r} is {size} bytes; it must be positive.")
    return size


def check_budget(budget: str | int | float) -> None:
    """Raise what `parse_budget` raises for a budget that is one for no model."""
    parse_budget(budget, 1 << 60)
