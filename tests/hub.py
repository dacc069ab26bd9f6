"""A server that answers the Hugging Face hub's client, for one dataset."""

import hashlib
import json
import threading
from contextlib import contextmanager
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Hub(BaseHTTPRequestHandler):
    """The part of the hub's interface that its client uses to download."""

    protocol_version = "HTTP/1.1"

    def __init__(self, name, folder, log, *args):
        self.name, self.folder, self.log = name, folder, log
        super().__init__(*args)

    def do_GET(self):
        url = unquote(urlsplit(self.path).path)
        self.log.append(f"{self.command} {url}")
        tree = f"/api/datasets/{self.name}/tree/{COMMIT}"
        files = f"/datasets/{self.name}/resolve/{COMMIT}/"
        if url == f"/api/datasets/{self.name}":
            self.answer(json.dumps({"id": self.name, "sha": COMMIT}))
        elif url.startswith(tree):
            root = self.folder / url[len(tree):].strip("/")
            self.answer(json.dumps([
                {"type": "file", "oid": "0", "size": path.stat().st_size,
                 "path": path.relative_to(self.folder).as_posix()}
                for path in root.rglob("*") if path.is_file()])
            ) if root.is_dir() else self.refuse("EntryNotFound")
        elif url.startswith(files):
            path = self.folder / url[len(files):]
            self.answer(path.read_bytes())
        else:
            self.refuse("RepoNotFound")

    do_HEAD = do_GET

    def answer(self, body, status=200, **headers):
        body = body if isinstance(body, bytes) else body.encode()
        headers = {"ETag": f'"{hashlib.sha1(body).hexdigest()}"',
                   "X-Repo-Commit": COMMIT, "Content-Length": str(len(body)),
                   **headers}
        self.send_response(status)
        for header in headers.items():
            self.send_header(*header)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def refuse(self, code):
        self.answer("", 404, **{"X-Error-Code": code})

    def log_message(self, *args):
        pass


@contextmanager
def serve(name, folder):
    """Serve `folder` as the dataset `name`: (endpoint, list of requests)."""
    log = []
    server = ThreadingHTTPServer(("127.0.0.1", 0),
                                 partial(Hub, name, folder, log))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", log
    finally:
        server.shutdown()
        server.server_close()
