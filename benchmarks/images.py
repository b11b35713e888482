"""Fashion-MNIST as tensors: 60,000 and 10,000 grey pictures of 28 x 28 in ten classes (MIT licence).

It travels as the Debian package dataset-fashion-mnist. `load` looks for its files below $HF_LOWBIT_ASSETS (or
~/.cache/hf_lowbit/assets), in /usr/share/datasets where the package is installed, and else fetches the package with
apt-get and unpacks it without installing; files are known by their sha256.
"""

import gzip
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.debian import Package


PICTURES = Package("dataset-fashion-mnist", "usr/share/datasets/fashion-mnist", "fashion-mnist", {
    "train-images-idx3-ubyte.gz": "b0564c3eedabfbf835052cff8503ea422014ce006caf5b757f851416ee8300c7",
    "train-labels-idx1-ubyte.gz": "0ae29f65d86684f32d1b9c85147786c547b9c6aebcaf235f0400a0cce308b056",
    "t10k-images-idx3-ubyte.gz": "cc1d090a38ace84dfa1aa66e3ada7c336ef481a96936906477e6dd344da56eaa",
    "t10k-labels-idx1-ubyte.gz": "8d3605d196f4be44669e46906da9733c8131fef761fdbfec72c424d5222f1a05",
})  # fmt: skip
# of the training pictures divided by 255
MEAN, DEVIATION = 0.2860, 0.3530


def read_idx(path: Path) -> Tensor:
    """uint8 tensor of an IDX file: 0, 0, type 8, number of dimensions, sizes as big-endian int32, data."""
    data = gzip.decompress(path.read_bytes())
    if data[:3] != b"\0\0\x08":
        raise ValueError(f"{path} is no IDX file of bytes; it begins with {data[:3]!r}.")
    sizes = [int.from_bytes(data[4 + 4 * i : 8 + 4 * i], "big") for i in range(data[3])]
    return torch.frombuffer(bytearray(data[4 + 4 * data[3] :]), dtype=torch.uint8).view(sizes)


def load(part: str, folder: Path | None = None) -> tuple[Tensor, Tensor]:
    """(pictures float32 [n, 1, 28, 28] of mean 0 and deviation 1, labels int64 [n]) of "train" or "t10k"."""
    folder = folder or PICTURES.folder()
    pictures = read_idx(folder / f"{part}-images-idx3-ubyte.gz").float().div_(255).sub_(MEAN).div_(DEVIATION)
    return pictures[:, None], read_idx(folder / f"{part}-labels-idx1-ubyte.gz").long()
