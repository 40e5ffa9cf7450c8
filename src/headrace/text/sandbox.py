"""Runs one chat template: jinja2's sandbox as transformers sets it up, with bounds on time and memory added.

jinja2's sandbox keeps a template from Python's internals, but not from looping for hours or doubling a string until
memory is gone. So loops, calls and string operations count against a budget; one run may take `MAX_STEPS` steps and
`MAX_CPU_S` of processor time, and no text may grow past a bound that follows the size of the input.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterable, Iterator, Mapping
from contextvars import ContextVar
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from headrace.base.errors import InvalidInput, UnsupportedModel

MAX_STEPS = 1_000_000
MAX_CPU_S = 2.0
_BASE_CHARS = 1_000_000
_CHARS_PER_INPUT_CHAR = 16
_BUILT_PER_CHAR = 256  # intermediate texts of one run together, as a multiple of the bound on one

# Padding makes large texts from small ones, and no chat template needs it.
_REFUSED_METHODS = frozenset({"center", "ljust", "rjust", "zfill", "expandtabs", "translate", "format_map", "encode"})
_REFUSED_FILTERS = ("batch", "center", "filesizeformat", "pprint", "slice", "urlize", "wordwrap", "xmlattr")
_PERCENT_WIDTH = re.compile(r"%[^a-zA-Z%]*(\d{4}|\*)")
_BRACE_WIDTH = re.compile(r"\{[^{}]*(\d{4}|\{)")


class _Refusal(Exception):
    """Raised by `raise_exception` in a template."""


class _OverBudget(Exception):
    """The template went over its bounds."""


class _Budget:
    def __init__(self, max_chars: int) -> None:
        self.max_chars = max_chars
        self.steps = 0
        self.deadline_s = time.thread_time() + MAX_CPU_S
        self.built_chars = 0

    def step(self) -> None:
        self.steps += 1
        if self.steps > MAX_STEPS:
            raise _OverBudget(f"took more than {MAX_STEPS:,} steps")
        if self.steps % 1024 == 0 and time.thread_time() > self.deadline_s:
            raise _OverBudget(f"took more than {MAX_CPU_S} s of processor time")

    def build(self, chars: int) -> None:
        """A text (or list) of this length is about to be built."""
        self.built_chars += max(chars, 0)
        if chars > self.max_chars or self.built_chars > _BUILT_PER_CHAR * self.max_chars:
            raise _OverBudget(f"built more than {self.max_chars:,} characters of text")


_budget: ContextVar[_Budget] = ContextVar("template budget")


class Program:
    """One compiled template. Raises `UnsupportedModel` if it does not compile.

    `takes_parts`: whether it goes through the parts of a message's content: `no`, `also` (besides plain text) or
    `only`.
    """

    def __init__(self, source: str) -> None:
        environment = _Environment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
        )
        try:
            tree = environment.parse(source)
            self.takes_parts = _takes_parts(tree)
            self._template = environment.from_string(_bounded(tree))
        except jinja2.TemplateError as error:
            line = getattr(error, "lineno", None)
            raise UnsupportedModel(
                f"the chat template does not compile: {error}" + (f" (line {line})" if line else ""),
                field="chat_template",
                remedy="give another template with --chat-template FILE",
            ) from None

    def render(self, variables: Mapping[str, Any]) -> str:
        """See `ChatTemplate.render`."""
        budget = _Budget(_BASE_CHARS + _CHARS_PER_INPUT_CHAR * _chars(variables))
        token = _budget.set(budget)
        try:
            pieces: list[str] = []
            total = 0
            for piece in self._template.generate(variables):
                total += len(piece)
                if total > budget.max_chars:
                    raise _OverBudget(f"wrote more than {budget.max_chars:,} characters")
                pieces.append(piece)
            return "".join(pieces)
        except _Refusal as refusal:
            raise InvalidInput(str(refusal), field="messages") from None
        except SecurityError as error:
            raise _broken(f"is not safe: {error}") from None
        except _OverBudget as error:
            raise _broken(f"was stopped: it {error}") from None
        except (RecursionError, MemoryError, OverflowError) as error:
            raise _broken(f"was stopped: {type(error).__name__}") from None
        except Exception as error:  # whatever a template can raise on input it does not expect
            raise InvalidInput(
                f"the model's chat template cannot render these messages: {error}",
                field="messages",
                remedy="check the roles, that each message has its content, and what the template needs",
            ) from None
        finally:
            _budget.reset(token)


def _broken(why: str) -> UnsupportedModel:
    return UnsupportedModel(
        f"the model's chat template {why}",
        field="chat_template",
        remedy="give another template with --chat-template FILE",
    )


class _Environment(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        for name in _REFUSED_FILTERS:
            del self.filters[name]
        self.filters |= {
            _COUNTED: _counted,
            _CONCATENATED: lambda parts: _concat(map(str, parts)),
            "tojson": _tojson,
            "format": _format,
            "indent": _indent,
            "join": _join,
            "replace": _replace,
        }
        self.globals |= {
            "raise_exception": _raise_exception,
            "strftime_now": _strftime_now,
            "dict": _Dict(),
            "namespace": _Namespace,
        }
        del self.globals["lipsum"]

    @staticmethod
    def concat(texts: Iterable[str]) -> str:  # what macros, `set` blocks and the like put together
        return _concat(texts)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        if isinstance(obj, str) and attr in _REFUSED_METHODS:
            return False
        return bool(super().is_safe_attribute(obj, attr, value))

    def wrap_str_format(self, value: Any) -> Any:
        wrapped = super().wrap_str_format(value)
        if wrapped is not None and _BRACE_WIDTH.search(value.__self__):
            raise SecurityError("a text is formatted to a width")
        return wrapped

    def call(self, context: Any, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        budget = _budget.get()
        budget.step()
        owner = getattr(obj, "__self__", None)
        if isinstance(owner, str):
            match getattr(obj, "__name__", ""), args:
                case "replace", (str(old), str(new), *_):
                    budget.build(_replaced_chars(owner, old, new))
                case "join", (parts,):
                    return _join(self, parts, owner)
        return super().call(context, obj, *args, **kwargs)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        budget = _budget.get()
        budget.step()
        match operator, left, right:
            case "*", (str() | list() | tuple()), int():
                budget.build(len(left) * right)
            case "*", int(), (str() | list() | tuple()):
                budget.build(left * len(right))
            case "*", int(), int():
                budget.build(left.bit_length() + right.bit_length())
            case "**", int(), int():
                budget.build(left.bit_length() * abs(right))
            case "+", (str() | list() | tuple()), (str() | list() | tuple()):
                budget.build(len(left) + len(right))
            case "%", str(), _:
                return _format(left, *(right if isinstance(right, tuple) else (right,)))
        return super().call_binop(context, operator, left, right)


_COUNTED, _CONCATENATED = "counted by the sandbox", "concatenated by the sandbox"  # names no template can write


def _bounded(tree: nodes.Template) -> nodes.Template:
    """Count every turn of every loop, and check the length of every `~`."""
    for loop in list(tree.find_all(nodes.For)):
        loop.iter = _filter(loop.iter, _COUNTED)
    _replace_concats(tree)
    return tree.set_environment(tree.environment)  # type: ignore[arg-type, return-value]


def _replace_concats(node: nodes.Node) -> None:
    for child in list(node.iter_child_nodes()):
        _replace_concats(child)
    for name, value in list(node.iter_fields()):
        if isinstance(value, list):
            value[:] = [_without_concat(item) for item in value]
        elif isinstance(value, nodes.Concat):
            setattr(node, name, _without_concat(value))


def _without_concat(node: Any) -> Any:
    return (
        _filter(nodes.List(node.nodes, lineno=node.lineno), _CONCATENATED) if isinstance(node, nodes.Concat) else node
    )


def _filter(node: Any, name: str) -> nodes.Filter:
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)


def _counted(items: Iterable[Any]) -> Iterator[Any]:
    budget = _budget.get()
    for item in items:
        budget.step()
        yield item


def _concat(texts: Iterable[str]) -> str:
    parts = list(texts)
    _budget.get().build(sum(map(len, parts)))
    return "".join(parts)


def _format(template: Any, *args: Any, **kwargs: Any) -> str:
    text = str(template)
    if _PERCENT_WIDTH.search(text):
        raise SecurityError("a text is formatted to a width")
    formatted: str = text % (kwargs or args)
    _budget.get().build(len(formatted))
    return formatted


@jinja2.pass_environment
def _join(environment: Any, value: Any, d: str = "", attribute: str | int | None = None) -> str:
    items = list(_counted(value))
    if attribute is not None:
        items = [environment.getitem(item, attribute) for item in items]
    texts = [str(item) for item in items]
    _budget.get().build(sum(map(len, texts)) + len(d) * len(texts))
    return d.join(texts)


def _replace(value: Any, old: str, new: str, count: int | None = None) -> str:
    text = str(value)
    _budget.get().build(_replaced_chars(text, old, new))
    return text.replace(old, new, -1 if count is None else count)


def _replaced_chars(text: str, old: str, new: str) -> int:
    return len(text) + text.count(old) * max(0, len(new) - len(old))


def _indent(value: Any, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
    text = str(value)
    margin = width if isinstance(width, str) else " " * min(width, 1000)
    lines = text.splitlines(keepends=True)
    _budget.get().build(len(text) + len(margin) * len(lines))
    indented = [
        margin + line if (index or first) and (blank or line.strip()) else line for index, line in enumerate(lines)
    ]
    return "".join(indented)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as it is, where jinja2's own filter would escape it for HTML."""
    if indent is not None and not 0 <= int(indent) <= 64:
        raise SecurityError("JSON is indented by more than 64")
    text = json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
    _budget.get().build(len(text))
    return text


def _raise_exception(message: Any) -> NoReturn:
    raise _Refusal(str(message))


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


class _Dict:
    """`dict(…)` without the attributes of the class."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)


class _Namespace(Namespace):
    """`namespace(…)`, which cannot hold names that reach into Python."""

    def __setitem__(self, name: str, value: Any) -> None:
        if str(name).startswith("_"):
            raise SecurityError(f"a namespace cannot hold {name!r}")
        super().__setitem__(name, value)


class _Generation(Extension):
    """`{% generation %}…{% endgeneration %}` marks the assistant's words for training; here it is just its content."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it so

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


def _takes_parts(tree: nodes.Template) -> str:
    """`no`, `also` or `only`: whether the template loops over a message's content, and tests for a string too."""
    names = {"content"}  # the usual name of a macro's parameter for it
    for assignment in tree.find_all(nodes.Assign):
        if isinstance(assignment.target, nodes.Name) and _is_content(assignment.node, names):
            names.add(assignment.target.name)
    if not any(_is_content(loop.iter, names) for loop in tree.find_all(nodes.For)):
        return "no"
    tests = (test for test in tree.find_all(nodes.Test) if test.name in ("string", "iterable", "sequence", "mapping"))
    return "also" if any(_is_content(test.node, names) for test in tests) else "only"


def _is_content(node: nodes.Node | None, names: set[str]) -> bool:
    match node:
        case nodes.Getattr(attr="content"):
            return True
        case nodes.Getitem(arg=nodes.Const(value="content")):
            return True
        case nodes.Name(name=name):
            return name in names
        case nodes.Filter(node=inner):
            return _is_content(inner, names)
        case nodes.CondExpr(expr1=one, expr2=other):
            return _is_content(one, names) or _is_content(other, names)
    return False


def _chars(value: Any) -> int:
    """Characters of all strings in a JSON-like value."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, Mapping):
        return sum(_chars(key) + _chars(item) for key, item in value.items())
    if isinstance(value, list | tuple):
        return sum(map(_chars, value))
    return 8
