"""What the user asked for: plain JSON configs, checked in sentences before any work starts."""

from .blast import BlastConfig
from .dqt import DQTConfig
from .lowbit import LowBitConfig
from .scheme import Scheme


__all__ = ["BlastConfig", "DQTConfig", "LowBitConfig", "Scheme"]
