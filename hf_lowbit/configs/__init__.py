"""What the user asked for: plain JSON configs, checked in sentences before any work starts."""

from .lowbit import LowBitConfig
from .scheme import Scheme


__all__ = ["LowBitConfig", "Scheme"]
