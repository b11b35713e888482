"""What evaluation multiplies with between updates: the codes of now, never a form kept from an earlier evaluation."""

import pytest
import torch

import hf_lowbit as lb
from hf_lowbit.kernels import use_kernel
from hf_lowbit.kernels.cpu.record import TIERS, refuse_tier


KERNELS = ["reference", "torch-native", *TIERS]
FIELDS = [
    {"bits": 8, "forward_bits": "ternary"},
    {"bits": 4, "forward_bits": "ternary", "group_size": 32, "scale": "learned"},
    {"bits": 8},
    {"bits": "ternary"},
]


@pytest.mark.parametrize("fields", FIELDS, ids=str)
@pytest.mark.parametrize("moved_by", ["reference", *TIERS])
def test_an_update_is_seen_by_the_next_evaluation(fields, moved_by):
    if moved_by != "reference" and (reason := refuse_tier(moved_by)):
        pytest.skip(reason)
    torch.manual_seed(0)
    model = lb.quantize(torch.nn.Sequential(torch.nn.Linear(64, 32)), lb.DQTConfig(**fields)).eval()
    optimizer = lb.DQTOptimizer(model, lr=1e-2)
    x, target = torch.randn(8, 64), torch.randn(8, 32)
    for _ in range(3):
        with torch.no_grad():
            before = [_output(model, x, kernel) for kernel in KERNELS]
        ((model(x) - target) ** 2).mean().backward()
        with use_kernel(moved_by):
            optimizer.step()
        optimizer.zero_grad()
        # with gradients the weight is built from the codes at every call
        expected = model(x).detach()
        with torch.no_grad():
            after = [_output(model, x, kernel) for kernel in KERNELS]
        for old, new in zip(before, after, strict=True):
            if new is not None:
                torch.testing.assert_close(new, expected, atol=2e-3, rtol=2e-2)
                assert not torch.equal(old, new)


def _output(model, x, kernel):
    if kernel in TIERS and refuse_tier(kernel):
        return None
    with use_kernel(kernel):
        return model(x)
