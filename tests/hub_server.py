"""A Hub for the tests: the HTTP calls of huggingface_hub, answered on a loopback port by the standard library.

The real client talks to it, so what the tests push and load takes the road it takes on huggingface.co: create the
repository, ask how each file is uploaded (in the commit, or through LFS), upload, commit, resolve. Repositories
live in memory as commits that map a path to its bytes. The server binds 127.0.0.1, picks its own port and ends with
its fixture (`tests/hub_fixture.py`).

What can be set from a test:

    hub.lfs_threshold        files of this size and more go through LFS (0: all but empty files, None: none)
    hub.cut_uploads          numbers of the LFS uploads (1, 2, ...) whose connection is cut half-way
    hub.cut_commits          the same for commits, cut before they are applied
    hub.tokens               token -> user; a user may write to repositories under its own name and its organizations
"""

import base64
import hashlib
import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit

from tests.hub_state import READ_TOKEN, TOKEN, Entry, HubState, Refused


class HubServer(HubState):
    """The state, served on a port of its own while the `with` block lasts."""

    def __init__(self):
        super().__init__()
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (Handler,), {"hub": self}))
        self.server.daemon_threads = True
        self.endpoint = f"http://127.0.0.1:{self.server.server_address[1]}"
        self.token = TOKEN
        self.thread = threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)

    def __enter__(self):
        self.thread.start()
        return self

    def __exit__(self, *_):
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()


REPO = r"/api/(?P<type>model|dataset|space)s/(?P<id>[^/]+/[^/]+)"
FILES = r"/(?:(?P<type>dataset|space)s/)?(?P<id>[^/]+/[^/]+)"
ROUTES = [
    ("GET", r"/api/whoami-v2", "whoami"),
    ("POST", r"/api/validate-yaml", "validate_yaml"),
    ("POST", r"/api/repos/create", "create"),
    ("GET", REPO, "info"),
    ("GET", REPO + r"/revision/(?P<rev>[^/]+)", "info"),
    ("GET", REPO + r"/refs", "list_refs"),
    ("GET", REPO + r"/tree/(?P<rev>[^/]+)(?:/(?P<path>.*))?", "tree"),
    ("POST", REPO + r"/branch/(?P<rev>[^/]+)", "branch"),
    ("POST", REPO + r"/preupload/(?P<rev>[^/]+)", "preupload"),
    ("POST", REPO + r"/commit/(?P<rev>[^/]+)", "commit"),
    ("POST", FILES + r"\.git/info/lfs/objects/batch", "lfs_batch"),
    ("PUT", r"/lfs/(?P<oid>[0-9a-f]{64})", "lfs_put"),
    ("GET", FILES + r"/resolve/(?P<rev>[^/]+)/(?P<path>.+)", "resolve"),
]


class Handler(BaseHTTPRequestHandler):
    """One request: find its route, call the method of that name, send what it returns as JSON."""

    hub: HubServer
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def handle_one_route(self):
        split = urlsplit(self.path)
        self.query = {name: values[-1] for name, values in parse_qs(split.query).items()}
        self.length = int(self.headers.get("Content-Length") or 0)
        method = "GET" if self.command == "HEAD" else self.command
        self.hub.requests.append(f"{self.command} {split.path}")
        try:
            for verb, pattern, name in ROUTES:
                match = re.fullmatch(pattern, split.path)
                if verb == method and match:
                    # uploads are read without the lock; everything else sees one state
                    names = {key: unquote(value) for key, value in match.groupdict(default="").items()}
                    if "type" in names:
                        names["type"] = names["type"] or "model"
                    self.user = self.authenticate()
                    if name == "lfs_put":
                        return self.lfs_put(**names)
                    self.body = self.rfile.read(self.length)
                    with self.hub.lock:
                        return getattr(self, name)(**names)
            raise Refused(404, f"no such route: {self.command} {split.path}")
        except Refused as refused:
            self.refuse(refused)

    do_GET = do_HEAD = do_POST = do_PUT = do_DELETE = handle_one_route

    def authenticate(self):
        header = self.headers.get("Authorization")
        if header is None:
            return None
        token = header.removeprefix("Bearer ")
        if token not in self.hub.tokens:
            raise Refused(401, "Invalid credentials in Authorization header")
        if token == READ_TOKEN and self.command == "POST" and not self.path.startswith("/api/validate-yaml"):
            raise Refused(403, "this token may read but not write")
        return self.hub.tokens[token]

    def send(self, status, payload=b"", headers=()):
        if not isinstance(payload, bytes):
            payload, headers = json.dumps(payload).encode(), {"Content-Type": "application/json", **dict(headers)}
        self.send_response(status)
        for name, value in dict(headers).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(payload)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(payload)

    def refuse(self, refused):
        # an unread body would be taken for the next request of this connection
        self.close_connection = True
        headers = {"X-Error-Message": refused.message, "Connection": "close"}
        if refused.code:
            headers["X-Error-Code"] = refused.code
        self.send(refused.status, {"error": refused.message}, headers)

    def cut(self):
        """Drop the connection without an answer, as a broken network does."""
        self.close_connection = True
        self.connection.close()

    # accounts and repositories

    def whoami(self):
        if self.user is None:
            raise Refused(401, "Invalid username or password.")
        organizations = [{"name": name, "type": "org"} for name in self.hub.organizations.get(self.user, [])]
        self.send(200, {"type": "user", "name": self.user, "fullname": self.user, "orgs": organizations})

    def validate_yaml(self):
        content = json.loads(self.body)["content"]
        block = re.match(r"---\n(.*?)\n---", content, re.DOTALL)
        if block is None:
            message = "empty or missing yaml metadata in repo card"
            return self.send(200, {"errors": [], "warnings": [{"message": message}]})
        base = re.search(r"^base_model: *['\"]?(.*?)['\"]?$", block[1], re.MULTILINE)
        if base and not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", base[1]):
            message = f'"base_model" with value "{base[1]}" is not valid. Use a model id from https://hf.co/models.'
            return self.send(400, {"errors": [{"message": message}], "warnings": []})
        self.send(200, {"errors": [], "warnings": []})

    def create(self):
        if self.user is None:
            raise Refused(401, "Invalid username or password.")
        body = json.loads(self.body)
        type, repo_id = body.get("type") or "model", f"{body.get('organization') or self.user}/{body['name']}"
        if not self.hub.may_write(self.user, repo_id):
            raise Refused(403, f'You don\'t have the rights to create a {type} under the namespace "{repo_id}"')
        prefix = "" if type == "model" else f"{type}s/"
        answer = {"url": f"{self.hub.endpoint}/{prefix}{repo_id}", "name": repo_id, "id": repo_id}
        if (type, repo_id) in self.hub.repos:
            error = f"You already created this {type} repo"
            return self.send(409, {"error": error, **answer}, {"X-Error-Message": error})
        private = body.get("private") or body.get("visibility") == "private"
        self.hub.add_repo(repo_id, {".gitattributes": "*.safetensors filter=lfs\n"}, type, bool(private))
        self.send(200, answer)

    def info(self, type, id, rev="main"):
        repo = self.hub.open(type, id, self.user)
        oid = repo.resolve(rev)
        siblings = [{"rfilename": path} for path in repo.files(oid)]
        self.send(200, {"id": id, "sha": oid, "private": repo.private, "siblings": siblings, "tags": []})

    def list_refs(self, type, id):
        refs = self.hub.open(type, id, self.user).refs
        heads = {name: oid for name, oid in refs.items() if not name.startswith("refs/")}
        branches = [{"name": name, "ref": f"refs/heads/{name}", "targetCommit": oid} for name, oid in heads.items()]
        pulls = [{"name": name, "ref": name, "targetCommit": oid} for name, oid in refs.items() if name not in heads]
        self.send(200, {"branches": branches, "tags": [], "converts": [], "pullRequests": pulls})

    def branch(self, type, id, rev):
        repo = self.hub.open(type, id, self.user, write=True)
        if rev in repo.refs:
            raise Refused(409, f"Reference already exists: {rev}")
        repo.refs[rev] = repo.resolve(json.loads(self.body or b"{}").get("startingPoint", "main"))
        self.send(200, {})

    # reading

    def tree(self, type, id, rev, path=""):
        files = self.hub.open(type, id, self.user).files(rev)
        prefix = f"{path.rstrip('/')}/" if path else ""
        found = {name: entry for name, entry in files.items() if name.startswith(prefix)}
        if prefix and not found:
            raise Refused(404, f"{path} does not exist on {rev}", "EntryNotFound")
        items = [e.describe(name) for name, e in found.items() if "/" not in name[len(prefix) :]]
        deep = {name: entry for name, entry in found.items() if "/" in name[len(prefix) :]}
        folders = sorted({prefix + name[len(prefix) :].split("/")[0] for name in deep})
        items += [{"type": "directory", "path": name, "size": 0, "oid": "0" * 40} for name in folders]
        if self.query.get("recursive", "").lower() in ("1", "true"):
            items += [entry.describe(name) for name, entry in deep.items()]
        self.send(200, items)

    def resolve(self, type, id, rev, path):
        repo = self.hub.open(type, id, self.user)
        oid = repo.resolve(rev)
        entry = repo.files(oid).get(path)
        if entry is None:
            raise Refused(404, "Entry not found", "EntryNotFound")
        headers = {"X-Repo-Commit": oid, "ETag": f'"{entry.oid}"', "Accept-Ranges": "bytes"}
        asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        if asked is None:
            return self.send(200, entry.content, headers)
        size = len(entry.content)
        first, last = int(asked[1]), min(int(asked[2] or size - 1), size - 1)
        if first >= size:
            raise Refused(416, f"range starts at {first}, the file has {size} bytes")
        headers["Content-Range"] = f"bytes {first}-{last}/{size}"
        self.send(206, entry.content[first : last + 1], headers)

    # writing

    def proposes(self, rev):
        """A pull request needs no write access, neither to open one nor to add to it."""
        return "create_pr" in self.query or rev.startswith("refs/pr/")

    def preupload(self, type, id, rev):
        repo = self.hub.open(type, id, self.user, write=not self.proposes(rev))
        files, threshold = repo.files(rev), self.hub.lfs_threshold
        answers = []
        for item in json.loads(self.body)["files"]:
            mode = "lfs" if threshold is not None and item["size"] >= max(threshold, 1) else "regular"
            known = files.get(item["path"])
            answers.append({"path": item["path"], "uploadMode": mode, "shouldIgnore": False})
            answers[-1]["oid"] = known.oid if known else None
        self.send(200, {"files": answers})

    def lfs_batch(self, type, id):
        if self.user is None:
            raise Refused(401, "log in to upload")
        objects = []
        for item in json.loads(self.body)["objects"]:
            upload = {"href": f"{self.hub.endpoint}/lfs/{item['oid']}"}
            # an object that arrived earlier is not asked for again: this is how a broken push resumes
            needed = {} if item["oid"] in self.hub.lfs else {"actions": {"upload": upload}}
            objects.append({**item, **needed})
        self.send(200, {"transfer": "basic", "objects": objects})

    def lfs_put(self, oid):
        if next(self.hub.upload_count) in self.hub.cut_uploads:
            self.rfile.read(self.length // 2)
            return self.cut()
        content = self.rfile.read(self.length)
        if hashlib.sha256(content).hexdigest() != oid:
            raise Refused(400, "the content does not match its sha256")
        with self.hub.lock:
            self.hub.lfs[oid] = content
        self.send(200)

    def commit(self, type, id, rev):
        repo = self.hub.open(type, id, self.user, write=not self.proposes(rev))
        if self.user is None:
            raise Refused(401, "log in to open a pull request")
        if next(self.hub.commit_count) in self.hub.cut_commits:
            return self.cut()
        if rev not in repo.refs:
            raise Refused(404, f"Invalid rev id: {rev}", "RevisionNotFound")
        files, title = dict(repo.files(rev)), ""
        for line in self.body.splitlines():
            step = json.loads(line)
            kind, value = step["key"], step["value"]
            if kind == "header":
                title = value["summary"]
            elif kind == "file":
                files[value["path"]] = Entry(base64.b64decode(value["content"]))
            elif kind == "lfsFile":
                if value["oid"] not in self.hub.lfs:
                    raise Refused(400, f"{value['path']} was never uploaded")
                files[value["path"]] = Entry(self.hub.lfs[value["oid"]], lfs=True)
            elif kind in ("deletedFile", "deletedFolder"):
                folder = value["path"].rstrip("/") + "/"
                gone = [path for path in files if path == value["path"] or path.startswith(folder)]
                if not gone:
                    raise Refused(404, "A file with this name doesn't exist", "EntryNotFound")
                for path in gone:
                    del files[path]
        pull = "create_pr" in self.query
        number = 1 + sum(name.startswith("refs/pr/") for name in repo.refs)
        oid = repo.commit(f"refs/pr/{number}" if pull else rev, title, files)
        prefix = f"{self.hub.endpoint}/{'' if type == 'model' else type + 's/'}{id}"
        answer = {"success": True, "commitOid": oid, "commitUrl": f"{prefix}/commit/{oid}", "hookOutput": ""}
        if pull:
            answer["pullRequestUrl"] = f"{prefix}/discussions/{number}"
        self.send(200, answer)
