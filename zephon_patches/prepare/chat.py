"""Conversations to texts, with the chat template of a tokenizer's folder, and where in them the assistant speaks.

A template is a Jinja program; it comes with a tokenizer from anywhere, so it runs in Jinja's sandbox and may change
nothing. It gets what Hugging Face's tokenizers give it: ``messages``, ``add_generation_prompt``, ``tools`` and
``documents`` (none), the special tokens of ``tokenizer_config.json``, ``raise_exception`` and the filter ``tojson``.
There is no ``strftime_now``: a text that depends on the day of tokenizing is not one text, and templates that use it
have a fixed date for where it is missing.

What the assistant says are the ``{% generation %}`` blocks of a template that has some. Else the conversation up to a
turn of the assistant, with the prompt that makes it speak, is rendered too: it must be what the text up to that turn
begins with, and the turn is the rest.

Worked case, with ``<|role|>content<|end|>`` for each message and the prompt ``<|assistant|>``: the conversation
(user: hi) (assistant: yes) gives ``<|user|>hi<|end|><|assistant|>yes<|end|>``, and the span is that of
``yes<|end|>``.
"""

import json
import re
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import orjson
from jinja2.sandbox import ImmutableSandboxedEnvironment

from zephon_patches.errors import InputError
from zephon_patches.keys import fingerprint
from zephon_patches.prepare.readers import BadRecord, has_lone_surrogate
from zephon_patches.prepare.rendered import Rendered

__all__ = ["ChatTemplate"]

# Stand around what the assistant says while a text is rendered. Unicode promises that they are no characters.
_BEGIN, _END = "\ufdd0", "\ufdd1"
_MARKS = re.compile(f"[{_BEGIN}{_END}]")

_HAS_GENERATION = re.compile(r"\{%[-+]?\s*generation\b")
_SPECIAL_TOKENS = ("bos_token", "eos_token", "pad_token", "unk_token", "sep_token", "cls_token", "mask_token")
_ASSISTANT = "assistant"


class ChatTemplate:
    """The template of a tokenizer's folder.

    Args:
        folder: Has ``chat_template.jinja``, or ``tokenizer_config.json`` with the key ``chat_template``.

    Raises:
        InputError: There is none, or it is no template.
    """

    def __init__(self, folder: Path) -> None:
        self._config = _read_config(folder / "tokenizer_config.json")
        self.path, self._source = self._find(folder)
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise
        try:
            self._template = environment.from_string(self._source)
        except jinja2.TemplateError as error:
            raise InputError(f"{self.path}: the chat template is no Jinja template ({error})") from None
        tokens = {key: self._config.get(key) for key in _SPECIAL_TOKENS}
        named = {key: token.get("content") if isinstance(token, dict) else token for key, token in tokens.items()}
        self._tokens = {key: token for key, token in named.items() if isinstance(token, str)}
        self._has_generation = bool(_HAS_GENERATION.search(self._source))

    @cached_property
    def identity(self) -> str:
        """16 hexadecimal digits for the template and the tokens it gets."""
        return fingerprint([self._source, self._tokens])

    def render(self, messages: Any, name: str) -> Rendered | BadRecord:
        """Renders a conversation.

        Args:
            messages: What a record has as its conversation.
            name: Of the field that it stands in, for messages.
        """
        if not (isinstance(messages, list) and messages and all(_is_message(message) for message in messages)):
            return BadRecord(
                "wrong type", f"{name} is no conversation: expected a list of messages, each an object with a role"
            )
        if _MARKS.search(json.dumps(messages, ensure_ascii=False, default=str)):
            return BadRecord("noncharacter", f"{name} has U+FDD0 or U+FDD1 in it, which no text may")
        try:
            found = self._rendered(messages, name)
        except Exception as error:  # a template may do anything to a message that it does not expect
            return BadRecord("template error", f"the chat template in {self.path} fails for {name}: {error!r:.300}")
        if isinstance(found, Rendered) and has_lone_surrogate(found.text):
            return BadRecord("lone surrogate", f"{name} has a lone surrogate in it")
        return found

    def _rendered(self, messages: list[dict[str, Any]], name: str) -> Rendered | BadRecord:
        marked = self._text(messages)
        if self._has_generation:
            return _unmarked(marked)
        spans = []
        for number, message in enumerate(messages):
            if message["role"] != _ASSISTANT:
                continue
            until = self._text(messages[: number + 1]) if number + 1 < len(messages) else marked
            before = self._text(messages[:number], add_generation_prompt=True)
            if not until.startswith(before):
                before = self._text(messages[:number])
            if not (until.startswith(before) and marked.startswith(until)):
                return BadRecord(
                    "not a prefix",
                    f"{name}: message {number} (from 0) changes how the chat template in {self.path} writes those "
                    "before it, so where the assistant speaks cannot be told; put {% generation %} blocks around that "
                    "in the template",
                )
            spans.append((len(before), len(until)))
        return Rendered(marked, spans)

    def _text(self, messages: Sequence[dict[str, Any]], add_generation_prompt: bool = False) -> str:
        return self._template.render(
            messages=list(messages),
            add_generation_prompt=add_generation_prompt,
            tools=None,
            documents=None,
            **self._tokens,
        )

    def _find(self, folder: Path) -> tuple[Path, str]:
        path = folder / "chat_template.jinja"
        try:
            return path, path.read_text(encoding="utf-8")
        except FileNotFoundError:
            pass
        except (OSError, UnicodeDecodeError) as error:
            raise InputError(f"{path}: cannot be read ({error})") from None
        found = self._config.get("chat_template")
        if isinstance(found, list):  # several, each with a name
            named = {entry.get("name"): entry.get("template") for entry in found if isinstance(entry, dict)}
            found = named.get("default")
        if not isinstance(found, str):
            raise InputError(
                f"{folder}: no chat template: expected chat_template.jinja, or the key chat_template in "
                "tokenizer_config.json; conversations need one"
            )
        return folder / "tokenizer_config.json", found


class _Generation(jinja2.ext.Extension):
    """``{% generation %} ... {% endgeneration %}``: puts marks around what is inside."""

    tags = {"generation"}  # noqa: RUF012  (as the base class has it)

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_marked"), [], [], body).set_lineno(line)

    def _marked(self, caller: Any) -> str:
        return f"{_BEGIN}{caller()}{_END}"


def _unmarked(text: str) -> Rendered | BadRecord:
    """Takes the marks out of a text."""
    parts = _MARKS.split(text)
    marks = _MARKS.findall(text)
    if marks != [_BEGIN, _END] * (len(marks) // 2):
        return BadRecord("template error", "the chat template repeats, nests or cuts what is in a generation block")
    spans, at = [], 0
    for number, part in enumerate(parts):
        if number % 2 and part:
            spans.append((at, at + len(part)))
        at += len(part)
    return Rendered("".join(parts), spans)


def _is_message(message: Any) -> bool:
    return isinstance(message, dict) and isinstance(message.get("role"), str)


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)


def _to_json(value: Any, indent: int | None = None) -> str:
    # Not Jinja's own, which escapes for HTML.
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _read_config(path: Path) -> dict[str, Any]:
    try:
        content = orjson.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror})") from None
    except orjson.JSONDecodeError as error:
        raise InputError(f"{path}: damaged, not JSON ({error})") from None
    if not isinstance(content, dict):
        raise InputError(f"{path}: expected a JSON object")
    return content
