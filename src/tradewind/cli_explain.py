"""`tradewind explain`: where the time of a request went, asked of a running server or read from a journal.

Knows: its words on the command line and how a receipt looks on a terminal. Refuses to know: how receipts are made (observability.receipts).
"""

from __future__ import annotations

import argparse
import http.client
import json
import ssl
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, urlsplit

from tradewind.contract.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tradewind.observability.receipts import ItemisedReceipt, Part

DEFAULT_URL = "http://127.0.0.1:8000"
BAR = 24
"""Characters of the longest bar."""


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    """Adds the command to those of argparse's `subparsers`; its `run` is set."""
    text = "Tell where the time of a request went, what bound it, and what would have helped."
    made: argparse.ArgumentParser = subparsers.add_parser("explain", help=text, description=text)
    made.add_argument("id", nargs="?", metavar="ID", help="id of an answer, or an X-Request-Id")
    made.add_argument("--slowest", type=int, metavar="N", help="the N slowest requests (default: 10, without an ID)")
    made.add_argument("--url", metavar="URL", help=f"a running server (default {DEFAULT_URL})")
    made.add_argument("--journal", metavar="DIR", help="read a journal of tradewind serve --record instead")
    made.add_argument("--api-key", metavar="KEY", help="of the server; receipts of other keys are not shown")
    made.add_argument("--json", action="store_true", help="the receipts as JSON, one a line")
    made.set_defaults(run=run, parser=made)
    return made


def run(arguments: argparse.Namespace) -> int:
    """Prints one receipt or several; the exit code. Raises UserError."""
    if arguments.id is not None and arguments.slowest is not None:
        raise UserError("give an ID or --slowest, not both")
    if arguments.url is not None and arguments.journal is not None:
        raise UserError("give --url or --journal, not both")
    count = 10 if arguments.slowest is None else arguments.slowest
    if count < 1:
        raise UserError(f"--slowest is {count}; it must be at least 1")
    if arguments.journal is not None:
        receipts = from_journal(Path(arguments.journal), arguments.id, count)
    else:
        receipts = from_server(arguments.url or DEFAULT_URL, arguments.id, count, key=arguments.api_key)
    if arguments.json:
        import msgspec

        for receipt in receipts:
            sys.stdout.write(msgspec.json.encode(receipt).decode() + "\n")
    elif arguments.id is None and not receipts:
        print("no request has ended yet")
    else:
        print("\n\n".join(spoken(receipt) for receipt in receipts))
    return 0


def from_server(url: str, name: str | None, count: int, *, key: str | None = None) -> list[ItemisedReceipt]:
    """The receipt of a name, or the slowest ones. Raises UserError when there is none, or no server."""
    import msgspec

    from tradewind.observability.receipts import ItemisedReceipt

    path = f"/v1/receipts?slowest={count}" if name is None else f"/v1/receipts/{quote(name, safe='')}"
    status, body = get(url, path, key=key)
    if status != 200:
        raise UserError(f"{url} says: {_refusal(body, status)}")
    try:
        if name is not None:
            return [msgspec.json.decode(body, type=ItemisedReceipt)]
        found = msgspec.json.decode(body, type=dict[str, list[ItemisedReceipt]])
        return found.get("receipts", [])
    except msgspec.DecodeError as error:
        raise UserError(
            f"{url}{path} answers with something that is no receipt ({error}); is it a Tradewind server?"
        ) from None


def from_journal(folder: Path, name: str | None, count: int) -> list[ItemisedReceipt]:
    """The same of a journal."""
    from tradewind.observability.journal import read_journal

    journal = read_journal(folder)
    found = [entry.receipt for entry in journal.entries if entry.receipt is not None]
    if name is not None:
        mine = [receipt for receipt in found if name in (receipt.id, receipt.request_id)]
        if not mine:
            raise UserError(f"the journal in {folder} has no request {name!r} among its {len(journal.entries)}")
        return mine[-1:]
    return sorted(found, key=lambda receipt: -receipt.e2e_s)[:count]


def get(url: str, path: str, *, key: str | None = None, timeout_s: float = 10.0) -> tuple[int, bytes]:
    """(status, body) of a GET. Raises UserError when the URL makes no sense or nobody answers."""
    parts = urlsplit(url)
    try:
        host, port = parts.hostname, parts.port
    except ValueError:
        host, port = None, None
    if parts.scheme not in ("http", "https") or not host:
        raise UserError(f"{url!r} is no address of a server; give one such as {DEFAULT_URL}")
    connection: http.client.HTTPConnection
    if parts.scheme == "https":
        context = ssl.create_default_context()
        connection = http.client.HTTPSConnection(host, port, timeout=timeout_s, context=context)
    else:
        connection = http.client.HTTPConnection(host, port, timeout=timeout_s)
    try:
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        connection.request("GET", parts.path.rstrip("/") + path, headers=headers)
        answer = connection.getresponse()
        return answer.status, answer.read()
    except (OSError, http.client.HTTPException) as error:
        why = getattr(error, "strerror", None) or str(error) or type(error).__name__
        raise UserError(
            f"no server answers at {url}: {why}; start one with tradewind serve, or name another with --url"
        ) from None
    finally:
        connection.close()


def _refusal(body: bytes, status: int) -> str:
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"status {status}"


# -- on a terminal -------------------------------------------------------------------------------------------------------


def spoken(receipt: ItemisedReceipt) -> str:
    """A receipt as text: what it was, what bound it, what would have helped, and its parts."""
    from tradewind.observability.receipts import SAYS

    when = datetime.fromtimestamp(receipt.arrived, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    cached = f" ({receipt.cached_tokens} cached)" if receipt.cached_tokens else ""
    ttft = "no token" if receipt.ttft_s is None else f"TTFT {ms(receipt.ttft_s)}"
    each = "" if receipt.tpot_s is None else f", {ms(receipt.tpot_s)} a token"
    lines = [
        f"{receipt.id}  {receipt.endpoint}  {receipt.finish}",
        f"  {when}, {receipt.prompt_tokens} prompt tokens{cached}, {receipt.completion_tokens} generated",
        f"  {ttft}, whole {ms(receipt.e2e_s)}{each}",
        f"  bound by {receipt.binding.cause}: {receipt.binding.says}",
    ]
    if receipt.ttft_binding is not None and receipt.ttft_binding.cause != receipt.binding.cause:
        lines.append(f"  TTFT by {receipt.ttft_binding.cause}: {receipt.ttft_binding.says}")
    if receipt.counterfactual is not None:
        lines.append(f"  {receipt.counterfactual.says}")
    if receipt.error:
        lines.append(f"  error: {receipt.error}")
    for title, parts, total_s in (("first token", receipt.ttft, receipt.ttft_s), ("whole", receipt.e2e, receipt.e2e_s)):
        if parts and total_s:
            lines.append(f"  {title}, {ms(total_s)}:")
            lines += _bars(parts, total_s, SAYS)
    return "\n".join(lines)


def _bars(parts: Sequence[Part], total_s: float, says: Any) -> list[str]:
    lines: list[str] = []
    for part in parts:
        share = part.seconds / total_s
        if share < 0.001:
            continue
        who = f" ({part.blocked_by})" if part.blocked_by else ""
        bar = "█" * round(BAR * share) if share >= 0.5 / BAR else "▏"
        lines.append(f"    {part.name:<15}{ms(part.seconds):>9}  {bar:<{BAR}}  {says[part.name]}{who}")
    return lines


def ms(seconds: float) -> str:
    """A time with three digits that count."""
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"
