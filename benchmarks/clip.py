"""Which error the data-free clip search should minimise: candidates for its measure, on every model that is here.

    python -m benchmarks.clip                # continues where the last run stopped, 20 minutes at most
    python -m benchmarks.clip --only minilm/4 --rules power1,power0

hf_lowbit.functional.rounding tries steps for each group of weights w and keeps the one with the least error. The
steps are the same here, the codes and scales are made by the same code; only the measure differs:

    power0, power0.5, power1    sum_i |w_i|^p (w_i - s v_i)^2, the scale s that minimises it; 1 is the package's
    mean                        the same with (|w_i| + mean|w|) as the weight
    norm2.4, norm4              sum_i |w_i - s v_i|^p, the scale of the least squares
    rowsum                      squared error and the square of the group's summed error
    floor0.8, floor0.9          power0, and no step below 0.8 or 0.9 of the one that covers the group
    power1floor0.8              power1 with that floor
    unbiased                    power0, and then the scale s = <w, w> / <w, v>, with which <w, s v> = <w, w>
    cover                       no search: the step that covers the group

Judged on calibration text alone: Emma, and Sense and Sensibility. Smaller is better in every figure:

    smollm2   mean KL divergence of the next token's distribution from the dense model's, nats a token; the mean over
              shuffles of the channels (scripts/permute.py), which change the groups and nothing else
    minilm    1 - mean cosine between the embeddings of a passage under the dense and the low-bit model
    albert    1 - mean cosine between the last hidden states of a symbol; reactions as SMILES

Writes benchmarks/results/clip.json and a table of docs/quality.md.
"""

import argparse
import math
import re
import statistics
import time
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from tqdm import tqdm
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

from benchmarks import encoder, perplexity
from benchmarks.record import ROOT, Record, watch
from benchmarks.render import replace_between
from hf_lowbit.functional import rounding
from hf_lowbit.functional.grid import dequantize, grid_of
from scripts.fetch_assets import ASSETS, locate
from scripts.permute import permute


MODELS = ("minilm", "albert", "smollm2")
POINTS = ((4, 64), (3, 64), (4, None), (4, 128), (3, None), (2, 64))
WINDOWS, LENGTH, SHUFFLES = 1, 512, (1, 2)  # windows a novel; SmolLM2 alone
PASSAGES = 25  # a novel; MiniLM
REACTIONS = (
    "CC(C)S.CN(C)C=O.Fc1cccnc1F.O=C([O-])[O-].[K+].[K+]>>CC(C)Sc1ncccc1F",
    "CCO.CC(=O)O>>CC(=O)OCC.O",
    "O=C(Cl)c1ccccc1.Nc1ccccc1>>O=C(Nc1ccccc1)c1ccccc1",
    "Brc1ccccc1.OB(O)c1ccccc1.O=C([O-])[O-].[K+].[K+]>>c1ccc(-c2ccccc2)cc1",
    "CC(=O)c1ccccc1.[BH4-].[Na+].CO>>CC(O)c1ccccc1",
    "C=CC=C.C=CC(=O)OC>>COC(=O)C1CC=CCC1",
    "CC(=O)Oc1ccccc1C(=O)O.O>>O=C(O)c1ccccc1O.CC(=O)O",
    "Cc1ccccc1.O=[N+]([O-])O.O=S(=O)(O)O>>Cc1ccc([N+](=O)[O-])cc1",
)
SYMBOL = re.compile(r"\[[^\]]+\]|Br|Cl|>>|%\d\d|.")
CLS, SEP = 12, 13


class Measure(rounding._Best):
    """The search's bookkeeping with the measure of a rule: what `weigh` gives, a norm, a floor, a last scale."""

    power, offset, norm, floor, rowsum, unbiased = 1.0, 0.0, 2.0, 0.0, False, False

    def __init__(self, x, grid, step, zero, symmetric):
        super().__init__(x, grid, step, zero, symmetric)
        magnitude = x.abs()
        self.weights = magnitude**self.power + self.offset * magnitude.mean(dim=1, keepdim=True)
        self.weighted = x * self.weights
        self.gain.fill_(-math.inf)
        self.least = self.floor * step

    def rate(self, step, zero):
        step = torch.maximum(step, self.least)
        x, grid = self.x, self.grid
        v = torch.clamp((x / step).round_(), grid.qmin - zero, grid.qmax - zero)
        cross = (self.weighted * v).sum(dim=1, keepdim=True)
        power = (self.weights * v * v).sum(dim=1, keepdim=True).clamp_(min=1e-30)
        scale = cross / power
        if self.norm != 2:
            gain = -(x - scale * v).abs_().pow_(self.norm).sum(dim=1, keepdim=True)
        elif self.rowsum:
            lost = x - scale * v
            gain = -lost.square().sum(dim=1, keepdim=True) - lost.sum(dim=1, keepdim=True).square()
        else:
            gain = cross * scale
        if self.unbiased:
            scale = x.square().sum(dim=1, keepdim=True) / cross.clamp(min=1e-30)
        better = (gain > self.gain) & (cross > 0)
        self.gain = torch.where(better, gain, self.gain)
        self.tried = torch.where(better, step, self.tried)
        self.step = torch.where(better, scale, self.step)
        self.zero = torch.where(better, zero, self.zero)


DEFAULT = "power1"
RULES = {
    "power1": {},
    "power0": {"power": 0.0},
    "cover": None,
    "mean": {"offset": 1.0},
    "power0.5": {"power": 0.5},
    "unbiased": {"power": 0.0, "unbiased": True},
    "floor0.9": {"power": 0.0, "floor": 0.9},
    "floor0.8": {"power": 0.0, "floor": 0.8},
    "power1floor0.8": {"floor": 0.8},
    "norm2.4": {"power": 0.0, "norm": 2.4},
    "norm4": {"power": 0.0, "norm": 4.0},
    "rowsum": {"power": 0.0, "rowsum": True},
}


@contextmanager
def measured_by(rule: str):
    """The package's search with another measure; `cover` is its `search=False`."""
    kept = rounding._Best
    if RULES[rule] is not None:
        rounding._Best = type("Rule", (Measure,), RULES[rule])
    try:
        yield
    finally:
        rounding._Best = kept


def rounded(weight: Tensor, bits: int, group_size: int | None, rule: str) -> Tensor:
    """`weight` on the grid and back; zero points below 4 bits, as the package's default is."""
    with measured_by(rule):
        search = RULES[rule] is not None
        q = rounding.round_to_nearest(weight, grid_of(bits), group_size, symmetric=bits >= 4, search=search)
    return dequantize(q.codes, q.scale, q.zero_point, group_size).to(weight.dtype)


class Subject:
    """A dense model, its outputs, and the weights to round."""

    def __init__(self, model):
        self.model = model.eval()
        skipped = ("lm_head", "pooler")
        self.linears = [m for n, m in model.named_modules() if isinstance(m, nn.Linear) and not n.startswith(skipped)]
        self.kept = [linear.weight.detach().clone() for linear in self.linears]
        self.expected = self.outputs()

    @torch.no_grad()
    def loss(self, bits: int, group_size: int | None, rule: str) -> float:
        for linear, weight in zip(self.linears, self.kept, strict=True):
            linear.weight.copy_(rounded(weight, bits, group_size, rule))
        return self.distance(self.outputs())

    def distance(self, outputs: Tensor) -> float:
        """1 - mean cosine of rows."""
        return 1 - float(nn.functional.cosine_similarity(self.expected, outputs, dim=-1).double().mean())


class SmolLM2(Subject):
    """Log-probabilities of every next token, bfloat16 as the model computes."""

    def __init__(self, shuffle: int):
        folder = locate("smollm2-shipped")
        tokenizer = AutoTokenizer.from_pretrained(folder)
        parts = [perplexity.windows(tokenizer, perplexity.novel(n), LENGTH, WINDOWS) for n in perplexity.CALIBRATION]
        self.batch = torch.cat(parts)
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
        permute(model, shuffle)
        super().__init__(model)

    @torch.inference_mode()
    def outputs(self) -> Tensor:
        windows = [self.model(input_ids=window[None], use_cache=False).logits[0] for window in self.batch]
        return torch.cat(windows)

    def distance(self, outputs: Tensor) -> float:
        total = 0.0
        for p, q in zip(self.expected.split(256), outputs.split(256), strict=True):
            p, q = p.float().log_softmax(-1), q.float().log_softmax(-1)
            total += float(nn.functional.kl_div(q, p, reduction="sum", log_target=True))
        return total / len(outputs)


class MiniLM(Subject):
    """Embeddings of passages."""

    def __init__(self):
        folder = locate("minilm")
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.passages = []
        for name in perplexity.CALIBRATION:
            found = [text for text in perplexity.novel(name).split("\n\n") if len(text.split()) >= encoder.WORDS]
            self.passages += found[:PASSAGES]
        super().__init__(AutoModel.from_pretrained(folder))

    def outputs(self) -> Tensor:
        return encoder.embed(self.model, self.tokenizer, self.passages)


class Albert(Subject):
    """Last hidden states of all symbols."""

    def __init__(self):
        folder = locate("albert")
        vocabulary = {symbol: index for index, symbol in enumerate((folder / "vocab.txt").read_text().split())}
        rows = [[CLS, *(vocabulary[symbol] for symbol in SYMBOL.findall(text)), SEP] for text in REACTIONS]
        self.rows = [torch.tensor([row]) for row in rows]
        super().__init__(AutoModel.from_pretrained(folder))

    @torch.inference_mode()
    def outputs(self) -> Tensor:
        return torch.cat([self.model(input_ids=row).last_hidden_state[0] for row in self.rows])


def key_of(model: str, bits: int, group_size: int | None, rule: str) -> str:
    return f"{model}/{bits}/{'channel' if group_size is None else f'g{group_size}'}/{rule}"


def subjects(name: str):
    """(name in the record, how to load it)."""
    if name == "smollm2":
        return [(f"smollm2-{shuffle}", lambda shuffle=shuffle: SmolLM2(shuffle)) for shuffle in SHUFFLES]
    return [(name, {"minilm": MiniLM, "albert": Albert}[name])]


def sweep(record: Record, only: str, rules: list[str], deadline: float) -> None:
    for model in MODELS:
        for name, load in subjects(model):
            cells = [(bits, group, rule) for bits, group in POINTS for rule in rules]
            missing = [cell for cell in cells if (key := key_of(name, *cell)) not in record.rows and only in key]
            if not missing or time.monotonic() > deadline:
                continue
            subject = load()
            for cell in tqdm(missing, desc=name, unit="point"):
                if time.monotonic() > deadline:
                    return
                with watch() as spent:
                    loss = subject.loss(*cell)
                record.add(key_of(name, *cell), {"loss": loss, "seconds": round(spent.seconds, 1)})


def table(rows: dict) -> str:
    """Loss of every rule as a ratio to power1's, the geometric mean over shuffles."""
    lines = ["| model, bits, group | power1 | " + " | ".join(list(RULES)[1:]) + " |"]
    lines.append("| --- |" + " ---: |" * len(RULES))
    for model in MODELS:
        for bits, group in POINTS:
            names = [name for name, _ in subjects(model)]
            cells = []
            for rule in RULES:
                ratios = []
                for name in names:
                    row = rows.get(key_of(name, bits, group, rule))
                    base = rows.get(key_of(name, bits, group, "power1"))
                    if row and base:
                        ratios.append((row["loss"], base["loss"]))
                if not ratios:
                    cells.append("")
                elif rule == "power1":
                    cells.append(f"{statistics.fmean(loss for loss, _ in ratios):.4f}")
                else:
                    cells.append(f"{math.exp(statistics.fmean(math.log(a / b) for a, b in ratios)):.2f}")
            if any(cells):
                lines.append(f"| {model}, {bits}, {group or 'channel'} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--restart", action="store_true", help="throw the measured rows away")
    parser.add_argument("--only", default="", metavar="TEXT", help="measure the rows whose name contains this")
    parser.add_argument("--rules", default=",".join(RULES), help="measure these alone, in this order")
    parser.add_argument("--minutes", type=float, default=20, help="stop after this time; the next run continues")
    arguments = parser.parse_args()
    if missing := [name for name in ("smollm2-shipped", "minilm", "albert") if locate(name) is None]:
        raise SystemExit(f"not on this machine: {', '.join(missing)}; run `python scripts/fetch_assets.py`.")
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    torch.set_num_threads(1)
    protocol = {
        "baselines": {name: asset.baseline for name, asset in ASSETS.items()},
        "novels": list(perplexity.CALIBRATION),
        "smollm2": {"windows": WINDOWS, "length": LENGTH, "dtype": "bfloat16", "shuffles": list(SHUFFLES)},
        "minilm": {"passages": PASSAGES, "dtype": "float32"},
        "albert": {"reactions": len(REACTIONS), "dtype": "float32"},
    }
    record = Record("clip", protocol, restart=arguments.restart, timed=False)
    total = sum(len(subjects(model)) for model in MODELS) * len(POINTS) * len(RULES)
    print(f"{len(record.rows)} of {total} points are measured; this run takes {arguments.minutes:g} minutes at most")
    sweep(record, arguments.only, arguments.rules.split(","), time.monotonic() + 60 * arguments.minutes)
    page = ROOT / "docs" / "quality.md"
    page.write_text(replace_between(page.read_text(), "clip", table(record.rows)))


if __name__ == "__main__":
    main()
