"""A bucket of Google Cloud Storage in memory: a file system for `gs://` paths, and a server for tensorstore's requests."""

from __future__ import annotations

import contextlib
import functools
import json
import sys
import threading
import types
import urllib.parse
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import fsspec
import pytest
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
        return {"name": _name(key), "bucket": key.split("/")[1], "generation": "1", "size": str(len(_bytes(key)))}

    def _asked(self):
        """Return the key that a request is about, or the bucket, and the options of its URL."""
        url = urllib.parse.urlsplit(self.path)
        query = {name: values[0] for name, values in urllib.parse.parse_qs(url.query).items()}
        bucket, _, name = url.path.partition("/b/")[2].partition("/o")
        name = urllib.parse.unquote(name.strip("/")) or query.get("name", "")
        return f"/{bucket}/{name}".rstrip("/"), query

    def do_GET(self):
        """Return an object, its facts, or the names of objects."""
        key, query = self._asked()
        if urllib.parse.urlsplit(self.path).path.endswith("/o"):
            first, end = query.get("startOffset", ""), query.get("endOffset", "\U0010ffff")
            names = sorted(name for name in FakeBuckets.store if name.startswith(f"{key}/{query.get('prefix', '')}"))
            facts = [self._facts(name) for name in names if first <= _name(name) < end]
            return self._answer(200, json.dumps({"items": facts}).encode())
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
        key, _ = self._asked()
        FakeBuckets().pipe_file(f"gs:/{key}", self.rfile.read(int(self.headers["Content-Length"])))
        return self._answer(200, json.dumps(self._facts(key)).encode())

    def do_DELETE(self):
        """Delete an object."""
        FakeBuckets.store.pop(self._asked()[0], None)
        return self._answer(204)


def _name(key):
    return key.split("/", 2)[2]


def _bytes(key):
    return FakeBuckets.store[key].getvalue()


def _list_blobs(prefix="", delimiter="", **_):
    """Return what Google's client returns for a listing: an iterable whose `prefixes` are the folders directly below."""
    keys = [key for key in FakeBuckets.store if _name(key).startswith(prefix)]
    below = {_name(key)[len(prefix) :] for key in keys}

    class Blobs(list):
        prefixes = {prefix + name.split("/")[0] + "/" for name in below if "/" in name}  # noqa: RUF012

    blobs = [types.SimpleNamespace(name=_name(key), delete=functools.partial(FakeBuckets.store.pop, key, None)) for key in keys]
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


@contextlib.contextmanager
def serve():
    """Serve buckets to everything in this process that opens `gs://` paths."""
    FakeBuckets.store.clear()
    fsspec.register_implementation("gcs", FakeBuckets, clobber=True)
    fsspec.register_implementation("gs", FakeBuckets, clobber=True)
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Server)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    settings = {
        "TENSORSTORE_GCS_HTTP_URL": f"http://127.0.0.1:{server.server_port}",
        "GOOGLE_AUTH_TOKEN_FOR_TESTING": "token",
        "STORAGE_EMULATOR_HOST": f"http://127.0.0.1:{server.server_port}",
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, value in settings.items():
            patch.setenv(name, value)
        for name, module in _google_cloud().items():
            patch.setitem(sys.modules, name, module)
        yield FakeBuckets.store
    server.shutdown()
