"""`DQTConfig`: the weights of linear layers are low-bit codes while they are trained.

It reads and writes the same kind of checkpoint as `LowBitConfig` (one `quant_method`); a section `training` in the
saved config says that the codes are to be trained, and how the forward pass reads them. So a checkpoint of a Trainer
is resumable, and is loaded for inference, as it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .lowbit import LowBitConfig
from .scheme import Scheme


SCALES = ("fixed", "learned")
GRAD_DTYPES = (None, "float32", "bfloat16", "float16")
TRAINING_FIELDS = ("forward_bits", "scale", "grad_dtype")
# codes of fewer levels have nothing to be averaged over
COARSE_FROM = (3, 4, 8)


class DQTConfig(LowBitConfig):
    """Quantization config for training low-bit weights directly (Direct Quantized Training, Zhao et al. 2024).

    Pass it to `from_pretrained(quantization_config=...)` or to `hf_lowbit.quantize`, and train with
    `Trainer(callbacks=[hf_lowbit.DQTCallback()])` or with `hf_lowbit.DQTOptimizer`. `hf_lowbit.freeze` ends training.

    Args:
        bits: of the stored codes: 8 (default; right for pretrained weights), 4, 3, 2 or "ternary".
        group_size: weights along the input that share a scale; None (default): one scale per output channel;
            "tensor": one in all.
        forward_bits: what the forward pass multiplies with: None (default) the stored codes themselves; "ternary"
            their ternary form (absmean, BitNet b1.58), which is what `freeze` stores. For training from scratch.
        activation_bits: 8 rounds each token to 8 bits; "float" does not; None (default): 8 when the forward weights
            are ternary, as BitNet defines them, "float" otherwise.
        modules_to_not_convert: names or "re:patterns" to leave dense, in addition to what is always left dense.
        scale: "fixed" (default), or "learned": scales get gradients and are trained with the codes.
        grad_dtype: dtype of the codes' gradients: None (default) is the model's; "bfloat16" (or torch.bfloat16) halves
            their memory where a float32 model trains under bfloat16 autocast.
        dequantize: turn a checkpoint back into dense weights while loading.

    Linear layers and GPT-2's `Conv1D` are converted; embeddings, norms, output layers and fused experts stay float and
    are trained by the ordinary optimizer. Grids are symmetric.

    Raises:
        TypeError, ValueError: with the field, its value and the allowed ones.
    """

    fields = ("bits", "group_size", "forward_bits", "activation_bits", "modules_to_not_convert", "scale", "grad_dtype",
              "dequantize")  # fmt: skip
    # kinds of weights that can be trained directly
    kinds = ("linear", "conv1d")

    def __init__(
        self,
        bits: str | int = 8,
        group_size: int | str | None = None,
        forward_bits: str | int | None = None,
        activation_bits: str | int | None = None,
        modules_to_not_convert: list[str] | None = None,
        scale: str = "fixed",
        grad_dtype: str | None = None,
        dequantize: bool = False,
        **kwargs,
    ):
        # what `to_dict` writes beside the arguments: the bookkeeping of a saved config
        saved = {
            name: kwargs.pop(name) for name in ("symmetric", "activations", "modules", "method") if name in kwargs
        }
        training = kwargs.pop("training", None)
        if training is not None:
            forward_bits, scale, grad_dtype = _read_training(training)
        activations = saved.pop("activations", None) or _activations(activation_bits, forward_bits or bits)
        Scheme(bits, group_size)
        if forward_bits == bits:
            forward_bits = None
        if forward_bits is not None and (forward_bits != "ternary" or bits not in COARSE_FROM):
            raise ValueError(
                f"`forward_bits`={forward_bits!r} with `bits`={bits!r} is not supported: use None (the stored codes), "
                f'or "ternary" with `bits` of {list(COARSE_FROM)}.'
            )
        if scale not in SCALES:
            raise ValueError(f"`scale`={scale!r} is not supported; use one of {list(SCALES)}.")
        # a torch.dtype is kept by name: the config is JSON
        grad_dtype = None if grad_dtype is None else str(grad_dtype).removeprefix("torch.")
        if grad_dtype not in GRAD_DTYPES:
            raise ValueError(f"`grad_dtype`={grad_dtype!r} is not supported; use one of {list(GRAD_DTYPES)}.")
        saved.setdefault("symmetric", True)
        super().__init__(
            bits, group_size, activations=activations, modules_to_not_convert=modules_to_not_convert,
            dequantize=dequantize, **saved, **kwargs,
        )  # fmt: skip
        self.forward_bits = forward_bits
        self.scale = scale
        self.grad_dtype = grad_dtype

    @property
    def activation_bits(self) -> str | int:
        """8 or "float"."""
        return 8 if self.activations == "int8" else "float"

    @property
    def training(self) -> dict[str, Any]:
        """The section of the saved config that makes it one for training."""
        return {"method": "dqt", **{field: getattr(self, field) for field in TRAINING_FIELDS}}

    def to_dict(self) -> dict[str, Any]:
        return {**super().to_dict(), "training": self.training}

    def get_loading_attributes(self) -> dict[str, Any]:
        attributes = super().get_loading_attributes()
        attributes["requested"]["training"] = self.training
        return attributes

    def frozen(self) -> LowBitConfig:
        """The config of the model that `freeze` makes: what the forward pass multiplies with."""
        if self.forward_bits is None:
            schemes = dict(self.modules)
        else:
            schemes = {
                n: Scheme(self.forward_bits, s.group_size, True, s.activations, s.scales)
                for n, s in self.modules.items()
            }
        config = LowBitConfig(
            self.forward_bits or self.bits, self.group_size, self.symmetric, self.activations,
            modules_to_not_convert=self.modules_to_not_convert,
        )  # fmt: skip
        config.modules, config.shapes = schemes, dict(self.shapes)
        config.origin = "dqt"
        return config

    @classmethod
    def continuing(cls, config: LowBitConfig, training: Mapping) -> DQTConfig:
        """The config under which the low-bit weights that `config` records are trained further."""
        fields = {name: value for name, value in config.to_dict().items() if name != "dequantize"}
        return cls(**{**fields, "training": dict(training)})


# transformers compares the names of the two classes when a config is passed for a checkpoint that has one; ours are
# one kind of checkpoint, and which of them fit is decided in sentences (`hf_lowbit/quantizers/transitions.py`)
DQTConfig.__name__ = LowBitConfig.__name__


def _activations(activation_bits: str | int | None, forward_bits: str | int) -> str | None:
    if activation_bits is None:
        return Scheme(forward_bits, None).activations if forward_bits == "ternary" else "float"
    if isinstance(activation_bits, bool) or activation_bits not in (8, "float"):
        raise ValueError(f'`activation_bits`={activation_bits!r} is not supported; use 8, "float" or None.')
    return "int8" if activation_bits == 8 else "float"


def _read_training(training: Any) -> tuple:
    if not isinstance(training, Mapping) or training.get("method") != "dqt":
        raise ValueError(f"`training`={training!r} is not known to this hf_lowbit; upgrade hf_lowbit.")
    unknown = sorted(set(training) - {"method", *TRAINING_FIELDS})
    if unknown:
        raise TypeError(f"`training` has no field {unknown[0]!r}; it has {list(TRAINING_FIELDS)}.")
    return training.get("forward_bits"), training.get("scale", "fixed"), training.get("grad_dtype")
