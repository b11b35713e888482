"""What a model is for and which Auto class loads it, read from transformers' own mappings.

`transformers.modelcard.TASK_MAPPING` maps a pipeline tag to {model type: class name}; it is what Trainer writes its
cards with. The Auto classes hold the same kind of mapping. No list of architectures is kept here.
"""

from __future__ import annotations


def describe(architecture: str) -> tuple[str | None, str | None]:
    """(pipeline tag, name of the Auto class) for a class name such as "LlamaForCausalLM"; None where unknown."""
    # imported here: a card is rare, and these modules pull in a large part of transformers
    from transformers.modelcard import TASK_MAPPING
    from transformers.models.auto import modeling_auto

    tasks = {task: mapping for task, mapping in TASK_MAPPING.items() if _lists(mapping, architecture)}
    loaders = {}
    for name in dir(modeling_auto):
        lazy = getattr(getattr(modeling_auto, name), "_model_mapping", None) if name.startswith("AutoModel") else None
        if lazy is not None and _lists(lazy._model_mapping, architecture):
            loaders[name] = lazy._model_mapping
    if tasks:
        # a class of several tasks is listed under the text-only ones first: Gemma 3 reads images, BART fills no masks
        task, mapping = list(tasks.items())[-1]
        fitting = [name for name, own in loaders.items() if own.items() <= mapping.items()]
        return task, (fitting or list(loaders) or [None])[0]
    if "AutoModel" in loaders:
        return _bare_task(architecture), "AutoModel"
    return None, next(iter(loaders), None)


def _lists(mapping: dict, architecture: str) -> bool:
    return any(architecture == names or (not isinstance(names, str) and architecture in names)
               for names in mapping.values())  # fmt: skip


def _bare_task(architecture: str) -> str | None:
    """The tag of a model without a head: features of what it reads."""
    import transformers
    from transformers.pipelines import SUPPORTED_TASKS

    modalities = {"input_ids": "text", "pixel_values": "image"}
    modality = modalities.get(getattr(getattr(transformers, architecture, None), "main_input_name", None))
    for task, entry in SUPPORTED_TASKS.items():
        if entry["type"] == modality and [loader.__name__ for loader in entry["pt"]] == ["AutoModel"]:
            return task
    return None
