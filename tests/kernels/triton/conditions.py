"""What tests of the Triton kernels need, and one way to run a kernel without asking which the library would choose.

Triton decides at import whether kernels are compiled or interpreted, so one process does one of both: `make triton`
runs this folder twice. Without triton everything but the choice and the plans is skipped.
"""

import importlib.util
import os

import pytest

from hf_lowbit.kernels.triton.plans import Plan, complete


HAS_TRITON = importlib.util.find_spec("triton") is not None
INTERPRETED = os.environ.get("TRITON_INTERPRET", "0") == "1"


def need_interpreter():
    """Skip the module that calls this unless kernels are interpreted."""
    if not (HAS_TRITON and INTERPRETED):
        pytest.skip("needs triton and TRITON_INTERPRET=1: `make triton`", allow_module_level=True)


def need_compiler():
    """Skip the module that calls this unless kernels are compiled."""
    if not HAS_TRITON or INTERPRETED:
        pytest.skip("needs triton, and no TRITON_INTERPRET: `make triton`", allow_module_level=True)


# as small as tiles get: several of them, and tails, in small matrices
TILES = Plan("tiles", 16, 16, 64, 4, 2, 1, False, True)
SCALE_FIRST = TILES._replace(scale_first=True, scale_ahead=False)
WORDS = Plan("words", 1, 32, 16, 4, 2, 1, False, False)


def in_parts(plan, problem, parts):
    """`plan` fitted to a problem, with K in at most so many parts."""
    plan = complete(plan, problem, processors=1)._replace(parts=1)
    steps = plan.part_steps
    part_steps = -(-steps // parts)
    return plan._replace(parts=-(-steps // part_steps), part_steps=part_steps)
