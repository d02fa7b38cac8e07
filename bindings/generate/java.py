# SPDX-License-Identifier: Apache-2.0
"""Writes the records, builders and enumerations of the Java package, and the superclasses of its classes.

A class gets what src/main/members has under its name: members that do not follow from the header. A superclass also
has the overloads that follow from methods of its class.
"""

from __future__ import annotations

import pathlib
import re
import textwrap
from collections.abc import Iterable, Iterator

import names
from docs import Translator
from header import Enum, Enumerator, Field, Function, Header, LayerFunction, Struct

_WIDTH = 100
_SOURCES = pathlib.Path(__file__).resolve().parent.parent / "java" / "src" / "main"
_MEMBERS = _SOURCES / "members"

# Enumerations within a record, and names that are not the header's.
_NESTED = {
    "ga_optimizer_kind": "Optimizer.Kind", "ga_adjust_lr": "Optimizer.AdjustLr",
    "ga_precision": "Optimizer.Precision", "ga_newton_schulz": "Optimizer.NewtonSchulzPreset",
    "ga_equilibrate": "Optimizer.Equilibrate",
    "ga_gradient_kind": "Config.GradientKind", "ga_reduce": "Config.Reduce", "ga_missing": "Config.Missing",
    "ga_nonfinite": "Config.Nonfinite", "ga_accumulation": "Config.Accumulation",
    "ga_gradient_life": "Config.GradientLife", "ga_window_state": "Window.State",
    "ga_step_outcome": "StepResult.Outcome", "ga_schedule_kind": "Schedule.Kind", "ga_clip_scope": "Clip.Scope",
    "ga_agc_units": "Clip.AgcUnits", "ga_clip_when": "Clip.When", "ga_ema_kind": "Ema.Kind",
    "ga_master": "ParamOptions.Master", "ga_rounding": "ParamOptions.Rounding", "ga_rows": "ParamOptions.Rows",
    "ga_state_parts": "StateOptions.Parts", "ga_state_settings": "StateOptions.Settings",
    "ga_comm_wire": "CommunicatorOptions.Wire", "ga_shard": "CommunicatorOptions.Shard",
    "ga_comm_adder": "CommunicatorOptions.Adder", "ga_reduced": "CommunicatorOptions.Reduced", "ga_bn_mode": "BatchNormOptions.Mode",
    "ga_bn_layout": "BatchNormOptions.Layout",
}  # fmt: skip
_RENAMED = {"ga_memory": "MemoryUse", "ga_optimizer.ns_coefficients": "newton_schulz"}
# Written by hand: an option that is a flag, and enumerations within classes that are.
_BY_HAND = {"ga_micro_options", "ga_micro_flags", "ga_bn_spread"}
_INTERNAL = {"ga_comm_kind"}
_ALIVE = {"ga_accumulator"}  # results whose class is by hand, but for its fields, which a superclass has
_LAST = {"log", "on_param_done"}  # in a record
_COPIED = "ga_step_result"  # by the raw layer, in one call: all words of the struct
_FUNCTIONS = {
    "MicroBatch.end": "MicroBatch.close", "BatchNorm.finalize": "BatchNorm.finalize_stats",
    "BatchNorm.backward": "MicroBatch.backward", "BatchNorm.backward_accumulate": "MicroBatch.backward_accumulate",
}  # fmt: skip
# Classes of which members are generated, in a superclass, and what that extends.
_CLASSES = {
    "Context": ("ContextCalls", "Config config"), "Group": ("ContextObject", "Context context, int id"),
    "Param": ("ContextObject", "Context context, int id"), "BatchNorm": ("ContextObject", "Context context, int id"),
}  # fmt: skip

# Classes whose methods have overloads, and the file that has these methods.
_OVERLOADED = {
    "Context": "ContextWindow", "Param": "Param", "BatchNorm": "BatchNorm", "MicroBatch": "MicroBatch", "Gradient": "Gradient",
}  # fmt: skip
_METHOD = re.compile(r"  (/\*\*(?:(?!\*/).)*\*/)\n  public (\w+) (\w+)\(([^)]+)\) \{", re.DOTALL)

# Fields that are not as in C: the type, how it is read from `from`, and how it is written to `to`, if here.
_OTHERWISE = {
    "ga_optimizer.ns_coefficients": ("NewtonSchulz", "NewtonSchulz.read(from)", "newtonSchulz.write(to)"),
    "ga_optimizer.ns_table": ("List<NewtonSchulz>", "NewtonSchulz.readTable(from)", "NewtonSchulz.writeTable(nsTable, to)"),
    "ga_schedule.table": ("double[]", "new double[0]", "to.set_table(table)"),
    "ga_param_info.shape": (
        "List<Long>",
        "LongStream.range(0, from.getRank()).map(axis -> from.dimension((int) axis)).boxed().toList()",
        "",
    ),
    "ga_param_options.reduce": (
        "Optional<Config.Reduce>",
        "Numbered.ofOptional(Config.Reduce.values(), from.getReduce())",
        "to.setReduce(valueOf(reduce))",
    ),
    "ga_config.log": ("Consumer<String>", "null", ""),
    "ga_config.on_param_done": ("Consumer<Param>", "null", ""),
    "ga_state_options.progress": ("Progress", "null", ""),
    "ga_state_options.note": ("String", "null", "to.set_note(note)"),
}
# What a comment says beyond the header's.
_MORE = {
    "ga_config.seed": "; 64 bits without a sign",
    "ga_config.log": ". What it throws comes out of the call, which has been made all the same",
    "ga_config.on_param_done": ". What it throws comes out of the call that it is called in, or of the next one",
}
_IMPORTS = {
    "ArrayList": "java.util.ArrayList", "Buffer": "java.nio.Buffer", "Collections": "java.util.Collections",
    "DoubleStream": "java.util.stream.DoubleStream", "Consumer": "java.util.function.Consumer", "List": "java.util.List", "LongStream": "java.util.stream.LongStream",
    "Optional": "java.util.Optional",
}  # fmt: skip


_NONE = Struct("", "", (), False, (), {})  # of which a value of a function is no field


def _camel(name: str) -> str:
    first, *rest = name.split("_")
    return first + "".join(part.capitalize() for part in rest)


def _type_name(c_name: str) -> str:
    return _NESTED.get(c_name) or _RENAMED.get(c_name) or names.TYPES[c_name]


class _Words:
    null, false, true = "null", "false", "true"

    def type(self, c_name: str) -> str:
        return f"{{@link {_type_name(c_name)}}}"

    def field(self, struct: str, name: str) -> str:
        return f"{{@link {_type_name(struct)}#{_field_name(struct, name)}}}"

    def own_field(self, struct: str, name: str) -> str:
        return _field_name(struct, name)

    def constant(self, enum: Enum, enumerator: Enumerator) -> str:
        if enum.c_name in _BY_HAND:
            return enumerator.name
        return f"{{@link {_type_name(enum.c_name)}#{enumerator.name}}}"

    def function(self, member: str) -> str:
        owner, name = _FUNCTIONS.get(member, member).split(".")
        # Without a text, the link would show the superclass that has the method.
        return f"{{@link {owner}#{_camel(name)} {owner}.{_camel(name)}}}"

    def text(self, text: str) -> str:
        return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def _field_name(struct: str, name: str) -> str:
    return _camel(_RENAMED.get(f"{struct}.{name}", name))


def write(header: Header) -> dict[str, str]:
    """The files: name and text."""
    java = _Java(header)
    files = {}
    for enum in header.enums.values():
        if enum.c_name not in _NESTED and enum.c_name not in _BY_HAND:
            files[f"{_type_name(enum.c_name)}.java"] = java.file(java.enum(enum, ""))
    for struct in header.structs.values():
        if struct.c_name in _ALIVE:
            files[f"{_type_name(struct.c_name)}Members.java"] = java.file(java.fields(struct))
        elif struct.c_name not in _BY_HAND:
            files[f"{_type_name(struct.c_name)}.java"] = java.file(java.record(struct))
    for owner in dict.fromkeys([*_CLASSES, *_OVERLOADED]):
        files[f"{owner}Members.java"] = java.file(java.members(owner))
    java.translator.check()
    return files


class _Java:
    def __init__(self, header: Header) -> None:
        self.header = header
        self.translator = Translator(header, _Words())

    def file(self, lines: Iterator[str]) -> str:
        """A class with its package and imports."""
        body = "\n".join(lines)
        imports = [f"import {_IMPORTS[name]};" for name in sorted(_IMPORTS) if re.search(rf"\b{name}\b", body)]
        head = ["// SPDX-License-Identifier: Apache-2.0", "// Generated from gradaccum.h by bindings/generate."]
        return "\n".join([*head, "package org.gradaccum;", "", *sorted(imports), *([""] if imports else []), body])

    # ---- Enumerations

    def enum(self, enum: Enum, indent: str) -> Iterator[str]:
        """An enumeration; in a record with an indent."""
        name = _type_name(enum.c_name).rpartition(".")[2]
        members = _members(name) if not indent else ""
        numbered = "" if "static Status of(" in members else " implements Numbered"
        lines = list(_javadoc(self.translator.enum(enum), len(indent)))
        lines.append(f"{'' if enum.c_name in _INTERNAL else 'public '}enum {name}{numbered} {{")
        last = enum.enumerators[-1]
        for e in enum.enumerators:
            lines += _indented(_javadoc(self.translator.enumerator(e, enum), len(indent) + 2))
            end = ";" if e is last and numbered else ","
            lines.append(f"  {e.name}(RawConstants.{e.c_name}){end}")
        if numbered:
            lines += ["", "  private final int value;", "", f"  {name}(int value) {{", "    this.value = value;", "  }",
                      "", "  @Override", "  public int value() {", "    return value;", "  }", "",
                      f"  static {name} of(int value) {{", "    return Numbered.of(values(), value);", "  }"]  # fmt: skip
        if members:
            lines += ([""] if numbered else []) + members.split("\n")
        lines.append("}")
        yield from (indent + line if line else "" for line in lines)

    # ---- Records

    def record(self, struct: Struct) -> Iterator[str]:
        """A record; of options, with a builder."""
        name = _type_name(struct.c_name)
        fields = sorted(struct.fields, key=lambda f: struct.c_name == "ga_config" and f.c_name in _LAST)
        parameters = [(_field_name(struct.c_name, f.c_name), self._text(struct, f)) for f in fields]
        yield from _javadoc(self.translator.struct(struct), 0, parameters)
        yield f"public record {name}("
        yield ",\n".join(f"    {self._declared(struct, f)}" for f in fields) + ") {"
        if struct.is_result:
            yield from self._result(struct, name, fields)
        else:
            yield from self._options(struct, name, fields)
        members = _members(name)
        if members:
            yield from ["", *members.split("\n")]
        for enum in self.header.enums.values():
            if _NESTED.get(enum.c_name, "").startswith(name + "."):
                yield ""
                yield from self.enum(enum, "  ")
        yield "}"

    def _text(self, struct: Struct, f: Field) -> str:
        text = self.translator.fragment(struct, f).replace("\n\n", " ").removesuffix(".")
        text += _MORE.get(f"{struct.c_name}.{f.c_name}", "")
        return re.sub(r"\bdefault:", "empty, the default:", text) if f.is_optional else text

    def _type(self, struct: Struct, f: Field) -> str:
        special = _OTHERWISE.get(f"{struct.c_name}.{f.c_name}")
        if special:
            return special[0]
        if f.enum is not None:
            kind = _type_name(f.enum.c_name)
            kind = kind.removeprefix(_type_name(struct.c_name) + ".")
            return f"Optional<{kind}>" if f.is_optional else kind
        if f.kind == "int":
            return "int" if f.bits == 32 else "long"
        return {"bool": "boolean", "double": "double", "string": "String", "address": "long"}[f.kind]

    def _declared(self, struct: Struct, f: Field) -> str:
        return f"{self._type(struct, f)} {_field_name(struct.c_name, f.c_name)}"

    def _read(self, struct: Struct, f: Field) -> str:
        special = _OTHERWISE.get(f"{struct.c_name}.{f.c_name}")
        if special:
            return special[1]
        value = f"from.get{f.c_name[0].upper()}{f.c_name[1:]}()"
        if f.enum is not None:
            kind = _type_name(f.enum.c_name).removeprefix(_type_name(struct.c_name) + ".")
            return f"{kind}.ofOptional({value})" if f.is_optional else f"{kind}.of({value})"
        return f"{value} != 0" if f.kind == "bool" else value

    def _write(self, struct: Struct, f: Field) -> str:
        special = _OTHERWISE.get(f"{struct.c_name}.{f.c_name}")
        if special:
            return f"    {special[2]};" if special[2] else ""
        name = _field_name(struct.c_name, f.c_name)
        value = name
        if f.enum is not None:
            value = f"{_type_name(f.enum.c_name)}.value({name})" if f.is_optional else f"{name}.value()"
        elif f.kind == "bool":
            value = f"{name} ? 1 : 0"
        return f"    to.set{f.c_name[0].upper()}{f.c_name[1:]}({value});"

    def _result(self, struct: Struct, name: str, fields: list[Field]) -> Iterator[str]:
        yield from ["", f"  static {name} read({struct.c_name} from) {{", f"    return new {name}("]
        yield ",\n".join(f"        {self._read(struct, f)}" for f in fields) + ");"
        yield "  }"
        if struct.c_name != _COPIED:
            return
        yield from ["", f"  static final int WORDS = {max(struct.layout.values()) // 8 + 1};"]
        yield from ["", f"  /** As {{@link #read}}, from what {{@code {_COPIED}.copy}} has copied. */"]
        yield from [f"  static {name} of(long[] words) {{", f"    return new {name}("]
        values = []
        for f in fields:
            value = f"words[{struct.layout[f.c_name] // 8}]"  # an enumeration is the lower half of its word
            if f.enum is not None:
                value = f"{self._type(struct, f)}.of((int) {value})"
            values.append(f"        Double.longBitsToDouble({value})" if f.kind == "double" else f"        {value}")
        yield ",\n".join(values) + ");"
        yield "  }"

    def fields(self, struct: Struct) -> Iterator[str]:
        """A class with the fields of a result."""
        name = f"{_type_name(struct.c_name)}Members"
        declared = [(_field_name(struct.c_name, f.c_name), self._declared(struct, f)) for f in struct.fields]
        yield from [f"abstract class {name} {{", *(f"  private final {field};" for _, field in declared)]
        yield from ["", f"  {name}({struct.c_name} from) {{"]
        yield from [f"    {n} = {self._read(struct, f)};" for (n, _), f in zip(declared, struct.fields, strict=True)]
        yield "  }"
        for (n, field), f in zip(declared, struct.fields, strict=True):
            yield from ["", *_indented(_javadoc(f"{{@return {self._text(struct, f)}}}", 2))]
            yield from [f"  public {field}() {{", f"    return {n};", "  }"]
        yield "}"

    def _options(self, struct: Struct, name: str, fields: list[Field]) -> Iterator[str]:
        camel = [_field_name(struct.c_name, f.c_name) for f in fields]
        yield from self._first_builder(struct)
        yield ""
        yield from _indented(_javadoc("Makes a builder that begins with these values.", 2, returns="the builder"))
        yield from ["  public Builder toBuilder() {", "    Builder builder = new Builder();"]
        yield from [f"    builder.{n} = {n};" for n in camel]
        yield from ["    return builder;", "  }", ""]
        yield from [f"  static Builder read({struct.c_name} from) {{", "    Builder builder = new Builder();"]
        yield from [f"    builder.{n} = {self._read(struct, f)};" for n, f in zip(camel, fields, strict=True)]
        yield from ["    return builder;", "  }", ""]
        yield "  /** Refuses null, in a builder and where a record is used that was made without one. */"
        yield f"  private {name} checked() {{"
        for n, f in zip(camel, fields, strict=True):
            if self._type(struct, f).startswith("List<"):
                yield f'    Check.noneNull({n}, "{n}");'
            elif f.enum is not None or f.kind == "array":
                yield f'    Check.notNull({n}, "{n}");'
        yield from ["    return this;", "  }", "", f"  void write({struct.c_name} to) {{", "    checked();"]
        yield from filter(None, (self._write(struct, f) for f in fields))
        yield from ["  }", ""]
        article = "an" if name[0] in "AEIO" else "a"
        yield from [f"  /** Collects the values of {article} {name}. */", "  public static final class Builder {"]
        yield from [f"    private {self._declared(struct, f)};" for f in fields]
        yield from ["", "    private Builder() {}"]
        for n, f in zip(camel, fields, strict=True):
            yield ""
            yield from _indented(_javadoc(f"Sets {n}.", 4, [(n, self._text(struct, f))], "this builder"), 4)
            yield f"    public Builder {n}({self._declared(struct, f)}) {{"
            copy = n
            if self._type(struct, f).startswith("List<"):
                copy = f"{n} == null ? null : Collections.unmodifiableList(new ArrayList<>({n}))"
            yield from [f"      this.{n} = {copy};", "      return this;", "    }"]
        yield ""
        yield from _indented(_javadoc("Makes an immutable value of what was set.", 4, returns="the value"), 4)
        yield from [f"    public {name} build() {{", f"      return new {name}("]
        yield ",\n".join(f"          {n}" for n in camel) + ").checked();"
        yield from ["    }", "  }"]

    # ---- Members of classes

    def members(self, owner: str) -> Iterator[str]:
        """The superclass of a class, which calls functions of C as they are."""
        base, parameters = _CLASSES.get(owner, ("Object", ""))
        arguments = ", ".join(parameter.split()[1] for parameter in parameters.split(", ") if parameter)
        yield f"/** What {{@link {owner}}} has of gradaccum.h as it is there, and overloads of its methods. */"
        yield f"abstract class {owner}Members extends {base} {{"
        yield from [f"  {owner}Members({parameters}) {{", f"    super({arguments});", "  }"]
        for f in self.header.functions:
            if f.owner == owner and owner in _CLASSES:
                yield from self.member(f)
        layer = "\n".join(line for f in self.header.layer_functions for line in self.layer_function(f, owner))
        yield from [layer, *_overloads(layer, owner, declared=True)]
        if owner in _OVERLOADED:
            path = _SOURCES / "java/org/gradaccum" / f"{_OVERLOADED[owner]}.java"
            yield from _overloads(path.read_text(encoding="utf-8"), owner, declared=False)
        yield "}"

    def member(self, f: Function) -> Iterator[str]:
        """A method that calls a function of C; one more where null removes what was set."""
        name = _FUNCTIONS.get(f"{f.owner}.{f.name}", f"{f.owner}.{f.name}").split(".")[1]
        handle = "c" if f.owner == "Context" else "c, id"
        throws = "; ".join(self.translator.errors(f))
        value = f.argument or f.result
        if value is None:
            yield from self._method(f, f"void {_camel(name)}()", [f"Raw.{f.c_name}({handle});"],
                                    _javadoc(self.translator.function(f), 2, throws=throws))  # fmt: skip
            return
        about = self.translator.value(f)
        kind, argument = self._value_type(value), _camel(value.c_name)
        struct = self.header.structs.get(value.struct)
        new = struct and f"{struct.c_name} fields = new {struct.c_name}({struct.zeros})"
        if f.result:
            doc = _javadoc(self.translator.function(f, f"{{@return {about}}}"), 2, throws=throws)
            if struct:
                built = "" if struct.is_result else ".build()"
                body = [f"Raw.{f.c_name}({handle}, fields);", f"return {kind}.read(fields){built};"]
            else:
                out = {"boolean": "int"}.get(kind, kind) if value.enum is None else "int"
                read = f"{kind}.of(out[0])" if value.enum else "out[0] != 0" if value.kind == "bool" else "out[0]"
                body = [f"{out}[] out = new {out}[1];", f"Raw.{f.c_name}({handle}, out);", f"return {read};"]
            yield from self._method(f, f"{kind} {_camel(name)}()", body, doc, resource=new or "")
            return
        doc = _javadoc(self.translator.function(f), 2, [(argument, about)], throws=throws)
        given = {"bool": f"{argument} ? 1 : 0", "enum": f"{argument}.value()", "struct": "fields"}.get(value.kind, argument)
        body = [f"{argument}.write(fields);"] if struct else []
        before = [f'Check.notNull({argument}, "{argument}");'] if value.kind in ("enum", "struct") else []
        body.append(f"Raw.{f.c_name}({handle}, {given});")
        yield from self._method(f, f"void {_camel(name)}({kind} {argument})", body, doc, before, new or "")
        if value.clears:
            cleared = _javadoc(self.translator.cleared(f), 2, throws=throws)
            body = [f"Raw.{f.c_name}({handle}, null);"]
            yield from self._method(f, f"void {_camel(name.replace('set_', 'clear_'))}()", body, cleared)

    def layer_function(self, f: LayerFunction, owner: str) -> Iterator[str]:
        """A method that calls a function of a layer with tensors."""
        its_owner, name = _FUNCTIONS.get(f"{f.owner}.{f.name}", f"{f.owner}.{f.name}").split(".")
        if its_owner != owner:
            return
        taken = [f"{'Tensor' if a in f.tensors else 'long'} {a}" for a in f.arguments]
        documented = [(a, names.LAYER_ARGUMENTS[a]) for a in f.arguments]
        before, begin = "BatchNorm layer = (BatchNorm) this;", "context.run("
        if owner == "MicroBatch":
            taken, documented = ["BatchNorm layer", *taken], [("layer", "the layer"), *documented]
            before, begin = "MicroBatch micro = (MicroBatch) this;", 'micro.run("layer", layer, '
        written = {a: "true" if a in names.WRITTEN else "false" for a in f.tensors}
        given = [f'layer.address({a}, samples, positions, {written[a]}, "{a}")' if a in f.tensors else a for a in f.arguments]
        throws = "; ".join(self.translator.errors(f))
        yield from ["", *_indented(_javadoc(self.translator.function(f), 2, documented, throws=throws))]
        yield from [f"  public void {_camel(name)}({', '.join(taken)}) {{", f"    {before}"]
        yield f"    {begin}c -> Raw.{f.c_name}(c, layer.id(), {', '.join(given)}), {', '.join(f.tensors)});"
        yield "  }"

    def _method(
        self, f: Function, head: str, body: list[str], doc: Iterator[str], before: Iterable[str] = (), resource: str = ""
    ) -> Iterator[str]:
        context = "" if f.owner == "Context" else "context."
        yield ""
        yield from _indented(doc)
        yield f"  public {head} {{"
        yield from [f"    {line}" for line in [*before, f"long c = {context}enter();"]]
        yield f"    try {f'({resource}) ' if resource else ''}{{"
        yield from [f"      {line}" for line in body]
        yield from ["    } finally {", f"      {context}exit();", "    }", "  }"]

    def _value_type(self, value: Field) -> str:
        if value.kind == "struct":
            return _type_name(value.struct)
        return "long" if value.kind == "size" else self._type(_NONE, value)

    def _first_builder(self, struct: Struct) -> Iterator[str]:
        """builder(), with what chooses the defaults; with two arguments it is written by hand."""
        if len(struct.arguments) > 1:
            return
        yield ""
        taken, given = "", ""
        parameters = []
        for argument in struct.arguments:
            fields = [f for f in struct.fields if f.c_name == argument]
            kind = self._type(struct, fields[0]) if fields else "Flavor"
            text = self._text(struct, fields[0]) if fields else "whose defaults: TORCH or KERAS"
            parameters.append((argument, text))
            taken, given = f"{kind} {argument}", f'Check.notNull({argument}, "{argument}").value()'
        yield from _indented(_javadoc("Begins with the defaults.", 2, parameters, "the builder"))
        yield f"  public static Builder builder({taken}) {{"
        yield f"    try ({struct.c_name} defaults = new {struct.c_name}({given})) {{"
        yield from ["      return read(defaults);", "    }", "  }"]


def _overloads(source: str, owner: str, *, declared: bool) -> Iterator[str]:
    """Methods that take buffers where those of a class take tensors, and methods without options of a micro-batch.

    Declares what they call, unless it is declared.
    """
    for doc, result, name, parameters in _METHOD.findall(source.replace("{@link #", f"{{@link {owner}#")):
        given, taken = [], []
        head = [] if declared else ["", f"  {doc}", f"  public abstract {result} {name}({parameters});"]
        for kind, parameter in (p.rsplit(None, 1) for p in parameters.split(",")):
            kind = kind.strip()
            if kind == "Tensor":
                doc = re.sub(rf"@param {parameter}\b", r"\g<0> a direct buffer:", doc)
                taken.append(f"Buffer {parameter}")
                given.append(f'Tensor.of("{parameter}", {parameter})')
            elif kind == "MicroOptions" and not given:
                doc = re.sub(rf"   \* @param {parameter} .*\n", "", doc)
                given.append("null")
            else:
                taken.append(f"{kind} {parameter}")
                given.append(parameter)
        call = f"{name}({', '.join(given)});"
        if "Tensor.of(" in call or "null, " in call:
            yield from [*head, "", f"  {doc}", f"  public {result} {name}({', '.join(taken)}) {{"]
            yield from [f"    {'' if result == 'void' else 'return '}{call}", "  }"]


def _members(name: str) -> str:
    """What a class has beyond the header."""
    path = _MEMBERS / f"{name}.java"
    return path.read_text(encoding="utf-8").rstrip("\n") if path.is_file() else ""


def _indented(lines: Iterator[str], width: int = 2) -> Iterator[str]:
    yield from (" " * width + line for line in lines)


def _javadoc(
    text: str, indent: int = 0, parameters: list[tuple[str, str]] | None = None, returns: str = "", throws: str = ""
) -> Iterator[str]:
    """A comment, as it is without an indent, but no wider than that one leaves."""
    tags = [f"@param {name} {about}" for name, about in parameters or []]
    tags += [f"@return {returns}"] if returns else []
    tags += [f"@throws GradAccumException {throws}"] if throws else []
    if not tags and len(text) + indent + 7 <= _WIDTH and "\n" not in text:
        yield f"/** {text} */"
        return
    width = _WIDTH - indent - 3
    yield "/**"
    for i, paragraph in enumerate(text.split("\n\n")):
        if i:
            yield " *"
        yield from (f" * {line}" for line in textwrap.wrap(("<p>" if i else "") + paragraph, width))
    if tags:
        yield " *"
    for tag in tags:
        yield from (f" * {line}" for line in textwrap.wrap(tag, width, subsequent_indent="    "))
    yield " */"
