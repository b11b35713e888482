"""Model cards made of facts: what was converted and how, measured bytes, the base model and what its own card allows.

    render_card(model_or_dir)                    the card as a `huggingface_hub.ModelCard`
    write_card_beside(folder, model)             the same, into `folder`/README.md; text that a person wrote is kept

The text is `card_template.md`. Everything foreign that enters it (a base model's metadata, names of modules and
data sets) goes through `markdown.plain` or `markdown.code`, and metadata is written by a YAML library, so no text
of others becomes markup or a field of its own.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCard, ModelCardData

from ..configs.lowbit import QUANT_METHOD
from ..configs.scheme import BITS
from . import evaluation, facts, markdown, origin, readme, sparse_blocks, stages, task


TEMPLATE = Path(__file__).with_name("card_template.md")
METHODS = {
    "rtn": "round to nearest, without calibration data",
    "dqt": "[Direct Quantized Training](https://arxiv.org/abs/2412.04787): the codes themselves were trained",
    "gptq": "[GPTQ](https://arxiv.org/abs/2210.17323): rounding errors compensated on calibration data",
    "compressed-tensors": "imported from a compressed-tensors checkpoint, codes and scales as they were",
}
ACTIVATIONS = {"float": "not quantized", "int8": "8 bits per token"}
GROUPS = {None: "output channel", "tensor": "whole tensor"}
SHOWN_NAMES = 8


def render_card(
    model_or_dir: Any,
    base_model: str | os.PathLike | None = None,
    report: Any = None,
    results: Iterable[EvalResult | Mapping] | None = None,
    base_card: ModelCard | str | os.PathLike | None = None,
    *,
    repo_id: str | None = None,
    token: bool | str | None = None,
    online: bool = True,
    training: str | None = None,
) -> ModelCard:
    """The card of a low-bit model in memory or of a checkpoint folder.

    Args:
        model_or_dir: the model, or the folder that `save_pretrained` wrote (its weights are not read).
        base_model: Hub id or folder of the dense model; None takes what the model was loaded from. Folders are not
            named.
        report: of `hf_lowbit.report(model)`, or its `to_dict()`; or what `compress` wrote to report.json, whose stages
            and figures the card then shows. None measures now, and takes the report.json of a folder; where there is
            none, a folder's card has no reasons.
        results: measured quality, as EvalResult or dicts (see `evaluation.py`); None takes that of the report. Without
            any the card says that none exist.
        base_card: the base model's README: ModelCard, text, file or folder. None looks beside the base and on the Hub.
        repo_id: where the model will lie, for the title and the loading code.
        token, online: for looking up the base's card on the Hub; `online=False` uses only what is on this machine.
        training: Markdown about the training run, put in as it is.
    """
    run = _run_of(model_or_dir, report)
    measured = _measure(model_or_dir, report["report"] if stages.is_run(report) else report)
    run = run if run is not None and stages.belongs(run, measured) else None
    if run is not None and report is None:
        # the files don't say why a weight stayed dense, the report does
        measured = _measure(model_or_dir, run["report"])
    base = origin.find(model_or_dir, base_model, base_card, token, online)
    return card_of(measured, base, results, repo_id, training, run)


def card_of(
    measured: facts.Facts,
    base: origin.Origin,
    results: Iterable[EvalResult | Mapping] | None = None,
    repo_id: str | None = None,
    training: str | None = None,
    run: Mapping | None = None,
) -> ModelCard:
    """The card of measured facts; nothing but the template enters it. Arguments as in `render_card`; `run` is the
    report of the compression that ended in these facts."""
    pipeline_tag, loader = task.describe(measured.architecture)
    pipeline_tag = base.metadata.get("pipeline_tag", pipeline_tag)
    title = _title(measured, base, repo_id)
    if results is None and run is not None:
        results = stages.results(run)
    rows = evaluation.read(results, pipeline_tag)
    metadata = ModelCardData(
        base_model=base.base_id,
        library_name="transformers",
        pipeline_tag=pipeline_tag,
        tags=[*_tags(measured), "hf_lowbit"],
        model_name=title if rows else None,
        eval_results=[row.result for row in rows] or None,
        **{name: value for name, value in base.metadata.items() if name != "pipeline_tag"},
    )
    if base.base_id is not None:
        # blocks are only ever removed by training
        metadata["base_model_relation"] = "finetune" if measured.sparse else "quantized"
    return ModelCard(
        readme.sign(
            _fill(
                card_data=metadata.to_yaml(),
                title=markdown.plain(title),
                summary=_summary(measured, base),
                numbers=_numbers(measured, base),
                lowbit=_lowbit_table(measured.lowbit) if measured.lowbit else "",
                sparse=sparse_blocks.table_of(measured.sparse) if measured.sparse else "",
                dense=_dense_table(measured.dense),
                results=evaluation.table(rows),
                stages=stages.table(run) if run else "",
                plan=stages.plan_table(run) if run else "",
                calibration=stages.data_of(run) if run else "",
                loader=loader or "AutoModel",
                location=repo_id or "path/to/this/folder",
                training=training,
                licence_known="license" in base.metadata,
            )
        )
    )


def write_card_beside(save_directory: str | os.PathLike, model: Any, **options) -> Path:
    """Write the card of `model` to README.md in a folder it was saved to; `options` are those of `render_card`.

    A README that is there keeps its text, unless it is an untouched card of ours or transformers' empty form; its
    metadata is completed.
    """
    path = Path(save_directory) / "README.md"
    existing = path.read_text(encoding="utf-8-sig") if path.is_file() else None
    readme.merge(existing, render_card(model, **options)).save(path)
    return path


def width_tags(bits: list[int | str]) -> list[str]:
    """The tag for a model's bit width: "4-bit", "ternary", or "mixed-precision" where there are several."""
    if len(bits) > 1:
        return ["mixed-precision"]
    return [f"{width}-bit" if width != "ternary" else width for width in bits if width in BITS]


def is_lowbit(model: Any) -> bool:
    """Whether `model` is a transformers model that is low-bit or block-sparse by us."""
    config = getattr(getattr(model, "config", None), "quantization_config", None)
    method = config.get("quant_method") if isinstance(config, Mapping) else getattr(config, "quant_method", None)
    return method == QUANT_METHOD


def _run_of(model_or_dir: Any, report: Any) -> Mapping | None:
    """The report of the compression that made the model, where there is one."""
    if stages.is_run(report):
        return report
    return stages.read(model_or_dir) if report is None and isinstance(model_or_dir, (str, os.PathLike)) else None


def _measure(model_or_dir: Any, report: Any) -> facts.Facts:
    if isinstance(model_or_dir, (str, os.PathLike)):
        stored = facts.from_checkpoint(model_or_dir)
        return stored if report is None else facts.from_report(report, stored.architecture, stored.config)
    if not is_lowbit(model_or_dir):
        raise ValueError(
            f"the {type(model_or_dir).__name__} is not a low-bit model; compress it first, with from_pretrained(..., "
            "quantization_config=hf_lowbit.LowBitConfig(...)) or hf_lowbit.quantize(model, config)."
        )
    if report is None:
        from ..compression.report import report as measure

        report = measure(model_or_dir)
    config = model_or_dir.config.quantization_config
    config = config if isinstance(config, Mapping) else config.to_dict()
    return facts.from_report(report, type(model_or_dir).__name__, config)


def _fill(**values) -> str:
    # comes with torch, and is needed for cards only
    import jinja2

    options = {"undefined": jinja2.StrictUndefined, "trim_blocks": True, "lstrip_blocks": True}
    text = TEMPLATE.read_text(encoding="utf-8")
    return jinja2.Environment(**options, keep_trailing_newline=True).from_string(text).render(**values)


def _width(bits: int | str) -> str:
    return f"{bits} bits" if isinstance(bits, int) else markdown.plain(bits)


def _title(measured: facts.Facts, base: origin.Origin, repo_id: str | None) -> str:
    if repo_id is not None:
        return repo_id.split("/")[-1]
    name = base.base_id.split("/")[-1] if base.base_id else measured.architecture
    if measured.sparse:
        return f"{name}, {sparse_blocks.title_of(measured.sparse)}"
    return f"{name}, {_width(measured.bits[0]) if len(measured.bits) == 1 else 'mixed low bits'}"


def _summary(measured: facts.Facts, base: origin.Origin) -> str:
    name = markdown.code(measured.architecture)
    if base.base_id is not None:
        name = f"[{base.base_id}](https://huggingface.co/{base.base_id})"
    elif base.local:
        name += " model from a local folder, not known on the Hub,"
    widths = " and ".join("ternary form" if width == "ternary" else _width(width) for width in measured.bits)
    share = measured.lowbit_parameters / max(measured.parameters, 1)
    if measured.sparse:
        rest = f" {share:.1%} of its parameters are stored in {widths}." if measured.lowbit else ""
        return f"This is {name}{sparse_blocks.summary_of(measured)}{rest}"
    return f"This is {name} with {share:.1%} of its parameters stored in {widths}, made with `hf_lowbit`."


def _numbers(measured: facts.Facts, base: origin.Origin) -> str:
    trained = "dqt" if measured.config.get("training") else None
    method = measured.config.get("origin") or trained or measured.config.get("method")
    # the plain facts of a checkpoint, in the order a reader asks for them
    return markdown.table(
        ("Measured", ""),
        [
            ("Architecture", markdown.code(measured.architecture)),
            *sparse_blocks.numbers_of(measured),
            *([("Method", METHODS.get(method) or markdown.code(method))] if method or not measured.sparse else []),
            *_training(measured.config.get("training")),
            ("Parameters", f"{measured.parameters:,}"),
            *_in_low_bits(measured),
            ("Size of all tensors", markdown.size(measured.bytes)),
            ("The same model in 16 bits", markdown.size(2 * measured.parameters)),
        ],
    )


def _in_low_bits(measured: facts.Facts) -> list[tuple[str, str]]:
    if measured.sparse and not measured.lowbit:
        return []
    return [("In low bits", f"{measured.lowbit_parameters:,}, with {measured.bits_per_weight:.2f} bits per weight")]


def _tags(measured: facts.Facts) -> list[str]:
    low = ["low-bit", "quantized", *width_tags(measured.bits)] if measured.lowbit or not measured.sparse else []
    return [*(["block-sparse"] if measured.sparse else []), *low]


def _training(training: Mapping | None) -> list[tuple[str, str]]:
    """What a checkpoint of direct training says about itself."""
    if not training:
        return []
    form = "the stored codes" if training.get("forward_bits") is None else "their ternary form"
    text = f"the codes themselves are trained (Direct Quantized Training); the forward pass multiplies with {form}"
    return [("Training", text)]


def _lowbit_table(groups: list[facts.Group]) -> str:
    header = ("Bits", "Group", "Zero points", "Activations", "#Weights", "#Parameters", "#Bits each", "#Size", "Where")
    rows = []
    for group in groups:
        scheme = group.scheme
        size = scheme["group_size"]
        rows.append(
            (
                _width(scheme["bits"]),
                GROUPS.get(size) or markdown.plain(size),
                "no" if scheme["symmetric"] else "yes",
                ACTIVATIONS.get(scheme["activations"]) or markdown.plain(scheme["activations"]),
                *_counts(group),
                f"{8 * group.bytes / max(group.parameters, 1):.2f}",
                markdown.size(group.bytes),
                _names(group),
            )
        )
    return markdown.table(header, rows)


def _dense_table(groups: list[facts.Group]) -> str:
    rows = [(markdown.plain(g.reason), *_counts(g), markdown.size(g.bytes), _names(g)) for g in groups]
    return markdown.table(("Why", "#Weights", "#Parameters", "#Size", "Where"), rows) if rows else ""


def _counts(group: facts.Group) -> tuple[str, str]:
    return f"{group.count:,}", f"{group.parameters:,}"


def _names(group: facts.Group) -> str:
    names = [markdown.code(name) for name in sorted(group.names)]
    rest = [f"and {len(names) - SHOWN_NAMES} more"] if len(names) > SHOWN_NAMES else []
    return ", ".join(names[:SHOWN_NAMES] + rest)
