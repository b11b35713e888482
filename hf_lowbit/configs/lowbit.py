"""`LowBitConfig`: compress the weights of a model to low bits."""

from __future__ import annotations

import copy
import difflib
import json
import warnings
from collections.abc import Mapping
from typing import Any

from transformers.utils.quantization_config import QuantizationConfigMixin

from .digest import check_digest, modules_digest
from .modules import read_modules, read_names
from .scheme import Scheme
from .size import check_average, check_budget


QUANT_METHOD = "hf_lowbit"
FORMAT_VERSION = 1
METHODS = ("rtn", "gptq")
# "dqt": the codes were trained directly, then frozen; the others: the checkpoint was imported from that format
ORIGINS = (None, "dqt", "gptq", "compressed-tensors")
FIELDS = ("bits", "group_size", "symmetric", "activations", "method", "budget", "calibration", "modules",
          "modules_to_not_convert", "dequantize")  # fmt: skip
# what decides the stored numbers; a request that differs in one of them conflicts with a checkpoint's own
STORED_FIELDS = ("bits", "group_size", "symmetric", "activations", "method")


class LowBitConfig(QuantizationConfigMixin):
    """Quantization config for `from_pretrained(quantization_config=...)` and `hf_lowbit.quantize`.

    Args:
        bits: "ternary", 2, 3, 4 (default) or 8 for every weight. A float from 2 to 8 is an average over what is
            converted, scales included: each weight then gets 2, 3, 4 or 8 bits by a plan (docs/compress.md).
        group_size: weights along the input that share one scale (default 128); None: one scale per output channel;
            "tensor": one scale per weight. It need not divide the input size. Of a planned size it is the most: the
            largest of 128, 64 and 32 that all weights divide by is taken where it does not.
        symmetric: None (default) uses zero points at 2 and 3 bits and none elsewhere.
        activations: "float" or "int8" per token; None (default) is "int8" for ternary and "float" for the rest.
        method: "rtn", round to nearest with a searched clip, without data. "gptq": codes that compensate each other's
            errors on `calibration`, block by block; the dense model is loaded for it. None (default) is "gptq" where
            there is `calibration`, else "rtn".
        budget: size of the whole model: bytes, "60MB", "2GiB", or a share of the dense bytes, "40%" or 0.4. Bits are
            planned to fit, for the embedding and the output layer too; `bits` stays 4. The dense model is loaded for
            a plan.
        calibration: data for "gptq" and for plans; never saved. A list of texts, a text file, a Dataset (column text,
            messages or input_ids), chats, token tensors, or dicts of model inputs; some thousand tokens. "rtn" needs
            none; a plan without is rough.
        modules: {name or "re:pattern": Scheme or dict} for single modules; overrides the fields above (a dict without
            `group_size` takes the one above). Naming an embedding or the output layer here is how it is asked to be
            converted too; what is named is not planned. After conversion it lists every converted module, and that is
            what is saved.
        modules_to_not_convert: names or "re:patterns" to leave dense, in addition to what is always left dense (output
            embeddings, tied weights, task heads, routers, weights that model code reads directly).
        dequantize: turn a low-bit checkpoint back into dense weights while loading.

    Names match whole dotted parts anywhere in a module's path: "mlp.gate" matches `model.layers.0.mlp.gate` and
    everything below it, not `mlp.gate_proj`. Patterns after "re:" are searched, anchored at dots. A pattern that
    matches nothing is an error when the model is converted.

    Raises:
        TypeError, ValueError: with the field, its value and the allowed ones.
    """

    fields = FIELDS
    # kinds of weights that are converted; None: all that have a low-bit form
    kinds: tuple[str, ...] | None = None
    # how the codes are trained (see DQTConfig); None: they are not
    training: dict[str, Any] | None = None
    # where dense weights wait while others are rounded with data (`quantizers/spool.py`); None: in memory. Never saved
    spool: Any = None
    # what an interrupted conversion has done already (`pipeline/journal.py`). Never saved
    journal: Any = None
    # which blocks of which weights exist (see BlastConfig); None: all do
    sparse: dict[str, Any] | None = None

    def __init__(
        self,
        bits: str | int | float = 4,
        group_size: int | str | None = 128,
        symmetric: bool | None = None,
        activations: str | None = None,
        method: str | None = None,
        budget: str | int | float | None = None,
        calibration: Any = None,
        modules: Mapping[str, Scheme | Mapping] | None = None,
        modules_to_not_convert: list[str] | None = None,
        dequantize: bool = False,
        **kwargs,
    ):
        # how the codes came about where `method` did not make them; `freeze` writes it, and cards say it
        self.origin = kwargs.pop("origin", None)
        if self.origin not in ORIGINS:
            raise ValueError(f"`origin`={self.origin!r} is not known to this hf_lowbit; it knows {list(ORIGINS)}.")
        digest = kwargs.pop("modules_digest", None)
        _check_rest(kwargs, type(self))
        for name, value in (("budget", budget), ("calibration", calibration)):
            if value is not None and name not in self.fields:
                _refuse_field(name, type(self))
        self.quant_method = QUANT_METHOD
        if isinstance(bits, float):
            check_average(bits)
        if budget is not None:
            check_budget(budget)
            if bits != 4 or isinstance(bits, float):
                raise ValueError(f"`bits`={bits!r} and `budget`={budget!r} both say how large; pass one of them.")
        if method is None:
            method = "rtn" if calibration is None else "gptq"
        if method not in METHODS:
            raise ValueError(f"`method`={method!r} is not supported; use one of {list(METHODS)}.")
        planned = isinstance(bits, float) or budget is not None
        if calibration is not None and method == "rtn" and not planned:
            warnings.warn('`calibration` is not used: `method`="rtn" rounds without data.', stacklevel=2)
        if not isinstance(dequantize, bool):
            raise TypeError(f"`dequantize`={dequantize!r} must be True or False.")
        # of a plan each width has its own symmetry and activations where nothing is said
        default = Scheme(4 if planned else bits, group_size, symmetric, activations)
        self.bits = bits if planned else default.bits
        self.group_size = default.group_size
        self.symmetric = symmetric if planned else default.symmetric
        self.activations = default.activations
        self.method = method
        self.budget = budget
        self.calibration = calibration
        self.modules, self.shapes = read_modules(modules, self.group_size)
        check_digest(digest, self.modules, self.shapes)
        self.modules_to_not_convert = read_names(modules_to_not_convert)
        self.dequantize = dequantize

    @classmethod
    def from_dict(cls, config_dict, return_unused_kwargs=False, **kwargs):
        """Build from saved fields; keyword arguments override single fields, and are checked like them."""
        if config_dict.get("training") is not None and cls is LowBitConfig:
            # one kind of checkpoint: the section says which of our configs it was written from
            from .dqt import DQTConfig as cls
        if config_dict.get("sparse") is not None and cls is LowBitConfig:
            from .blast import BlastConfig as cls
        own = {name: value for name, value in kwargs.items() if name in cls.fields}
        config = cls(**{**config_dict, **own})
        unused = {name: value for name, value in kwargs.items() if name not in cls.fields}
        return (config, unused) if return_unused_kwargs else config

    @property
    def is_planned(self) -> bool:
        """True while `bits` or `budget` say how large, and no plan has been made yet."""
        return isinstance(self.bits, float) or self.budget is not None

    @property
    def default_scheme(self) -> Scheme:
        """The scheme of modules that `modules` does not name; of a plan one whose bits it decides."""
        return Scheme(4 if self.is_planned else self.bits, self.group_size, self.symmetric, self.activations)

    @property
    def is_resolved(self) -> bool:
        """True once `modules` lists what was converted, with shapes: the config of a checkpoint."""
        return bool(self.shapes)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON; calibration data is left out, unset fields too."""
        modules = {name: scheme.to_dict() for name, scheme in self.modules.items()}
        for name, shape in self.shapes.items():
            modules[name]["shape"] = list(shape)
        output = {"quant_method": self.quant_method, "format_version": FORMAT_VERSION, "bits": self.bits,
                  "group_size": self.group_size, "symmetric": self.symmetric, "activations": self.activations,
                  "method": self.method, "modules": modules,
                  "modules_to_not_convert": list(self.modules_to_not_convert)}  # fmt: skip
        if self.budget is not None:
            output["budget"] = self.budget
        if self.origin is not None:
            output["origin"] = self.origin
        if self.is_resolved:
            output["modules_digest"] = modules_digest(self.modules, self.shapes)
        if self.dequantize:
            output["dequantize"] = True
        return output

    def to_diff_dict(self) -> dict[str, Any]:
        """Same as `to_dict`: every field decides how the bytes are read."""
        return self.to_dict()

    def to_json_string(self, use_diff: bool = True) -> str:
        """`to_dict` as indented JSON."""
        return json.dumps(self.to_dict(), indent=2) + "\n"

    def get_loading_attributes(self) -> dict[str, Any]:
        """What transformers carries over from this config to the one of an already low-bit checkpoint."""
        requested = {field: getattr(self, field) for field in (*STORED_FIELDS, "budget")}
        requested["modules"] = dict(self.modules)
        requested["modules_to_not_convert"] = list(self.modules_to_not_convert)
        return {"dequantize": self.dequantize, "requested": requested}

    def conflict(self) -> str | None:
        """Why this checkpoint config disagrees with what the user asked for at load, or None."""
        requested = getattr(self, "requested", None)
        if requested is None or self.dequantize:
            return None
        if isinstance(requested["bits"], float) or requested["budget"] is not None:
            return (
                "the checkpoint is already low-bit, and a size is planned for dense weights only. Load it without "
                "`quantization_config`; or load it with LowBitConfig(dequantize=True) and quantize the result again "
                "with hf_lowbit.quantize."
            )
        wrong = [f for f in STORED_FIELDS if requested[f] != getattr(self, f)]
        if not wrong:
            return None
        return (
            "the checkpoint is already low-bit, with "
            + ", ".join(f"`{f}`={getattr(self, f)!r}" for f in wrong)
            + ", but `quantization_config` asks for "
            + ", ".join(f"`{f}`={requested[f]!r}" for f in wrong)
            + ". Load it without `quantization_config`; or load it with LowBitConfig(dequantize=True) and quantize "
            "the result again with hf_lowbit.quantize."
        )

    def __deepcopy__(self, memo):
        # the data is the caller's: it may be large, or a generator, which can't be copied
        memo[id(self.calibration)] = self.calibration
        copied = memo[id(self)] = type(self).__new__(type(self))
        copied.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return copied

    def __iter__(self):
        yield from self.to_dict().items()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, LowBitConfig) and self.to_dict() == other.to_dict()

    __hash__ = None

    def __repr__(self) -> str:
        return f"{type(self).__qualname__} {self.to_json_string()}"


def _check_rest(rest: dict, owner: type) -> None:
    """Accept the bookkeeping keys of a saved config, refuse every unknown field by name."""
    method = rest.pop("quant_method", QUANT_METHOD)
    if method != QUANT_METHOD:
        raise ValueError(f"`quant_method`={method!r} is not {QUANT_METHOD!r}; this config reads only its own.")
    version = rest.pop("format_version", FORMAT_VERSION)
    if isinstance(version, bool) or not isinstance(version, int) or version < 1:
        raise ValueError(f"`format_version`={version!r} is not a format version (a positive integer).")
    if version > FORMAT_VERSION:
        raise ValueError(
            f"`format_version`={version} is newer than {FORMAT_VERSION}, the newest this hf_lowbit reads; "
            "upgrade hf_lowbit."
        )
    for name in rest:
        _refuse_field(name, owner)


def _refuse_field(name: str, owner: type) -> None:
    close = difflib.get_close_matches(name, owner.fields, n=1)
    hint = f"; did you mean `{close[0]}`?" if close else f"; the fields are {list(owner.fields)}."
    raise TypeError(f"{owner.__qualname__} has no field `{name}`{hint}")
