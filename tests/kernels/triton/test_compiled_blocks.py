"""The block-sparse Triton kernels compiled ahead: product instructions, copies that run ahead, memory that fits.

Nothing here runs a kernel, and nothing here says how fast one is.
"""

import pytest
import torch

from hf_lowbit.functional.block_dispatch import BlockProblem
from tests.kernels.triton.conditions import need_compiler


need_compiler()

from tests.kernels.triton.ahead import compile_block_gradient, compile_block_product  # noqa: E402
from tests.kernels.triton.test_compiled import PRODUCTS, SHARED  # noqa: E402


pytestmark = pytest.mark.filterwarnings("error")
capabilities = pytest.mark.parametrize("capability", [80, 90, 100], ids=["sm_80", "sm_90", "sm_100"])


def problem(rows=512, block=64, dtype=torch.bfloat16):
    return BlockProblem(block, block, 128, 2048, rows, dtype, "cuda")


def fits(code, capability, tmp_path):
    assert code.shared <= SHARED[capability] and code.spilled(tmp_path) == 0
    # results never depend on which program is first
    assert code.count(r"(atom|red)\.") == 0


@capabilities
@pytest.mark.parametrize("weights", [1, 2], ids=["product", "swiglu"])
@pytest.mark.parametrize("rows", [1, 512])
def test_products_use_the_hardware_and_copy_ahead(capability, weights, rows, tmp_path):
    code = compile_block_product(problem(rows), capability, weights)
    assert code.count(PRODUCTS[capability]) > 0
    # 16 bytes a copy
    assert code.count(r"cp\.async\.cg\.shared\.global .*, 0x10") > 0
    fits(code, capability, tmp_path)


@capabilities
def test_the_gradient_of_blocks_uses_the_hardware(capability, tmp_path):
    code = compile_block_gradient(problem(), capability)
    assert code.count(PRODUCTS[capability]) > 0 and code.count(r"cp\.async\.cg\.shared\.global .*, 0x10") > 0
    fits(code, capability, tmp_path)


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("weights", [1, 2], ids=["product", "swiglu"])
def test_more_stages_keep_more_copies_under_way(capability, weights):
    """The column of a block is read a step ahead: else no more than two steps would be under way."""
    codes = [compile_block_product(problem(16), capability, weights, stages=stages) for stages in (2, 3, 4)]
    assert codes[0].shared < codes[1].shared < codes[2].shared
    copies = [code.count(r"cp\.async\.c[ag]") for code in codes]
    assert copies[0] < copies[1] < copies[2]


@pytest.mark.parametrize(("block", "dtype"), [(24, torch.float16), (128, torch.float32)], ids=str)
def test_other_dtypes_and_blocks(block, dtype, tmp_path):
    asked = problem(64, block, dtype)
    for code in (compile_block_product(asked, 90), compile_block_gradient(asked, 90)):
        assert code.count(r"(mma\.sync|wgmma)") > 0
        fits(code, 80, tmp_path)
