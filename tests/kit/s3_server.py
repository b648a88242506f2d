"""An S3 server in its own process: moto's, over HTTP, with faults that a test asks for.

    python -m tests.kit.s3_server PORT

Its objects are in its memory. A fault answers requests instead of moto, as a busy or broken server
does; `POST /_faults` sets them, so that tests and the server share nothing but HTTP.
"""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

BUCKET = "nightshift-blobs"
PREFIX = "all/of/it"
_ERROR = '<?xml version="1.0" encoding="UTF-8"?><Error><Code>{code}</Code></Error>'


@dataclass(frozen=True)
class Fault:
    """What to answer instead of doing it.

    Attributes:
        method: of the requests that it hits; empty means any.
        query: which of them by their query, a pattern that is searched for.
        times: how many it hits, and then none; -1 means all until it is changed.
        done: whether what was asked is done all the same, and only its answer is lost.
    """

    status: int = 503
    code: str = "SlowDown"
    method: str = ""
    query: str = ""
    times: int = -1
    done: bool = False


@dataclass(frozen=True)
class S3Server:
    """A server that runs, with one bucket."""

    port: int
    process: "subprocess.Popen[bytes]"

    @property
    def url(self) -> str:
        """Return what `NIGHTSHIFT_STORE_BLOBS_URL` must be."""
        return f"s3://{BUCKET}/{PREFIX}"

    def environment(self, port: int | None = None) -> dict[str, str]:
        """Return the variables of a store that keeps its blobs there, `port` being a proxy's."""
        return {
            "NIGHTSHIFT_STORE_BLOBS_URL": self.url,
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port or self.port}",
            "AWS_ACCESS_KEY_ID": "test",
            "AWS_SECRET_ACCESS_KEY": "test",
            "AWS_REGION": "us-east-1",
        }

    def fault(self, fault: Fault | None) -> None:
        """Answer so from now on; None ends it."""
        self._post("/_faults", json.dumps(None if fault is None else asdict(fault)).encode())

    def objects(self) -> dict[str, int]:
        """Return the sizes in bytes of all objects, by blob name."""
        found = _client(self.port).list_objects_v2(Bucket=BUCKET).get("Contents", [])
        return {each["Key"].removeprefix(f"{PREFIX}/"): each["Size"] for each in found}

    def unfinished(self) -> list[str]:
        """Return the keys of multipart uploads that were neither completed nor aborted."""
        answer = _client(self.port).list_multipart_uploads(Bucket=BUCKET)
        return [each["Key"] for each in answer.get("Uploads", [])]

    def drop(self, name: str) -> None:
        """Delete a blob behind the store's back."""
        _client(self.port).delete_object(Bucket=BUCKET, Key=f"{PREFIX}/{name}")

    def empty(self) -> None:
        """Forget everything, and make the bucket anew."""
        self._post("/moto-api/reset", b"")
        _client(self.port).create_bucket(Bucket=BUCKET)

    def _post(self, path: str, body: bytes) -> None:
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}{path}", data=body)
        urllib.request.urlopen(request, timeout=20).close()


def _client(port: int) -> Any:
    import boto3

    return boto3.client(
        "s3",
        endpoint_url=f"http://127.0.0.1:{port}",
        aws_access_key_id="test",
        aws_secret_access_key="test",
        region_name="us-east-1",
    )


@contextlib.contextmanager
def s3_server(folder: Path) -> Iterator[S3Server]:
    """Run a server with an empty bucket; it logs below `folder`. Takes about 3 s to start."""
    folder.mkdir(parents=True, exist_ok=True)
    ready, told = os.pipe()
    with (folder / "s3.log").open("ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.kit.s3_server", str(told)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            pass_fds=[told],
        )
    os.close(told)
    try:
        with os.fdopen(ready, encoding="ascii") as line:
            port = line.readline()
        assert port, f"no S3 server: {(folder / 's3.log').read_text()}"
        server = S3Server(int(port), process)
        _client(server.port).create_bucket(Bucket=BUCKET)
        yield server
    finally:
        process.send_signal(signal.SIGCONT)
        process.kill()
        process.wait(10)


# --- the process itself ---------------------------------------------------------------------------


class _Faulty:
    """A WSGI application that answers with a fault while one is set."""

    def __init__(self, app: Callable[..., Iterable[bytes]]) -> None:
        self._app = app
        self._fault: Fault | None = None
        self._left = 0

    def __call__(self, environ: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
        if environ["PATH_INFO"] == "/_faults":
            said = json.loads(environ["wsgi.input"].read(int(environ["CONTENT_LENGTH"])))
            self._fault = None if said is None else Fault(**said)
            self._left = 0 if self._fault is None else self._fault.times
            start("200 OK", [("Content-Length", "0")])
            return []
        fault = self._hit(environ)
        if fault is None:
            return self._app(environ, start)
        if fault.done:
            for _ in self._app(environ, lambda *_: None):
                pass
        elif length := int(environ.get("CONTENT_LENGTH") or 0):
            environ["wsgi.input"].read(length)
        body = _ERROR.format(code=fault.code).encode()
        start(f"{fault.status} Fault", [("Content-Length", str(len(body)))])
        return [body]

    def _hit(self, environ: dict[str, Any]) -> Fault | None:
        fault = self._fault
        if fault is None or self._left == 0 or environ["PATH_INFO"].startswith("/moto-api"):
            return None
        if fault.method and fault.method != environ["REQUEST_METHOD"]:
            return None
        if not re.search(fault.query, environ.get("QUERY_STRING", "")):
            return None
        self._left -= 1
        return fault


def _serve(told: int) -> None:
    from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import make_server

    app = _Faulty(DomainDispatcherApplication(create_backend_app))
    server = make_server("127.0.0.1", 0, app, threaded=True)
    os.write(told, f"{server.server_port}\n".encode())
    os.close(told)
    server.serve_forever()


if __name__ == "__main__":
    _serve(int(sys.argv[1]))
