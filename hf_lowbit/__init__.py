"""hf_lowbit: compress any Hugging Face model to low bits, with the calls you already know.

Importing it registers the quantization configs with transformers; `from_pretrained(quantization_config=...)`,
`save_pretrained`, `push_to_hub`, `dequantize` and `generate` then work as for any model.
"""

from .compress.inspect import inspect
from .compress.report import report
from .configs import LowBitConfig, Scheme
from .nn.codes import codes
from .quantizers import register
from .quantizers.memory import quantize


__version__ = "0.1.0"
__all__ = ["LowBitConfig", "Scheme", "codes", "inspect", "quantize", "report"]

register()
