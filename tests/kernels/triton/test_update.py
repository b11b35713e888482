"""The Triton update in Triton's interpreter against torch's operations: equal bits; and compiled ahead for sm_90."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_lowbit.functional.update import register_update
from hf_lowbit.kernels.triton import update as module
from hf_lowbit.training.states import STATE_BITS
from tests.kernels import test_cpu_update as cpu
from tests.kernels.triton.conditions import need_interpreter


need_interpreter()

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

# the interpreter has no bfloat16 below the normal numbers: states of 16 bits are a matter for a device
INTERPRETED = [bits for bits in STATE_BITS if bits != 16]
WIDTHS = st.sampled_from([8, 16, 40, 136, 192, 264, 512])


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch):
    """The kernel takes tensors on the CPU here, where the interpreter runs it."""
    kernel = module.UpdateKernel("triton", 400, module.refuse_update, module.launch)
    register_update(kernel)
    yield
    register_update(module.UpdateKernel("triton", 400, module.refuse, module.run))


@settings(max_examples=40, deadline=None)
@given(
    scheme=cpu.SCHEMES,
    rule=st.sampled_from(sorted(cpu.RULES)),
    state_bits=st.sampled_from(INTERPRETED),
    shape=st.tuples(st.integers(1, 3), WIDTHS),
    dtype=st.sampled_from([torch.float32, torch.float16]),
    decay=st.sampled_from([0.0, 0.1]),
    transposed=st.booleans(),
    seed=st.integers(0, 9),
    lr=st.sampled_from([1e-5, 1e-3, 1e-1]),
)
def test_bits_of_the_definition(scheme, rule, state_bits, shape, dtype, decay, transposed, seed, lr):
    arguments = scheme, rule, state_bits, shape, dtype, decay, transposed, seed, lr
    cpu.assert_same(cpu.run("triton", *arguments), cpu.run("reference", *arguments))


def test_blocks_that_share_bytes_are_refused():
    update = module.Update("adamw", 4, "ternary", None, 4, 130, torch.float32, torch.float32, "cuda")
    assert "share bytes" in module.refuse_update(update)
    assert "whole matrix" in module.refuse_update(update._replace(rule=None))
