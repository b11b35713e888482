"""The stages of a compression, in order. Each improves the model of the one before, and each is saved.

    plan     a scheme for every weight (`compression/plan.py`)
    layer    GPTQ on calibration data, or rounding without; this checkpoint can be deployed
    block    each transformer block tuned toward the dense one (`compression/refine/blocks.py`)
    global   the whole tuned toward the dense predictions (`compression/refine/whole.py`)

The last quarter of the calibration rows is held out: block and global keep what is better there, and nothing else.
"""

from __future__ import annotations

import copy
import json
import os
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..compression.calibrate import make_batches
from ..compression.inspect import class_of, on_meta
from ..compression.plan import check_size, plan, uniform
from ..compression.report import Report, report
from ..compression.table import megabytes, render_table
from ..configs.lowbit import LowBitConfig
from ..nn.block_sparse import BlockWeight
from ..nn.packed import LowBitModule
from ..nn.sparsify import sparse_modules
from ..quantizers.calibrated import tokenizer_of
from ..quantizers.memory import quantize
from ..quantizers.spool import Spool
from .journal import Journal
from .records import calibration_facts, module_records, name_of, protocol, stage_record
from .store import Store, alone, fingerprint, fingerprint_of_data, fingerprint_of_files


STAGES = ("layer", "block", "global")
# rows of calibration text, of which a quarter is held out
ROWS = 16
WINDOW = 512


@dataclass
class Compressed:
    """`model` low-bit, `plan` the config that names every weight's scheme, `report` what it is now (`lb.report`),
    `stages` what each cost and gained, `notes` what was left out, and why."""

    model: nn.Module
    plan: LowBitConfig
    report: Report
    stages: dict[str, dict]
    notes: list[str]
    output_dir: str | None = None

    def __str__(self) -> str:
        header = ["stage", "metric", "value", "MB", "seconds", "peak MB"]
        rows = [
            [name, s.get("metric") or "-", "-" if s.get("value") is None else f"{s['value']:.2f}",
             megabytes(s["bytes"]), f"{s['seconds']:.1f}", megabytes(s["peak_bytes"] or 0)]
            for name, s in self.stages.items()
        ]  # fmt: skip
        return "\n".join([str(self.report), render_table(header, rows), *self.notes])


def compress(
    model_or_id: nn.Module | str | os.PathLike,
    output_dir: str | os.PathLike | None = None,
    budget: str | int | float | None = None,
    bits: str | int | float | None = None,
    calibration: Any = None,
    stages: tuple[str, ...] = STAGES,
    evaluation: Any = None,
    low_memory: bool = False,
    seed: int = 0,
    resume: bool = True,
) -> Compressed:
    """Compress a model to a size, or to a number of bits, as well as the data allows.

    Args:
        model_or_id: a model (it is left as it is: a copy is compressed), or the id or folder of one.
        output_dir: holds a checkpoint that loads with `from_pretrained` after every stage; None keeps nothing.
        budget: bytes of all parameters: "60MB", "2GiB", an int, or a share of the dense bytes, "40%" or 0.4. None,
            with `bits` None: the free memory of this machine, less keys and values of 4096 tokens.
        bits: "ternary", 2, 3, 4 or 8 for all weights; a float is an average, scales included, which is planned.
        calibration: text, a text file, a Dataset, token tensors, chats or dicts of model inputs
            (`compression/calibrate.py`). None rounds and plans without data; block and global are then left out.
        stages: of "layer", "block" and "global", in this order; "layer" is always the first.
        evaluation: as `calibration`: rows of 512 tokens, scored before and after each stage (perplexity; the first
            token of a row is not scored); or dicts with `labels`.
        low_memory: read the weights one by one and never hold the dense model; "layer" only. With `calibration` they
            wait in files beside `output_dir` (or among temporary ones), and one block at a time is in float.
        seed: of the rows that are drawn, and of everything random.
        resume: go on after the last finished stage of `output_dir`, and inside of a layer or block stage after the
            last finished weight or block; the result is the same.

    Raises:
        TypeError, ValueError: for arguments that make no sense, a budget that nothing fits (the smallest size is
            named), a model that is quantized already, data that is empty, too short, or of another vocabulary.
        FileExistsError, RuntimeError: when `output_dir` holds something else, or another run is writing it.
    """
    check_size(bits, budget)
    stages = _stages(stages)
    if low_memory:
        _check_low_memory(model_or_id, budget, bits, stages)
        dense = on_meta(model_or_id)[0]
    else:
        dense = _load(model_or_id)
    tokenizer = tokenizer_of(dense)
    with _same_rng(seed):
        batches = None if calibration is None else make_batches(calibration, tokenizer, dense, rows=ROWS, seed=seed)
        rows = None if evaluation is None else make_batches(evaluation, tokenizer, dense, rows=sys.maxsize)
        scored = None if rows is None else _labelled(rows, tokenizer, dense)
        run = _Run(model_or_id, dense, tokenizer, batches, scored, seed)
        run.protocol = protocol(
            None if batches is None else calibration_facts(name_of(calibration), run.training, run.held_out, seed),
            None if rows is None else (name_of(evaluation), rows), dense, WINDOW,
        )  # fmt: skip
        if output_dir is None:
            return run.go(stages, bits, budget, None)
        with alone(output_dir):
            run.work_dir = Path(output_dir).parent
            identity = {**run.identity(), "settings": json.dumps({"budget": budget, "bits": bits, "seed": seed})}
            store = Store(output_dir, identity, resume)
            run.journal = Journal(store.folder, identity, resume)
            return run.go(stages, bits, budget, store)


class _Run:
    """A compression: what it starts from, and what it has made so far. `dense` has no weights with `low_memory`."""

    def __init__(self, source, dense: nn.Module, tokenizer, batches, scored, seed: int):
        self.source, self.dense, self.tokenizer, self.scored, self.seed = source, dense, tokenizer, scored, seed
        self.batches = batches
        self.training, self.held_out = _split(batches)
        self.low_memory = any(p.device.type == "meta" for p in dense.parameters())
        self.records: dict[str, dict] = {}
        self.notes: list[str] = []
        self.protocol: dict = {}
        # where files of a run may lie while it works; None is the place for temporary ones
        self.work_dir: Path | None = None
        self.journal: Journal | None = None

    def identity(self) -> dict[str, str]:
        weights = fingerprint_of_files(self.source) if self.low_memory else fingerprint(self.dense)
        return {"model": weights, "calibration": fingerprint_of_data(self.batches)}

    def go(self, stages, bits, budget, store: Store | None) -> Compressed:
        self.records = {} if store is None else dict(store.stages)
        late = [s for s in stages if s not in self.records and any(d in self.records for d in _after(s))]
        if late:
            raise ValueError(
                f"`output_dir`={str(store.folder)!r} holds a model after stage {list(self.records)[-1]!r}, and "
                f"{late[0]!r} comes before it. Name another folder, or pass resume=False to begin anew there."
            )
        model = type(self.dense).from_pretrained(store.folder).eval() if "layer" in self.records else None
        for stage in stages:
            if stage in self.records:
                continue
            if stage == "layer" and not self.low_memory:
                self.records["dense"] = stage_record(self.dense, self.scored, time.perf_counter())
            begin = time.perf_counter()
            if stage == "layer":
                model = self._layer(bits, budget)
                details = {"modules": module_records(model)}
            else:
                details = self._refine(stage, model)
            if details is None:
                continue
            self.records[stage] = {**stage_record(model, self.scored, begin), **details}
            if store is not None:
                content = {"stages": self.records, "protocol": self.protocol, "notes": self.notes,
                           "modules_digest": model.hf_quantizer.quantization_config.to_dict()["modules_digest"],
                           "report": report(model).to_dict()}  # fmt: skip
                store.save(model, self.tokenizer, self.records, content)
                self.journal.clear()
        if self.journal:
            self.journal.clear()
        folder = None if store is None else str(store.folder)
        config = model.hf_quantizer.quantization_config
        return Compressed(model, config, report(model), self.records, self.notes, folder)

    def _layer(self, bits, budget) -> nn.Module:
        config = self._plan(bits, budget)
        if self.training is not None:
            fields = {"bits": config.bits, "group_size": config.group_size, "modules": dict(config.modules) or None}
            config = LowBitConfig(**fields, method="gptq", calibration=self.training)
        config.journal = self.journal
        if not self.low_memory:
            return quantize(copy.deepcopy(self.dense), config)
        if self.training is not None:
            config.spool = Spool(self.work_dir)
        try:
            loaded = type(self.dense).from_pretrained(self.source, dtype="auto", quantization_config=config)
        finally:
            if config.spool is not None:
                config.spool.close()
        return loaded.eval()

    def _plan(self, bits, budget) -> LowBitConfig:
        if bits is not None and not isinstance(bits, float):
            return uniform(self.dense, bits)
        kept = self.journal.find("layer", "plan") if self.journal else None
        if kept is not None:
            return LowBitConfig.from_dict(kept[1])
        method = "rtn" if self.training is None else "gptq"
        wishes = LowBitConfig(bits=4 if bits is None else bits, budget=budget, method=method)
        config = plan(self.dense, wishes, self.training, self.seed)
        if self.journal:
            self.journal.keep("layer", "plan", {}, config.to_dict())
        return config

    def _refine(self, stage: str, model: nn.Module) -> dict | None:
        """Improve `model` in place; None where the stage is left out, which a note then says."""
        from ..compression.refine.blocks import refine_blocks
        from ..compression.refine.whole import refine_globally

        if self.held_out is None:
            self.notes.append(f"stage {stage!r} was left out: it needs two rows of {WINDOW} tokens of `calibration`.")
            return None
        if stage == "global":
            found = refine_globally(model, self.dense, self.training, self.held_out, seed=self.seed)
            return {"distillation": asdict(found)}
        blocks = refine_blocks(model, self.dense, self.training, self.held_out, seed=self.seed, journal=self.journal)
        if not blocks:
            self.notes.append("stage 'block' changed nothing: the model has no repeated blocks.")
        return {"blocks": [asdict(block) for block in blocks]}


def _after(stage: str) -> tuple[str, ...]:
    return STAGES[STAGES.index(stage) + 1 :]


def _split(batches: list[dict] | None) -> tuple[list[dict] | None, list[dict] | None]:
    if batches is None or len(batches) < 2:
        return batches, None
    count = max(1, len(batches) // 4)
    return batches[:-count], batches[-count:]


def _stages(stages) -> tuple[str, ...]:
    stages = (stages,) if isinstance(stages, str) else tuple(stages)
    unknown = [s for s in stages if s not in STAGES]
    if unknown or not stages or stages[0] != "layer" or list(stages) != sorted(set(stages), key=STAGES.index):
        raise ValueError(f'`stages`={stages!r} must begin with "layer" and keep the order of {STAGES}.')
    return stages


def _load(model_or_id) -> nn.Module:
    if isinstance(model_or_id, nn.Module):
        lowbit = any(isinstance(m, LowBitModule) for m in model_or_id.modules())
        lowbit = lowbit or any(isinstance(weight, BlockWeight) for _, weight in sparse_modules(model_or_id))
        if lowbit or getattr(model_or_id, "hf_quantizer", None) is not None:
            raise ValueError("the model is quantized already; pass the dense one.")
        return model_or_id
    if not isinstance(model_or_id, (str, os.PathLike)):
        raise TypeError(f"`model_or_id` must be a model, a model id or a folder, got {type(model_or_id).__name__}.")
    return class_of(model_or_id)[0].from_pretrained(model_or_id, dtype="auto").eval()


def _labelled(rows: list[dict], tokenizer, model: nn.Module) -> list[dict]:
    """Rows with labels: those that they have, or made of plain token ids, as the model's kind asks for."""
    from ..compression.evaluate import labelled

    return labelled(rows, model, tokenizer, WINDOW)


def _check_low_memory(model_or_id, budget, bits, stages) -> None:
    if isinstance(model_or_id, nn.Module) or stages != ("layer",):
        raise ValueError(
            "`low_memory`=True never holds the dense model, which the block and global stages need: pass an id or a "
            'folder, and stages=("layer",).'
        )
    if budget is not None or bits is None or isinstance(bits, float):
        raise ValueError(
            '`low_memory`=True sees no weight twice and can\'t plan: pass `bits`="ternary", 2, 3, 4 or 8.'
        )


class _same_rng:
    """The caller's random state is put back; inside, everything follows from the seed."""

    def __init__(self, seed: int):
        self.seed = seed

    def __enter__(self):
        self.state = torch.get_rng_state()
        torch.manual_seed(self.seed)

    def __exit__(self, *error):
        torch.set_rng_state(self.state)
