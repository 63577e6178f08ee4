"""The servers of `tests/realservers`, each with a root of its own for every test.

Locally a server whose program is missing skips its tests and says how to get it. `.ci/run` installs
what the registries offer, and names it in CKPT_STORAGE_REAL_SERVERS: then it must start.
"""

from __future__ import annotations

import os

import real_servers
from server_fixtures import new_root, session_server
from servers import Running


def _is_installed(name: str) -> bool:
    return name in os.environ.get("CKPT_STORAGE_REAL_SERVERS", "").split()


ceph_server = session_server("ceph", real_servers.ceph, is_required=_is_installed)
mount_server = session_server("mount", real_servers.rclone_mount, is_required=_is_installed)
openssh_server = session_server("openssh", real_servers.openssh, is_required=_is_installed)
redis_server = session_server("redis", real_servers.redis, is_required=_is_installed)
rclone_server = session_server("rclone", real_servers.rclone_s3, is_required=_is_installed)
samba_server = session_server("samba", real_servers.samba, is_required=_is_installed)
sshfs_server = session_server("sshfs", real_servers.sshfs_mount, is_required=_is_installed)
swift_server = session_server("swift", real_servers.swift, is_required=_is_installed)
rclone_webdav_server = session_server(
    "rclone_webdav", real_servers.rclone_webdav, is_required=_is_installed
)


def _below(running: Running, name: str) -> str:
    return f"{running.url}/{name}/run"


ceph_root = new_root("ceph", real_servers.new_bucket)
mount_root = new_root("mount", _below)
openssh_root = new_root("openssh", _below)
rclone_root = new_root("rclone", real_servers.new_bucket)
redis_root = new_root("redis", _below)
samba_root = new_root("samba", lambda running, name: f"{running.url}/data/{name}/run")
sshfs_root = new_root("sshfs", _below)
swift_root = new_root("swift", real_servers.new_bucket)
rclone_webdav_root = new_root("rclone_webdav", lambda _, name: f"webdav://{name}/run")
