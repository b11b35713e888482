"""Fast implementations of the operators that `functional` declares. Deleting this package changes speed only.

Importing it registers kernels and nothing more: no compiler runs, no library is loaded before the first product.
"""

from ..functional.dispatch import use_kernel  # noqa: F401
from ..functional.several import separate_products  # noqa: F401
from . import cpu, torch_native, triton  # noqa: F401
from .triton import blocks, update  # noqa: F401
