# SPDX-License-Identifier: Apache-2.0
"""The reference of C, made of the headers: a page for each of their sections, with the declarations in their order.

Behind a function stands what examples/reference shows for it.
"""

from __future__ import annotations

import pathlib
import re
import subprocess
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass, field

from clang import cindex
from clang.cindex import Cursor, CursorKind, TokenKind

# The parts of gradaccum.h that have a file of their own; a section is a page.
HEADERS = ("gradaccum.h", "batchnorm.h", "comm.h", "state.h")
_EXAMPLE = re.compile(r"^ *(?:/\* example: (.*) \*/|/\* (end) \*/)$")
_SECTION = re.compile(r"/\* ---- (.+?) -+ \*/")
_SHOWN = {CursorKind.FUNCTION_DECL, CursorKind.TYPEDEF_DECL, CursorKind.ENUM_DECL, CursorKind.STRUCT_DECL}
_VERSION = re.compile(r"GA_VERSION\w*")  # the macros of the interface: others are the header's own
# Sentences about the whole call, wherever they stand; gradaccum.h defines the first two.
_OF_THE_CALL = re.compile(r"(Between windows|Waits?|Does not wait|Static|Legal)\b")
_ROLES = {
    CursorKind.FUNCTION_DECL: "func", CursorKind.TYPEDEF_DECL: "type", CursorKind.STRUCT_DECL: "struct",
    CursorKind.ENUM_CONSTANT_DECL: "enumerator", CursorKind.MACRO_DEFINITION: "macro",
}  # fmt: skip


@dataclass
class Entry:
    """Declarations with one comment, or a comment of its own."""

    comment: str
    cursors: list[Cursor] = field(default_factory=list)


@dataclass
class Section:
    """What is below a line such as "---- Windows ----"."""

    title: str
    header: str
    entries: list[Entry] = field(default_factory=list)

    @property
    def page(self) -> str:
        """The name of its file."""
        return re.sub(r"\W+", "-", self.title.lower())


def pages(include: pathlib.Path, examples: pathlib.Path) -> dict[str, str]:
    """The files of the reference, in reStructuredText."""
    reader = _Reader(include)
    reader.read_examples(examples)
    files = {f"c/{s.page}.rst": reader.page(s) for s in reader.sections}
    files["c/index.rst"] = reader.index()
    if reader.problems:
        raise SystemExit("\n".join(reader.problems))
    return files


class _Reader:
    def __init__(self, include: pathlib.Path) -> None:
        # The package of libclang has no headers of its own, such as stddef.h.
        command = ["cc", "-print-file-name=include"]
        system = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
        self.unit = cindex.Index.create().parse(
            str(include / "gradaccum.h"), ["-x", "c", "-std=c99", "-DGA_STATIC", "-fparse-all-comments", "-isystem", system],
            options=cindex.TranslationUnit.PARSE_DETAILED_PROCESSING_RECORD,
        )  # fmt: skip
        if self.unit.diagnostics:
            raise SystemExit("\n".join(map(str, self.unit.diagnostics)))
        self.essay: list[str] = []  # the comments of gradaccum.h about all of it
        self.sections: list[Section] = []
        self.names: dict[str, str] = {}  # of everything that has a place: its role
        self.members: set[str] = set()
        self.examples: dict[str, list[str]] = {}  # by what they are for
        self.problems: list[str] = []
        for header in HEADERS:
            self._read(include / header)

    def _read(self, path: pathlib.Path) -> None:
        file = self.unit.get_file(str(path))
        end = cindex.SourceLocation.from_offset(self.unit, file, path.stat().st_size)
        start = cindex.SourceLocation.from_offset(self.unit, file, 0)
        cursors = [c for c in self.unit.cursor.get_children() if c.location.file and c.location.file.name == str(path)]
        defined = {c.spelling for c in cursors if c.kind == CursorKind.STRUCT_DECL and c.is_definition()}
        things: list[tuple[int, int, Cursor | str]] = []
        for c in cursors:
            if c.kind == CursorKind.MACRO_DEFINITION:
                if _VERSION.fullmatch(c.spelling):
                    things.append((c.extent.start.line, c.extent.end.line, c))
            elif c.kind in _SHOWN and not (c.kind == CursorKind.TYPEDEF_DECL and c.spelling in defined):
                if c.kind != CursorKind.STRUCT_DECL or c.is_definition():
                    things.append((c.extent.start.line, c.extent.end.line, c))
        inside = [range(first, last + 1) for first, last, _ in things]
        for token in self.unit.get_tokens(extent=cindex.SourceRange.from_locations(start, end)):
            line = token.extent.start.line
            if token.kind == TokenKind.COMMENT and token.extent.start.column == 1 and not any(line in i for i in inside):
                if "clang-format" not in token.spelling:
                    things.append((line, token.extent.end.line, token.spelling))
        things.sort(key=lambda thing: (thing[0], thing[1]))
        last_line = -1
        for first, last, thing in things:
            if isinstance(thing, Cursor):
                entries = self.sections[-1].entries
                if first > last_line + 1 or entries[-1].comment.startswith("/* Options and results"):
                    entries.append(Entry(""))
                entries[-1].cursors.append(thing)
                self._name(thing)
            elif match := _SECTION.fullmatch(thing):
                self.sections.append(Section(match[1], path.name))
            elif thing.startswith("/* ====") or (path.name == HEADERS[0] and not self.sections):
                self.essay.append(thing)
            elif self.sections and self.sections[-1].header == path.name:
                self.sections[-1].entries.append(Entry(thing))
            last_line = last

    def _name(self, cursor: Cursor) -> None:
        if cursor.spelling and not cursor.is_anonymous():
            self.names[cursor.spelling] = _ROLES.get(cursor.kind, "type")
        if cursor.kind in (CursorKind.ENUM_DECL, CursorKind.STRUCT_DECL):
            for member in cursor.get_children():
                if member.kind == CursorKind.ENUM_CONSTANT_DECL:
                    self.names[member.spelling] = "enumerator"
                elif member.kind == CursorKind.FIELD_DECL:
                    self.members.add(f"{cursor.spelling}.{member.spelling}")

    def read_examples(self, folder: pathlib.Path) -> None:
        """The lines between "/* example: ga_step */" and "/* end */", for each declaration that is named there."""
        for path in sorted(folder.glob("*.c")):
            shown: list[str] | None = None
            names: list[str] = []
            for line in path.read_text().split("\n"):
                mark = _EXAMPLE.match(line)
                if not mark:
                    if shown is not None:
                        shown.append(line)
                    continue
                if bool(mark[1]) == (shown is not None):
                    raise SystemExit(f"{path.name}: {line.strip()} is not in its place")
                if mark[1]:
                    shown, names = [], mark[1].split()
                    continue
                code = textwrap.dedent("\n".join(shown or [])).strip("\n").split("\n")
                for name in names:
                    if self.names.get(name) not in ("func", "struct", "type"):
                        self.problems.append(f"{path.name} has an example for {name}, which the headers do not declare")
                    if name in self.examples:
                        self.problems.append(f"{path.name} has a second example for {name}")
                    self.examples[name] = [
                        ".. code-block:: c", "", *(f"   {each}".rstrip() for each in code), "",
                        f"From {_source(f'examples/reference/{path.name}')}.", "",
                    ]  # fmt: skip
                shown = None
            if shown is not None:
                raise SystemExit(f"{path.name}: the last example has no end")

    # ---- Pages

    def index(self) -> str:
        """The essay at the top of the header, and all sections."""
        lines = [
            "C: reference", "============", "",
            f"These pages are made of {_source('include/gradaccum/gradaccum.h')} and the parts that it includes: a page for "
            "each section, with the declarations in the order of the header. :doc:`/docs/reference` has the tables of "
            "optimizers, defaults and memory; :ref:`genindex` lists all names.", "",
        ]  # fmt: skip
        captions = {"Status": "A first program", "Configuration": "To look up"}
        names = {"batchnorm.h": "Batch normalisation", "comm.h": "Ranks", "state.h": "State"}
        for i, section in enumerate(self.sections):
            starts_part = section.header in names and section.header != self.sections[i - 1].header
            caption = names[section.header] if starts_part else captions.get(section.title)
            if caption:
                lines += ["", caption, "-" * len(caption), "", ".. list-table::", "   :widths: 1 3", "   :class: plain", ""]
            cursors = [c for e in section.entries for c in e.cursors]
            calls = [c.spelling for c in cursors if c.kind == CursorKind.FUNCTION_DECL and not c.spelling.endswith("_init")]
            shown = calls or [c.spelling for c in cursors if c.kind in (CursorKind.STRUCT_DECL, CursorKind.TYPEDEF_DECL)]
            names_shown = " ".join(f":c:{self.names[name]}:`{name}`" for name in dict.fromkeys(shown))
            about = re.split(r"(?<=[.:]) ", " ".join(_text(section.entries[0].comment).split()))[0]
            lines += [f"   * - :doc:`{section.page}`", f"     - {names_shown or self.inline(about)}"]
        lines += ["", "The manual", "----------", ""]
        for comment in self.essay:
            lines += [*self._blocks(_text(comment), set()), ""]
        toctree = [".. toctree::", "   :hidden:", "", *(f"   {s.page}" for s in self.sections)]
        return "\n".join([*lines, *toctree, ""])

    def page(self, section: Section) -> str:
        """A section."""
        title = section.title
        lines = [title, "=" * len(title), "", f"In {_source(f'include/gradaccum/{section.header}')}.", ""]
        for entry in section.entries:
            lines += self._entry(entry) if entry.cursors else self._blocks(_text(entry.comment), set())
            lines.append("")
        return "\n".join(lines)

    def _entry(self, entry: Entry) -> list[str]:
        text = _text(entry.comment)
        self.problems += [
            f"{c.spelling} has no comment" for c in entry.cursors if c.kind == CursorKind.FUNCTION_DECL and not text
        ]
        by_directive: dict[str, list[Cursor]] = {}
        enums = []
        for cursor in entry.cursors:
            if cursor.kind == CursorKind.ENUM_DECL:
                enums.append(cursor)
            elif cursor.spelling not in self.names or cursor.kind != CursorKind.TYPEDEF_DECL or not any(
                c.kind == CursorKind.STRUCT_DECL and c.spelling == cursor.spelling for c in entry.cursors
            ):
                by_directive.setdefault(_ROLES[cursor.kind].replace("func", "function"), []).append(cursor)
        lines: list[str] = []
        for number, (directive, cursors) in enumerate(by_directive.items()):
            head = f".. c:{directive}:: "
            for cursor in cursors:
                lines.append(head + _declaration(cursor))
                head = " " * len(head)
            lines.append("")
            inner = []
            if number == len(by_directive) - 1:
                params = {a.spelling for c in cursors for a in c.get_arguments() or () if c.kind == CursorKind.FUNCTION_DECL}
                inner += self._blocks(text, params)
                for cursor in cursors:
                    if cursor.kind == CursorKind.STRUCT_DECL:
                        inner += self._members(cursor)
                examples = [self.examples[c.spelling] for c in entry.cursors if c.spelling in self.examples]
                for example in dict.fromkeys(map(tuple, examples)):
                    inner += example
                if enums:
                    inner += ["", ".. c:namespace:: NULL", ""]
            for enum in enums:
                inner += self._members(enum)
            enums = []
            lines += [f"   {line}".rstrip() for line in inner] + [""]
        for enum in enums:
            lines += [*self._blocks(text, set()), "", *self._members(enum)]
        return lines

    def _members(self, cursor: Cursor) -> Iterator[str]:
        """Fields of a struct, or enumerators; several in a row may have one comment."""
        members = [
            c for c in cursor.get_children() if c.kind in (CursorKind.FIELD_DECL, CursorKind.ENUM_CONSTANT_DECL)
        ]
        for i, member in enumerate(members):
            yield ""
            if member.kind == CursorKind.FIELD_DECL:
                yield f".. c:member:: {_declaration(member)}"
            else:
                yield f".. c:enumerator:: {member.spelling} = {member.enum_value}"
            yield ""
            comment = member.raw_comment
            if not comment and member.kind == CursorKind.FIELD_DECL and member.type.spelling.endswith(")"):
                comment = members[i - 1].raw_comment
            yield from (f"   {line}".rstrip() for line in self._blocks(_text(comment or "", False), set()))

    # ---- Text

    def _blocks(self, text: str, params: set[str]) -> Iterator[str]:
        """Paragraphs; what is set in columns as definitions, and what is indented as it is."""
        fields: list[str] = []
        terms = False
        for block in _split(text):
            lines = block.split("\n")
            indent = min((len(line) - len(line.lstrip()) for line in lines if line.strip()), default=0)
            lines = [line[indent:] for line in lines]
            if not block.strip():
                continue
            definitions = _definitions(lines)
            if definitions:
                terms = True
                before, pairs = definitions
                if before:
                    yield from (self.inline(before), "")
                for term, meaning in pairs:
                    yield from (self.inline(term), f"   {self.inline(meaning)}", "")
            elif terms and indent > 8:  # goes on in the column of a definition
                yield from (f"   {self.inline(' '.join(lines))}", "")
            elif _is_list(lines):
                for item in re.split(r"\n?- ", "\n".join(lines))[1:]:
                    yield f"- {self.inline(' '.join(item.split()))}"
                yield ""
            elif indent >= 2:
                yield from ("", ".. code-block:: c" if ";" in block else "::", "")
                yield from (f"   {line}".rstrip() for line in lines)
                yield ""
            else:
                body, labelled = _labelled(" ".join(line.strip() for line in lines), params)
                if body:
                    yield from (self.inline(body), "")
                fields += [
                    f":{'retval' if label.startswith('GA_') else 'param'} {label}: {self.inline(meaning)}"
                    for labels, meaning in labelled
                    for label in labels.split(", ")
                ]
        if fields:
            yield from ("", *fields, "")

    def inline(self, text: str) -> str:
        """With links where a name has a place."""
        parts, end = [], 0
        pattern = r"\b(ga_\w+\.\w+)|\b(ga_\w+|GA_\w+)(?:\(\))?|\bdocs/([\w-]+)\.md|\b(examples/[\w/.]*\w)"
        for match in re.finditer(pattern, text):
            member, name, page, source = match.groups()
            if member and member in self.members:
                link = f":c:member:`{member}`"
            elif name and name in self.names:
                link = f":c:{self.names[name]}:`{name}`"
            elif page:
                link = f":doc:`/docs/{page}`"
            elif source:
                link = _source(source)
            else:
                if member or name.startswith("ga_"):
                    self.problems.append(f"a comment mentions {match[0]}, which the headers do not declare: {text}")
                continue
            parts += [_escaped(text[end : match.start()]), f"\\ {link}\\ "]
            end = match.end()
        return re.sub(r"\\ (?= |$)|(?<= )\\ |^\\ ", "", "".join([*parts, _escaped(text[end:])]))


def _split(text: str) -> list[str]:
    """Into paragraphs; code stays one, with its blank lines."""
    blocks: list[str] = []
    for block in re.split(r"\n\s*\n", text.strip("\n")):
        if blocks and all(re.match(r"  .*;( |$)", b, re.S | re.M) for b in (blocks[-1], block)):
            blocks[-1] += f"\n\n{block}"
        else:
            blocks.append(block)
    return blocks


def _source(path: str) -> str:
    return f":doc:`{path} </source/{path}>`"


def _escaped(text: str) -> str:
    return re.sub(r"([\\*`|_])", r"\\\1", text)


def _text(comment: str, is_block: bool = True) -> str:
    """Without what marks a comment; of a member's comment, lines are not indented."""
    lines = comment.split("\n")
    lines[0] = re.sub(r"^/\* ?=*", "   " if is_block else "", lines[0])
    lines[-1] = re.sub(r"\s*=*\s*\*/$", "", lines[-1])
    starred = len(lines) > 1 and all(re.match(r" \*| ?$", line) for line in lines[1:])
    lines[1:] = [re.sub(r"^ \* ?", "   ", line) if starred else line for line in lines[1:]]
    lines = [line for line in lines if "SPDX" not in line]
    if not is_block:
        return "\n".join(line.strip() for line in lines)
    return "\n".join(line[3:] if line.startswith("   ") else line.strip() for line in lines)


def _definitions(lines: list[str]) -> tuple[str, list[tuple[str, str]]] | None:
    """Terms in a column and their meanings in another one, after a sentence if there is one."""
    first = next((i for i, line in enumerate(lines) if re.match(r"\S.*\S {2,}\S|\S+ {2,}\S", line.strip())), None)
    if first is None or "─" in "".join(lines) or re.search(r";( |$)", lines[first].split("   ")[0]):
        return None
    pairs: list[list[str]] = []
    column = max(line.find(re.split(r" {2,}", line.strip(), maxsplit=1)[-1]) for line in lines[first : first + 1])
    for line in lines[first:]:
        if line[:column].strip() and len(split := re.split(r" {2,}", line.strip(), maxsplit=1)) == 2:
            pairs.append(list(split))
        elif line[:column].strip() and len(line[:column].strip()) < len(line.strip()):
            pairs.append([line[:column].strip(), line[column:].strip()])
        elif pairs and not line[:column].strip():
            pairs[-1][1] += " " + line.strip()
        else:
            return None
    return " ".join(line.strip() for line in lines[:first]), [(term, meaning) for term, meaning in pairs]


def _is_list(lines: list[str]) -> bool:
    return lines[0].startswith("- ") and all(re.match(r"- |  ", line) for line in lines)


def _labelled(text: str, params: set[str]) -> tuple[str, list[tuple[str, str]]]:
    """What is said of the call, and of its parameters and errors: "out: may be NULL. GA_ERROR_FAULT: ..."."""
    names = "|".join(sorted(map(re.escape, params), key=len, reverse=True)) or "(?!)"
    label = rf"(?:^|(?<=[.] ))((?:\*?(?:{names}))(?:, \*?(?:{names}))*|GA_ERROR_\w+)(?:: | (?=may be NULL))"
    parts = re.split(label, text)
    body, labelled = parts[0], []
    for names_of, meaning in zip(parts[1::2], parts[2::2], strict=True):
        sentences = re.split(r"(?<=\.) (?=[A-Z])", meaning.strip())
        kept = [s for i, s in enumerate(sentences) if i == 0 or not _OF_THE_CALL.match(s)]
        body += "".join(f" {s}" for s in sentences if s not in kept)
        labelled.append((names_of.replace("*", ""), " ".join(kept)))
    return body.strip(), labelled


def _declaration(cursor: Cursor) -> str:
    """As the header has it, in one line."""
    if cursor.kind == CursorKind.MACRO_DEFINITION or cursor.kind == CursorKind.STRUCT_DECL:
        return cursor.spelling
    tokens = [t.spelling for t in cursor.get_tokens() if t.kind != TokenKind.COMMENT]
    if cursor.kind == CursorKind.FIELD_DECL and "," in tokens and "(" not in tokens:  # one of several
        return f"{cursor.type.spelling} {cursor.spelling}"
    if tokens[-1] == ";":
        tokens.pop()
    text = " ".join(t for t in tokens if t not in ("GA_API", "typedef"))
    if cursor.kind == CursorKind.TYPEDEF_DECL and text.startswith("struct"):
        return cursor.spelling
    return re.sub(r" ?([(),\[\]*]) ?", lambda m: {",": ", ", "*": " *"}.get(m[1], m[1]), text)
