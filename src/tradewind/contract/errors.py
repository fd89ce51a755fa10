"""Errors that a user can cause, each one clear sentence.

Knows: how a refusal is worded (what, the numbers, what to change) and which exit code or HTTP status it deserves.
Refuses to know: who raises it. A bug is never a `UserError`: bugs are assertions and keep their traceback.
"""

from __future__ import annotations


class UserError(Exception):
    """A refusal that the person at the keyboard can act on; its text is shown without a traceback."""

    exit_code = 2
    http_status = 400


class RequestError(UserError):
    """The request itself is wrong: a value out of range, a prompt that is empty or too long."""


class LimitError(UserError):
    """A limit is too small for what is asked: the message has need, have, shortfall and settings that would fit."""


class ModelNotFoundError(UserError):
    """A model name that leads nowhere; the message lists what was tried."""

    http_status = 404


class MissingExtraError(UserError):
    """An optional package is not installed; the message names the extra that brings it."""

    def __init__(self, *, package: str, extra: str, purpose: str) -> None:
        super().__init__(f"{purpose} needs the package '{package}': pip install 'tradewind[{extra}]'")


class EngineDeadError(Exception):
    """The engine stopped working; every open request ends with this."""

    http_status = 503
