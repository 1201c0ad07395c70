"""A Hugging Face hub on this machine: what ``datasets`` and ``huggingface_hub`` ask of one to load a data set.

Serves commits of data sets, each a dict of files. Clients find it by ``HF_ENDPOINT``, which they read when they are
imported, so each test runs them in a process of its own.
"""

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit


class FakeHub:
    """Data sets of a hub.

    Attributes:
        url: For ``HF_ENDPOINT``.
        asked: The paths that were asked for.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        self.asked: list[str] = []
        self._commits: dict[tuple[str, str], dict[str, bytes]] = {}
        self._branches: dict[tuple[str, str], str] = {}

    def push(self, name: str, files: dict[str, bytes], branch: str = "main") -> str:
        """Adds a commit, to which the branch moves; returns its hash."""
        content = b"".join(path.encode() + b"\0" + data for path, data in sorted(files.items()))
        commit = hashlib.sha1(name.encode() + content).hexdigest()
        self._commits[name, commit] = files
        self._branches[name, branch] = commit
        return commit

    def answer(self, method: str, path: str) -> tuple[int, dict[str, str], bytes]:
        parts = unquote(urlsplit(path).path).strip("/").split("/")
        if parts[:2] == ["api", "datasets"]:
            name, rest = "/".join(parts[2:4]), parts[4:]
            revision = rest[1] if len(rest) > 1 else "main"
            found = self._find(name, revision)
            if isinstance(found, str):
                return 404, {"X-Error-Code": found}, b"{}"
            commit, files = found
            if not rest or rest[0] == "revision":
                siblings = [{"rfilename": file} for file in sorted(files)]
                info = {"_id": "0", "id": name, "sha": commit, "private": False, "tags": [], "siblings": siblings}
                return self._json(info)
            inside = "/".join(rest[2:])
            if rest[0] == "tree":
                return self._json(
                    [_entry(file, data) for file, data in sorted(files.items()) if file.startswith(inside)]
                )
            return self._json(
                [_entry(file, data) for file, data in sorted(files.items())]
            )  # paths-info: more than asked
        if parts[0] == "datasets" and "resolve" in parts:
            place = parts.index("resolve")
            found = self._find("/".join(parts[1:place]), parts[place + 1])
            if isinstance(found, str):
                return 404, {"X-Error-Code": found}, b""
            commit, files = found
            data = files.get("/".join(parts[place + 2 :]))
            headers = {"X-Repo-Commit": commit}
            if data is None:
                return 404, {**headers, "X-Error-Code": "EntryNotFound"}, b""
            return 200, {**headers, "ETag": f'"{hashlib.sha1(data).hexdigest()}"', "Accept-Ranges": "bytes"}, data
        return 404, {}, b""

    def _find(self, name: str, revision: str) -> tuple[str, dict[str, bytes]] | str:
        if not any(known == name for known, _ in self._commits):
            return "RepoNotFound"
        commit = self._branches.get((name, revision), revision)
        files = self._commits.get((name, commit))
        return "RevisionNotFound" if files is None else (commit, files)

    @staticmethod
    def _json(content: object) -> tuple[int, dict[str, str], bytes]:
        return 200, {"Content-Type": "application/json"}, json.dumps(content).encode()


def _entry(path: str, data: bytes) -> dict[str, object]:
    return {"type": "file", "path": path, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}


@contextmanager
def serving() -> Iterator[FakeHub]:
    """Runs a hub until the block ends."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _answer(self) -> None:
            if length := int(self.headers.get("Content-Length") or 0):
                self.rfile.read(length)
            hub.asked.append(f"{self.command} {self.path}")
            status, headers, body = hub.answer(self.command, self.path)
            if status == 200 and (span := self.headers.get("Range")):
                first, _, last = span.removeprefix("bytes=").partition("-")
                stop = int(last) + 1 if last else len(body)
                headers["Content-Range"] = f"bytes {first}-{min(stop, len(body)) - 1}/{len(body)}"
                status, body = 206, body[int(first) : stop]
            self.send_response(status)
            for key, value in headers.items():
                self.send_header(key, value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        do_GET = do_HEAD = do_POST = _answer

        def log_message(self, *arguments: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    hub = FakeHub(f"http://127.0.0.1:{server.server_address[1]}")
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
