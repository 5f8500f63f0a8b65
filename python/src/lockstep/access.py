"""Finds the server's address and the token in the same places as the command line."""

from __future__ import annotations

import ipaddress
import os
import ssl
import stat
import sys
from collections.abc import Generator
from pathlib import Path
from typing import Any

import httpx

from .errors import LockstepError

DEFAULT_SERVER = "http://127.0.0.1:7070"
# Added to the error of a request without a token.
NO_TOKEN = (
    "a client takes its token from the argument `token`, the file that LOCKSTEP_TOKEN_FILE names, LOCKSTEP_TOKEN or, "
    "on the server's machine, the folder lockstep-data here (or the argument `data_dir` or LOCKSTEP_DATA_DIR); on that "
    "machine, `lockstep token create` makes a token for another machine or person"
)
# The server answers `GET /jobs/{id}?wait=` and other long requests within 120 seconds.
TIMEOUT = httpx.Timeout(150.0, connect=5.0)

_Addresses = list[ipaddress.IPv4Address | ipaddress.IPv6Address]


class Token(httpx.Auth):
    """An access token. `source` is the place where it was found."""

    def __init__(self, secret: str, source: str) -> None:
        self.header, self.source = f"Bearer {secret}", source

    def auth_flow(self, request: httpx.Request) -> Generator[httpx.Request, httpx.Response, None]:
        """Adds the token to a request."""
        request.headers["Authorization"] = self.header
        yield request


def httpx_arguments(url: str | None, token: str | None, data_dir: str | os.PathLike[str] | None) -> dict[str, Any]:
    """Returns the arguments of `httpx.Client`. Raises `LockstepError` if the URL, the token or a file is wrong."""
    folder = Path(data_dir or os.environ.get("LOCKSTEP_DATA_DIR") or "lockstep-data")
    server = url or os.environ.get("LOCKSTEP_SERVER") or _recorded_server(folder) or DEFAULT_SERVER
    try:
        address = httpx.URL(server if "://" in server else f"http://{server}")
    except httpx.InvalidURL as error:
        raise LockstepError(f"the server's URL is {server!r}: {error}. Give it as in {DEFAULT_SERVER}") from error
    auth = Token(token, "the argument `token`") if token else _find_token(address, folder)
    # Loading the system's CA certificates takes a while, and only https needs them.
    is_https = address.scheme == "https"
    verify = ssl.create_default_context() if is_https else ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    if is_https and (ca_file := os.environ.get("LOCKSTEP_CA_FILE")):
        try:
            verify.load_verify_locations(ca_file)
        except OSError as error:
            raise LockstepError(f"LOCKSTEP_CA_FILE is {ca_file}, which cannot be used: {error}") from error
    return {
        "base_url": str(address).rstrip("/") + "/api/v1",
        "auth": auth,
        "timeout": TIMEOUT,
        "verify": verify,
        # The environment's proxies are used only with https, so that no token passes a proxy unencrypted.
        "trust_env": is_https and not _loopback_addresses(address),
    }


def _recorded_server(data_dir: Path) -> str | None:
    """Returns the address that a server on this machine has recorded in its data directory. A record that another
    account owns is ignored, because that account's server would get the tokens of everybody who works in the folder.
    """
    file = data_dir / "address"
    try:
        status, server = file.lstat(), file.read_text().strip()
        is_own = stat.S_ISREG(status.st_mode) and status.st_uid in (os.geteuid(), 0)
        return server if is_own and _loopback_addresses(httpx.URL(server)) else None
    except (OSError, UnicodeDecodeError, httpx.InvalidURL):
        return None


def _find_token(address: httpx.URL, data_dir: Path) -> Token | None:
    if file_name := os.environ.get("LOCKSTEP_TOKEN_FILE"):
        return _read(Path(file_name), ", which LOCKSTEP_TOKEN_FILE names")
    if token := os.environ.get("LOCKSTEP_TOKEN", "").strip():
        return Token(token, "the environment variable LOCKSTEP_TOKEN")
    file = data_dir / "token"
    # The token in the data directory is only for a server on this machine.
    if not (addresses := _loopback_addresses(address)):
        return None
    try:
        owner = file.lstat().st_uid
    except FileNotFoundError:
        return None
    except OSError:
        # `_read` raises an error that names the file.
        return _read(file)
    # After a server has stopped, another account's program may listen on its port. That program must not get the token.
    port = address.port or (443 if address.scheme == "https" else 80)
    if others := listener_owners(addresses, port) - {owner, 0}:
        raise LockstepError(
            f"{address}: the program that listens there has user id {others.pop()}, and {file} has user id {owner}, "
            f"so the token is not sent. Start the server again, or pass url or token"
        )
    return _read(file)


def _read(file: Path, named_by: str = "") -> Token:
    try:
        token = file.read_text().strip()
    except OSError as error:
        raise LockstepError(f"the token file {file}: {error.strerror}") from error
    if not token:
        raise LockstepError(f"the token file {file} is empty")
    return Token(token, f"the file {file}{named_by}")


def _loopback_addresses(address: httpx.URL) -> _Addresses:
    """Returns the loopback addresses of a URL's host. Empty if the host is another machine."""
    host = address.host
    try:
        found = [ipaddress.ip_address(name) for name in (("127.0.0.1", "::1") if host == "localhost" else (host,))]
    except ValueError:
        return []
    return [address for address in found if address.is_loopback]


def listener_owners(addresses: _Addresses, port: int) -> set[int]:
    """Returns the user ids of the programs that listen on a port of these addresses. Empty without `/proc/net`."""
    owners = set()
    for table in (Path("/proc/net/tcp"), Path("/proc/net/tcp6")):
        for row in table.read_text().splitlines()[1:] if table.exists() else []:
            columns = row.split()
            host_hex, port_hex = columns[1].split(":")
            # The address has 32-bit words, each in the machine's byte order.
            words = [int(host_hex[at : at + 8], 16) for at in range(0, len(host_hex), 8)]
            host = ipaddress.ip_address(b"".join(word.to_bytes(4, sys.byteorder) for word in words))
            host = getattr(host, "ipv4_mapped", None) or host
            is_listening = columns[3] == "0A" and int(port_hex, 16) == port
            if is_listening and (host in addresses or host.is_unspecified):
                owners.add(int(columns[7]))
    return owners
