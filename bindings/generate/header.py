# SPDX-License-Identifier: Apache-2.0
"""What gradaccum.h declares: enumerations, structs and functions with their comments, as libclang reads them."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field

from clang import cindex
from clang.cindex import Cursor, CursorKind, TokenKind, Type

import names


class Refused(Exception):
    """The header says something that no binding can be made of; the message has the places."""


@dataclass(frozen=True)
class Enumerator:
    """A number with a name."""

    c_name: str  # GA_FLAVOR_TORCH
    name: str  # TORCH
    value: int
    doc: str


@dataclass(frozen=True)
class Enum:
    """An enumeration: the typedef of an integer, and the unnamed enum behind it."""

    c_name: str  # ga_flavor
    doc: str
    enumerators: tuple[Enumerator, ...]
    is_flags: bool


@dataclass(frozen=True)
class Field:
    """A field of a struct that a binding shows."""

    c_name: str
    kind: str  # enum, bool, int, double, string, address, array or callback; of a function also size and struct
    doc: str
    enum: Enum | None = None
    is_optional: bool = False  # kind enum: 0 is none of the enumerators, but leaves the choice to the library
    bits: int = 0  # kind int
    is_signed: bool = True
    length: str | int = 0  # kind array: the field that has it, or a number
    callback: str = ""  # the typedef
    struct: str = ""  # kind struct: its name
    clears: str = ""  # of a struct that may be NULL: what that does


@dataclass(frozen=True)
class Struct:
    """A struct of options, which an _init function fills, or of results, which a function fills."""

    c_name: str
    doc: str
    fields: tuple[Field, ...]
    is_result: bool
    arguments: tuple[str, ...]  # of the _init function, which choose the defaults
    layout: dict[str, int]  # where all fields are, those that no binding shows included: in bytes, with 64-bit addresses

    @property
    def zeros(self) -> str:
        """What its constructor takes in the raw layer, where a function of C fills it afterwards."""
        return ", ".join("0" for _ in self.arguments)


@dataclass(frozen=True)
class Function:
    """A function of a context, or of one of its objects, that takes or returns one value, or none."""

    c_name: str
    owner: str  # the class: Context, or that of the object
    name: str  # of the member, such as set_lr
    argument: Field | None
    result: Field | None
    doc: str  # without what is the argument's or the result's
    errors: tuple[tuple[str, str], ...]  # statuses, and when


@dataclass(frozen=True)
class LayerFunction(Function):
    """A function of a layer that works on the tensors of a micro-batch."""

    arguments: tuple[str, ...]  # which of names.LAYER_ARGUMENTS, in their order

    @property
    def tensors(self) -> list[str]:
        return [a for a in self.arguments if a not in ("samples", "positions")]


@dataclass
class Header:
    """All of it."""

    enums: dict[str, Enum] = field(default_factory=dict)
    structs: dict[str, Struct] = field(default_factory=dict)
    functions: list[Function] = field(default_factory=list)  # those of which members are generated
    layer_functions: list[LayerFunction] = field(default_factory=list)
    names: set[str] = field(default_factory=set)  # of all functions
    callbacks: dict[str, str] = field(default_factory=dict)  # typedef: comment
    constants: dict[str, tuple[Enum, Enumerator]] = field(default_factory=dict)


def read(path: str, compiler: str = "cc") -> Header:
    """Reads the header. Raises Refused with all places where something is missing."""
    return _Reader(path, compiler).header


class _Reader:
    def __init__(self, path: str, compiler: str) -> None:
        # The package of libclang has no headers of its own, such as stddef.h.
        include = subprocess.run(
            [compiler, "-print-file-name=include"], capture_output=True, text=True, check=True
        ).stdout.strip()
        arguments = ["-x", "c", "-std=c99", "-fparse-all-comments", "-isystem", include]
        if not os.path.isfile(path):
            raise Refused(f"{path}: there is no such file")
        unit = cindex.Index.create().parse(path, arguments)
        self.problems = [str(d) for d in unit.diagnostics if d.severity >= cindex.Diagnostic.Warning]
        self.header = Header()
        ours = os.path.dirname(os.path.realpath(path))
        cursors = [
            c for c in unit.cursor.get_children()
            if c.location.file and os.path.dirname(os.path.realpath(c.location.file.name)) == ours
        ]  # fmt: skip
        inits = {c.spelling: c for c in cursors if c.kind == CursorKind.FUNCTION_DECL}
        self.header.names = set(inits)
        taken = {
            argument.type.get_pointee().get_declaration().spelling
            for c in inits.values() for argument in c.get_arguments()
            if argument.type.get_pointee().is_const_qualified()
        }  # fmt: skip
        before: Cursor | None = None
        for cursor in cursors:
            if cursor.kind == CursorKind.TYPEDEF_DECL and cursor.spelling in names.CALLBACKS:
                self.header.callbacks[cursor.spelling] = self._comment(cursor)
            if cursor.kind == CursorKind.ENUM_DECL:
                self._enum(cursor, before)
            before = cursor
        for cursor in cursors:
            if cursor.kind == CursorKind.STRUCT_DECL and cursor.is_definition() and cursor.spelling in names.TYPES:
                self._struct(cursor, inits, cursor.spelling not in taken)
        for name in names.TYPES:
            if name not in self.header.enums and name not in self.header.structs:
                self.problems.append(f"names.py has {name}, which the header has not")
        self.header.functions = [f for c in inits.values() if (f := self._function(c)) is not None]
        self.header.layer_functions = [
            self._layer_function(c) for c in inits.values() if "positions" in [a.spelling for a in c.get_arguments()]
        ]
        if self.problems:
            raise Refused("\n".join(self.problems))

    def _complain(self, cursor: Cursor, what: str) -> None:
        place = cursor.location
        self.problems.append(f"{place.file}:{place.line}: {cursor.spelling} {what}")

    def _comment(self, cursor: Cursor) -> str:
        text = clean(cursor.raw_comment)
        if not text:
            self._complain(cursor, "has no comment")
        return text

    def _check_attributed(self, body: Cursor, comments: list[str]) -> None:
        """Every comment within a struct or an enum belongs to a member, or says that something is reserved."""
        for token in body.get_tokens():
            if token.kind == TokenKind.COMMENT and clean(token.spelling) not in comments:
                place = token.location
                self.problems.append(
                    f"{place.file}:{place.line}: no member has this comment: {clean(token.spelling)}"
                )

    def _enum(self, cursor: Cursor, before: Cursor | None) -> None:
        members = [c for c in cursor.get_children() if c.kind == CursorKind.ENUM_CONSTANT_DECL]
        unnamed = names.UNNAMED.get(members[0].spelling)
        if unnamed is not None:
            c_name, doc = unnamed, clean(cursor.raw_comment)
        elif before is not None and before.kind == CursorKind.TYPEDEF_DECL:
            c_name, doc = before.spelling, clean(before.raw_comment)
        else:
            c_name, doc = "", ""
        if c_name not in names.TYPES:
            if members[0].spelling not in names.NOT_WRAPPED:
                self._complain(members[0], "begins an enum that names.py does not name")
            return
        if not doc:
            self._complain(cursor, f"({c_name}) has no comment")
        prefix = names.PREFIXES.get(c_name) or os.path.commonprefix([m.spelling for m in members])
        prefix = prefix[: prefix.rfind("_") + 1]
        enumerators = []
        for m in members:
            name = m.spelling.removeprefix(prefix).removeprefix("GA_")
            enumerators.append(Enumerator(m.spelling, name, m.enum_value, self._comment(m)))
        self._check_attributed(cursor, [e.doc for e in enumerators])
        enum = Enum(c_name, doc, tuple(enumerators), c_name in names.FLAGS)
        self.header.enums[c_name] = enum
        for e in enumerators:
            self.header.constants[e.c_name] = (enum, e)

    def _struct(self, cursor: Cursor, inits: dict[str, Cursor], is_result: bool) -> None:
        name = cursor.spelling
        doc = clean(cursor.raw_comment)
        if not doc:
            self._complain(cursor, "has no comment")
        init = inits[f"{name}_init"]
        arguments = tuple(a.spelling for a in init.get_arguments())[2:]
        members = [c for c in cursor.get_children() if c.kind == CursorKind.FIELD_DECL]
        fields = [f for member in members if (f := self._field(name, member)) is not None]
        self._check_attributed(cursor, [clean(c.raw_comment) for c in members])
        layout = {c.spelling: c.get_field_offsetof() // 8 for c in members}
        self.header.structs[name] = Struct(name, doc, tuple(fields), is_result, arguments, layout)

    def _field(self, struct: str, cursor: Cursor) -> Field | None:
        c_name = cursor.spelling
        if c_name in names.NOT_FIELDS or (struct, c_name) in names.NOT_FIELDS:
            return None
        doc = self._comment(cursor)
        c_type = cursor.type.spelling
        length = names.LENGTHS.get((struct, c_name))
        enum_name = names.FIELD_ENUMS.get((struct, c_name), c_type)
        if enum_name in self.header.enums:
            enum = self.header.enums[enum_name]
            optional = all(e.value != 0 for e in enum.enumerators) and re.search(r"\b0: ", doc) is not None
            optional = optional or (struct, c_name) in names.OPTIONAL
            return Field(c_name, "enum", doc, enum=enum, is_optional=optional)
        if c_type in names.CALLBACKS:
            return Field(c_name, "callback", doc, callback=c_type)
        if length is not None:
            return Field(c_name, "array", doc, length=length)
        if c_type == "const char *":
            return Field(c_name, "string", doc)
        return self._number(cursor, cursor.type, doc, is_bool=re.match(r"0 or 1\b", doc) is not None)

    def _number(self, cursor: Cursor, c_type: Type, doc: str, *, is_bool: bool) -> Field | None:
        name, spelling = cursor.spelling, c_type.spelling
        if spelling in self.header.enums:
            return Field(name, "enum", doc, enum=self.header.enums[spelling])
        if spelling == "void *":
            return Field(name, "address", doc)
        if spelling == "double":
            return Field(name, "double", doc)
        if spelling == "int32_t" and is_bool:
            return Field(name, "bool", doc)
        sizes = {"int": (32, True), "unsigned int": (32, False), "long": (64, True), "unsigned long": (64, False)}
        size = sizes.get(c_type.get_canonical().spelling)
        if size is None:
            self._complain(cursor, f"has the type {spelling}, for which no binding has one")
            return None
        return Field(name, "int", doc, bits=size[0], is_signed=size[1])

    def _function(self, cursor: Cursor) -> Function | None:
        name, values = cursor.spelling, list(cursor.get_arguments())
        if not values or values.pop(0).type.spelling.removeprefix("const ") != "ga_context *":
            return None
        if values and values[0].type.spelling.removeprefix("ga_") in names.OWNERS:  # the object
            values = values[1:]
        if len(values) > 1 or name in names.BY_HAND:
            return None
        member = names.member(name)
        if member is None:
            self._complain(cursor, "is a member of no class that names.py names")
            return None
        text, about, errors = _parts(self._comment(cursor), values[0].spelling if values else "")
        value = self._value(values[0], about) if values else None
        is_result = value is not None and value.c_name == "out"
        if is_result and not about:
            self._complain(cursor, 'has no sentence that begins with "*out: "')
        owner, member = member.split(".")
        argument, result = (None, value) if is_result else (value, None)
        return Function(name, owner, member, argument, result, text, errors)

    def _layer_function(self, cursor: Cursor) -> LayerFunction:
        owner, _, name = (names.member(cursor.spelling) or "").partition(".")
        if not owner:
            self._complain(cursor, "is a member of no class that names.py has")
        text, _, errors = _parts(self._comment(cursor), "")
        arguments = tuple(a.spelling for a in list(cursor.get_arguments())[2:])  # behind the context and the layer
        for unknown in set(arguments) - set(names.LAYER_ARGUMENTS):
            self._complain(cursor, f"has the argument {unknown}, which names.py does not describe")
        return LayerFunction(cursor.spelling, owner, name, None, None, text, errors, arguments)

    def _value(self, cursor: Cursor, doc: str) -> Field | None:
        """What a function takes, or returns by a parameter."""
        c_type = cursor.type.get_pointee() if cursor.spelling == "out" else cursor.type
        struct = cursor.type.get_pointee().get_canonical().spelling.removeprefix("const ").removeprefix("struct ")
        if struct in self.header.structs:
            about, _, clears = doc.partition("NULL ")
            return Field(cursor.spelling, "struct", about.removesuffix("; "), struct=struct, clears=clears)
        if c_type.spelling == "size_t":
            return Field(cursor.spelling, "size", doc)
        return self._number(cursor, c_type, doc, is_bool=doc.startswith("1 "))


def _parts(comment: str, value: str) -> tuple[str, str, tuple[tuple[str, str], ...]]:
    """The sentences of a comment about the call, about what it takes or returns (lr: or *out:), and about statuses."""
    about = ""
    errors, paragraphs = [], []
    for paragraph in comment.split("\n\n"):
        rest = []
        for sentence in re.split(r"(?<=\.) (?=[A-Z*]|\w+: )", paragraph):
            head, colon, tail = sentence.partition(": ")
            if colon and value and head.lstrip("*") == value:
                about = tail.removesuffix(".")
            elif colon and re.fullmatch(r"GA_ERROR_\w+", head):
                errors.append((head, tail.removesuffix(".")))
            else:
                rest.append(sentence)
        paragraphs += [" ".join(rest)] if rest else []
    return "\n\n".join(paragraphs), about, tuple(errors)


def clean(comment: str | None) -> str:
    """The text of a comment in C: paragraphs, which a blank line separates; lines of a list keep their breaks."""
    if not comment:
        return ""
    lines = [re.sub(r"^\s*(/\*+|\*(?!/))?\s?", "", line).rstrip() for line in comment.split("\n")]
    lines[-1] = re.sub(r"\s*\*+/$", "", lines[-1])
    paragraphs = [" ".join(p) for p in _paragraphs(line.strip() for line in lines)]
    return "\n\n".join(paragraphs)


def _paragraphs(lines: Iterator[str]) -> Iterator[list[str]]:
    paragraph: list[str] = []
    for line in lines:
        if line:
            paragraph.append(line)
        elif paragraph:
            yield paragraph
            paragraph = []
    if paragraph:
        yield paragraph
