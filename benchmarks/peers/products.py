"""Low-bit linear layers of other libraries: what `python -m benchmarks.linear --peers` times beside ours.

    pip install torchao optimum-quanto hqq termcolor bitsandbytes litespark-inference

A peer that is not installed, or does not run on this machine, is left out with a sentence. So is one whose result is
wrong: the weight that it gets is ternary, so every one of them should come close to the dense product. Nothing here is
imported before it is asked for. The activations are bfloat16 as for ours.
"""

import copy
from collections.abc import Callable

import torch
from torch import Tensor, nn


Product = Callable[[Tensor], Tensor]
GROUP = 64
# what may be left of the product beside a multiple of the exact one: some take the mean of |w| as scale
TOLERANCE = 0.15


def aten_int4(layer: nn.Linear) -> Product:
    """torch's own int4 product, groups of 64."""
    groups = layer.weight.detach().float().unflatten(1, (-1, GROUP))
    scale = (groups.abs().amax(2) / 7).clamp_min(1e-8).bfloat16()
    codes = (groups / scale.float().unsqueeze(2)).round().clamp(-8, 7).flatten(1).to(torch.int32) + 8
    packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes, 1)
    scale_and_zero = torch.stack([scale, torch.zeros_like(scale)], dim=2).transpose(0, 1).contiguous()
    return lambda x: torch.ops.aten._weight_int4pack_mm_for_cpu(x, packed, GROUP, scale_and_zero)


def aten_int8(layer: nn.Linear) -> Product:
    """torch's own int8 product, a scale a row."""
    weight = layer.weight.detach().float()
    scale = weight.abs().amax(1) / 127
    codes, scale = (weight / scale.unsqueeze(1)).round().to(torch.int8), scale.bfloat16()
    return lambda x: torch._weight_int8pack_mm(x, codes, scale)


def torchao(config: Callable[[], object]) -> Callable[[nn.Linear], Product]:
    def make(layer: nn.Linear) -> Product:
        from torchao.quantization import quantize_

        model = nn.Sequential(layer)
        quantize_(model, config())
        return model

    return make


def torchao_int4():
    from torchao.prototype.quantization.int4 import PrototypeInt4WeightOnlyConfig

    return PrototypeInt4WeightOnlyConfig(group_size=GROUP, set_inductor_config=False)


def torchao_int8():
    from torchao.quantization import Int8WeightOnlyConfig

    return Int8WeightOnlyConfig()


def torchao_int8_dynamic():
    from torchao.quantization import Int8DynamicActivationInt8WeightConfig

    return Int8DynamicActivationInt8WeightConfig()


def quanto(kind: str) -> Callable[[nn.Linear], Product]:
    def make(layer: nn.Linear) -> Product:
        from optimum import quanto

        model = nn.Sequential(layer)
        quanto.quantize(model, weights=getattr(quanto, kind))
        quanto.freeze(model)
        return model

    return make


def hqq(layer: nn.Linear) -> Product:
    """4 bits in groups of 64, without HQQ's search: it changes the codes, not the time."""
    from hqq.core.quantize import BaseQuantizeConfig, HQQLinear

    config = BaseQuantizeConfig(nbits=4, group_size=GROUP)
    config["weight_quant_params"]["optimize"] = False
    return HQQLinear(layer, config, compute_dtype=torch.bfloat16, device="cpu")


def bitsandbytes_nf4(layer: nn.Linear) -> Product:
    from bitsandbytes.nn import Linear4bit

    low = Linear4bit(layer.in_features, layer.out_features, False, compute_dtype=torch.bfloat16, quant_type="nf4")
    low.load_state_dict(layer.state_dict())
    return low.to("cpu")


def bitsandbytes_int8(layer: nn.Linear) -> Product:
    from bitsandbytes.nn import Linear8bitLt

    low = Linear8bitLt(layer.in_features, layer.out_features, bias=False, has_fp16_weights=False)
    low.load_state_dict(layer.state_dict())
    return low.to("cpu")


def litespark(layer: nn.Linear) -> Product:
    """Ternary; it takes float32 activations and as many threads as it is told."""
    from litespark_inference.models import TernaryLinear

    low = TernaryLinear(layer.in_features, layer.out_features, bias=False, num_threads=torch.get_num_threads())
    low.load_from_weight(layer.weight.detach().float())
    return lambda x: low(x.float())


PEERS: dict[str, Callable[[nn.Linear], Product]] = {
    "aten int4": aten_int4,
    "aten int8": aten_int8,
    "torchao int4": torchao(torchao_int4),
    "torchao int8": torchao(torchao_int8),
    "torchao int8 int8": torchao(torchao_int8_dynamic),
    "quanto int4": quanto("qint4"),
    "quanto int8": quanto("qint8"),
    "hqq int4": hqq,
    "bitsandbytes nf4": bitsandbytes_nf4,
    "bitsandbytes int8": bitsandbytes_int8,
    "litespark ternary": litespark,
}


def dense_layer(shape: tuple[int, int]) -> nn.Linear:
    layer = nn.Linear(shape[1], shape[0], bias=False, dtype=torch.bfloat16).requires_grad_(False)
    layer.weight.copy_(torch.randint(-1, 2, shape) * 0.03125)
    return layer


def obstacle(make: Callable[[nn.Linear], Product], shape: tuple[int, int]) -> str | None:
    """Why a peer is left out, or None."""
    layer = dense_layer(shape)
    x = torch.randn(4, shape[1]).bfloat16()
    expected = layer(x).float()
    try:
        y = make(copy.deepcopy(layer))(x).float()
    # whatever a library raises where it does not run is the reason that the reader gets
    except Exception as problem:
        return f"{type(problem).__name__}: {str(problem).strip().splitlines()[0] if str(problem).strip() else ''}"
    error = float((y - expected * (y * expected).sum() / expected.square().sum()).norm() / y.norm())
    return None if error <= TOLERANCE else f"its result is off by {error:.2f} of the dense product"


def candidates(shape: tuple[int, int], count: int) -> tuple[dict[str, Callable], dict[str, str]]:
    """name -> function(x, i) over a ring of `count` layers, and name -> why it is left out."""
    found, left_out = {}, {}
    for name, make in PEERS.items():
        reason = obstacle(make, shape)
        if reason is not None:
            left_out[name] = reason
            continue
        ring = [make(dense_layer(shape)) for _ in range(count)]
        found[name] = lambda x, i, ring=ring: ring[i % count](x)
    return found, left_out
