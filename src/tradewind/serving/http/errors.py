"""What can be wrong with an HTTP request, each as one sentence in OpenAI's error shape, with the exact field.

Knows: statuses, error types, how msgspec says what it found. Refuses to know: what the fields mean.

      {"error": {"message": "...", "type": "invalid_request_error", "param": "temperature", "code": null}}
"""

from __future__ import annotations

import difflib
import functools
import re
from collections.abc import Mapping
from typing import Any, TypeVar, cast

import msgspec
from msgspec import inspect

from tradewind.contract.errors import EngineDeadError, LimitError, RequestError, UserError
from tradewind.serving.http.types import NOT_YET

T = TypeVar("T")

MAX_UNKNOWN = 64
"""So many unknown fields are listed."""
MAX_SHOWN = 60

TYPES: dict[int, str] = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    413: "invalid_request_error",
    415: "invalid_request_error",
    429: "rate_limit_error",
    500: "server_error",
    501: "not_implemented_error",
    503: "service_unavailable_error",
    504: "timeout_error",
}


class ApiError(Exception):
    """An answer that is a refusal."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.headers = dict(headers or {})

    def body(self) -> bytes:
        """The JSON body."""
        return msgspec.json.encode({"error": self.record()})

    def record(self) -> dict[str, Any]:
        """The content of `error`."""
        kind = TYPES.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        return {"message": self.message, "type": kind, "param": self.param, "code": self.code}


def api_error(error: Exception, *, param: str | None = None, code: str | None = None) -> ApiError:
    """The refusal for an error of ours. `param` and `code` are kept where the error itself says no field."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, EngineDeadError):
        return ApiError(503, f"the engine does not work any more: {error}", code="engine_dead")
    if isinstance(error, LimitError):
        return ApiError(error.http_status, str(error), param=param, code="context_length_exceeded")
    if isinstance(error, RequestError):
        return ApiError(error.http_status, str(error), param=_named(str(error)) or param, code=code)
    if isinstance(error, UserError):
        return ApiError(error.http_status, str(error), param=param, code=code)
    return ApiError(500, "the server met a bug; the log has the details under this request's id", code="internal_error")


def _named(message: str) -> str | None:
    """The field that one of SamplingParams' sentences begins with."""
    match = re.match(r"([a-z_]+) (?:is|names|of) ", message)
    return match[1] if match and match[1] in _SAMPLING_FIELDS else None


_SAMPLING_FIELDS = frozenset(
    {"temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias",
     "min_tokens", "max_tokens", "n", "seed", "logprobs", "prompt_logprobs", "stop"}
)  # fmt: skip


# -- bodies


def decode(
    body: bytes, kind: type[T], *, decoder: msgspec.json.Decoder[T], ignore_unknown: bool
) -> tuple[T, list[str]]:
    """(the request, names of fields that were ignored). Raises ApiError naming what is wrong and where."""
    try:
        return decoder.decode(body), []
    except msgspec.ValidationError:
        pass
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise _malformed(body, error) from None
    try:
        raw = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise _malformed(body, error) from None
    if not isinstance(raw, dict):
        raise ApiError(400, f"the body must be a JSON object, not {_kind_of(raw)}", code="invalid_type")
    return _convert(raw, kind, ignore_unknown=ignore_unknown)


def _malformed(body: bytes, error: Exception) -> ApiError:
    if not body.strip():
        return ApiError(400, "the body is empty; send a JSON object", code="invalid_json")
    try:
        body.decode()
    except UnicodeDecodeError as bad:
        return ApiError(
            400, f"the body is not valid UTF-8: byte {bad.start} is {body[bad.start]:#04x}", code="invalid_utf8"
        )
    if isinstance(error, RecursionError):
        return ApiError(400, "the body is nested too deeply", code="invalid_json")
    match = re.search(r"(?:JSON is malformed: )?(.*?)(?: \(byte (\d+)\))?$", str(error))
    what = match[1] if match else str(error)
    if match and match[2]:
        return ApiError(400, f"the body is not valid JSON: {what} at byte {match[2]}", code="invalid_json")
    if "truncated" in str(error):
        return ApiError(
            400,
            f"the body is not valid JSON: it ends at byte {len(body)} before the object is complete",
            code="invalid_json",
        )
    return ApiError(400, f"the body is not valid JSON: {what}", code="invalid_json")


def _convert(raw: dict[str, Any], kind: type[T], *, ignore_unknown: bool) -> tuple[T, list[str]]:
    """Converts after taking unknown fields out, in one pass, so that all of them can be named."""
    for name in raw:
        if name in NOT_YET:
            raise ApiError(
                400,
                f"{name} is not supported: {NOT_YET[name]}",
                param=name,
                code="unsupported_parameter",
            )
    shape = _shape_of(cast("Any", kind))
    unknown: list[tuple[str, str]] = []
    _strip(raw, shape, "", unknown)
    if unknown and not ignore_unknown:
        hints = ", ".join(hint for _, hint in unknown[:MAX_UNKNOWN])
        more = f" and {len(unknown) - MAX_UNKNOWN} more" if len(unknown) > MAX_UNKNOWN else ""
        many = "fields that are" if len(unknown) > 1 else "a field that is"
        raise ApiError(
            400,
            f"the request has {many} not known or not supported here: {hints}{more}",
            param=unknown[0][0],
            code="unknown_parameter",
        )
    try:
        return msgspec.convert(raw, kind), [name for name, _ in unknown]
    except msgspec.ValidationError as error:
        text = str(error)
        raise _wrong(raw, kind, text, _path(text)) from None


@functools.cache
def _shape_of(kind: type) -> inspect.Type:
    return inspect.type_info(kind)


def _strip(value: Any, shape: inspect.Type, place: str, unknown: list[tuple[str, str]]) -> None:
    """Takes fields that no record knows out of `value`, and notes (where, where with a hint). As deep as the types are."""
    if isinstance(value, dict):
        for variant in _variants(shape):
            if isinstance(variant, inspect.StructType):
                fields = {field.encode_name: field.type for field in variant.fields}
                for name in [name for name in value if name not in fields]:
                    del value[name]
                    where = _short(f"{place}.{name}" if place else name, 100)
                    close = (
                        difflib.get_close_matches(name[:100], fields, n=1, cutoff=0.75)
                        if len(unknown) < MAX_UNKNOWN
                        else []
                    )
                    unknown.append((where, f"{where} (did you mean {close[0]}?)" if close else where))
                for name, inner in value.items():
                    _strip(inner, fields[name], f"{place}.{name}" if place else name, unknown)
                return
    elif isinstance(value, list):
        for variant in _variants(shape):
            if isinstance(variant, inspect.ListType):
                for index, inner in enumerate(value):
                    if isinstance(inner, dict | list):
                        _strip(inner, variant.item_type, f"{place}[{index}]", unknown)
                return


def _wrong(raw: dict[str, Any], kind: type, text: str, path: list[str | int]) -> ApiError:
    """The sentence for one of msgspec's refusals."""
    missing = re.match(r"Object missing required field `(.*?)`", text)
    if missing:
        place = _spelled([*path, missing[1]])
        return ApiError(400, f"{place} is missing", param=place, code="missing_required_parameter")
    place = _spelled(path)
    value = _at(raw, path)
    shape = _type_at(_shape_of(kind), path)
    if text.startswith("Number out of range"):
        return ApiError(400, f"{place} is a number out of every range", param=place, code="invalid_value")
    wanted = _describe(shape) if shape is not None else text.split(" - at ")[0]
    if path and isinstance(path[-1], str) and path[-1] == "[...]":
        holder = _at(raw, path[:-1])
        place = _spelled(path[:-1])
        return ApiError(
            400,
            f"a value in {place} is wrong ({_short(repr(holder))}); each must be {wanted}",
            param=place,
            code="invalid_value",
        )
    same = shape is not None and _fits_kind(value, shape)
    if place == "":
        return ApiError(400, f"the body must be {wanted}", code="invalid_type")
    if shape is not None and _only_null(shape):
        return ApiError(400, f"{place} is not supported; leave it out", param=place, code="unsupported_parameter")
    if isinstance(value, list | dict) and any(
        isinstance(v, inspect.ListType | inspect.DictType) for v in (_variants(shape) if shape is not None else [])
    ):
        same, shown = True, f"{_kind_of(value)} of {len(value)}"
    else:
        shown = _short(msgspec.json.encode(value).decode()) if same else _kind_of(value)
    code = "invalid_value" if same else "invalid_type"
    return ApiError(400, f"{place} is {shown}; it must be {wanted}", param=place, code=code)


def _path(text: str) -> list[str | int]:
    """`... - at `$.messages[0].content`` -> ["messages", 0, "content"]."""
    match = re.search(r" - at `(?:key in )?\$(.*)`$", text, re.S)
    if match is None:
        return []
    steps: list[str | int] = []
    for name, index, any_key in re.findall(r"\.([^.\[\]]+)|\[(\d+)\]|(\[\.\.\.\])", match[1]):
        steps.append(name if name else any_key if any_key else int(index))
    return steps


def _spelled(path: list[str | int]) -> str:
    text = ""
    for step in path:
        text += f"[{step}]" if isinstance(step, int) else f".{step}" if text else str(step)
    return text


def _at(raw: Any, path: list[str | int]) -> Any:
    for step in path:
        if isinstance(step, int) and isinstance(raw, list) and step < len(raw):
            raw = raw[step]
        elif isinstance(step, str) and isinstance(raw, dict):
            raw = raw.get(step)
        else:
            return None
    return raw


def _short(text: str, limit: int = MAX_SHOWN) -> str:
    return text if len(text) <= limit else text[: limit - 3] + "..."


def _kind_of(value: object) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "a boolean"
    if isinstance(value, int):
        return "a whole number"
    if isinstance(value, float):
        return "a number"
    if isinstance(value, str):
        return "a string"
    return "a list" if isinstance(value, list) else "an object"


# -- what msgspec knows of a type, in words


def _variants(shape: inspect.Type) -> list[inspect.Type]:
    return list(shape.types) if isinstance(shape, inspect.UnionType) else [shape]


def _only_null(shape: inspect.Type) -> bool:
    return all(isinstance(v, inspect.NoneType) for v in _variants(shape))


def _type_at(shape: inspect.Type, path: list[str | int]) -> inspect.Type | None:
    for step in path:
        found: inspect.Type | None = None
        for variant in _variants(shape):
            if isinstance(variant, inspect.StructType) and isinstance(step, str):
                found = next((f.type for f in variant.fields if f.encode_name == step), None)
            elif isinstance(variant, inspect.ListType) and isinstance(step, int):
                found = variant.item_type
            elif isinstance(variant, inspect.DictType) and step == "[...]":
                found = variant.value_type
            if found is not None:
                break
        if found is None:
            return None
        shape = found
    return shape


def _fits_kind(value: object, shape: inspect.Type) -> bool:
    """The value has the right JSON kind, so that its size or content is what is wrong."""
    for v in _variants(shape):
        if isinstance(v, inspect.LiteralType):
            if any(type(value) is type(one) for one in v.values):
                return True
        elif isinstance(value, bool):
            if isinstance(v, inspect.BoolType):
                return True
        elif isinstance(value, int):
            if isinstance(v, inspect.IntType | inspect.FloatType):
                return True
        elif isinstance(value, float):
            if isinstance(v, inspect.FloatType | inspect.IntType):
                return True
        elif isinstance(value, str) and isinstance(v, inspect.StrType):
            return True
    return False


def _describe(shape: inspect.Type) -> str:
    words = [_describe_one(v) for v in _variants(shape) if not isinstance(v, inspect.NoneType)]
    return " or ".join(dict.fromkeys(words)) or "null"


def _describe_one(v: inspect.Type) -> str:
    if isinstance(v, inspect.LiteralType):
        values = [msgspec.json.encode(one).decode() for one in sorted(v.values, key=str)]
        return values[0] if len(values) == 1 else "one of " + ", ".join(values)
    if isinstance(v, inspect.IntType | inspect.FloatType):
        name = "a whole number" if isinstance(v, inspect.IntType) else "a number"
        low = v.ge if v.ge is not None else v.gt
        if low is None or v.le is None:
            return name
        return f"{name} over {low} and up to {v.le}" if v.gt is not None else f"{name} from {low} to {v.le}"
    if isinstance(v, inspect.StrType):
        limits = []
        if v.min_length:
            limits.append(f"at least {v.min_length}")
        if v.max_length is not None:
            limits.append(f"at most {v.max_length}")
        suffix = f" of {' and '.join(limits)} characters" if limits else ""
        return f"a string{suffix}" + (f" that matches {v.pattern}" if v.pattern else "")
    if isinstance(v, inspect.ListType):
        if v.max_length == 0:
            return "an empty list"
        sizes = ([f"at least {v.min_length}"] if v.min_length else []) + (
            [f"at most {v.max_length}"] if v.max_length is not None else []
        )
        return "a list" + (f" of {' and '.join(sizes)}" if sizes else "") + f" ({_describe(v.item_type)} each)"
    if isinstance(v, inspect.DictType):
        return (
            "an empty object"
            if v.max_length == 0
            else "an object" + (f" with at most {v.max_length} entries" if v.max_length else "")
        )
    if isinstance(v, inspect.BoolType):
        return "true or false"
    return "an object" if isinstance(v, inspect.StructType) else "any JSON value"
