"""The Triton kernels compiled ahead to machine code for devices that need not be here: does it hold the instructions
that make them fast, and does it fit?

Nothing here runs a kernel, and nothing here says how fast one is.
"""

import pytest
import torch

from hf_lowbit.functional.dispatch import Problem
from hf_lowbit.functional.grid import BITS
from hf_lowbit.functional.update import Update
from hf_lowbit.kernels.triton.plans import can_use_words
from tests.kernels.triton.conditions import need_compiler


need_compiler()

from tests.kernels.triton.ahead import compile_product, compile_quantize, compile_sum, compile_update  # noqa: E402


# a launch says everything itself: Triton has nothing to warn of
pytestmark = pytest.mark.filterwarnings("error")

# the product instruction of each generation
PRODUCTS = {80: r"mma\.sync", 90: r"wgmma\.mma_async", 100: r"tcgen05\.mma"}
# bytes of shared memory a program may have; the table of 80 also serves 8.6, 8.9 and 12.x, which have less
SHARED = {80: 99 * 1024, 90: 227 * 1024, 100: 227 * 1024}
# a few registers more than there are, in the longest unpacking; what is common must not spill at all
FEW_BYTES = 64
SCHEMES = {
    "ternary": ("ternary", 0, False), "4-bit": (4, 64, False), "3-bit": (3, 128, True), "8-bit": (8, 0, False),
}  # fmt: skip
MODES = [("ternary", True), ("4-bit", True), ("4-bit", False), ("3-bit", False), ("8-bit", True), ("8-bit", False)]

capabilities = pytest.mark.parametrize("capability", [80, 90, 100], ids=["sm_80", "sm_90", "sm_100"])
modes = pytest.mark.parametrize(("scheme", "int8"), MODES, ids=[f"{s}-{'int8' if i else 'float'}" for s, i in MODES])


def problem_of(scheme, int8, rows, dtype=torch.bfloat16):
    bits, group, asymmetric = SCHEMES[scheme]
    per_tensor = scheme == "ternary"
    return Problem(bits, group, per_tensor, asymmetric, int8, 4096, 4096, rows, dtype, "cuda")


@pytest.mark.parametrize("capability", [80, 90, pytest.param(100, marks=pytest.mark.slow)])
@modes
@pytest.mark.parametrize(
    "rows",
    [
        1,
        8,
        pytest.param(16, marks=pytest.mark.slow),
        pytest.param(64, marks=pytest.mark.slow),
        pytest.param(256, marks=pytest.mark.slow),
        2048,
    ],
)
def test_products_use_the_hardware(capability, scheme, int8, rows, tmp_path):
    problem = problem_of(scheme, int8, rows)
    code = compile_product(problem, capability)
    product = r"dp4a\.s32\.s32" if can_use_words(problem, True) else PRODUCTS[capability]
    assert code.count(product) > 0
    # weights arrive while others are multiplied, 16 bytes a copy where a thread takes so many
    assert code.count(r"cp\.async") > 0
    # results never depend on which program is first
    assert code.count(r"(atom|red)\.") == 0
    assert code.shared <= SHARED[capability]
    common = scheme != "3-bit"
    assert code.spilled(tmp_path) <= (0 if common else FEW_BYTES)


@pytest.mark.parametrize(("capability", "pattern"), [(80, r"mma\.sync.*\.s8\.s8\.s32"), (90, r"wgmma.*\.s32\.s8\.s8"),
                                                      (100, r"tcgen05\.mma.*::i8")])  # fmt: skip
def test_int8_activations_are_multiplied_as_integers(capability, pattern):
    code = compile_product(problem_of("4-bit", True, 64), capability)
    assert code.count(pattern) > 0 and code.count(r"cvt\.\S*\.bf16") <= 2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@capabilities
def test_float_dtypes(capability, dtype, tmp_path):
    code = compile_product(problem_of("4-bit", False, 16, dtype), capability)
    assert code.count(PRODUCTS[capability] if dtype != torch.float32 else r"(mma\.sync|wgmma|tcgen05\.mma)") > 0
    assert code.spilled(tmp_path) == 0 and code.shared <= SHARED[capability]


def test_weights_go_from_memory_to_the_product_in_registers():
    """Without a way back through shared memory: what makes W the left operand."""
    whole = problem_of("4-bit", False, 2048)
    code = compile_product(whole, 90)
    assert code.count(r"st\.shared") == 0
    # no conversion instruction either: numbers are made by or-ing and subtracting
    assert code.count(r"cvt\.rn\.(bf16|f32)\S*\.(s|u)(8|16|32)") == 0


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("scheme", ["4-bit", "ternary"])
def test_deeper_pipelines_hold_more(capability, scheme):
    problem = problem_of(scheme, scheme == "ternary", 16)
    codes = [compile_product(problem, capability, stages=stages) for stages in (2, 3, 4)]
    assert codes[0].shared < codes[1].shared < codes[2].shared
    copies = [code.count(r"cp\.async\.c[ag]") for code in codes]
    assert copies[0] < copies[1] < copies[2]


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("scheme", ["4-bit", "3-bit", "8-bit", "ternary"])
def test_words_need_no_tensor_core(capability, scheme, tmp_path):
    code = compile_product(problem_of(scheme, True, 1), capability)
    assert code.count(r"(mma\.sync|wgmma)") == 0
    assert code.count(r"cp\.async\.cg\.shared\.global .*, 0x10") > 0
    assert code.spilled(tmp_path) == 0


@pytest.mark.parametrize("capability", [86, 89, 120], ids=["sm_86", "sm_89", "sm_120"])
@modes
@pytest.mark.slow
def test_devices_with_little_shared_memory(capability, scheme, int8):
    for rows in (1, 64, 2048):
        assert compile_product(problem_of(scheme, int8, rows), capability, 84).shared <= SHARED[80]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_activations_are_rounded_twice_like_the_reference(dtype):
    code = compile_quantize(dtype, 90)
    # a fused multiplication and addition would round x * inverse together with the rounding to an integer
    assert code.count(r"fma\.") == 0 and code.count(r"mul\.\S*f32") > 0
    assert code.count(r"div\.rn\.f32") == 2 and code.count(r"div\.(full|approx)") == 0


@pytest.mark.parametrize("int8", [True, False], ids=["int8", "float"])
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize(
    "sizes",
    [(1, 1, 1), *(pytest.param(sizes, marks=pytest.mark.slow) for sizes in ((1, 1, 2), (33, 77, 1), (16, 16, 1)))],
    ids=str,
)
def test_sizes_of_every_kind_compile(bits, int8, sizes):
    """A launch makes a size of 1 a constant, and sizes that 16 does not divide cost the wide copies."""
    for group, asymmetric in ((0, False), (32, bits != "ternary")):
        assert compile_product(Problem(bits, group, False, asymmetric, int8, *sizes, torch.bfloat16, "cuda"), 90).cubin


def test_small_sizes_of_the_other_kernels_compile():
    assert compile_quantize(torch.bfloat16, 90, width=1).cubin and compile_sum(90, out_features=1).cubin


def test_the_sum_over_parts_keeps_its_order():
    code = compile_sum(90)
    assert code.count(r"fma\.") == 0 and code.count(r"(atom|red)\.") == 0


@pytest.mark.parametrize("state_bits", [8, 4, 32, 16])
@pytest.mark.parametrize(("rule", "bits"), [("adamw", "ternary"), ("adamw", 3), ("lion", 8), ("sgd", 4)])
def test_an_update_rounds_every_operation_once(rule, bits, state_bits, tmp_path):
    update = Update(rule, state_bits, bits, None, 1536, 1024, torch.bfloat16, torch.float32, "cuda")
    code = compile_update(update, asymmetric=bits == 3, capability=90)
    assert code.count(r"fma\.") == 0 and code.count(r"div\.(full|approx)") == 0
    assert code.count(r"sqrt\.approx") == 0
    assert (code.count(r"sqrt\.rn\.f32") > 0) == (rule == "adamw")
    assert code.spilled(tmp_path) == 0
