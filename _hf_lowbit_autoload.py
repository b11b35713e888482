"""Lets transformers load hf_lowbit checkpoints in a process that never imports hf_lowbit.

transformers has no plugin discovery: a checkpoint whose `quant_method` nobody registered is read as if it were dense.
`hf_lowbit_autoload.pth`, installed beside this file, imports this module when the interpreter starts. All that
happens then is one entry in `sys.meta_path`. The entry waits for `transformers.quantizers.auto`, the module that
holds the registry, and calls `hf_lowbit.registration.register()` as soon as that module has run; after `peft`, which
has no discovery either, it calls `register_peft()`, and after `transformers.trainer` `register_trainer()`, and
in `optimum-cli` `register_optimum()`. A process
that never imports transformers never imports hf_lowbit.

What holds in every case: only the standard library is used, and of it only what the interpreter has loaded anyway; a
failure of hf_lowbit becomes a warning, never a failed import of transformers; `HF_LOWBIT_AUTOLOAD=0` switches it off.
"""

import os
import sys


TARGET = "transformers.quantizers.auto"
# what of hf_lowbit.registration is called after which module
STEPS = {TARGET: "register", "transformers.trainer": "register_trainer", "peft": "register_peft",
         "optimum.commands.optimum_cli": "register_optimum"}  # fmt: skip
SWITCH = "HF_LOWBIT_AUTOLOAD"


class RegisterAfterImport:
    """A meta path finder that finds nothing itself: it asks the finders after it and adds a step to their answer."""

    searching = False

    def find_spec(self, name, path=None, target=None):
        if name not in STEPS or self.searching or self not in sys.meta_path:
            return None
        # a finder that calls all the others from its own search must not lead back into this one
        self.searching = True
        try:
            # those before this one have already been asked
            for finder in sys.meta_path[sys.meta_path.index(self) + 1 :]:
                find_spec = getattr(finder, "find_spec", None)
                spec = find_spec(name, path, target) if find_spec else None
                if spec is not None:
                    register_after(spec.loader, STEPS[name])
                    return spec
            return None
        finally:
            self.searching = False


def register_after(loader, step):
    """Make `loader` call `register(step)` once it has executed its module; it keeps its type and its other methods."""

    def exec_module(module):
        del loader.exec_module
        loader.exec_module(module)
        register(step)

    # a loader that is a class is shared by all modules of its kind, and some loaders accept no attributes: both are
    # left as they are, and such a process has to import hf_lowbit itself
    if hasattr(loader, "exec_module") and not isinstance(loader, type):
        try:
            loader.exec_module = exec_module
        except AttributeError:
            return


def register(step):
    """Call function `step` of hf_lowbit.registration; whatever goes wrong is a warning."""
    if getattr(getattr(sys.modules.get("hf_lowbit"), "__spec__", None), "_initializing", False):
        # hf_lowbit is still being imported, and registers when it is complete
        return
    try:
        from hf_lowbit import registration

        getattr(registration, step)()
    except Exception as cause:
        warn(
            f"hf_lowbit is installed but could not be loaded ({type(cause).__name__}: {cause}), so this process will "
            f"not read low-bit checkpoints. `import hf_lowbit` shows where it fails; {SWITCH}=0 leaves it out."
        )


def warn(message):
    """Issue a RuntimeWarning, and only print it where warnings are turned into errors."""
    import warnings

    try:
        warnings.warn(message, RuntimeWarning, stacklevel=2)
    except Exception:
        print(f"RuntimeWarning: {message}", file=sys.stderr)


def install():
    """Put the finder in place, once; for what is already there, register now."""
    if not any(isinstance(finder, RegisterAfterImport) for finder in sys.meta_path):
        sys.meta_path.insert(0, RegisterAfterImport())
    for step in loaded():
        register(step)


def loaded():
    """The steps whose module is there. peft loads transformers halfway through its own import, and with it us: its
    step comes when it is complete. The same goes for transformers.trainer."""
    return [STEPS[name] for name in STEPS if name in sys.modules
            and not (name != TARGET and getattr(sys.modules[name].__spec__, "_initializing", False))]  # fmt: skip


# the switch is for processes that do not import hf_lowbit; hf_lowbit itself calls `install` in any case
if os.environ.get(SWITCH) != "0":
    install()
