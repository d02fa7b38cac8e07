# SPDX-License-Identifier: Apache-2.0
"""Comments of the header in the words of a language: its names for types, fields, constants and functions."""

from __future__ import annotations

import dataclasses
import re
from typing import Protocol

import names
from header import Enum, Enumerator, Field, Function, Header, Refused, Struct


class Words(Protocol):
    """How a language writes what a comment mentions."""

    null: str
    false: str
    true: str

    def type(self, c_name: str) -> str:
        """An enumeration or a struct."""

    def field(self, struct: str, name: str) -> str:
        """A field of a struct, from anywhere."""

    def own_field(self, struct: str, name: str) -> str:
        """A field, in the comments of its struct."""

    def constant(self, enum: Enum, enumerator: Enumerator) -> str:
        """An enumerator."""

    def function(self, member: str) -> str:
        """What names.FUNCTIONS has for a function: "Context.set_stream"."""

    def text(self, text: str) -> str:
        """What is between names, with what the language needs escaped."""


# A sentence with one of these is about C alone.
_C_ONLY = re.compile(r"\b(" + "|".join(names.C_ONLY) + r")\b")
_NAME = re.compile(r'"[^"]*"|' r"\b(ga_\w+)\.(\w+)|\b(ga_\w+)(?:\(\))?|\b(GA_\w+)|\b(NULL)\b|\b([a-z]+(?:_[a-z0-9]+)+)\b")


class Translator:
    """Translates the comments of a header for a language."""

    def __init__(self, header: Header, words: Words) -> None:
        self.header = header
        self.words = words
        self.unknown: set[str] = set()

    def check(self) -> None:
        """Raises Refused if a comment has mentioned a name without a counterpart."""
        if self.unknown:
            raise Refused(
                "comments mention what names.py has neither a counterpart for nor a place in C_ONLY: "
                + ", ".join(sorted(self.unknown))
            )

    def enum(self, enum: Enum) -> str:
        return self._sentences(enum.doc, self._struct_of(enum))

    def enumerator(self, enumerator: Enumerator, enum: Enum) -> str:
        return self._sentences(enumerator.doc, self._struct_of(enum))

    def _struct_of(self, enum: Enum) -> Struct | None:
        """The options that an enumeration belongs to, whose fields its comments mention."""
        users = [s for s in self.header.structs.values() if any(f.enum is enum for f in s.fields)]
        return users[0] if len(users) == 1 else None

    def struct(self, struct: Struct) -> str:
        return self._sentences(struct.doc, struct)

    def field(self, struct: Struct, field: Field) -> str:
        """A sentence: with a capital, and a full stop."""
        return self._sentences(self._field_text(field), struct)

    def fragment(self, struct: Struct, field: Field) -> str:
        """As Javadoc has its parameters: no capital, no full stop."""
        return self.translate(self._field_text(field), struct)

    def function(self, function: Function, begin: str = "") -> str:
        """What a function does, after what is already in the words of the language."""
        text = re.sub(r"(^|(?<=\. ))Waits\.", "Waits until a device has done its work.", function.doc)
        if _C_ONLY.search(text) and text == _without_c(text):
            text = ""
        rest = self._sentences(text, self._struct_in(function)) if text else ""
        return " ".join(filter(None, [begin, rest]))

    def value(self, function: Function) -> str:
        """What a function takes or returns, without a capital and a full stop."""
        value = function.argument or function.result
        assert value is not None
        text = value.doc or f"the {value.c_name.replace('_', ' ')}"
        if value.kind == "bool":
            words = {"0": self.words.false, "1": self.words.true}
            text = re.sub(r"(^|, )([01]) ", lambda m: f"{m[1]}{words[m[2]]} ", text)
        if value.kind == "address":
            text = text.replace("NULL", "0")
        return self.translate(text, self._struct_in(function))

    def argument(self, function: Function) -> str:
        """What a function takes, with what NULL does."""
        assert function.argument is not None
        clears = self.translate(function.argument.clears, self._struct_in(function))
        return self.value(function) + (f"; {self.words.null} {clears}" if clears else "")

    def cleared(self, function: Function) -> str:
        """What a function does with NULL."""
        assert function.argument is not None
        rest = function.doc.partition(". ")[2]
        return self.function(dataclasses.replace(function, doc=rest), sentence(function.argument.clears))

    def errors(self, function: Function) -> list[str]:
        """The statuses that a function has beyond the common ones, each with its reason."""
        return [self.translate(f"{status}: {why}", self._struct_in(function)) for status, why in function.errors]

    def _struct_in(self, function: Function) -> Struct | None:
        value = function.argument or function.result
        return self.header.structs.get(value.struct) if value else None

    def _field_text(self, field: Field) -> str:
        text = field.doc
        if field.kind == "bool":
            text = re.sub(r"^0 or 1: ", "", text)
            words = {"0": self.words.false, "1": self.words.true}
            text = re.sub(r"\b([Dd]efault )([01])\b", lambda m: m[1] + words[m[2]], text)
        elif field.is_optional:
            text = re.sub(r"\b([Dd]efault) 0:", r"\1:", text)
        elif field.enum is not None:
            zero = [e for e in field.enum.enumerators if e.value == 0]
            if zero:
                text = re.sub(r"\b([Dd]efault) 0\b", rf"\1 {zero[0].c_name}", text)
        if field.kind == "address":
            text = text.replace("NULL", "0")
        if field.kind == "array":
            text = re.sub(r"\[\w+\] ", "", text)
        if field.kind == "callback":
            text = f"{self.header.callbacks[field.callback]} {text[0].upper()}{text[1:]}"
        return text

    def _sentences(self, text: str, struct: Struct | None) -> str:
        return "\n\n".join(sentence(p) for p in self.translate(text, struct).split("\n\n"))

    def translate(self, text: str, struct: Struct | None = None) -> str:
        """The text with the names of the language."""
        text = "\n\n".join(_without_c(p) for p in text.split("\n\n"))
        parts, end = [], 0
        for match in _NAME.finditer(text):
            replacement = self._name(match, struct)
            if replacement is None:
                continue
            parts += [self.words.text(text[end : match.start()]), replacement]
            end = match.end()
        return "".join([*parts, self.words.text(text[end:])])

    def _name(self, match: re.Match[str], struct: Struct | None) -> str | None:
        owner, member, plain, constant, null, own = match.groups()
        if owner is not None:
            shown = self.header.structs.get(owner)
            if shown is None or member not in {f.c_name for f in shown.fields}:
                return self._as_in_c(match[0])
            return self.words.field(owner, member)
        if plain is not None:
            if plain in names.TYPES:
                return self.words.type(plain)
            function = names.member(plain) if plain in self.header.names and plain not in names.C_ONLY else None
            return self.words.function(function) if function else self._as_in_c(plain)
        if constant is not None:
            if constant in self.header.constants:
                return self.words.constant(*self.header.constants[constant])
            return self._as_in_c(constant)
        if null is not None:
            return self.words.null
        if struct is not None and own in {f.c_name for f in struct.fields}:
            return self.words.own_field(struct.c_name, own)
        return None

    def _as_in_c(self, name: str) -> str:
        if name not in names.C_ONLY | names.SAME:
            self.unknown.add(name)
        return name


def _without_c(paragraph: str) -> str:
    """Leaves out sentences about C alone, unless nothing else is left."""
    sentences = re.split(r"(?<=\.) (?=[A-Z])", paragraph)
    kept = [s for s in sentences if not _C_ONLY.search(s)]
    return " ".join(kept) if kept else paragraph


def sentence(text: str) -> str:
    """With a capital, unless it begins with a formula, and a full stop."""
    if re.match(r"(a|[a-z]{2,})([\s,:;'-]|$)", text) and not re.match(r"\w+( [-+*/=^<]|[(\[^])|(lr|end)( |$)", text):
        text = text[0].upper() + text[1:]
    return text if text[-1] in ".!?:" else text + "."
