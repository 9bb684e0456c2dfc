"""A Hub of the tests' own, as small as can be: repositories in memory, served over HTTP on the loopback interface.

The real clients (huggingface_hub, transformers, datasets) talk to it, in this process or in others. A repository is a
set of commits, a commit is a mapping of paths to bytes. Weights and tables are uploaded by the LFS protocol and named
by the commit afterwards; all other files travel inside the commit.
"""

import base64
import hashlib
import itertools
import json
import re
import threading
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit

import datasets
import huggingface_hub
import transformers.utils.hub

WRITER, READER, STRANGER = "hf_WriterOfTester", "hf_ReaderOfTester", "hf_WriterOfStranger"
TOKENS = {WRITER: ("tester", True), READER: ("tester", False), STRANGER: ("stranger", True)}
"""Whose a token is, and whether it may write."""

NAME = r"(?P<name>[\w.-]+/[\w.-]+)"
REPO = f"(?P<kind>models|datasets)/{NAME}"
REVISION = r"(?P<revision>[^/]+)"  # slashes in it arrive quoted
ROUTES = []
LARGE = (".safetensors", ".parquet")
"""Suffixes of the files that the Hub wants by LFS."""


class Repo:
    """Commits by id, each with all its files, and the refs that point to them."""

    numbers = itertools.count()

    def __init__(self, private):
        self.private = private
        self.commits, self.refs = {}, {}
        self.commit("main", {})

    def commit(self, ref, files):
        oid = hashlib.sha1(f"commit {next(self.numbers)}".encode()).hexdigest()
        self.commits[oid] = files
        self.refs[ref] = oid
        return oid


class Refusal(Exception):
    """Becomes an HTTP error; `code` tells the client which of its exceptions to raise."""

    def __init__(self, status, message, code=None):
        super().__init__(message)
        self.status, self.code = status, code


def route(methods, pattern):
    def register(function):
        ROUTES.append((methods.split(), re.compile(pattern), function))
        return function

    return register


def oid_of(path, data):
    """Return the name of a content, by which the client sees that a file need not be sent again."""
    if path.endswith(LARGE):
        return hashlib.sha256(data).hexdigest()
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


class Handler(BaseHTTPRequestHandler):
    """Answers one request; `self.server.hub` is the Hub."""

    protocol_version = "HTTP/1.1"

    def handle_any(self):
        url = urlsplit(self.path)
        self.hub, self.query = self.server.hub, parse_qs(url.query)
        self.body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.token = self.headers.get("Authorization", "").removeprefix("Bearer ") or None
        self.hub.requests.append((self.command, url.path))
        breakage = self.hub.take_breakage(self.command, url.path)
        if breakage != "unheard":
            with self.hub.lock:
                answer = self.answer(url.path)
        if breakage:  # the line is cut
            self.close_connection = True
            return
        self.send(*answer)

    do_GET = do_HEAD = do_POST = do_PUT = handle_any

    def answer(self, path):
        """Return status, body and headers."""
        try:
            if self.token is not None and self.token not in self.hub.tokens:
                raise Refusal(401, "Invalid credentials in Authorization header")
            for methods, pattern, function in ROUTES:
                match = pattern.fullmatch(path)
                if match and self.command in methods:
                    answer = function(self, **{name: unquote(text or "") for name, text in match.groupdict().items()})
                    return answer if isinstance(answer, tuple) else (200, answer, {})
            raise Refusal(501, f"this Hub has no {self.command} {path}")
        except Refusal as refusal:
            headers = {"X-Error-Message": str(refusal)} | ({"X-Error-Code": refusal.code} if refusal.code else {})
            return refusal.status, {"error": str(refusal)}, headers

    def send(self, status, body, headers):
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        for name, value in ({"Content-Length": str(len(data)), "Content-Type": "application/json"} | headers).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            with suppress(ConnectionError):  # the client has heard enough
                self.wfile.write(data)

    def log_message(self, *_):
        pass

    # Who may do what ----------------------------------------------------------------------------------------------

    def repo(self, kind, name, *, write=False):
        user, may_write = self.hub.tokens.get(self.token, (None, False))
        owner = name.split("/")[0]
        repo = self.hub.repos.get(f"{kind}/{name}")
        if repo is None or (repo.private and user != owner):
            raise Refusal(404 if user else 401, "Repository not found", "RepoNotFound")
        if write and not (may_write and user == owner):
            raise Refusal(403, "you must use a write token of the repository's owner")
        return repo

    def files(self, repo, revision):
        """Return the id and the files of a revision: a branch, a pull request's ref or a commit's id."""
        oid = repo.refs.get(revision or "main", revision)
        if oid not in repo.commits:
            raise Refusal(404, f"Invalid rev id: {revision}", "RevisionNotFound")
        return oid, repo.commits[oid]

    # Reading ------------------------------------------------------------------------------------------------------

    @route("GET", "/api/whoami-v2")
    def whoami(self):
        if self.token is None:
            raise Refusal(401, "Invalid credentials in Authorization header")
        return {"type": "user", "name": self.hub.tokens[self.token][0], "orgs": []}

    @route("GET", f"/api/{REPO}(?:/revision/{REVISION})?")
    def info(self, kind, name, revision):
        repo = self.repo(kind, name)
        oid, files = self.files(repo, revision)
        siblings = [{"rfilename": path} for path in sorted(files)]
        return {"_id": name, "id": name, "sha": oid, "private": repo.private, "tags": [], "siblings": siblings}

    @route("GET", f"/api/{REPO}/tree/{REVISION}(?:/(?P<folder>.+))?")
    def tree(self, kind, name, revision, folder):
        _, files = self.files(self.repo(kind, name), revision)
        prefix = f"{folder}/" if folder else ""
        below = [path for path in sorted(files) if path.startswith(prefix)]
        if folder and not below:
            raise Refusal(404, f"{folder} does not exist", "EntryNotFound")
        deep = self.query.get("recursive", ["false"])[0].lower() in ("true", "1")
        here = {path if deep else prefix + path.removeprefix(prefix).split("/")[0]: None for path in below}
        return [self.entry(path, files) for path in here]

    def entry(self, path, files):
        if path not in files:
            return {"type": "directory", "path": path, "oid": hashlib.sha1(path.encode()).hexdigest()}
        return {"type": "file", "path": path, "size": len(files[path]), "oid": oid_of(path, files[path])}

    @route("GET HEAD", f"/(?P<kind>datasets/)?{NAME}/resolve/{REVISION}/(?P<path>.+)")
    def resolve(self, kind, name, revision, path):
        oid, files = self.files(self.repo(kind.rstrip("/") or "models", name), revision)
        headers = {"X-Repo-Commit": oid}
        if path not in files:
            return 404, {}, headers | {"X-Error-Code": "EntryNotFound", "X-Error-Message": "Entry not found"}
        etag = f'"{oid_of(path, files[path])}"'
        return 200, files[path], headers | {"ETag": etag, "Content-Type": "application/octet-stream"}

    # Writing ------------------------------------------------------------------------------------------------------

    @route("POST", "/api/repos/create")
    def create(self):
        wanted = json.loads(self.body)
        user, may_write = self.hub.tokens.get(self.token, (None, False))
        owner = wanted.get("organization") or user
        name, kind = f"{owner}/{wanted['name']}", f"{wanted.get('type') or 'model'}s"
        if not may_write or owner != user:
            raise Refusal(403, f"You don't have the rights to create a {kind[:-1]} under the namespace {owner!r}")
        url = {"url": f"{self.hub.url}/{'datasets/' if kind == 'datasets' else ''}{name}"}
        if f"{kind}/{name}" in self.hub.repos:
            return 409, url | {"error": "You already created this repository"}, {}
        self.hub.repos[f"{kind}/{name}"] = Repo(wanted.get("visibility") == "private")
        return url

    @route("POST", "/api/validate-yaml")
    def validate_yaml(self):
        return {"errors": [], "warnings": []}

    @route("POST", f"/api/{REPO}/branch/(?P<branch>.+)")
    def create_branch(self, kind, name, branch):
        repo = self.repo(kind, name, write=True)
        repo.refs[branch], _ = self.files(repo, json.loads(self.body or b"{}").get("startingPoint"))
        return {}

    @route("POST", f"/api/{REPO}/preupload/{REVISION}")
    def preupload(self, kind, name, revision):
        _, files = self.files(self.repo(kind, name, write=True), revision)
        answers = []
        for path in (file["path"] for file in json.loads(self.body)["files"]):
            known = {"oid": oid_of(path, files[path])} if path in files else {}
            mode = "lfs" if path.endswith(LARGE) else "regular"
            answers.append({"path": path, "uploadMode": mode, "shouldIgnore": False} | known)
        return {"files": answers}

    @route("POST", rf"/(?P<kind>datasets/)?{NAME}\.git/info/lfs/objects/batch")
    def lfs_batch(self, kind, name):
        self.repo(kind.rstrip("/") or "models", name, write=True)
        objects = [{"oid": wanted["oid"], "size": wanted["size"]} for wanted in json.loads(self.body)["objects"]]
        for wanted in objects:
            if wanted["oid"] not in self.hub.large:
                wanted["actions"] = {"upload": {"href": f"{self.hub.url}/large/{wanted['oid']}"}}
        return {"transfer": "basic", "objects": objects}

    @route("PUT", "/large/(?P<oid>[0-9a-f]{64})")
    def lfs_upload(self, oid):
        if hashlib.sha256(self.body).hexdigest() != oid:
            raise Refusal(400, "the content does not have this sha256")
        self.hub.large[oid] = self.body
        return {}

    @route("POST", f"/api/{REPO}/commit/{REVISION}")
    def commit(self, kind, name, revision):
        repo = self.repo(kind, name, write=True)
        parent, files = self.files(repo, revision)
        if revision not in repo.refs:
            raise Refusal(400, "a commit needs a branch")
        files = dict(files)
        for line in self.body.splitlines():
            item = json.loads(line)
            value = item["value"]
            if item["key"] == "header" and value.get("parentCommit", parent) != parent:
                raise Refusal(412, "A commit has happened since. Please refresh and try again.")
            if item["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif item["key"] == "lfsFile":
                files[value["path"]] = self.hub.large[value["oid"]]
        number = 1 + sum(ref.startswith("refs/pr/") for ref in repo.refs)
        pull_request = "create_pr" in self.query
        oid = repo.commit(f"refs/pr/{number}" if pull_request else revision, files)
        url = f"{self.hub.url}/{name}"
        return {"success": True, "commitOid": oid, "commitUrl": f"{url}/commit/{oid}"} | (
            {"pullRequestUrl": f"{url}/discussions/{number}"} if pull_request else {}
        )


class Hub:
    """The server, while it is open: `with Hub() as hub`.

    Attributes:
        url: What HF_ENDPOINT must be.
        repos: Repositories, by "models/USER/NAME" or "datasets/USER/NAME".
        large: What was uploaded by LFS, by its sha256; committed or not.
        requests: (method, path) of all requests so far.
    """

    def __init__(self):
        self.tokens = dict(TOKENS)
        self.repos, self.large, self.requests, self.lock = {}, {}, [], threading.Lock()
        self._breakages = []
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._server.hub = self
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self):
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        return self

    def __exit__(self, *_):
        self._server.shutdown()
        self._server.server_close()

    def cut_line(self, method, pattern, *, after=False):
        """Cut the connection at the next request that matches, before it is heard or `after` it was obeyed."""
        self._breakages.append((method, re.compile(pattern), "unanswered" if after else "unheard"))

    def take_breakage(self, method, path):
        for breakage in self._breakages:
            if breakage[0] == method and breakage[1].search(path):
                self._breakages.remove(breakage)
                return breakage[2]
        return None

    def files(self, repo, revision="main", kind="models"):
        """Return what is stored: bytes by path."""
        stored = self.repos[f"{kind}/{repo}"]
        return stored.commits[stored.refs[revision]]

    def environment(self, home, token=None):
        """Return the variables with which another process uses this Hub, its cache in the folder `home`."""
        variables = {"HF_ENDPOINT": self.url, "HF_HOME": str(home), "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1"}
        return variables | ({"HF_TOKEN": token} if token else {})

    def connect(self, monkeypatch, cache, token=None):
        """Make this process use this Hub, as if it had been started with `environment`."""
        constants = huggingface_hub.constants
        monkeypatch.setattr(constants, "ENDPOINT", self.url)
        monkeypatch.setattr(
            constants, "HUGGINGFACE_CO_URL_TEMPLATE", self.url + "/{repo_id}/resolve/{revision}/{filename}"
        )
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
        monkeypatch.setattr(transformers.utils.hub, "_hf_api", None)  # the next use makes one with this endpoint
        monkeypatch.setattr(huggingface_hub.hf_api.api, "endpoint", self.url)
        monkeypatch.setattr(datasets.config, "HF_ENDPOINT", self.url)
        monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
        if token is not None:
            monkeypatch.setenv("HF_TOKEN", token)
