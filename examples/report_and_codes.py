"""Look inside: what is low-bit and what is not, the integer codes of a layer, and the way back to dense weights.

    python examples/report_and_codes.py MODEL            # a folder or Hub id of a causal language model

A layer's numbers are scale * (code - zero_point); `lb.codes` gives the three to whoever wants to see or check them.
"""

import argparse

import torch
from transformers import AutoModelForCausalLM

import hf_lowbit as lb


def main(model: str, bits: int, group_size: int) -> None:
    config = lb.LowBitConfig(bits=bits, group_size=group_size)
    lowbit = AutoModelForCausalLM.from_pretrained(model, quantization_config=config)
    report = lb.report(lowbit)
    print(report)
    print(f"\n{report.bits_per_weight:.2f} bits a converted weight, {report.total_bytes:,} bytes in all")

    name = next(iter(lowbit.config.quantization_config.modules))
    layer = lowbit.get_submodule(name)
    codes, scale, zero_point = lb.codes(layer)
    print(f"\n{name}: codes {tuple(codes.shape)} from {int(codes.min())} to {int(codes.max())}")
    for code, count in zip(*codes.unique(return_counts=True), strict=True):
        print(f"  {int(code):4d} {100 * int(count) / codes.numel():5.1f} %")

    # the same numbers by hand: every scale serves `group_size` neighbours, the last ones of a row maybe fewer
    def spread(values):
        return values.float().repeat_interleave(group_size, dim=1)[:, : codes.shape[1]]

    by_hand = spread(scale) * (codes.float() - (0 if zero_point is None else spread(zero_point)))
    dense = lowbit.dequantize().get_submodule(name).weight
    equal = torch.equal(by_hand.to(dense.dtype), dense)
    print(f"scale * (code - zero_point) {'equals' if equal else 'DIFFERS FROM'} the dequantized weight")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--bits", type=int, default=4)
    parser.add_argument("--group-size", type=int, default=64)
    main(**vars(parser.parse_args()))
