"""Samples to a target by batch size and optimizer: pictures, which is what large batches were first tried on.

    python -m benchmarks.vision              # continues where the last run stopped, 20 minutes at most
    python -m benchmarks.vision --restart

Fashion-MNIST (`benchmarks/images.py`), label smoothing 0.1 as Yamazaki et al. (2019) have it, until the error on
VALIDATION pictures of the training set is at most TARGET; the test set decides nothing here. A small ResNet, whose
convolutions stay float, with float weights; a small ViT with float weights and with direct updates.
`benchmarks/batch_sweep.py` says how the learning rate of each cell is found and what is counted.

Writes benchmarks/results/vision.json; docs/measurement.md quotes it.
"""

import argparse
import time

import torch
from torch import nn
from transformers import ResNetConfig, ResNetForImageClassification, ViTConfig, ViTForImageClassification
from transformers.utils import logging

from benchmarks import images
from benchmarks.batch_sweep import (
    FACTOR,
    MICRO,
    MOST_RATES,
    OPTIMIZERS,
    WARMUP,
    WAYS,
    Cell,
    Task,
    cells,
    summary,
    sweep,
)
from benchmarks.record import Record


CLASSES, SMOOTHING, VALIDATION, TARGET = 10, 0.1, 1000, 0.3
VIT = {"image_size": 28, "patch_size": 7, "num_channels": 1, "hidden_size": 64, "num_hidden_layers": 2,
       "num_attention_heads": 4, "intermediate_size": 128}  # fmt: skip
RESNET = {"num_channels": 1, "embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "layer_type": "basic"}
BATCHES, SEEDS = (16, 128, 1024), (0, 1, 2)
# model -> ways to hold its weights: direct updates are of linear layers, and a ResNet has one
MODELS = {"vit": tuple(WAYS), "resnet": ("bf16",)}


def smoothed(model: nn.Module, batch: dict) -> torch.Tensor:
    """Cross entropy with label smoothing."""
    logits = model(pixel_values=batch["pixel_values"]).logits.float()
    return nn.functional.cross_entropy(logits, batch["labels"], label_smoothing=SMOOTHING)


def build(name: str, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    if name == "vit":
        return ViTForImageClassification(ViTConfig(**VIT, num_labels=CLASSES))
    return ResNetForImageClassification(ResNetConfig(**RESNET, num_labels=CLASSES))


def task(name: str, pictures, labels) -> Task:
    """`pictures`, `labels`: the training set; its last VALIDATION pictures are held out."""
    own, held_out = (pictures[:-VALIDATION], labels[:-VALIDATION]), (pictures[-VALIDATION:], labels[-VALIDATION:])

    def batches(seed: int, batch: int):
        generator = torch.Generator().manual_seed(seed)
        while True:
            # pictures of an epoch are drawn without putting back
            order = torch.randperm(len(own[0]), generator=generator)
            for start in range(0, len(order) - batch + 1, batch):
                chosen = order[start : start + batch]
                yield {"pixel_values": own[0][chosen], "labels": own[1][chosen]}

    @torch.inference_mode()
    def quality(model) -> float:
        model.eval()
        return float((model(pixel_values=held_out[0]).logits.argmax(-1) != held_out[1]).float().mean())

    return Task(lambda seed: build(name, seed), batches, quality, TARGET, lambda batch: max(32_768, 64 * batch),
                lambda batch: max(1, 512 // batch), loss=smoothed)  # fmt: skip


def plan() -> dict[str, list[Cell]]:
    return {name: cells(ways, OPTIMIZERS, BATCHES, name) for name, ways in MODELS.items()}


def main(arguments) -> None:
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    protocol = {
        "vit": VIT, "resnet": RESNET, "smoothing": SMOOTHING, "target": TARGET, "validation": VALIDATION,
        "batches": BATCHES, "seeds": SEEDS, "models": MODELS, "ways": WAYS,
        "optimizers": {name: first for name, (_, first) in OPTIMIZERS.items()}, "warmup": WARMUP, "factor": FACTOR,
        "most_rates": MOST_RATES, "micro_batch": MICRO, "budget": "the larger of 32768 samples and 64 steps",
        "every": "512 samples, or a step", "data": f"Fashion-MNIST, {images.PICTURES.package}", "autocast": "bfloat16",
    }  # fmt: skip
    record = Record("vision", protocol, arguments.restart, timed=False)
    found = plan()
    print(f"{sum(map(len, found.values()))} cells of about 6 runs, 5 to 60 seconds each; {len(record.rows)} are done.")
    data, deadline = images.load("train"), time.monotonic() + 60 * arguments.minutes
    for name, cells_of in found.items():
        if not sweep(record, task(name, *data), cells_of, SEEDS, deadline):
            break
    for name, cells_of in found.items():
        print(f"{name}\n{summary(record.rows, cells_of, SEEDS)}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--restart", action="store_true")
    parser.add_argument("--minutes", type=float, default=20)
    main(parser.parse_args())
