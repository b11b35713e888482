"""hf_lowbit: compress any Hugging Face model to low bits, with the calls you already know.

Importing it registers the quantization configs with transformers; `from_pretrained(quantization_config=...)`,
`save_pretrained`, `push_to_hub`, `dequantize` and `generate` then work as for any model. The names below are imported
when they are first used, so that the import itself costs next to nothing.
"""

from importlib import import_module
from typing import TYPE_CHECKING

import _hf_lowbit_autoload


if TYPE_CHECKING:
    from .compression.inspect import inspect
    from .compression.report import report
    from .configs import BlastConfig, DQTConfig, LowBitConfig, Scheme
    from .exports import export
    from .hub import push_to_hub
    from .imports import import_checkpoint
    from .nn.codes import codes
    from .pipeline import compress
    from .quantizers.freeze import freeze
    from .quantizers.loftq import initialize_from_error
    from .quantizers.memory import quantize
    from .quantizers.merging import merge_as
    from .quantizers.prepare import prepare_model_for_lowbit_training
    from .sparsity.callback import BlastCallback
    from .training.callback import DQTCallback
    from .training.large_batch import LAMB, LARS
    from .training.mlperf import MLPerfCallback
    from .training.optimizer import DQTOptimizer


__version__ = "0.1.0"
__all__ = [
    "BlastCallback",
    "BlastConfig",
    "DQTCallback",
    "DQTConfig",
    "DQTOptimizer",
    "LAMB",
    "LARS",
    "LowBitConfig",
    "MLPerfCallback",
    "Scheme",
    "codes",
    "compress",
    "export",
    "freeze",
    "import_checkpoint",
    "initialize_from_error",
    "inspect",
    "merge_as",
    "prepare_model_for_lowbit_training",
    "push_to_hub",
    "quantize",
    "report",
]

# where each public name lives
_HOMES = {
    "BlastCallback": "sparsity.callback",
    "BlastConfig": "configs",
    "DQTCallback": "training.callback",
    "DQTConfig": "configs",
    "DQTOptimizer": "training.optimizer",
    "LAMB": "training.large_batch",
    "LARS": "training.large_batch",
    "LowBitConfig": "configs",
    "MLPerfCallback": "training.mlperf",
    "Scheme": "configs",
    "codes": "nn.codes",
    "compress": "pipeline",
    "export": "exports",
    "freeze": "quantizers.freeze",
    "import_checkpoint": "imports",
    "initialize_from_error": "quantizers.loftq",
    "inspect": "compression.inspect",
    "merge_as": "quantizers.merging",
    "prepare_model_for_lowbit_training": "quantizers.prepare",
    "push_to_hub": "hub",
    "quantize": "quantizers.memory",
    "report": "compression.report",
}


def __getattr__(name: str):
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f".{_HOMES[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])


# now with what of transformers and peft is loaded, with the rest as soon as it is
for _step in _hf_lowbit_autoload.loaded():
    getattr(import_module(".registration", __name__), _step)()
_hf_lowbit_autoload.install()
