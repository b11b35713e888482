"""GPTQ checkpoints as AutoGPTQ writes them, and their weights as it reads them: word by word, as its layers do it, so
that nothing here is shared with the code under test.
"""

import json

import numpy as np
import torch
from safetensors.torch import save_file


def pack_rows(fields, bits):
    """uint32 [K, N] of fields -> int32 [K b / 32, N], along the first dimension."""
    fields = fields.astype(np.uint32)
    words = np.zeros((fields.shape[0] * bits // 32, fields.shape[1]), dtype=np.uint32)
    at = row = 0
    while row < words.shape[0]:
        if bits in (2, 4, 8):
            for j in range(32 // bits):
                words[row] |= fields[at + j] << np.uint32(bits * j)
            at, row = at + 32 // bits, row + 1
            continue
        # three words hold 32 fields of three bits, two of which are cut
        for j in range(10):
            words[row] |= fields[at + j] << np.uint32(3 * j)
        words[row] |= fields[at + 10] << np.uint32(30)
        words[row + 1] |= (fields[at + 10] >> np.uint32(2)) & np.uint32(1)
        for j in range(10):
            words[row + 1] |= fields[at + 11 + j] << np.uint32(3 * j + 1)
        words[row + 1] |= fields[at + 21] << np.uint32(31)
        words[row + 2] |= (fields[at + 21] >> np.uint32(1)) & np.uint32(3)
        for j in range(10):
            words[row + 2] |= fields[at + 22 + j] << np.uint32(3 * j + 2)
        at, row = at + 32, row + 3
    return torch.from_numpy(words.view(np.int32).copy())


class Layer:
    """A random layer [N, K] on GPTQ's grid."""

    def __init__(self, rows, columns, bits, group_size, sym, generator, order=None):
        groups = columns // group_size if group_size > 0 else 1
        top = (1 << bits) - 1
        self.bits, self.sym = bits, sym
        self.codes = torch.randint(0, top + 1, (columns, rows), generator=generator)
        self.zeros = torch.randint(0, top + 1, (groups, rows), generator=generator)
        if sym:
            self.zeros.fill_(1 << (bits - 1))
        self.scales = (torch.rand(groups, rows, generator=generator) * 0.02 + 0.005).to(torch.float16)
        self.g_idx = torch.arange(columns, dtype=torch.int32) // (group_size if group_size > 0 else columns)
        if order is not None:
            self.g_idx = self.g_idx[order]

    def tensors(self, layout):
        zeros = self.zeros - 1 if layout == "gptq" else self.zeros
        fields = (zeros & ((1 << self.bits) - 1)).numpy()
        return {
            "qweight": pack_rows(self.codes.numpy(), self.bits),
            "qzeros": pack_rows(fields.T, self.bits).t().contiguous(),
            "scales": self.scales.clone(),
            "g_idx": self.g_idx.clone(),
        }

    def dense(self, dtype):
        """[N, K] as AutoGPTQ's layer multiplies with, formed in float32."""
        g = self.g_idx.to(torch.int64)
        steps = (self.codes - self.zeros[g]).to(torch.float32)
        return (self.scales[g].to(torch.float32) * steps).t().contiguous().to(dtype)


def write(
    folder, model, *, bits, group_size, sym, layout="gptq", order=None, dynamic=None, zero_bias=False, older=False
):
    """A checkpoint of `model` (a causal LM) with random layers in all linear ones but the head; they are returned."""
    generator = torch.Generator().manual_seed(0)
    layers, tensors = {}, {}
    linears = {n: m for n, m in model.named_modules() if isinstance(m, torch.nn.Linear) and n != "lm_head"}
    for name, module in linears.items():
        rows, columns = module.weight.shape
        width = (dynamic or {}).get(name, bits)
        permutation = torch.randperm(columns, generator=generator) if order else None
        layers[name] = Layer(rows, columns, width, group_size, sym, generator, permutation)
        tensors |= {f"{name}.{part}": tensor for part, tensor in layers[name].tensors(layout).items()}
        if zero_bias:
            tensors[f"{name}.bias"] = torch.zeros(rows, dtype=torch.float16)
    tied = model.config.tie_word_embeddings
    for name, tensor in model.state_dict().items():
        if name.rpartition(".")[0] not in linears and not (tied and name == "lm_head.weight"):
            tensors[name] = tensor.to(torch.float16).clone()
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = model.config.to_dict() | {"dtype": "float16", "architectures": [type(model).__name__]}
    quantization = {"bits": bits, "group_size": group_size, "sym": sym, "desc_act": bool(order)}
    if older:
        (folder / "quantize_config.json").write_text(json.dumps(quantization))
    else:
        config["quantization_config"] = quantization | {"quant_method": "gptq", "checkpoint_format": layout}
    (folder / "config.json").write_text(json.dumps(config))
    return layers


def replace(folder, layers, layout="gptq"):
    """Put `layers` in the place of the dense weights of the same names."""
    from safetensors.torch import load_file

    tensors = load_file(folder / "model.safetensors")
    for name, layer in layers.items():
        del tensors[f"{name}.weight"]
        tensors |= {f"{name}.{part}": tensor for part, tensor in layer.tensors(layout).items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
