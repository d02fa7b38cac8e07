# SPDX-License-Identifier: Apache-2.0
"""Writes enums.py, options.py and _members.py of the Python package."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Iterator

import names
from docs import Translator, sentence
from header import Enum, Enumerator, Field, Function, Header, Struct

_WIDTH = 110

# Classes of which members are generated in a base class, and functions whose members do more than call them.
_CLASSES = ("Context", "Group", "Param", "BatchNorm")
_MEMBERS_BY_HAND = {"ga_group_count", "ga_param_count", "ga_bn_count", "ga_context_set_stream"}
_ASSIGNED = {"Group.lr", "Group.optimizer"}  # properties that are set by assignment
_PROPERTIES = {"Context.loss_scale"}  # by hand

# Enumerators that Python adds: what stands for "none of them", and its comment.
_ADDED = {
    "ga_dtype": ("DEFAULT", "The choice of the library, where a field says so."),
    "ga_micro_flags": ("NONE", "None of them."),
}
_LEFT_OUT = {"GA_OK"}  # a call that succeeds raises nothing
_NOT_SHOWN = {"ga_transpose", "ga_accumulator"}  # a Tensor has strides

# Classes of _struct.py with what is not as in C; others derive from Struct or Result.
_BASES = {
    "ga_optimizer": "OptimizerStruct", "ga_schedule": "ScheduleStruct", "ga_param_options": "ParamOptionsStruct",
    "ga_state_options": "StateOptionsStruct",
}  # fmt: skip

# Arguments of an _init function: the field that the struct has for it, or its comment, and the default.
_ARGUMENTS = {
    ("ga_optimizer", "flavor"): "Flavor.TORCH",
    ("ga_bn_options", "flavor"): "Flavor.TORCH",
}
_ARGUMENT_DOCS = {("ga_bn_options", "flavor"): "Whose defaults."}

_CALLBACKS = {
    "ga_log": "Callable[[str], object]",
    "ga_param_done": 'Callable[["Param"], object]',
    "ga_progress": "Callable[[int, int], object]",
}

# What the comments of a class say beyond the header's.
_MORE = {
    "ga_config": "What ``log`` and ``on_param_done`` raise goes to ``sys.unraisablehook``.",
    "ga_state_options": "If ``progress`` raises or returns something true, the call ends.",
}

# Members beyond the header.
_MEMBERS = {
    "ga_dtype": '''
    @property
    def itemsize(self) -> int:
        """Bytes of an element; of STATE_8BIT, without the scales of blocks."""
        return 1 if self is Dtype.STATE_8BIT else (0, 4, 8, 2, 2, 4, 8, 1)[self]
''',
    "ga_step_result": '''
    @property
    def applied(self) -> bool:
        """Whether the step was applied."""
        return self.outcome == StepOutcome.APPLIED
''',
}


class _Words:
    null, false, true = "None", "False", "True"

    def __init__(self, header: Header) -> None:
        self.header = header
        self.properties = {f"{f.owner}.{f.name}" for f in header.functions if f.result} | _PROPERTIES

    def type(self, c_name: str) -> str:
        return f"``{names.TYPES[c_name]}``"

    def field(self, struct: str, name: str) -> str:
        return f"``{names.TYPES[struct]}.{name}``"

    def own_field(self, struct: str, name: str) -> str:
        return f"``{name}``"

    def constant(self, enum: Enum, enumerator: Enumerator) -> str:
        return f"``{names.TYPES[enum.c_name]}.{enumerator.name}``"

    def function(self, member: str) -> str:
        return f"``{member}``" if member in self.properties else f"``{member}()``"

    def text(self, text: str) -> str:
        return text.replace("\\", "\\\\")


def write(header: Header) -> dict[str, str]:
    """The files: name and text."""
    translator = Translator(header, _Words(header))
    enums = [e for e in header.enums.values() if e.c_name not in _NOT_SHOWN]
    files = {
        "enums.py": "\n".join(_enums(enums, translator)),
        "options.py": "\n".join(_options(header, translator)),
        "_members.py": "\n".join(_members_of_classes(header, translator)),
    }
    translator.check()
    return files


def _head(doc: str) -> list[str]:
    return ["# SPDX-License-Identifier: Apache-2.0", "# Generated from gradaccum.h by bindings/generate.", f'"""{doc}"""', ""]


def _docstring(text: str, indent: str) -> Iterator[str]:
    paragraphs = [textwrap.wrap(p, _WIDTH - len(indent) - 6) for p in text.split("\n\n")]
    lines = [line for p in paragraphs for line in [*p, ""]][:-1]
    lines = [indent + line if line else "" for line in lines]
    lines[0] = f'{indent}"""{lines[0].strip()}'
    lines[-1] += '"""'
    yield from lines


def _members_of_classes(header: Header, translator: Translator) -> Iterator[str]:
    yield from _head("What classes have of gradaccum.h as it is there: a base of each.")
    functions = [f for f in header.functions if f.owner in _CLASSES and f.c_name not in _MEMBERS_BY_HAND]
    values = [f.argument or f.result for f in functions]
    used = {v.struct for v in values if v}
    enums = {v.enum.c_name for v in values if v and v.enum}
    yield from ["from . import _raw", "from ._guard import Guard", "from ._object import ContextObject"]
    yield from _import(".enums", [names.TYPES[e] for e in header.enums if e in enums]) if enums else ()
    yield from _import(".options", [names.TYPES[s] for s in header.structs if s in used])
    for owner in _CLASSES:
        base = "" if owner == "Context" else "(ContextObject)"
        yield from ["", "", f"class {owner}Members{base}:", f'    """What {owner} has of gradaccum.h as it is there."""', ""]
        yield "    _guard: Guard" if owner == "Context" else "    __slots__ = ()"
        for f in functions:
            if f.owner == owner:
                yield from _member(f, functions, translator)


def _member(f: Function, functions: list[Function], translator: Translator) -> Iterator[str]:
    """A property of what a function returns, which may be set; a method of what it does."""
    guard, handle = ("self._guard", "c") if f.owner == "Context" else ("self.context._guard", "c, self.id")
    value = f.argument or f.result
    kind = "None" if value is None else _value_type(value)
    doc = translator.function(f, sentence(translator.value(f)) if f.result else "")
    if f.argument:
        if f"{f.owner}.{f.name.removeprefix('set_')}" in _ASSIGNED:
            return
        name = f.argument.c_name
        yield from ["", f"    def {f.name}(self, {name}: {kind}{' | None' if f.argument.clears else ''}) -> None:"]
        about = f"\n\n{name}: {translator.argument(f)}."
        yield from _docstring(_summarised(doc) + about + _raises(f, translator), "        ")
        yield from _forward(f, guard, handle)
        return
    if f.result is None:
        yield from ["", f"    def {f.name}(self) -> None:"]
        yield from _docstring(_summarised(doc) + _raises(f, translator), "        ")
        yield from [f"        with {guard} as c:", f"            _raw.{f.c_name}({handle})"]
        return
    setter, assigned = None, ""
    if f"{f.owner}.{f.name}" in _ASSIGNED:
        setter = next(s for s in functions if (s.owner, s.name) == (f.owner, f"set_{f.name}"))
        text = translator.function(setter)
        assigned = f"\n\nAssignment {text[0].lower()}{text[1:]}{_raises(setter, translator)}"
    yield from ["", "    @property", f"    def {f.name}(self) -> {kind}:"]
    yield from _docstring(_summarised(doc) + assigned + _raises(f, translator), "        ")
    yield f"        with {guard} as c:"
    if f.result.struct:
        yield f"            struct = _raw.{f.result.struct}({translator.header.structs[f.result.struct].zeros})"
        yield from [f"            _raw.{f.c_name}({handle}, struct)", f"            return {kind}._read(struct)"]
    else:
        call = f"_raw.{f.c_name}({handle})"
        yield f"            value: {kind} = {f'{kind}({call})' if f.result.enum or kind == 'bool' else call}"
        yield "            return value"
    if setter is not None and setter.argument is not None:
        name = setter.argument.c_name
        yield from ["", f"    @{f.name}.setter", f"    def {f.name}(self, {name}: {kind}) -> None:"]
        yield from _forward(setter, guard, handle)


def _forward(f: Function, guard: str, handle: str) -> Iterator[str]:
    assert f.argument is not None
    name = f.argument.c_name
    given = {"bool": f"int({name})", "struct": f"{name}._write()"}.get(f.argument.kind, name)
    if f.argument.clears:
        given = f"None if {name} is None else {given}"
    yield from [f"        with {guard} as c:", f"            _raw.{f.c_name}({handle}, {given})"]


def _value_type(value: Field) -> str:
    return names.TYPES[value.struct] if value.struct else "int" if value.kind == "size" else _type(value)


def _summarised(text: str) -> str:
    """The first sentence in a paragraph of its own."""
    return re.sub(r"(?<=[.]) (?=[A-Z`])", "\n\n", text, count=1)


def _raises(f: Function, translator: Translator) -> str:
    return "".join(f"\n\nError {error}." for error in translator.errors(f))


def _enums(enums: list[Enum], translator: Translator) -> Iterator[str]:
    yield from _head("The enumerations of gradaccum.h, with the numbers that they have there.")
    yield "from enum import IntEnum, IntFlag"
    for enum in enums:
        yield from ["", "", f"class {names.TYPES[enum.c_name]}({'IntFlag' if enum.is_flags else 'IntEnum'}):"]
        yield from _docstring(translator.enum(enum), "    ")
        yield ""
        if enum.c_name in _ADDED:
            name, doc = _ADDED[enum.c_name]
            yield f"    {name} = 0"
            yield from _docstring(doc, "    ")
        for e in enum.enumerators:
            if e.c_name not in _LEFT_OUT:
                yield f"    {e.name} = {e.value}"
                yield from _docstring(translator.enumerator(e, enum), "    ")
        yield from _members(enum.c_name)


def _members(c_name: str) -> Iterator[str]:
    if c_name in _MEMBERS:
        yield from _MEMBERS[c_name].rstrip("\n").split("\n")


def _options(header: Header, translator: Translator) -> Iterator[str]:
    yield from _head("Configuration and results.")
    shown = [e for e in header.enums if e not in _NOT_SHOWN]
    structs = [s for s in header.structs.values() if s.c_name not in _NOT_SHOWN]
    used = {f.enum.c_name for s in structs for f in s.fields if f.enum} | {"ga_flavor"}
    bases = sorted({_BASES.get(s.c_name, "Struct") for s in structs if not s.is_result} | {"Result"})
    yield from [
        "from collections.abc import Callable, Sequence",
        "from dataclasses import dataclass",
        "from typing import TYPE_CHECKING, NamedTuple",
        "",
        *_import("._struct", ["DEFAULT", *bases]),
        *_import(".enums", [names.TYPES[e] for e in shown if e in used]),
        "",
        "if TYPE_CHECKING:",
        "    from .params import Param",
    ]
    for struct in structs:
        if struct.c_name == "ga_step_result":
            yield from _tuple(struct, translator)
        elif struct.is_result:
            yield from _result(struct, translator)
        else:
            yield from _option(struct, translator)


def _import(module: str, imported: list[str]) -> Iterator[str]:
    yield f"from {module} import ("
    yield from textwrap.wrap(", ".join(imported) + ",", _WIDTH, initial_indent="    ", subsequent_indent="    ")
    yield ")"


def _types(struct: Struct) -> Iterator[str]:
    """How the numbers of C become those of Python, where they differ."""
    pairs = []
    for f in struct.fields:
        if f.kind == "enum" and f.enum is not None:
            kind = names.TYPES[f.enum.c_name]
            if f.is_optional and f.enum.c_name not in _ADDED:
                kind = f"lambda value: {kind}(value) if value else None"
            pairs.append(f'"{f.c_name}": {kind}')
        elif f.kind == "bool":
            pairs.append(f'"{f.c_name}": bool')
    if pairs:
        yield "    _types = {"
        yield from [f"        {pair}," for pair in pairs]
        yield "    }"


def _strings(values: Iterable[str]) -> str:
    """A tuple, as it is written."""
    return "(" + " ".join(f'"{v}",' for v in values) + ")"


def _type(f: Field) -> str:
    if f.kind == "enum" and f.enum is not None:
        return names.TYPES[f.enum.c_name] + (" | None" if _is_none_possible(f) else "")
    if f.kind == "array":
        if isinstance(f.length, int):
            return "tuple[" + ", ".join(["float"] * f.length) + "]"
        return "tuple[int, ...]" if f.c_name == "shape" else "Sequence[float]"
    if f.kind == "callback":
        return f"{_CALLBACKS[f.callback]} | None"
    return {"bool": "bool", "int": "int", "double": "float", "string": "str", "address": "int"}[f.kind]


def _is_none_possible(f: Field) -> bool:
    return f.is_optional and f.enum is not None and f.enum.c_name not in _ADDED


def _option(struct: Struct, translator: Translator) -> Iterator[str]:
    keywords = "frozen=True" if struct.arguments else "frozen=True, kw_only=True"
    name = names.TYPES[struct.c_name]
    base = _BASES.get(struct.c_name, "Struct")
    yield from ["", "", f"@dataclass({keywords})", f"class {name}({base}):"]
    more = _MORE.get(struct.c_name)
    yield from _docstring(translator.struct(struct) + (f"\n\n{more}" if more else ""), "    ")
    yield from ["", f'    _raw = "{struct.c_name}"']
    if struct.arguments:
        yield f"    _arguments = {_strings(struct.arguments)}"
    fields = {f.c_name for f in struct.fields}
    others = [f.c_name for f in struct.fields if f.kind in ("array", "callback", "string")]
    others += [a for a in struct.arguments if a not in fields]
    if others:
        yield f"    _not_fields = {_strings(others)}"
    yield from _types(struct)
    yield ""
    for argument in struct.arguments:
        if argument not in fields:
            yield f"    {argument}: Flavor = {_ARGUMENTS[struct.c_name, argument]}"
            yield from _docstring(_ARGUMENT_DOCS[struct.c_name, argument], "    ")
    # What has a default of Python's own comes last: other fields keep their places.
    for f in sorted(struct.fields, key=lambda f: f.kind in ("array", "callback", "string") and not isinstance(f.length, int)):
        if f.c_name in struct.arguments:
            default = _ARGUMENTS.get((struct.c_name, f.c_name))
            yield f"    {f.c_name}: {_type(f)}" + (f" = {default}" if default else "")
        elif f.kind == "array" and not isinstance(f.length, int):
            yield f"    {f.c_name}: {_type(f)} = ()"
        elif f.kind == "callback" or _is_none_possible(f):
            yield f"    {f.c_name}: {_type(f)} = None"
        elif f.kind == "string":
            yield f"    {f.c_name}: str | None = None"
        else:
            yield f"    {f.c_name}: {_type(f)} = DEFAULT"
        yield from _docstring(translator.field(struct, f), "    ")


def _tuple(struct: Struct, translator: Translator) -> Iterator[str]:
    yield from ["", "", f"class {names.TYPES[struct.c_name]}(NamedTuple):"]
    yield from _docstring(translator.struct(struct), "    ")
    yield ""
    for f in struct.fields:
        yield f"    {f.c_name}: {_type(f)}"
        yield from _docstring(translator.field(struct, f), "    ")
    yield from _members(struct.c_name)


def _result(struct: Struct, translator: Translator) -> Iterator[str]:
    yield from ["", "", "@dataclass(frozen=True)", f"class {names.TYPES[struct.c_name]}(Result):"]
    yield from _docstring(translator.struct(struct), "    ")
    types = list(_types(struct))
    if types:
        yield from ["", *types]
    yield ""
    for f in struct.fields:
        yield f"    {f.c_name}: {_type(f)}"
        yield from _docstring(translator.field(struct, f), "    ")
