"""`LoadedModule`: nothing is drawn for a module whose every tensor was loaded.

After loading, transformers calls the model's `_init_weights` on each module it takes to be new, and guards single
tensors inside. Some of these functions expect the dense shape (Funnel unpacks it into two numbers), which stored codes
and blocks do not have.
"""

from __future__ import annotations

from torch import nn


class LoadedModule(nn.Module):
    """Mixin that answers transformers' question whether the module is initialized from its parameters."""

    @property
    def _is_hf_initialized(self) -> bool:
        parameters = [parameter for parameter in self._parameters.values() if parameter is not None]
        known = self.__dict__.get("_is_hf_initialized", False)
        # buffers that no checkpoint holds (the scale of Gemma's embeddings) are filled by `_init_weights`
        complete = not self._non_persistent_buffers_set
        return known or (complete and all(getattr(p, "_is_hf_initialized", False) for p in parameters))

    @_is_hf_initialized.setter
    def _is_hf_initialized(self, value: bool) -> None:
        self.__dict__["_is_hf_initialized"] = value
