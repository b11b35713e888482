"""What the loopback Hub remembers: accounts, repositories as commits that map a path to bytes, faults to inject."""

import hashlib
import itertools
import threading
from dataclasses import dataclass, field


TOKEN = "hf_loopbackwriter"
READ_TOKEN = "hf_loopbackreader"
STRANGER_TOKEN = "hf_loopbackstranger"


class Refused(Exception):
    """An answer other than success: status, error code as the Hub names it, message."""

    def __init__(self, status, message, code=None):
        super().__init__(message)
        self.status, self.message, self.code = status, message, code


@dataclass
class Entry:
    """One file of a commit."""

    content: bytes
    lfs: bool = False

    @property
    def oid(self):
        if self.lfs:
            return hashlib.sha256(self.content).hexdigest()
        return hashlib.sha1(b"blob %d\0" % len(self.content) + self.content).hexdigest()

    def describe(self, path):
        item = {"type": "file", "path": path, "size": len(self.content), "oid": self.oid}
        if self.lfs:
            item["lfs"] = {"oid": self.oid, "size": len(self.content), "pointerSize": 130}
        return item


@dataclass
class Repo:
    """One repository: refs point to commits, a commit is (title, {path: Entry})."""

    id: str
    type: str = "model"
    private: bool = False
    refs: dict = field(default_factory=dict)
    commits: dict = field(default_factory=dict)

    def commit(self, ref, title, files):
        oid = hashlib.sha1(f"{self.type}/{self.id}/{len(self.commits)}/{title}".encode()).hexdigest()
        self.commits[oid] = (title, files)
        self.refs[ref] = oid
        return oid

    def resolve(self, revision):
        oid = self.refs.get(revision, revision)
        if oid not in self.commits:
            raise Refused(404, f"Invalid rev id: {revision}", "RevisionNotFound")
        return oid

    def files(self, revision="main"):
        return self.commits[self.resolve(revision)][1]

    def text(self, path, revision="main"):
        return self.files(revision)[path].content.decode()

    def titles(self):
        return [title for title, _ in self.commits.values()]


class HubState:
    """State shared by the requests, and what a test sets before and looks at afterwards."""

    def __init__(self):
        self.tokens = {TOKEN: "me", READ_TOKEN: "me", STRANGER_TOKEN: "stranger"}
        self.organizations = {"me": ["my-lab"]}
        self.repos, self.lfs, self.requests = {}, {}, []
        self.lfs_threshold = 10_000
        self.cut_uploads, self.cut_commits = set(), set()
        self.upload_count, self.commit_count = itertools.count(1), itertools.count(1)
        self.lock = threading.RLock()

    def repo(self, repo_id, type="model"):
        return self.repos[(type, repo_id)]

    def add_repo(self, repo_id, files=None, type="model", private=False):
        """A repository that already exists, with text or bytes by path."""
        repo = self.repos[(type, repo_id)] = Repo(repo_id, type, private)
        encoded = {path: text.encode() if isinstance(text, str) else text for path, text in (files or {}).items()}
        repo.commit("main", "initial commit", {path: Entry(content) for path, content in encoded.items()})
        return repo

    def may_write(self, user, repo_id):
        return user is not None and repo_id.split("/")[0] in [user, *self.organizations.get(user, [])]

    def open(self, type, repo_id, user, write=False):
        repo = self.repos.get((type, repo_id))
        if repo is None or (repo.private and not self.may_write(user, repo_id)):
            # the Hub does not tell a stranger whether a private repository exists
            raise Refused(404 if user else 401, "Repository not found", "RepoNotFound")
        if write and not self.may_write(user, repo_id):
            raise Refused(403 if user else 401, f"You don't have write access to {repo_id}")
        return repo
