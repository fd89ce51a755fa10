"""The sandbox a chat template runs in: a stranger's code that may neither reach into Python, nor run long, nor grow large.

Knows: the filters, globals and tags that chat templates expect, and how every loop turn, call, operator and filter that can
repeat or grow is counted. Refuses to know: what a template is for (chat_template.py).

Jinja's own sandbox keeps a template from Python's insides but not from looping or growing. Here both go through a `Meter`;
the drawing is at `metered_environment`.
"""

from __future__ import annotations

import datetime
import json
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import msgspec

if TYPE_CHECKING:
    from jinja2 import nodes
    from jinja2.sandbox import ImmutableSandboxedEnvironment


class TemplateLimits(msgspec.Struct, frozen=True, kw_only=True):
    """How much one template may ask for."""

    source_chars: int = 256 * 1024
    output_chars: int = 8 * 1024 * 1024
    """Also the limit of any one text made on the way, and of a list or object written out."""
    items: int = 1_000_000
    """Length of any one list; all loops and calls together may take ten times as many steps."""
    render_s: float = 5.0


class TemplateTooMuchError(Exception):
    """A template went over one of its limits."""


class Rendering(threading.local):
    """The meter of the rendering under way in this thread."""

    meter: Meter | None = None


class Meter:
    """What one rendering has used so far. One writer: that rendering.

    Lists can hold one big thing many times, so that a small structure is endless when written out or compared. Therefore each
    list and object has a *weight*, its size written out, worked out once when it comes into being from the weights of its
    items; one over the limit is refused before anything walks over it.
    """

    def __init__(self, limits: TemplateLimits) -> None:
        self._limits = limits
        self._deadline = time.monotonic() + limits.render_s
        self._steps = 0
        self._emitted = 0
        self._made = 0
        self._weights: dict[int, tuple[int, object]] = {}  # by id(); the object is kept so that its id stays its own

    def step(self) -> None:
        """Counts one turn of a loop, one call or one filter."""
        self._steps += 1
        if self._steps > 10 * self._limits.items:
            raise TemplateTooMuchError(f"it takes more than {10 * self._limits.items} steps")
        if time.monotonic() > self._deadline:
            raise TemplateTooMuchError(f"it runs for more than {self._limits.render_s:g} s")

    def emit(self, chars: int) -> None:
        """Counts characters of the result."""
        self._emitted += chars
        self.text(self._emitted)

    def text(self, chars: int) -> None:
        """Refuses a text of so many characters."""
        if chars > self._limits.output_chars:
            raise TemplateTooMuchError(f"it makes a text of more than {self._limits.output_chars} characters")

    def make(self, chars: int) -> None:
        """Counts characters (or bytes) of a new text or list; all of them together bound the memory a template can hold."""
        self._made += chars
        if self._made > 32 * self._limits.output_chars:
            raise TemplateTooMuchError(
                f"it makes texts of more than {32 * self._limits.output_chars} characters in all"
            )

    def size(self, length: int) -> None:
        """Refuses a list of so many items."""
        if length > self._limits.items:
            raise TemplateTooMuchError(f"it makes a list of more than {self._limits.items} items")

    def number(self, bits: int) -> None:
        """Refuses a whole number of so many bits."""
        if bits > _MAX_NUMBER_BITS:
            raise TemplateTooMuchError(f"it makes a number of more than {_MAX_NUMBER_BITS} bits")

    def weigh(self, value: object) -> int:
        """The size of a value written out, about; refuses what is over the limit."""
        if isinstance(value, str | bytes):
            return len(value) + 1
        if not isinstance(value, list | tuple | dict | set | frozenset):
            return 8
        known = self._weights.get(id(value))
        if known is not None:
            return known[0]
        self._weights[id(value)] = (0, value)  # a list that holds itself ends here
        if isinstance(value, dict):
            weight = sum(self.weigh(key) + self.weigh(item) for key, item in value.items())
        else:
            weight = sum(map(self.weigh, value))
        weight += 2
        self.text(weight)
        self._weights[id(value)] = (weight, value)
        return weight

    def value(self, made: Any) -> Any:
        """Refuses a value that is too large; gives it back otherwise."""
        if isinstance(made, str | bytes):
            self.text(len(made))
            self.make(len(made))
        elif isinstance(made, list | tuple | dict | set | frozenset):
            self.size(len(made))
            self.make(8 * len(made))
            self.weigh(made)
        elif isinstance(made, int):
            self.number(made.bit_length())
        return made

    def walk(self, items: Iterable[Any]) -> Iterator[Any]:
        """The same items, each counted as a step."""
        for item in items:
            self.step()
            yield item

    def join(self, texts: Iterable[Any], between: str = "") -> str:
        """`between.join(texts)`, stopped before it grows over the limit."""
        pieces: list[str] = []
        total = 0
        for text in texts:
            piece = str(text)
            total += len(piece) + len(between)
            self.text(total)
            pieces.append(piece)
        self.make(total)
        return between.join(pieces)

    def shown(self, value: Any) -> Any:
        """A value about to be written out; counts the text that is made for it, refuses what is too large."""
        if not isinstance(value, str):
            self.make(self.weigh(value))
        return value

    def operator(self, sign: str, left: Any, right: Any) -> None:
        """Refuses an operation whose result would be too large, before it is done."""
        if sign == "*":
            for one, times in ((left, right), (right, left)):
                if not isinstance(times, int):
                    continue
                if isinstance(one, str | bytes):
                    self.text(len(one) * times)
                elif isinstance(one, list | tuple):
                    self.size(len(one) * times)
                    self.text(self.weigh(one) * times)
            if isinstance(left, int) and isinstance(right, int):
                self.number(left.bit_length() + right.bit_length())
        elif sign == "**":
            if isinstance(left, int) and isinstance(right, int):
                self.number(left.bit_length() * abs(right))
        elif sign == "+":
            if isinstance(left, str) and isinstance(right, str):
                self.text(len(left) + len(right))
            elif isinstance(left, list | tuple) and isinstance(right, list | tuple):
                self.size(len(left) + len(right))
                self.text(self.weigh(left) + self.weigh(right))
        elif sign == "%" and isinstance(left, str):
            self.format(left)

    def format(self, pattern: str) -> None:
        """Refuses a format pattern with a width of five digits or more, or one that takes its width from an argument."""
        if _WIDE_FORMAT.search(pattern):
            raise TemplateTooMuchError("it formats a text with a very large or computed width")

    def method(self, owner: Any, name: str, args: Sequence[Any]) -> None:
        """Refuses a method of a text or number whose result would be too large, before it is called."""
        if name in ("encode", "to_bytes", "translate"):
            raise TemplateTooMuchError(f"it calls {name}, which no template needs and which has no bound")
        if not isinstance(owner, str):
            return
        if name in ("center", "ljust", "rjust", "zfill"):
            self.text(next((arg for arg in args if isinstance(arg, int)), 0))
        elif name == "expandtabs":
            self.text(len(owner) + owner.count("\t") * next((arg for arg in args if isinstance(arg, int)), 8))
        elif name == "replace" and len(args) >= 2 and isinstance(args[0], str) and isinstance(args[1], str):
            self.text(len(owner) + owner.count(args[0]) * len(args[1]))
        elif name in ("split", "rsplit", "splitlines"):
            mark = args[0] if args and isinstance(args[0], str) else None
            self.size(owner.count(mark) if mark else len(owner) // 2)
        elif name in ("format", "format_map"):
            self.format(owner)


_MAX_NUMBER_BITS = 4096

# A width of many digits; one that comes from an argument (`*`, or braces inside braces).
_WIDE_FORMAT = re.compile(r"\d{5,}|%[-+ #0]*(?:\d*\.)?\*|\{[^{}]*\{")

# Filters with a number that says how much to make, and the largest number allowed.
_COUNTED_FILTERS = {"batch": 100_000, "center": 100_000, "indent": 1_000, "slice": 100_000, "tojson": 64}
# Of no use to a chat template, and slow or random on purpose.
_REMOVED_FILTERS = ("pprint", "random", "striptags", "urlize", "wordwrap", "xmlattr")
_REMOVED_GLOBALS = ("cycler", "joiner", "lipsum")

# Filters put into the template's tree; a template that names them itself gains nothing.
_WALK, _JOIN, _MADE = "tradewind.walk", "tradewind.join", "tradewind.made"


def metered_environment(
    current: Callable[[], Meter], *, now: Callable[[], datetime.datetime]
) -> ImmutableSandboxedEnvironment:
    """Makes the sandbox a template lives in; `current` gives the meter of the rendering under way.

    ::

        can repeat                          goes through
        {% for %}, also recursive           walk(), put around the loop's items when the template is parsed
        macro, loop(...), caller(), range   call(), which counts a step
        can grow
        * ** + % on texts, lists, numbers   call_binop(), which works out the size first
        a ~ b                               join(), put in when parsed
        [a, b], {a: b}                      value(), put in when parsed
        filters, methods of texts           arguments checked first, result checked after
        {% set %}{% endset %}, macro text   concat, which is join()
        text[1:]                            value(), put in when parsed
        {{ list }}                          finalize, which is shown()
        the result                          emit() for each piece
    """
    from jinja2 import ext, nodes
    from jinja2.exceptions import SecurityError, TemplateError
    from jinja2.filters import make_attrgetter
    from jinja2.runtime import LoopContext
    from jinja2.sandbox import ImmutableSandboxedEnvironment
    from jinja2.utils import Namespace, pass_context

    class GenerationTag(ext.Extension):
        """`{% generation %}` marks the assistant's text for training; here it is only its content."""

        tags = {"generation"}  # noqa: RUF012 - the base class declares it so

        def parse(self, parser: Any) -> nodes.Node:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.Scope(body, lineno=line)

    class Environment(ImmutableSandboxedEnvironment):
        intercepted_binops = frozenset({"*", "**", "+", "%"})

        def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
            tree = super()._parse(source, name, filename)
            _put_in_filters(tree)
            return tree

        def concat(self, texts: Iterable[str]) -> str:
            return current().join(texts)

        def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
            meter = current()
            meter.operator(operator, left, right)
            return meter.value(super().call_binop(context, operator, left, right))

        def call(self, context: Any, called: Any, /, *args: Any, **kwargs: Any) -> Any:
            meter = current()
            meter.step()
            # A text's `format` comes wrapped by the sandbox; every other method names its owner itself.
            method = getattr(called, "__wrapped__", called)
            owner = getattr(method, "__self__", None)
            if isinstance(owner, str | int):
                name = getattr(method, "__name__", "")
                meter.method(owner, name, [*args, *kwargs.values()])
                if name == "join" and isinstance(owner, str) and len(args) == 1:
                    return meter.join(meter.walk(args[0]), owner)
            if isinstance(called, LoopContext) and args:
                args = (meter.walk(args[0]), *args[1:])
            return meter.value(super().call(context, called, *args, **kwargs))

    class TemplateDict:
        """`dict(...)` without the class's own attributes."""

        def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
            return dict(*args, **kwargs)

        def fromkeys(self, keys: Iterable[Any], value: Any = None) -> dict[Any, Any]:
            return dict.fromkeys(keys, value)

    class TemplateNamespace(Namespace):
        """`namespace(...)` that cannot hold underscore names."""

        def __init__(*args: Any, **kwargs: Any) -> None:  # so that namespace(self=...) works
            values = dict(*args[1:], **kwargs)
            for name in values:
                refuse_private(name)
            Namespace.__init__(args[0], values)

        def __setitem__(self, name: str, value: Any) -> None:
            refuse_private(name)
            super().__setitem__(name, value)

    def refuse_private(name: object) -> None:
        if isinstance(name, str) and name.startswith("_"):
            raise SecurityError(f"a namespace may not have the name {name!r}")

    def raise_exception(message: str) -> NoReturn:
        raise TemplateError(message)

    def strftime_now(pattern: str) -> str:
        current().format(pattern)
        return now().strftime(pattern)

    def to_json(
        value: Any,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        # Unlike jinja's own filter this writes no HTML escapes, which models were not trained on.
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    def join(value: Any, d: str = "", attribute: str | int | None = None) -> str:
        items: Iterable[Any] = current().walk(value)
        if attribute is not None:
            items = map(make_attrgetter(environment, attribute), items)
        return current().join(items, str(d))

    def replace(text: Any, old: Any, new: Any, count: int | None = None) -> str:
        whole = str(text)
        current().method(whole, "replace", (str(old), str(new)))
        return whole.replace(str(old), str(new), -1 if count is None else count)

    def add_up(items: Any, attribute: str | int | None = None, start: Any = 0) -> Any:
        meter = current()
        total = start
        for item in meter.walk(items):
            one = item if attribute is None else make_attrgetter(environment, attribute)(item)
            meter.operator("+", total, one)
            total = total + one
        return total

    def metered(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        largest = _COUNTED_FILTERS.get(name)

        def checked(*args: Any, **kwargs: Any) -> Any:
            meter = current()
            meter.step()
            if largest is not None:
                for number in (*args[1:], *kwargs.values()):
                    if isinstance(number, int) and abs(number) > largest:
                        raise TemplateTooMuchError(f"it uses the filter {name} with {number}, which is over {largest}")
            if name == "format":
                meter.format(str(args[0]))
            return meter.value(function(*args, **kwargs))

        # Keeps the marks by which jinja knows that a filter wants its context or environment.
        marks = getattr(function, "__dict__", {})
        checked.__dict__.update((mark, value) for mark, value in marks.items() if mark.startswith("jinja_"))
        return checked

    environment = Environment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[GenerationTag, ext.loopcontrols],
        finalize=pass_context(lambda context, value: current().shown(value)),
        optimized=False,  # nothing is worked out while compiling, where no meter runs
    )
    for name in _REMOVED_FILTERS:
        environment.filters.pop(name, None)
    for name in _REMOVED_GLOBALS:
        environment.globals.pop(name, None)
    environment.filters.update(join=join, replace=replace, sum=add_up, tojson=to_json)
    environment.filters = {name: metered(name, function) for name, function in environment.filters.items()}
    # pass_context, here and above, keeps jinja from trying these on constants while compiling.
    environment.filters[_WALK] = pass_context(lambda context, items: current().walk(items))
    environment.filters[_JOIN] = pass_context(lambda context, texts: current().join(texts))
    environment.filters[_MADE] = pass_context(lambda context, made: current().value(made))
    environment.globals.update(
        dict=TemplateDict(), namespace=TemplateNamespace, raise_exception=raise_exception, strftime_now=strftime_now
    )
    return environment


def _put_in_filters(tree: nodes.Template) -> None:
    """Puts the meter's filters around loops, concatenations and lists of a parsed template; changes `tree`."""
    from jinja2 import nodes

    def through(name: str, node: Any) -> nodes.Filter:
        return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)

    def replaced(child: Any) -> Any:
        if not isinstance(child, nodes.Node):
            return child
        visit(child)
        if isinstance(child, nodes.Concat):
            return through(_JOIN, nodes.List(child.nodes, lineno=child.lineno))
        if isinstance(child, nodes.List | nodes.Dict) or (isinstance(child, nodes.Tuple) and child.ctx == "load"):
            return child if _is_constant(child) else through(_MADE, child)
        if isinstance(child, nodes.Getitem) and isinstance(child.arg, nodes.Slice):
            return through(_MADE, child)
        return child

    def visit(node: nodes.Node) -> None:
        for field, child in node.iter_fields():
            if isinstance(child, list):
                child[:] = [replaced(one) for one in child]
            else:
                setattr(node, field, replaced(child))
        if isinstance(node, nodes.For):
            node.iter = through(_WALK, node.iter)

    visit(tree)


def _is_constant(node: nodes.Node) -> bool:
    """A list or object written out in the template, all of it: as small as its source."""
    from jinja2 import nodes

    plain = nodes.Const | nodes.TemplateData | nodes.List | nodes.Tuple | nodes.Dict | nodes.Pair
    return all(isinstance(child, plain) and _is_constant(child) for child in node.iter_child_nodes())
