"""The import hook: a process that never imports hf_lowbit finds our quantizer, and nothing the hook does can hurt.

Most cases run against three-file stand-ins for transformers and hf_lowbit, in an interpreter without site-packages
(`-S`), so that they see the hook of this checkout and not an installed one, and start in milliseconds. The last ones
load a real checkpoint with the real transformers.
"""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest


ROOT = Path(__file__).parents[2]
HOOK_FILES = ("_hf_lowbit_autoload.py", "hf_lowbit_autoload.pth")

# what the interpreter does with the .pth file at start, for an interpreter that was started without it
ADD_HOOK = "import site; site.addsitedir('hook'); "
IMPORT_TRANSFORMERS = "import transformers.quantizers as q; "


@pytest.fixture
def sandbox(tmp_path):
    """A directory with the hook and with stand-ins: `registered` in the registry module lists who registered."""
    files = {
        "transformers/__init__.py": "",
        "transformers/quantizers/__init__.py": "from .auto import registered\nfrom . import base\n",
        "transformers/quantizers/auto.py": "registered = []\n",
        "transformers/quantizers/base.py": "",
        "hf_lowbit/__init__.py": "",
        "hf_lowbit/registration.py": (
            "def register():\n"
            "    from transformers.quantizers.auto import registered\n"
            "    if 'hf_lowbit' not in registered:\n"
            "        registered.append('hf_lowbit')\n"
        ),
    }
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (tmp_path / "hook").mkdir()
    for name in HOOK_FILES:
        (tmp_path / "hook" / name).write_text((ROOT / name).read_text())
    return tmp_path


def python(code, cwd, *flags, **env):
    """Run `code` in a fresh interpreter with `cwd` as its import path; return the finished process."""
    keep = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "HF_LOWBIT_"))}
    return subprocess.run(
        [sys.executable, *flags, "-c", f"import sys; sys.path.insert(0, ''); {code}"],
        cwd=cwd,
        env={**keep, "HF_HUB_OFFLINE": "1", **env},
        capture_output=True,
        text=True,
    )


def output(code, cwd, *flags, **env):
    """The same, for code that must succeed and say nothing on stderr."""
    result = python(code, cwd, *flags, **env)
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    return result.stdout.strip()


@pytest.mark.parametrize("flags", [["-S"], ["-S", "-I"], ["-S", "-O"], ["-S", "-W", "error"]], ids=" ".join)
def test_import_of_transformers_registers(sandbox, flags):
    assert output(ADD_HOOK + IMPORT_TRANSFORMERS + "print(q.registered)", sandbox, *flags) == "['hf_lowbit']"


def test_start_imports_neither_transformers_nor_us(sandbox):
    code = ADD_HOOK + "print(sorted(m for m in sys.modules if m.startswith(('hf_lowbit', 'transformers'))))"
    assert output(code, sandbox, "-S") == "[]"


def test_start_adds_no_module_but_the_hook(sandbox):
    code = "import os, site; before = set(sys.modules); site.addsitedir('hook'); print(set(sys.modules) - before)"
    assert output(code, sandbox, "-S") == "{'_hf_lowbit_autoload'}"


def test_switched_off(sandbox):
    code = ADD_HOOK + IMPORT_TRANSFORMERS + "print(q.registered, 'hf_lowbit' in sys.modules)"
    assert output(code, sandbox, "-S", HF_LOWBIT_AUTOLOAD="0") == "[] False"


def test_transformers_imported_before_the_hook(sandbox):
    assert output(IMPORT_TRANSFORMERS + ADD_HOOK + "print(q.registered)", sandbox, "-S") == "['hf_lowbit']"


def test_reload_registers_again(sandbox):
    code = ADD_HOOK + IMPORT_TRANSFORMERS + "import importlib; print(importlib.reload(q.auto).registered)"
    assert output(code, sandbox, "-S") == "['hf_lowbit']"


def test_transformers_absent(sandbox):
    code = ADD_HOOK + "sys.modules['transformers'] = None; import transformers.quantizers.auto"
    result = python(code, sandbox, "-S")
    assert result.returncode == 1
    assert "ModuleNotFoundError" in result.stderr
    assert "hf_lowbit" not in result.stderr


def test_broken_registry_module_raises_its_own_error(sandbox):
    (sandbox / "transformers/quantizers/auto.py").write_text("raise OSError('disk on fire')")
    result = python(ADD_HOOK + IMPORT_TRANSFORMERS, sandbox, "-S")
    assert result.stderr.strip().endswith("OSError: disk on fire")
    assert "could not be loaded" not in result.stderr


@pytest.mark.parametrize("flags", [["-S"], ["-S", "-W", "error"], ["-S", "-W", "ignore"]], ids=" ".join)
@pytest.mark.parametrize("file", ["hf_lowbit/__init__.py", "hf_lowbit/registration.py"])
def test_broken_hf_lowbit_is_a_warning_with_its_cause(sandbox, file, flags):
    (sandbox / file).write_text("raise OSError('libtorch is missing')")
    result = python(ADD_HOOK + IMPORT_TRANSFORMERS + "print(q.registered)", sandbox, *flags)
    assert result.returncode == 0
    assert result.stdout.strip() == "[]"
    assert ("OSError: libtorch is missing" in result.stderr) == ("ignore" not in flags)


def test_import_that_starts_in_hf_lowbit_is_left_to_finish(sandbox):
    """hf_lowbit pulls transformers in before it is complete itself; the hook must not use it half-made."""
    (sandbox / "hf_lowbit/__init__.py").write_text(
        "from transformers.quantizers.auto import registered\nhalfway = list(registered)\n"
        "from .registration import register\nregister()\n"
    )
    code = ADD_HOOK + "import hf_lowbit as lb; print(lb.halfway, lb.registered)"
    assert output(code, sandbox, "-S") == "[] ['hf_lowbit']"


def test_switch_does_not_concern_those_who_import_us(sandbox):
    """hf_lowbit calls `install` when it is imported before transformers."""
    (sandbox / "hf_lowbit/__init__.py").write_text("import _hf_lowbit_autoload\n_hf_lowbit_autoload.install()\n")
    code = ADD_HOOK + "import hf_lowbit; " + IMPORT_TRANSFORMERS + "print(q.registered)"
    assert output(code, sandbox, "-S", HF_LOWBIT_AUTOLOAD="0") == "['hf_lowbit']"


def test_installing_twice_puts_one_finder(sandbox):
    code = ADD_HOOK + "import _hf_lowbit_autoload as a; a.install(); before = len(sys.meta_path); a.install(); "
    assert output(code + "print(len(sys.meta_path) - before)", sandbox, "-S") == "0"


def test_loader_is_given_back_as_it_was(sandbox):
    code = (
        ADD_HOOK
        + IMPORT_TRANSFORMERS
        + "import inspect; loader = q.auto.__spec__.loader; "
        + "print(type(loader).__name__, vars(loader).get('exec_module'), inspect.getsource(q.auto).strip())"
    )
    assert output(code, sandbox, "-S") == "SourceFileLoader None registered = []"


@pytest.mark.parametrize("place", ["before", "after"])
def test_lives_beside_a_hook_that_asks_every_finder(sandbox, place):
    """Some import hooks call all finders from their own; the two must not call each other for ever."""
    other = (
        "class Other:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        for finder in sys.meta_path:\n"
        "            if finder is not self:\n"
        "                spec = finder.find_spec(name, path, target)\n"
        "                if spec is not None: return spec\n"
    )
    add_other = f"exec({other!r}); sys.meta_path.insert(0, Other()); "
    code = add_other + ADD_HOOK if place == "after" else ADD_HOOK + add_other
    assert output(code + IMPORT_TRANSFORMERS + "print(q.registered)", sandbox, "-S") == "['hf_lowbit']"


def test_everything_in_zip_files(sandbox):
    """transformers and hf_lowbit imported from an archive, whose loader is another class."""
    with zipfile.ZipFile(sandbox / "all.zip", "w") as archive:
        for package in ("transformers", "hf_lowbit"):
            for path in sorted((sandbox / package).rglob("*.py")):
                archive.write(path, path.relative_to(sandbox))
                path.unlink()
    code = "sys.path.insert(0, 'all.zip'); " + ADD_HOOK + IMPORT_TRANSFORMERS + "print(q.registered, q.__file__)"
    assert output(code, sandbox, "-S").startswith("['hf_lowbit'] all.zip")


@pytest.mark.skipif(sys.platform == "win32", reason="the layout of the standard library differs")
def test_zipped_standard_library(sandbox):
    """An interpreter whose standard library is one archive, as embedded and bundled ones are."""
    major, minor = sys.version_info[:2]
    library = Path(os.__file__).parent
    home = sandbox / "home/lib"
    (home / f"python{major}.{minor}").mkdir(parents=True)
    (home / f"python{major}.{minor}/lib-dynload").symlink_to(library / "lib-dynload")
    with zipfile.ZipFile(home / f"python{major}{minor}.zip", "w") as archive:
        # the modules at the top and two packages are what an interpreter needs for `import json`
        for path in [*library.glob("*.py"), *library.glob("encodings/*.py"), *library.glob("json/*.py")]:
            archive.write(path, path.relative_to(library))
    code = ADD_HOOK + IMPORT_TRANSFORMERS + "import colorsys; print(q.registered, colorsys.__file__)"
    result = python(code, sandbox, "-S", PYTHONHOME=str(sandbox / "home"))
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("['hf_lowbit'] ")
    assert f"python{major}{minor}.zip" in result.stdout


@pytest.mark.parametrize(
    "code",
    [
        pytest.param("import hf_lowbit", id="ours-first"),
        pytest.param("import transformers.quantizers.auto, hf_lowbit", id="transformers-first"),
        pytest.param("import hf_lowbit; hf_lowbit.LowBitConfig", id="config-first"),
        pytest.param("import hf_lowbit; hf_lowbit.quantize", id="quantize-first"),
        pytest.param("import hf_lowbit; hf_lowbit.push_to_hub", id="push-first"),
    ],
)
def test_import_of_the_real_package_registers(code):
    """In every order, and whatever the switch says: the quantizer, and the card of a plain `push_to_hub`."""
    code += (
        "; from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING as known"
        "; from transformers.utils.hub import PushToHubMixin as mixin"
        "; print('hf_lowbit' in known, hasattr(mixin._upload_modified_files, 'hf_lowbit'))"
    )
    result = python(code, ROOT, HF_LOWBIT_AUTOLOAD="0")
    assert result.stdout == "True True\n", result.stderr
    assert "RuntimeWarning" not in result.stderr


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A tiny low-bit Llama on disk, and the logits it gives for the tokens 0 to 7."""
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig

    import hf_lowbit as lb

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    model = lb.quantize(AutoModelForCausalLM.from_config(config).eval(), lb.LowBitConfig(bits=4, group_size=16))
    folder = tmp_path_factory.mktemp("checkpoint")
    model.save_pretrained(folder)
    with torch.no_grad():
        return folder, model(torch.arange(8)[None]).logits


LOAD = (
    "import torch; from transformers import AutoModelForCausalLM; "
    "model = AutoModelForCausalLM.from_pretrained('.'); "
    "torch.save(model(torch.arange(8)[None]).logits.detach(), 'logits.pt')"
)


def test_checkpoint_loads_without_importing_us(checkpoint):
    import torch

    folder, expected = checkpoint
    result = python(f"import site; site.addsitedir({str(ROOT)!r}); {LOAD}", folder)
    assert result.returncode == 0, result.stderr
    assert torch.equal(torch.load(folder / "logits.pt"), expected)


def test_checkpoint_without_the_hook_fails_loudly(checkpoint):
    folder, _ = checkpoint
    result = python(LOAD, folder, HF_LOWBIT_AUTOLOAD="0")
    assert result.returncode != 0
    assert "size mismatch" in result.stderr or "mismatched" in result.stderr
