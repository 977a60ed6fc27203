"""What the receiver must know before it starts, and whether it may start like that."""

from __future__ import annotations

import ipaddress
import ssl
from dataclasses import dataclass, field
from pathlib import Path

from vllm_slo.exporters.errors import SloError

MIB = 1024 * 1024


class ReceiverError(SloError):
    """The receiver cannot start as configured."""


@dataclass(frozen=True)
class Limits:
    """Bounds on what the receiver takes in; beyond them senders are refused or asked to come again.

    ``body_bytes`` bounds a request as it travels and once more what unpacking makes of it. ``body_seconds`` bounds how
    long an HTTP body may take to come: a peer that vanished would keep its share of what follows. ``pending_bytes``
    and ``requests_in_flight`` bound what waits for an answer, of both protocols together. Spans are taken while the
    spool is under ``spool_bytes`` and its disk has ``free_bytes`` free (room for the lake to commit what is spooled).
    A segment is sealed at ``segment_bytes`` or ``segment_seconds`` after its first record. ``table_bytes`` of decoded
    rows wait in memory for the lake; what is beyond is decoded again from the spool.
    """

    body_bytes: int = 16 * MIB
    body_seconds: float = 30.0
    pending_bytes: int = 256 * MIB
    requests_in_flight: int = 128
    spool_bytes: int = 4096 * MIB
    free_bytes: int = 256 * MIB
    segment_bytes: int = 32 * MIB
    segment_seconds: float = 2.0
    table_bytes: int = 96 * MIB
    retry_seconds: float = 1.0


@dataclass(frozen=True)
class Tls:
    """PEM files of the server's certificate chain and its private key."""

    certificate: Path
    key: Path

    def check(self) -> None:
        """Raise ReceiverError unless both can be read and belong together."""
        try:
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(self.certificate, self.key)
        except OSError as error:
            raise ReceiverError(
                f"--tls-cert {self.certificate} --tls-key {self.key}: {error}; give PEM files that belong together"
            ) from error


@dataclass(frozen=True)
class ReceiverSettings:
    """Addresses (``host:port``; port 0 takes a free one; None: not served), access and limits."""

    grpc: str | None = "127.0.0.1:4317"
    http: str | None = "127.0.0.1:4318"
    token: str | None = field(default=None, repr=False)
    tls: Tls | None = None
    insecure: bool = False
    limits: Limits = Limits()

    def check(self) -> None:
        """Raise ReceiverError for a door open to the network without a token, and for a certificate without its key."""
        for name, address in (("grpc", self.grpc), ("http", self.http)):
            if address is None:
                continue
            host, _ = split_address(name, address)
            if not is_loopback(host) and not self.token and not self.insecure:
                raise ReceiverError(
                    f"--{name} {address}: anyone who reaches this address could write spans; "
                    "give --token-file, listen on 127.0.0.1, or say --insecure if the network itself is closed"
                )
        if self.tls is not None:
            self.tls.check()


def split_address(name: str, address: str) -> tuple[str, int]:
    """Host and port of ``host:port`` or ``[v6]:port``."""
    host, colon, port = address.rpartition(":")
    if not colon or not port.isdigit() or int(port) > 65535 or not host:
        raise ReceiverError(f"--{name} {address}: not HOST:PORT; write for example 127.0.0.1:4317")
    return host.removeprefix("[").removesuffix("]"), int(port)


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches ``host``."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def read_token(path: Path) -> str:
    """The bearer token in a file, surrounding blanks removed. Raises ReceiverError when there is none."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ReceiverError(f"--token-file {path}: {error}; put one line with the token into it") from error
    return token_of(text, f"--token-file {path}")


def token_of(text: str, where: str) -> str:
    """The bearer token in a text, surrounding blanks removed. Raises ReceiverError, with ``where``, for none."""
    token = text.strip()
    if not token or not token.isascii() or not token.isprintable() or " " in token:
        raise ReceiverError(f"{where}: no usable token; put one line of visible ASCII characters into it")
    return token
