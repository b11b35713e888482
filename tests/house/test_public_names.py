"""The public names are those of the design, each exists and says what it does, and importing them has no surprises."""

import inspect
import pkgutil

import pytest

import hf_lowbit as lb


# the whole public API as it is designed; names join `__all__` when they work
DESIGNED = {
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
}
# what works today; a name that goes missing is a broken promise, so the list is written down
PROMISED = {
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
}

# the argument names and their order are fixed: users pass them by position and by keyword
FIRST_PARAMETERS = {
    "BlastCallback": ["step_size"],
    "BlastConfig": ["sparsity", "block_size", "targets", "bits", "rest", "modules_to_not_convert"],
    "DQTCallback": ["optimizer", "state_bits", "seed"],
    "DQTConfig": ["bits", "group_size", "forward_bits", "activation_bits", "modules_to_not_convert"],
    "DQTOptimizer": ["params", "lr", "optimizer", "state_bits"],
    "LAMB": ["params", "lr", "betas", "eps", "weight_decay"],
    "MLPerfCallback": ["path", "benchmark", "target"],
    "LARS": ["params", "lr", "momentum", "eta", "eps", "weight_decay"],
    "export": ["model_or_dir", "output_dir", "format"],
    "freeze": ["model"],
    "LowBitConfig": [
        "bits",
        "group_size",
        "symmetric",
        "activations",
        "method",
        "budget",
        "calibration",
        "modules",
        "modules_to_not_convert",
    ],
    "Scheme": ["bits", "group_size", "symmetric", "activations"],
    "codes": ["module"],
    "compress": [
        "model_or_id",
        "output_dir",
        "budget",
        "bits",
        "calibration",
        "stages",
        "evaluation",
        "low_memory",
        "seed",
        "resume",
    ],  # fmt: skip
    "inspect": ["model_or_id"],
    "merge_as": ["mode"],
    "prepare_model_for_lowbit_training": ["model"],
    "push_to_hub": ["model", "repo_id", "tokenizer", "report"],
    "quantize": ["model", "config"],
    "report": ["model"],
}


def test_all_holds_designed_names_only():
    assert set(lb.__all__) <= DESIGNED


def test_all_keeps_what_was_promised():
    assert PROMISED <= set(lb.__all__)


def test_all_has_no_duplicates():
    assert len(lb.__all__) == len(set(lb.__all__))


def test_no_module_hides_a_public_name():
    """Importing a submodule sets it on the package, over whatever had its name."""
    assert not set(lb.__all__) & {module.name for module in pkgutil.iter_modules(lb.__path__)}


def test_dir_shows_every_public_name():
    assert set(lb.__all__) <= set(dir(lb))


@pytest.mark.parametrize("name", sorted(lb.__all__))
def test_name_is_documented(name):
    """A sentence at least: the docstring of the object itself, not one that it inherits."""
    value = getattr(lb, name)
    text = vars(value).get("__doc__") if inspect.isclass(value) else value.__doc__
    # a dataclass without a docstring gets its signature for one
    assert text and not text.startswith(f"{name}("), f"hf_lowbit.{name} has no docstring"
    assert len(text.split()) >= 5 and "." in text, f"the docstring of hf_lowbit.{name} is no sentence"


@pytest.mark.parametrize("name", sorted(FIRST_PARAMETERS))
def test_signature_is_the_designed_one(name):
    parameters = list(inspect.signature(getattr(lb, name)).parameters)
    assert parameters[: len(FIRST_PARAMETERS[name])] == FIRST_PARAMETERS[name]


def test_star_import_gives_exactly_the_public_names():
    namespace = {}
    exec("from hf_lowbit import *", namespace)
    assert set(namespace) - {"__builtins__"} == set(lb.__all__)


def test_version_is_a_version():
    from packaging.version import Version

    assert Version(lb.__version__) >= Version("0.1.0")
