"""Files behind links that strangers send: fetched only from addresses that anybody can reach, and only so much for so long.

Knows: http and https, addresses, limits. Refuses to know: what is in the files. Stands only where the operator allows links at all.

A link is somebody else's way to make this machine speak to another. So its host is resolved once, every address of it must be a public
one, and the connection goes to the address that was looked at, not to what the name says a moment later. Redirects are not followed: each
would be a new link. At the deadline the connection is cut, wherever it is.
"""

from __future__ import annotations

import http.client
import ipaddress
import socket
import ssl
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from urllib.parse import urlsplit

from tradewind.contract.errors import RequestError

PIECE_BYTES = 1 << 16
NAT64 = ipaddress.ip_network("64:ff9b::/96")
"""IPv4 addresses as some networks write them in IPv6."""

Resolve = Callable[[str, int], Sequence[str]]
"""Host and port -> addresses. Raises OSError."""


class LinkFetcher:
    """Fetches one file a call. Keeps nothing; safe to call from several threads."""

    def __init__(
        self,
        *,
        most_bytes: int = 12 << 20,
        timeout_s: float = 5.0,
        resolve: Resolve | None = None,
        is_public: Callable[[str], bool] | None = None,
    ) -> None:
        """`resolve` and `is_public` are for tests."""
        self._most_bytes, self._timeout_s = most_bytes, timeout_s
        self._resolve = resolve or addresses_of
        self._is_public = is_public or is_public_address

    def __call__(self, url: str, *, name: str, most_bytes: int | None = None) -> bytes:
        """The file behind a link; `name` is what messages call it. Raises RequestError, which tells nothing of our network."""
        most = self._most_bytes if most_bytes is None else min(most_bytes, self._most_bytes)
        try:
            parts = urlsplit(url)
            host, port = parts.hostname, parts.port
        except ValueError:
            raise RequestError(f"{name} has a link that cannot be read") from None
        if parts.scheme not in ("http", "https") or not host or parts.username is not None:
            raise RequestError(f"{name} has a link that cannot be followed: it must be http(s)://HOST/PATH")
        secure = parts.scheme == "https"
        port = port or (443 if secure else 80)
        address = self._address(host, port, name)
        connection = _Pinned(host, port, address=address, timeout_s=self._timeout_s, secure=secure)
        # A server that sends a byte now and then keeps every single read alive; this ends them all.
        cut = threading.Timer(self._timeout_s, connection.cut)
        cut.daemon = True
        cut.start()
        try:
            target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
            connection.request("GET", target, headers={"Accept": "image/*", "User-Agent": "tradewind"})
            with connection.getresponse() as response:
                data = self._read(response, name, most)
            if connection.was_cut:
                raise OSError("cut, which looks like the end of a file that does not say its length")
            return data
        except (OSError, http.client.HTTPException, ValueError) as error:
            late = connection.was_cut or isinstance(error, TimeoutError)
            why = f"it did not come within {self._timeout_s:g} s" if late else "its server could not be spoken to"
            raise RequestError(f"{name} cannot be fetched: {why}") from None
        finally:
            cut.cancel()
            connection.close()

    def _address(self, host: str, port: int, name: str) -> str:
        try:
            found = list(self._resolve(host, port))
        except (OSError, UnicodeError):
            found = []
        if not found or not all(self._is_public(address) for address in found):
            raise RequestError(f"{name} cannot be fetched: its host has no address that anybody can reach")
        return found[0]

    def _read(self, response: http.client.HTTPResponse, name: str, most: int) -> bytes:
        if 300 <= response.status < 400:
            raise RequestError(f"{name} cannot be fetched: its link leads to another, and such are not followed")
        if response.status != 200:
            raise RequestError(f"{name} cannot be fetched: its server answers {response.status}")
        data = bytearray()
        while piece := response.read(PIECE_BYTES):
            data += piece
            if len(data) > most:
                raise RequestError(f"{name} is larger than the {most} bytes that are left for links in a request")
        if response.length:
            raise OSError("the connection ended early")
        return bytes(data)


class _Pinned(http.client.HTTPConnection):
    """A connection to an address that was looked at, under the name that the link has."""

    def __init__(self, host: str, port: int, *, address: str, timeout_s: float, secure: bool) -> None:
        super().__init__(host, port, timeout=timeout_s)
        self.default_port = 443 if secure else 80
        self._address, self._secure = address, secure
        self.was_cut = False
        self._open: socket.socket | None = None
        """`sock` is forgotten as soon as an answer says that it is the last."""

    def connect(self) -> None:
        sock = socket.create_connection((self._address, self.port), self.timeout)
        if not self._secure:
            self.sock = self._open = sock
            return
        # Known to `cut` before the handshake, which may take as long as the other side likes.
        self.sock = self._open = secure = ssl.create_default_context().wrap_socket(
            sock, server_hostname=self.host, do_handshake_on_connect=False
        )
        secure.do_handshake()

    def cut(self) -> None:
        """Ends whatever is read or written, from another thread."""
        self.was_cut = True
        if self._open is not None:
            with suppress(OSError):
                self._open.shutdown(socket.SHUT_RDWR)


def addresses_of(host: str, port: int) -> list[str]:
    """Every address of a host."""
    return [str(found[4][0]) for found in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)]


def is_public_address(text: str) -> bool:
    """Whether an address is one of the public internet, whatever form it is written in; what cannot be read is not."""
    try:
        address = ipaddress.ip_address(text.partition("%")[0])
    except ValueError:
        return False
    if isinstance(address, ipaddress.IPv6Address):
        inner = address.ipv4_mapped or address.sixtofour or (address.teredo[1] if address.teredo else None)
        if inner is None and address in NAT64:
            inner = ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
        if inner is not None:
            return is_public_address(str(inner))
    return address.is_global and not address.is_multicast and not address.is_reserved
