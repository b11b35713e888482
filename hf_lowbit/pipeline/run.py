"""The stages of a compression, in order. Each improves the model of the one before, and each is saved.

    plan     a scheme for every weight (`plan.py`)
    layer    GPTQ on calibration data, or rounding without; this checkpoint can be deployed
    block    each transformer block tuned toward the dense one (`compression/refine/blocks.py`)
    global   the whole tuned toward the dense predictions (`compression/refine/whole.py`)

The last quarter of the calibration rows is held out: block and global keep what is better there, and nothing else.
"""

from __future__ import annotations

import copy
import os
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers import AutoConfig, PreTrainedModel
from transformers.utils import logging

from ..compression.calibrate import make_batches
from ..compression.report import Report, report
from ..compression.table import megabytes, render_table
from ..configs.lowbit import LowBitConfig
from ..nn.packed import LowBitModule
from ..quantizers.memory import quantize
from .plan import average_bits, known_bits, plan
from .store import Store, alone, fingerprint


logger = logging.get_logger(__name__)
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
    budget: str | int | None = None,
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
        budget: bytes of all parameters: "60MB", "2GiB", an int, or "40%" of the dense bytes. None, with `bits` None:
            the free memory of this machine, less keys and values of 4096 tokens.
        bits: "ternary", 2, 3, 4 or 8 for all weights; a float is an average, scales included, which is planned.
        calibration: text, a text file, a Dataset, token tensors, chats or dicts of model inputs
            (`compression/calibrate.py`). None rounds and plans without data; block and global are then left out.
        stages: of "layer", "block" and "global", in this order; "layer" is always the first.
        evaluation: as `calibration`: rows of 512 tokens, scored before and after each stage (perplexity; the first
            token of a row is not scored); or dicts with `labels`.
        low_memory: read the weights one by one and never hold the dense model; rounds without data, "layer" only.
        seed: of the rows that are drawn, and of everything random.
        resume: go on after the last finished stage of `output_dir`; the result is the same.

    Raises:
        TypeError, ValueError: for arguments that make no sense, a budget that nothing fits (the smallest size is
            named), a model that is quantized already, data that is empty, too short, or of another vocabulary.
        FileExistsError, RuntimeError: when `output_dir` holds something else, or another run is writing it.
    """
    known_bits(bits)
    stages = _stages(stages)
    if low_memory:
        return _rounded_while_loading(model_or_id, output_dir, budget, bits, calibration, stages)
    dense, tokenizer = _load(model_or_id)
    with _same_rng(seed):
        batches = None if calibration is None else make_batches(calibration, tokenizer, dense, rows=ROWS, seed=seed)
        scored = None if evaluation is None else _evaluation(evaluation, tokenizer, dense)
        if output_dir is None:
            return _run(dense, tokenizer, None, budget, bits, batches, scored, stages, seed)
        settings = {"budget": budget, "bits": bits, "seed": seed}
        with alone(output_dir):
            store = Store(output_dir, fingerprint(dense, batches, settings), resume)
            return _run(dense, tokenizer, store, budget, bits, batches, scored, stages, seed)


def _run(dense, tokenizer, store: Store | None, budget, bits, batches, scored, stages, seed) -> Compressed:
    from ..compression.refine.blocks import refine_blocks
    from ..compression.refine.whole import refine_globally

    done = {} if store is None else dict(store.stages)
    notes, records = [], {}
    training, held_out = _split(batches)
    if "layer" in done:
        model = type(dense).from_pretrained(store.folder).eval()
        records = done
    else:
        begin = time.perf_counter()
        config, chosen, targets = plan(dense, bits, budget, training, seed)
        logger.info(f"planned {average_bits(chosen, targets):.2f} bits a weight for {len(targets)} weights")
        records["dense"] = _record(dense, scored, begin)
        begin = time.perf_counter()
        model = copy.deepcopy(dense)
        wanted = {} if training is None else {"method": "gptq", "calibration": training}
        model = quantize(model, LowBitConfig(**_fields(config), **wanted))
        records["layer"] = _record(model, scored, begin)
        _keep(store, model, tokenizer, "layer", records, notes)
    for stage in stages[1:]:
        if stage in records:
            continue
        if held_out is None:
            notes.append(f"stage {stage!r} was left out: it needs two rows of {WINDOW} tokens of `calibration`.")
            continue
        begin = time.perf_counter()
        if stage == "block":
            found = refine_blocks(model, dense, training, held_out, seed=seed)
            details = {"blocks": [asdict(block) for block in found]}
            if not found:
                notes.append("stage 'block' changed nothing: the model has no repeated blocks.")
        else:
            details = {"distillation": asdict(refine_globally(model, dense, training, held_out, seed=seed))}
        records[stage] = {**_record(model, scored, begin), **details}
        _keep(store, model, tokenizer, stage, records, notes)
    folder = None if store is None else str(store.folder)
    return Compressed(model, model.hf_quantizer.quantization_config, report(model), records, notes, folder)


def _fields(config: LowBitConfig) -> dict:
    return {"bits": config.bits, "group_size": config.group_size, "modules": dict(config.modules) or None}


def _keep(store: Store | None, model, tokenizer, stage: str, records: dict, notes: list[str]) -> None:
    if store is None:
        return
    store.stages = {name: record for name, record in records.items() if name != stage}
    content = {"stages": records, "notes": notes, "report": report(model).to_dict()}
    store.save(model, tokenizer, stage, records[stage], {}, content)


def _record(model: nn.Module, scored: list[dict] | None, begin: float) -> dict:
    from ..compression.evaluate import evaluate

    seconds = time.perf_counter() - begin
    found = None if scored is None else evaluate(model, scored)
    size = sum(p.numel() * p.element_size() for p in model.parameters())
    return {"metric": found and found.metric, "value": found and found.value, "tokens": found and found.count,
            "bytes": size, "seconds": round(seconds, 1), "peak_bytes": _peak()}  # fmt: skip


def _peak() -> int | None:
    """Largest resident size of this process so far, bytes; None where the system doesn't say."""
    if sys.platform == "win32":
        return None
    import resource

    found = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return found if sys.platform == "darwin" else found * 1024


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


def _load(model_or_id) -> tuple[nn.Module, Any]:
    if isinstance(model_or_id, nn.Module):
        if any(isinstance(m, LowBitModule) for m in model_or_id.modules()) or hasattr(model_or_id, "hf_quantizer"):
            raise ValueError("the model is quantized already; pass the dense one.")
        name = getattr(model_or_id, "name_or_path", None)
        return model_or_id, _tokenizer(name) if name else None
    if not isinstance(model_or_id, (str, os.PathLike)):
        raise TypeError(f"`model_or_id` must be a model, a model id or a folder, got {type(model_or_id).__name__}.")
    model = _model_class(model_or_id).from_pretrained(model_or_id, dtype="auto").eval()
    return model, _tokenizer(model_or_id)


def _model_class(name) -> type[PreTrainedModel]:
    config = AutoConfig.from_pretrained(name)
    if hasattr(config, "quantization_config"):
        raise ValueError(f"`{name}` is quantized already; pass the dense model that it was made from.")
    known = [n for n in (config.architectures or []) if hasattr(transformers, n)]
    return getattr(transformers, known[0]) if known else transformers.AutoModel


def _tokenizer(name):
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError, KeyError):
        # models of images or sound have none; text for them is refused in a sentence
        return None


def _evaluation(data: Any, tokenizer, model) -> list[dict]:
    from ..compression.evaluate import strided_windows

    batches = make_batches(data, tokenizer, model, rows=sys.maxsize)
    rows = []
    for batch in batches:
        labelled = "labels" in batch or "input_ids" not in batch or set(batch) - {"input_ids", "attention_mask"}
        rows += [batch] if labelled else strided_windows(batch["input_ids"][0], WINDOW)
    if not all("labels" in row for row in rows):
        raise ValueError("`evaluation` has rows without `labels` that are not plain token ids: nothing to score.")
    return rows


def _rounded_while_loading(model_or_id, output_dir, budget, bits, calibration, stages) -> Compressed:
    if isinstance(model_or_id, nn.Module) or calibration is not None or stages != ("layer",):
        raise ValueError(
            "`low_memory`=True rounds each weight when it is read: pass an id or a folder, no `calibration`, and "
            'stages=("layer",).'
        )
    if budget is not None or bits is None or isinstance(bits, float):
        raise ValueError(
            '`low_memory`=True sees no weight twice and can\'t plan: pass `bits`="ternary", 2, 3, 4 or 8.'
        )
    begin = time.perf_counter()
    config = LowBitConfig(bits=bits, group_size="tensor" if bits == "ternary" else 64)
    model = _model_class(model_or_id).from_pretrained(model_or_id, dtype="auto", quantization_config=config).eval()
    records = {"layer": _record(model, None, begin)}
    folder = None
    if output_dir is not None:
        with alone(output_dir):
            store = Store(output_dir, {"model": str(model_or_id), "settings": repr(bits)}, resume=False)
            _keep(store, model, _tokenizer(model_or_id), "layer", records, [])
            folder = str(Path(output_dir))
    return Compressed(model, model.hf_quantizer.quantization_config, report(model), records, [], folder)


class _same_rng:
    """The caller's random state is put back; inside, everything follows from the seed."""

    def __init__(self, seed: int):
        self.seed = seed

    def __enter__(self):
        self.state = torch.get_rng_state()
        torch.manual_seed(self.seed)

    def __exit__(self, *error):
        torch.set_rng_state(self.state)
