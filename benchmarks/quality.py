"""What bits, groups and rounding cost two real models: the quality table.

    python -m benchmarks.quality                # continues where the last run stopped, 20 minutes at most
    python -m benchmarks.quality --restart      # from nothing
    python -m benchmarks.quality --again rtn    # after a change of the rounding: the reference rows stay

SmolLM2-135M (causal language model; perplexity, benchmarks/perplexity.py) and all-MiniLM-L6-v2 (encoder; two tasks,
benchmarks/encoder.py), each at every width and group size, under two roundings:

    rtn      hf_lowbit's own, through from_pretrained, save_pretrained: measured on the packed model, with its bytes
    absmax   the plain reference of benchmarks/absmax.py, applied to the same modules of the dense model

Everything is deterministic; the interval is over windows or passages, paired with the dense model. Activations stay
float at every width and products run through the reference operator, so the table compares weights alone: neither the
machine nor the kernel it has decides a figure.

That interval is about the text. Rounding has a luck of its own: which way single weights fall. So one point is
measured again under other shuffles of the same model's channels (scripts/permute.py), which change the grouping and
nothing else; their spread says which differences between rows mean something.

Writes benchmarks/results/quality.json and the tables of docs/quality.md.
"""

import argparse
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from tqdm import tqdm
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

import hf_lowbit as lb
from benchmarks import encoder, perplexity, render
from benchmarks.absmax import apply
from benchmarks.record import Record, watch
from hf_lowbit.functional.dispatch import use_kernel
from scripts.fetch_assets import ASSETS, locate
from scripts.permute import permute


BITS = (8, 4, 3, 2, "ternary")
GROUPS = (32, 64, 128, None)
METHODS = ("rtn", "absmax")
DENSE = "dense"
# the shipped copy is shuffled with seed 0
SHUFFLES = (1, 2, 3, 4)


@dataclass(frozen=True)
class Point:
    """One cell of the table."""

    model: str
    bits: str | int
    group_size: int | None
    method: str

    @property
    def key(self) -> str:
        group = "channel" if self.group_size is None else f"g{self.group_size}"
        return f"{self.model}/{self.bits}/{group}/{self.method}"


class LanguageModel:
    """SmolLM2: mean NLL of each window."""

    name, auto = "smollm2", AutoModelForCausalLM

    def __init__(self, folder: Path, count: int, length: int):
        self.folder = folder
        tokenizer = AutoTokenizer.from_pretrained(folder)
        self.batch = perplexity.windows(tokenizer, perplexity.novel("persuasion"), length, count)

    def prepare(self, model) -> None:
        """Nothing is derived from the dense model."""

    def measure(self, model, dense: dict | None) -> dict:
        nlls = list(perplexity.window_nlls(model, self.batch))
        figures = {"perplexity": perplexity.perplexity(nlls), "nlls": nlls}
        if dense:
            difference = perplexity.paired(dense["nlls"], nlls)
            figures["nll_difference"] = [difference.mean, difference.low, difference.high]
        return figures


class Encoder:
    """MiniLM: which novel, and the ranks of cosines."""

    name, auto = "minilm", AutoModel

    def __init__(self, folder: Path, train: int, test: int):
        self.folder = folder
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.passages = encoder.passages(train, test)

    def prepare(self, model) -> None:
        """The dense model's test embeddings, and the classifier trained on its other ones."""
        train = encoder.embed(model, self.tokenizer, self.passages.train)
        self.probe = encoder.train_probe(train, self.passages.train_labels)
        self.expected = encoder.embed(model, self.tokenizer, self.passages.test)

    def measure(self, model, dense: dict | None) -> dict:
        embeddings = encoder.embed(model, self.tokenizer, self.passages.test)
        correct = self.probe.correct(embeddings, self.passages.test_labels)
        figures = {
            "accuracy": sum(correct) / len(correct),
            "similarity": encoder.similarity(self.expected, embeddings),
            "correct": "".join(str(int(value)) for value in correct),
        }
        if dense:
            difference = perplexity.paired([float(c) for c in dense["correct"]], correct)
            figures["accuracy_difference"] = [difference.mean, difference.low, difference.high]
        return figures


def rtn(subject, point: Point) -> tuple:
    """The packed model, and what it weighs."""
    config = lb.LowBitConfig(bits=point.bits, group_size=point.group_size, activations="float")
    model = subject.auto.from_pretrained(subject.folder, quantization_config=config)
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        size = sum(file.stat().st_size for file in Path(folder).glob("*.safetensors"))
    report = lb.report(model)
    facts = {"bytes": size, "bits_per_weight": report.bits_per_weight}
    return model, facts


def absmax(subject, point: Point, names: list[str]) -> tuple:
    model = subject.auto.from_pretrained(subject.folder)
    apply(model, names, point.bits, point.group_size)
    return model, {}


def converted_names(subject) -> list[str]:
    """The modules that hf_lowbit converts: both roundings act on the same ones."""
    model = subject.auto.from_pretrained(subject.folder, quantization_config=lb.LowBitConfig(bits=8, group_size=None))
    return sorted(model.config.quantization_config.modules)


def sweep(subject, record: Record, deadline: float) -> None:
    """Measure what the record lacks, until the deadline."""
    points = [Point(subject.name, *rest) for rest in ((b, g, m) for m in METHODS for b in BITS for g in GROUPS)]
    missing = [point for point in points if point.key not in record.rows]
    dense_key = f"{subject.name}/{DENSE}"
    if (not missing and dense_key in record.rows) or time.monotonic() > deadline:
        return
    model = subject.auto.from_pretrained(subject.folder)
    subject.prepare(model)
    if dense_key not in record.rows:
        size = sum(file.stat().st_size for file in subject.folder.glob("*.safetensors"))
        with watch() as spent:
            figures = subject.measure(model, None)
        record.add(dense_key, {"bytes": size, **figures, "seconds": round(spent.seconds, 1)})
    del model
    dense = record.rows[dense_key]
    # a point costs what the dense model costs, and its rounding
    minutes = 1.3 * len(missing) * dense["seconds"] / 60
    print(f"{subject.name}: {len(missing)} points are missing, about {minutes:.0f} minutes")
    names = converted_names(subject)
    for point in tqdm(missing, desc=subject.name, unit="point"):
        if time.monotonic() > deadline:
            return
        with watch() as spent:
            model, facts = rtn(subject, point) if point.method == "rtn" else absmax(subject, point, names)
            with use_kernel("reference"):
                facts |= subject.measure(model, dense)
        record.add(point.key, {**facts, "seconds": round(spent.seconds, 1)})


def sweep_shuffles(subject, shipped: Path, record: Record, deadline: float) -> None:
    """The point of 4 bits and groups of 64 again, with the channels in other orders."""
    point = Point(subject.name, 4, 64, "rtn")
    missing = [seed for seed in SHUFFLES if f"{point.key}/shuffle{seed}" not in record.rows]
    for seed in tqdm(missing, desc="shuffles", unit="point"):
        if time.monotonic() > deadline:
            return
        model = subject.auto.from_pretrained(shipped)
        permute(model, seed)
        config = lb.LowBitConfig(bits=point.bits, group_size=point.group_size)
        model = lb.quantize(model.bfloat16(), config)
        with use_kernel("reference"):
            figures = subject.measure(model, record.rows[f"{subject.name}/{DENSE}"])
        record.add(f"{point.key}/shuffle{seed}", figures)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--restart", action="store_true", help="throw the measured rows away")
    parser.add_argument("--again", metavar="TEXT", help="throw the rows away whose name contains this")
    parser.add_argument("--minutes", type=float, default=20, help="stop after this time; the next run continues")
    arguments = parser.parse_args()
    folders = {name: locate(name) for name in ("smollm2", "minilm")}
    if missing := [name for name, folder in folders.items() if folder is None]:
        raise SystemExit(f"not on this machine: {', '.join(missing)}; run `python scripts/fetch_assets.py`.")
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    protocol = {
        "baselines": {name: ASSETS[name].baseline for name in folders},
        "smollm2": {
            "text": "persuasion",
            "windows": perplexity.COUNT,
            "length": perplexity.LENGTH,
            "dtype": "bfloat16",
        },
        "minilm": {
            "novels": encoder.NOVELS,
            "train": encoder.TRAIN,
            "test": encoder.TEST,
            "tokens": encoder.TOKENS,
            "dtype": "float32",
        },
        "activations": "float",
        "kernel": "reference",
        "seed": "none: nothing is random",
    }
    record = Record("quality", protocol, restart=arguments.restart, timed=False)
    if arguments.again:
        record.drop(arguments.again)
    deadline = time.monotonic() + 60 * arguments.minutes
    total = 2 * (1 + len(METHODS) * len(BITS) * len(GROUPS)) + len(SHUFFLES)
    print(f"{len(record.rows)} of {total} points are measured; this run takes {arguments.minutes:g} minutes at most")
    language_model = LanguageModel(folders["smollm2"], perplexity.COUNT, perplexity.LENGTH)
    sweep(language_model, record, deadline)
    sweep_shuffles(language_model, locate("smollm2-shipped"), record, deadline)
    sweep(Encoder(folders["minilm"], encoder.TRAIN, encoder.TEST), record, deadline)
    if len(record.rows) < total:
        print(f"{total - len(record.rows)} points are left: run this again to continue")
    render.write()


if __name__ == "__main__":
    main()
