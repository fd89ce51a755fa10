"""Messages to the text a model was trained on, by the template that comes with its checkpoint.

Knows: which template a checkpoint is spoken to with, what shape of messages it reads, how its failures are worded.
Refuses to know: token ids (tokenizer.py's `encode_chat` owns BOS), how a hostile template is stopped (template_sandbox.py).

jinja2 is imported when the first template is compiled.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tradewind.contract.errors import RequestError, UserError
from tradewind.serving.template_sandbox import (
    Meter,
    Rendering,
    TemplateLimits,
    TemplateTooMuchError,
    metered_environment,
)

if TYPE_CHECKING:
    from jinja2 import Template, nodes

    from tradewind.serving.tokenizer import TextTokenizer


CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
"""What a model that has `<|im_start|>` and `<|im_end|>` but no template of its own is spoken to in."""


class ChatTemplate:
    """One compiled template. `render` changes nothing; safe to share among threads."""

    def __init__(
        self,
        source: str,
        *,
        bos_token: str = "",
        eos_token: str = "",
        limits: TemplateLimits | None = None,
        now: Callable[[], datetime.datetime] = datetime.datetime.now,
    ) -> None:
        """Compiles `source`; raises UserError naming the line when it is no template. `now` feeds `strftime_now`."""
        import jinja2

        self._limits = limits or TemplateLimits()
        if not isinstance(source, str):
            raise UserError(f"a chat template must be text, not {type(source).__name__}")
        if len(source) > self._limits.source_chars:
            raise UserError(
                f"the chat template has {len(source)} characters; at most {self._limits.source_chars} are allowed"
            )
        self.source = source
        self._bos_token = bos_token
        self._eos_token = eos_token
        self._rendering = Rendering()
        environment = metered_environment(self._current_meter, now=now)
        try:
            tree = environment.parse(source)
            self._knows_none = "none" in source.lower()
            self._parts = _content_parts(tree)
            self._template: Template = environment.from_string(tree)
        except jinja2.TemplateSyntaxError as error:
            raise UserError(f"the chat template is broken at line {error.lineno}: {_one_line(error.message)}") from None
        except RecursionError:
            raise UserError("the chat template is nested too deeply to be compiled") from None

    @classmethod
    def for_tokenizer(
        cls,
        tokenizer: TextTokenizer,
        *,
        source: str | None = None,
        tools: bool = False,
        limits: TemplateLimits | None = None,
    ) -> ChatTemplate:
        """The template to use with a vocabulary: `source` if given, the checkpoint's own, ChatML if it has those tokens.

        With `tools` a checkpoint's separate `tool_use` template is preferred. Raises UserError when there is none.
        """
        own = tokenizer.chat_templates
        chosen = source or (own.get("tool_use") if tools else None) or own.get("default")
        if chosen is None and all(tokenizer.token_id(token) is not None for token in ("<|im_start|>", "<|im_end|>")):
            chosen = CHATML
        if chosen is None:
            raise UserError(
                "this model has no chat template, so it is not known how to speak to it in turns;"
                " use plain text completion, or give a template of your own"
            )
        return cls(chosen, bos_token=tokenizer.bos_token, eos_token=tokenizer.eos_token, limits=limits)

    @property
    def takes_parts(self) -> bool:
        """The template reads a message's content as a list of {type, text} parts itself."""
        return self._parts != "text"

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **kwargs: Any,
    ) -> str:
        """The text of a conversation; changes nothing.

        `messages`: {role, content, ...}, content a string or a list of {"type": "text", "text": ...} and {"type": "image"}, for which a
        template that knows images writes their mark. `kwargs` reach the
        template as variables. Raises RequestError for messages of a wrong shape and UserError, with the template's line, when
        the template refuses them, fails, or asks for more than its limits.
        """
        import jinja2

        variables: dict[str, Any] = {"bos_token": self._bos_token, "eos_token": self._eos_token, "documents": None}
        variables.update(kwargs)
        variables.update(
            messages=[self._message(message, place) for place, message in enumerate(check_messages(messages))],
            tools=None if tools is None else [dict(tool) for tool in tools],
            add_generation_prompt=add_generation_prompt,
        )
        self._rendering.meter = meter = Meter(self._limits)
        pieces: list[str] = []
        try:
            meter.weigh(variables)
            for piece in self._template.generate(variables):
                meter.step()
                meter.emit(len(piece))
                pieces.append(piece)
        except TemplateTooMuchError as error:
            raise UserError(f"the chat template was stopped{_at_line(error)}: {error}") from None
        except jinja2.UndefinedError as error:
            raise UserError(
                f"the chat template fails{_at_line(error)}: it uses something the messages do not have, {_one_line(error)}"
            ) from None
        except jinja2.exceptions.SecurityError as error:
            raise UserError(
                f"the chat template does something it may not{_at_line(error)}: {_one_line(error)}"
            ) from None
        except jinja2.TemplateError as error:
            raise UserError(f"the chat template refuses these messages{_at_line(error)}: {_one_line(error)}") from None
        except RecursionError as error:
            raise UserError(f"the chat template was stopped{_at_line(error)}: it calls itself without end") from None
        except Exception as error:  # whatever Python thinks of the template's code is the template's fault
            raise UserError(
                f"the chat template fails{_at_line(error)}: {type(error).__name__}: {_one_line(error)}"
            ) from None
        finally:
            self._rendering.meter = None
        return "".join(pieces)

    def _current_meter(self) -> Meter:
        # Without a rendering (jinja trying a constant while compiling) each step gets a meter of its own.
        return self._rendering.meter or Meter(self._limits)

    def _message(self, message: Mapping[str, Any], place: int) -> dict[str, Any]:
        """A copy of a message with its content in the shape the template reads."""
        copy = dict(message)
        content = copy.get("content")
        if isinstance(content, list | tuple):
            parts = [_plain_part(part, place) for part in content]
            if self._parts != "text":
                copy["content"] = parts
            elif IMAGE_PART in parts:
                raise RequestError(f"message {place} has an image, and this model's chat template reads text alone")
            else:
                copy["content"] = "\n".join(part["text"] for part in parts)
        elif isinstance(content, str) and self._parts == "parts":
            copy["content"] = [{"type": "text", "text": content}]
        elif content is None and "content" in copy and not self._knows_none:
            copy["content"] = ""  # a turn of tool calls only; most templates join it to other text
        return copy


def check_messages(messages: object) -> list[Mapping[str, Any]]:
    """The messages as a list; raises RequestError, in one sentence, naming the first that has a wrong shape."""
    if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Sequence):
        raise RequestError(f"messages must be a list of {{role, content}}, not {type(messages).__name__}")
    if not messages:
        raise RequestError("messages is empty; a chat needs at least one message")
    for place, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise RequestError(f"message {place} must be an object with role and content, not {type(message).__name__}")
        if not isinstance(message.get("role"), str) or not message["role"]:
            raise RequestError(f"message {place} has no role; give 'system', 'user', 'assistant' or 'tool'")
        content = message.get("content")
        if content is None and message["role"] != "assistant":
            raise RequestError(f"message {place} ({message['role']}) has no content")
        if content is not None and not isinstance(content, str | list | tuple):
            raise RequestError(
                f"the content of message {place} must be text or a list of text parts, not {type(content).__name__}"
            )
    return list(messages)


IMAGE_PART: dict[str, str] = {"type": "image"}
"""An image of a message, as templates see it."""


def _plain_part(part: object, place: int) -> dict[str, str]:
    """A part with nothing in it but what templates may see."""
    if isinstance(part, str):
        return {"type": "text", "text": part}
    kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    if isinstance(part, Mapping) and kind == "text" and isinstance(part.get("text"), str):
        return {"type": "text", "text": str(part["text"])}
    if isinstance(part, Mapping) and part == IMAGE_PART:
        return dict(IMAGE_PART)
    raise RequestError(
        f"message {place} has a content part of type {kind!r}; this model takes parts of type 'text' with a text"
    )


# -- what a template expects


def _content_parts(tree: nodes.Template) -> str:
    """Whether a template reads content as `text`, as `parts`, or tells the two apart (`either`), seen from its loops.

    It reads parts when it loops over `content` or over something set from it, and tells apart when it also tests what it has.
    """
    from jinja2 import nodes

    def bare(node: nodes.Node | None) -> nodes.Node | None:
        while isinstance(node, nodes.Filter):
            node = node.node
        return node

    names = {"content"}

    def is_content(node: nodes.Node | None) -> bool:
        node = bare(node)
        if isinstance(node, nodes.Getattr):
            return node.attr == "content"
        if isinstance(node, nodes.Getitem):
            return isinstance(node.arg, nodes.Const) and node.arg.value == "content"
        return isinstance(node, nodes.Name) and node.name in names

    for assign in tree.find_all(nodes.Assign):
        if is_content(assign.node) and isinstance(assign.target, nodes.Name):
            names.add(assign.target.name)
    if not any(is_content(loop.iter) for loop in tree.find_all(nodes.For)):
        return "text"
    tests = {test.name for test in tree.find_all(nodes.Test)}
    return "either" if tests & {"string", "iterable", "mapping", "sequence"} else "parts"


def _at_line(error: BaseException) -> str:
    """` at line N` of the template, from the traceback that jinja rewrote, or nothing."""
    line = None
    step = error.__traceback__
    while step is not None:
        if step.tb_frame.f_code.co_filename == "<template>":
            line = step.tb_lineno
        step = step.tb_next
    return "" if line is None else f" at line {line}"


def _one_line(message: object) -> str:
    return " ".join(str(message).split())
