"""A bucket of Google Cloud Storage in memory: a file system for `gs://` paths, and a server for tensorstore's requests."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import types
import urllib.parse
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import fsspec
from fsspec.implementations.memory import MemoryFileSystem


class FakeBuckets(MemoryFileSystem):
    """The file system; its objects are also those of the server."""

    protocol = ("gs", "gcs")
    store = {}  # noqa: RUF012 - shared by all instances, as in the base class
    pseudo_dirs = [""]  # noqa: RUF012

    @classmethod
    def _strip_protocol(cls, path):
        return "/" + str(path).removeprefix("gs://").removeprefix("gcs://").strip("/")


class _Server(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *args):
        """Print nothing."""

    def _answer(self, status, body=b"", kind="application/json", **headers):
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), str(value))
        self.end_headers()
        self.wfile.write(body)

    def _facts(self, key):
        return {"name": key.split("/", 2)[2], "bucket": key.split("/")[1], "generation": "1", "size": str(len(_bytes(key)))}

    def do_GET(self):
        """Return an object, its facts, or the names of objects."""
        url = urllib.parse.urlsplit(self.path)
        query = {name: values[0] for name, values in urllib.parse.parse_qs(url.query).items()}
        parts = [urllib.parse.unquote(part) for part in url.path.split("/")]
        bucket = "/" + parts[parts.index("b") + 1]
        name = parts[-1] if parts[-2] == "o" else None
        if name is None and parts[-1] == "o":
            prefix = f"{bucket}/{query.get('prefix', '')}"
            names = sorted(key for key in FakeBuckets.store if key.startswith(prefix))
            names = [key for key in names if key.split("/", 2)[2] >= query.get("startOffset", "")]
            if "endOffset" in query:
                names = [key for key in names if key.split("/", 2)[2] < query["endOffset"]]
            return self._answer(200, json.dumps({"items": [self._facts(key) for key in names]}).encode())
        key = f"{bucket}/{name}"
        if key not in FakeBuckets.store:
            return self._answer(404)
        if query.get("alt") != "media":
            return self._answer(200, json.dumps(self._facts(key)).encode())
        body, status, headers = _bytes(key), 200, {"x_goog_generation": 1}
        if wanted := self.headers.get("Range"):
            first, _, last = wanted.removeprefix("bytes=").partition("-")
            start = int(first) if first else max(len(body) - int(last), 0)
            stop = int(last) + 1 if first and last else len(body)
            headers["Content_Range"] = f"bytes {start}-{min(stop, len(body)) - 1}/{len(body)}"
            body, status = body[start:stop], 206
        return self._answer(status, body, "application/octet-stream", **headers)

    def do_POST(self):
        """Store an object."""
        url = urllib.parse.urlsplit(self.path)
        query = urllib.parse.parse_qs(url.query)
        bucket = url.path.split("/b/")[1].split("/")[0]
        key = f"/{bucket}/{query['name'][0]}"
        body = self.rfile.read(int(self.headers["Content-Length"]))
        FakeBuckets().pipe_file(f"gs:/{key}", body)
        return self._answer(200, json.dumps(self._facts(key)).encode())

    def do_DELETE(self):
        """Delete an object."""
        parts = [urllib.parse.unquote(part) for part in urllib.parse.urlsplit(self.path).path.split("/")]
        FakeBuckets.store.pop(f"/{parts[parts.index('b') + 1]}/{parts[-1]}", None)
        return self._answer(204)


def _list_blobs(prefix="", delimiter="", **_):
    """Return what Google's client returns for a listing: an iterable whose `prefixes` are the folders directly below."""
    names = [key for key in FakeBuckets.store if key.split("/", 2)[2].startswith(prefix)]
    below = {key.split("/", 2)[2][len(prefix) :] for key in names}

    class Blobs(list):
        prefixes = {prefix + name.split("/")[0] + "/" for name in below if "/" in name}  # noqa: RUF012

    def delete(key):
        return lambda: FakeBuckets.store.pop(key, None)

    blobs = [types.SimpleNamespace(name=key.split("/", 2)[2], delete=delete(key)) for key in names]
    return Blobs(blob for blob in blobs if not delimiter or "/" not in blob.name[len(prefix) :])


def _google_cloud():
    """Return modules in the place of Google's client, which Orbax asks for the kind of a bucket and for its folders."""
    bucket = types.SimpleNamespace(hierarchical_namespace_enabled=False, list_blobs=_list_blobs)
    client = types.SimpleNamespace(get_bucket=lambda name: bucket, bucket=lambda name: bucket)
    storage = types.ModuleType("google.cloud.storage")
    storage.Client = lambda *args, **kwargs: client
    cloud = types.ModuleType("google.cloud")
    cloud.storage = storage
    return {"google.cloud": cloud, "google.cloud.storage": storage}


def _bytes(key):
    return FakeBuckets.store[key].getvalue()


@contextlib.contextmanager
def serve():
    """Serve buckets to everything in this process that opens `gs://` paths."""
    FakeBuckets.store.clear()
    fsspec.register_implementation("gcs", FakeBuckets, clobber=True)
    fsspec.register_implementation("gs", FakeBuckets, clobber=True)
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Server)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    settings = {
        "TENSORSTORE_GCS_HTTP_URL": f"http://127.0.0.1:{server.server_port}",
        "GOOGLE_AUTH_TOKEN_FOR_TESTING": "token",
        "STORAGE_EMULATOR_HOST": f"http://127.0.0.1:{server.server_port}",
    }
    before = {name: os.environ.get(name) for name in settings}
    os.environ.update(settings)
    modules = {name: sys.modules.get(name) for name in _google_cloud()}
    sys.modules.update(_google_cloud())
    try:
        yield FakeBuckets.store
    finally:
        server.shutdown()
        for name, module in modules.items():
            sys.modules.pop(name) if module is None else sys.modules.update({name: module})
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})
