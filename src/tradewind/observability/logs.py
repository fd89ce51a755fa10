"""Logs: one JSON object a line for machines, one sentence a line for people.

Knows: formats, levels, what may be said of a request. Refuses to know: prompts and answers; no text of either ever comes here.
Everything goes to the logger "tradewind" and what is below it; the root logger and other packages' loggers are left alone.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from collections import OrderedDict
from datetime import UTC, datetime
from typing import IO, Any

from tradewind.observability.lives import ReceiptLike, tenant_hash

ROOT = "tradewind"
LIBRARIES = ("asyncio", "uvicorn")
"""Loggers of others, whose errors belong into the same log in the same form."""
REQUESTS = logging.getLogger("tradewind.requests")
LEVELS = ("debug", "info", "warning", "error")
QUIET_S = 60.0
"""An error that was said is not said again for so long."""
REMEMBERED = 256

_OURS = frozenset(logging.makeLogRecord({}).__dict__) | {"message", "asctime", "taskName"}
"""What every record has; the rest came with `extra=`."""


def _extras(record: logging.LogRecord) -> dict[str, Any]:
    return {name: value for name, value in record.__dict__.items() if name not in _OURS}


class JsonFormatter(logging.Formatter):
    """`{"time": "...Z", "level": "info", "logger": "tradewind.http", "message": "..."}`; what came with `extra=` are more keys."""

    def format(self, record: logging.LogRecord) -> str:
        """One line, whatever is in the record."""
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC)
            .isoformat(timespec="milliseconds")
            .replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        for name, value in _extras(record).items():
            line.setdefault(name, value)
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        if record.stack_info:
            line["stack"] = record.stack_info
        return json.dumps(line, default=str, ensure_ascii=False, separators=(", ", ": "))


class TextFormatter(logging.Formatter):
    """`12:03:41 the sentence  key=value ...`; the level is said when it is not INFO."""

    def format(self, record: logging.LogRecord) -> str:
        """One line, and a traceback below it where there is one."""
        clock = time.strftime("%H:%M:%S", time.localtime(record.created))
        level = "" if record.levelno == logging.INFO else f"{record.levelname.lower()}: "
        extras = "".join(f"  {name}={value}" for name, value in _extras(record).items() if value not in (None, ""))
        lines = [f"{clock} {level}{record.getMessage()}{extras}"]
        if record.exc_info:
            lines.append(self.formatException(record.exc_info))
        if record.stack_info:
            lines.append(record.stack_info)
        return "\n".join(lines)


class Once(logging.Filter):
    """Lets an error through once in a while, not once for each of a thousand requests; the next time it says how many it held back."""

    def __init__(self, *, quiet_s: float = QUIET_S) -> None:
        super().__init__()
        self._quiet_s = quiet_s
        self._said: OrderedDict[tuple[str, int, str], tuple[float, int]] = OrderedDict()
        """(when it was last let through, how many were held back since)."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether the record is said."""
        if record.levelno < logging.ERROR:
            return True
        error = record.exc_info[1] if record.exc_info else None
        # The format string, not the sentence, which may name a request; and with a traceback what kind of error it was.
        key = (record.name, record.levelno, f"{record.msg}|{error!r}" if error is not None else record.getMessage())
        said_s, held = self._said.pop(key, (-1e18, 0))
        if record.created - said_s < self._quiet_s:
            self._said[key] = (said_s, held + 1)
            return False
        self._said[key] = (record.created, 0)
        if len(self._said) > REMEMBERED:
            self._said.popitem(last=False)
        if held:
            record.held_back = held
        return True


def set_up_logs(
    *, level: str = "info", json_lines: bool | None = None, stream: IO[str] | None = None
) -> logging.Logger:
    """Sends the logger "tradewind" to a stream and returns it; a second call replaces the first. Raises ValueError for an unknown level.

    `json_lines` None: text where a person looks (a terminal), JSON otherwise. `stream` None is standard error.
    """
    if level not in LEVELS:
        raise ValueError(f"the log level is {level!r}; it must be one of {', '.join(LEVELS)}")
    stream = sys.stderr if stream is None else stream
    if json_lines is None:
        json_lines = not stream.isatty()
    logger = logging.getLogger(ROOT)
    for old in list(logger.handlers):
        logger.removeHandler(old)
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonFormatter() if json_lines else TextFormatter())
    handler.addFilter(Once())
    logger.addHandler(handler)
    logger.setLevel(level.upper())
    logger.propagate = False
    for name in LIBRARIES:
        library = logging.getLogger(name)
        library.handlers = [handler]
        # Their warnings are about what clients send, one line for each: only somebody who looks for a fault wants them.
        library.setLevel(logging.WARNING if level == "debug" else logging.ERROR)
        library.propagate = False
    return logger


def request_facts(receipt: ReceiptLike) -> dict[str, Any]:
    """What a log says of a finished request: counts and times, never text. Times are milliseconds that add up to `total_ms`."""
    first_s, scheduled_s = receipt.first_token_s, receipt.scheduled_s
    facts: dict[str, Any] = {
        "request_id": receipt.request_id,
        "id": receipt.id,
        "endpoint": receipt.endpoint,
        "stream": receipt.stream,
        "finish": receipt.finish,
        "prompt_tokens": receipt.prompt_tokens,
        "cached_tokens": receipt.cached_tokens,
        "generated_tokens": receipt.completion_tokens,
        "queue_ms": _ms(receipt.arrived_s, scheduled_s),
        "prefill_ms": _ms(scheduled_s, first_s),
        "decode_ms": _ms(first_s, receipt.finished_s),
        "total_ms": _ms(receipt.arrived_s, receipt.finished_s),
    }
    if receipt.samples != 1:
        facts["samples"] = receipt.samples
    if receipt.tenant:
        facts["tenant"] = tenant_hash(receipt.tenant)
    if receipt.error:
        facts["error"] = receipt.error
    return facts


def log_request(receipt: ReceiptLike) -> None:
    """One line at INFO for a finished request; a failed one at WARNING. Changes nothing."""
    level = logging.WARNING if receipt.error else logging.INFO
    if REQUESTS.isEnabledFor(level):
        REQUESTS.log(level, "request ended", extra=request_facts(receipt))


def _ms(begin_s: float | None, end_s: float | None) -> float | None:
    return None if begin_s is None or end_s is None else round(max(0.0, end_s - begin_s) * 1e3, 3)
