"""The `hub` fixture: the loopback server, and the two ways to point the real client at it.

    from tests.hub_fixture import hub        # in a conftest or a test file

In this process: huggingface_hub reads HF_ENDPOINT and its other variables once, on import, so the fixture sets the
constants they became (`connect_here`). In a process of its own: `hub.python(code)` sets the variables themselves,
which is what a user does. Xet is off in both, since it speaks to another service; files then go through LFS.
"""

import os
import subprocess
import sys
from pathlib import Path

import huggingface_hub
import pytest
import transformers.utils.hub
from huggingface_hub import constants

from tests.hub_server import HubServer


ROOT = Path(__file__).resolve().parent.parent


class Hub(HubServer):
    """The server together with its clients."""

    def __init__(self, folder):
        super().__init__()
        self.folder = Path(folder)

    def environment(self, token=True):
        """Variables for a process that takes this server for the Hub; without network variables of the machine."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
        own = {
            "HF_ENDPOINT": self.endpoint,
            "HF_HOME": str(self.folder / "home"),
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_DISABLE_PROGRESS_BARS": "1",
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "NO_PROXY": "127.0.0.1",
            "no_proxy": "127.0.0.1",
            "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
        }
        return kept | own | ({"HF_TOKEN": self.token} if token else {})

    def python(self, code, *arguments, token=True):
        """Run `code` in a new interpreter and return what it printed; its failure fails the test."""
        command = [sys.executable, "-c", code, *map(str, arguments)]
        done = subprocess.run(command, env=self.environment(token), cwd=self.folder, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def connect_here(self, monkeypatch):
        """Point huggingface_hub and transformers of this process at the server, until `monkeypatch` is undone."""
        template = self.endpoint + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "ENDPOINT", self.endpoint)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(self.folder / "cache"))
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(self.folder / "token"))
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        # both libraries keep one client that remembers the endpoint it was made with
        monkeypatch.setattr(huggingface_hub.hf_api.api, "endpoint", self.endpoint)
        monkeypatch.setattr(transformers.utils.hub, "_hf_api", None, raising=False)
        monkeypatch.setenv("HF_TOKEN", self.token)
        for name in ("NO_PROXY", "no_proxy"):
            monkeypatch.setenv(name, "127.0.0.1")
        huggingface_hub.close_session()


@pytest.fixture
def hub(tmp_path_factory, monkeypatch):
    """A running Hub with the user "me" logged in."""
    with Hub(tmp_path_factory.mktemp("hub")) as server:
        server.connect_here(monkeypatch)
        yield server
    # connections to a server that is gone must not be reused
    huggingface_hub.close_session()
