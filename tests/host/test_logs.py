"""Logs: every line is one JSON object, requests are described without their text, errors are said once."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator
from typing import Any

import pytest
from support_reports import Receipt

from tradewind.observability.lives import tenant_hash
from tradewind.observability.logs import JsonFormatter, Once, TextFormatter, log_request, request_facts, set_up_logs


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    """The logger as it was before."""
    logger = logging.getLogger("tradewind")
    handlers, level, propagate = list(logger.handlers), logger.level, logger.propagate
    yield
    logger.handlers[:], logger.propagate = handlers, propagate
    logger.setLevel(level)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def lines(stream: io.StringIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_every_line_is_an_object_whatever_is_logged() -> None:
    stream = io.StringIO()
    log = set_up_logs(level="debug", stream=stream)
    log.info('two\nlines and a "quote" of %s', "émile", extra={"request_id": "req-1", "odd": object()})
    try:
        raise ValueError("bad\nnews")
    except ValueError:
        logging.getLogger("tradewind.http").exception("it failed")
    first, second = lines(stream)
    assert first["message"] == 'two\nlines and a "quote" of émile'
    assert first["level"] == "info" and first["logger"] == "tradewind" and first["request_id"] == "req-1"
    assert first["time"].endswith("Z") and len(first["time"]) == 24
    assert second["level"] == "error" and "ValueError: bad\nnews" in second["exception"]


def test_extra_cannot_overwrite_what_a_line_always_has() -> None:
    record = logging.makeLogRecord(
        {"name": "tradewind", "msg": "x", "levelno": 20, "levelname": "INFO", "level": "forged", "time": 1}
    )
    line = json.loads(JsonFormatter().format(record))
    assert line["level"] == "info" and line["time"] != 1


def test_a_terminal_gets_text_and_a_file_gets_json() -> None:
    terminal, file = Terminal(), io.StringIO()
    set_up_logs(stream=terminal).info("ready", extra={"port": 8000, "nothing": None})
    set_up_logs(stream=file).warning("slow")
    set_up_logs(stream=terminal).warning("slow")
    assert terminal.getvalue().splitlines()[0].endswith(" ready  port=8000")
    assert "warning: slow" in terminal.getvalue()
    assert lines(file)[0]["message"] == "slow"
    assert set_up_logs(stream=terminal, json_lines=True).handlers[0].formatter.__class__ is JsonFormatter
    assert set_up_logs(stream=file, json_lines=False).handlers[0].formatter.__class__ is TextFormatter
    assert len(logging.getLogger("tradewind").handlers) == 1, "a second set-up replaces the first"


def test_levels() -> None:
    stream = io.StringIO()
    log = set_up_logs(level="warning", stream=stream)
    log_request(Receipt())
    log.info("no")
    log.warning("yes")
    assert [line["message"] for line in lines(stream)] == ["yes"]
    with pytest.raises(ValueError, match="'loud'; it must be one of debug, info, warning, error"):
        set_up_logs(level="loud")


def test_a_request_is_one_line_with_parts_that_add_up() -> None:
    stream = io.StringIO()
    set_up_logs(stream=stream)
    log_request(Receipt(tenant="key-secret", cached_tokens=4))
    (line,) = lines(stream)
    assert line["request_id"] == "req-1" and line["finish"] == "stop"
    assert (line["prompt_tokens"], line["cached_tokens"], line["generated_tokens"]) == (10, 4, 3)
    assert line["queue_ms"] + line["prefill_ms"] + line["decode_ms"] == pytest.approx(line["total_ms"])
    assert line["tenant"] == tenant_hash("key-secret")
    assert "secret" not in stream.getvalue()
    assert "samples" not in line and "error" not in line


def test_a_request_that_never_ran_has_no_times() -> None:
    facts = request_facts(Receipt(scheduled_s=None, first_token_s=None, finish="abort", samples=2))
    assert facts["queue_ms"] is None and facts["prefill_ms"] is None and facts["decode_ms"] is None
    assert facts["total_ms"] == 1000.0 and facts["samples"] == 2
    json.dumps(facts)


def test_a_failed_request_is_a_warning() -> None:
    stream = io.StringIO()
    set_up_logs(level="warning", stream=stream)
    log_request(Receipt(finish="error", error="logits are not finite"))
    assert lines(stream)[0]["error"] == "logits are not finite"


def test_an_error_is_said_once_and_counted() -> None:
    once = Once(quiet_s=60)

    def said(message: str, at_s: float, level: int = logging.ERROR) -> logging.LogRecord | None:
        record = logging.makeLogRecord({"name": "tradewind", "levelno": level, "msg": message})
        record.created = at_s
        return record if once.filter(record) else None

    assert said("the disk is full", 1000.0)
    assert not any(said("the disk is full", 1000.0 + n) for n in range(1, 50))
    assert said("another one", 1001.0)
    again = said("the disk is full", 1060.5)
    assert again is not None and vars(again)["held_back"] == 49
    assert said("fine", 1061.0, logging.INFO) and said("fine", 1061.0, logging.INFO), "only errors are held back"


def test_the_memory_of_errors_is_bounded() -> None:
    once = Once()
    for number in range(5000):
        once.filter(logging.makeLogRecord({"name": "tradewind", "levelno": logging.ERROR, "msg": f"error {number}"}))
    assert len(once._said) <= 256


def test_tenant_hash_says_the_same_again_and_not_who() -> None:
    assert tenant_hash("") == ""
    assert tenant_hash("alice") == tenant_hash("alice") != tenant_hash("bob")
    assert "alice" not in tenant_hash("alice")
