# SPDX-License-Identifier: Apache-2.0
"""Writes the enumerations, options and results of the C# package, and members of its classes.

Classes are partial: bindings/csharp/GradAccum has the members that do not follow from the header.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator

import names
from docs import Translator, sentence
from header import Enum, Enumerator, Field, Function, Header, LayerFunction, Struct

_WIDTH = 120

# Names that are not the header's in C#'s spelling.
_TYPES = {
    "ga_dtype": "DType", "ga_memory": "MemoryUse", "ga_state_settings": "StateSettings", "ga_comm_wire": "Wire",
    "ga_shard": "Shard", "ga_comm_adder": "Adder", "ga_comm_kind": "CommunicatorKind", "ga_bn_mode": "BatchNormMode",
    "ga_bn_layout": "BatchNormLayout", "ga_bn_spread": "Spread",
}  # fmt: skip
_ENUMERATORS = {
    "GA_OPTIMIZER_ADAMW": "AdamW", "GA_OPTIMIZER_RMSPROP": "RmsProp", "GA_OPTIMIZER_NADAM": "NAdam",
    "GA_OPTIMIZER_RADAM": "RAdam", "GA_OPTIMIZER_ADEMAMIX": "AdEmaMix",
    "GA_OPTIMIZER_SCHEDULE_FREE_ADAMW": "ScheduleFreeAdamW", "GA_BF16": "BF16", "GA_COMM_WIRE_BF16": "BF16",
    "GA_AGC_NFNETS": "NfNets", "GA_STATE_8BIT": "State8Bit", "GA_NO_TRANSPOSE": "No", "GA_TRANSPOSE": "Yes",
}  # fmt: skip
_FIELDS = {
    "ns_steps": "NewtonSchulzSteps", "ns_precision": "NewtonSchulzPrecision",
    "ns_preset": "NewtonSchulzPreset", "ns_table": "NewtonSchulzTable", "onednn": "OneDnn",
    "openmp": "OpenMp", "group": "GroupId", "data": "Address",
    "ga_bn_info.gamma": "GammaId", "ga_bn_info.beta": "BetaId", "ns_coefficients": "NewtonSchulzCoefficients",
}  # fmt: skip
_MEMBERS = {
    "Context.accumulate": "Context.Accumulate(Tensor[], double, double, bool)",
    "MicroBatch.accumulate": "MicroBatch.Accumulate(Param, Tensor)",
    "MicroBatch.accumulate_rows": "MicroBatch.AccumulateRows(Param, Tensor, Tensor)", "MicroBatch.end": "MicroBatch.Dispose",
    "Param.get_state": "Param.GetState{T}(string)", "Context.load": "Context.Load(string, StateOptions)",
    "Context.add_param": "Context.AddParam(Group, string, Tensor, ParamOptions, long[])",
    "Context.loss_scale": "Context.LossScale", "Context.step_result": "Context.GetStepResult",
    "BatchNorm.finalize": "BatchNorm.FinalizeStats", "Context.close": "Context.Dispose",
    "BatchNorm.backward": "MicroBatch.Backward", "BatchNorm.backward_accumulate": "MicroBatch.BackwardAccumulate",
}  # fmt: skip

# Classes of which members are generated, what their objects are called, and functions whose members do more than call them.
_CLASSES = {"Context": "", "Group": "group", "Param": "parameter", "BatchNorm": "layer", "MicroBatch": ""}
_MEMBERS_BY_HAND = {"ga_group_count", "ga_ema_swap", "ga_micro_abort"}
_IDENTITY = """\
/// <summary>Its context.</summary>
public Context Context {{ get; }}

/// <summary>Its number: 0, 1, 2, ... in the order in which {what}s are added.</summary>
public int Id {{ get; }}

/// <summary>Whether both are the same {what} of the same context.</summary>
/// <param name="other">The other {what}.</param>
/// <returns>Whether they are the same.</returns>
public bool Equals({name} other) {{
  return other != null && other.Context == Context && other.Id == Id;
}}

/// <summary>Whether both are the same {what} of the same context.</summary>
/// <param name="obj">The other object.</param>
/// <returns>Whether they are the same.</returns>
public override bool Equals(object obj) {{
  return Equals(obj as {name});
}}

/// <summary>A hash code.</summary>
/// <returns>The code.</returns>
public override int GetHashCode() {{
  return Id;
}}
"""

_INTERNAL = {"ga_comm_kind"}
_BY_HAND = {"ga_micro_options", "ga_micro_flags"}  # arguments of calls
_ADDED = {"ga_dtype": ("Default", "The choice of the library, where an option takes a type.")}
# Members by hand: what is not a number, the argument of a constructor, and what may be null.
_KINDS_BY_HAND = {"array", "callback", "string"}
_FIELDS_BY_HAND = {("ga_param_options", "reduce")}
_READ = {"ga_clip", "ga_optimizer"}  # options that a context returns
_COPIED = {"ga_step_result", "ga_window_info"}  # laid out as in C, for the sake of speed
_VALUES = {"ga_memory", "ga_state_info"}  # results that are structs
_ALIVE = {"ga_accumulator"}  # results whose class is by hand, but for its fields


def _pascal(name: str) -> str:
    return "".join(part[:1].upper() + part[1:] for part in name.split("_")).replace("Dtype", "DType")


def _type_name(c_name: str) -> str:
    return _TYPES.get(c_name) or names.TYPES[c_name]


def _enumerator_name(e: Enumerator) -> str:
    return _ENUMERATORS.get(e.c_name) or _pascal(e.name.lower())


def _field_name(struct: str, name: str) -> str:
    return _FIELDS.get(f"{struct}.{name}") or _FIELDS.get(name) or _pascal(name)


class _Words:
    null, false, true = "null", "false", "true"

    def type(self, c_name: str) -> str:
        return f'<see cref="GradAccum.{_type_name(c_name)}"/>'

    def field(self, struct: str, name: str) -> str:
        return f'<see cref="GradAccum.{_type_name(struct)}.{_field_name(struct, name)}"/>'

    def own_field(self, struct: str, name: str) -> str:
        return _field_name(struct, name)

    def constant(self, enum: Enum, enumerator: Enumerator) -> str:
        if enum.c_name in _BY_HAND:
            return enumerator.name
        return f'<see cref="GradAccum.{_type_name(enum.c_name)}.{_enumerator_name(enumerator)}"/>'

    def function(self, member: str) -> str:
        owner, name = member.split(".")
        return f'<see cref="GradAccum.{_MEMBERS.get(member) or f"{owner}.{_pascal(name)}"}"/>'

    def text(self, text: str) -> str:
        return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def write(header: Header) -> dict[str, str]:
    """The files: name and text."""
    translator = Translator(header, _Words())
    enums = [e for e in header.enums.values() if e.c_name not in _BY_HAND]
    structs = [s for s in header.structs.values() if s.c_name not in _BY_HAND]
    files = {
        "Enums.cs": _file(line for e in enums for line in _enum(e, translator)),
        "Options.cs": _file(line for s in structs if not s.is_result for line in _options(s, translator)),
        "Results.cs": _file(line for s in structs if s.is_result for line in _result(s, translator)),
    }
    files["Members.cs"] = _file(line for owner in _CLASSES for line in _class(owner, header, translator))
    translator.check()
    return files


def _file(lines: Iterator[str]) -> str:
    head = ["// SPDX-License-Identifier: Apache-2.0", "// Generated from gradaccum.h by bindings/generate.",
            "using System;", "using System.Runtime.InteropServices;", "", "namespace GradAccum {"]  # fmt: skip
    body = [f"  {line}" if line else "" for line in lines]
    return "\n".join([*head, *body[:-1], "}"])


def _summary(text: str) -> Iterator[str]:
    if len(text) < _WIDTH - 34 and "\n" not in text:
        yield f"/// <summary>{text}</summary>"
        return
    yield "/// <summary>"
    paragraphs = text.split("\n\n")
    for paragraph in paragraphs:
        marked = f"<para>{paragraph}</para>" if len(paragraphs) > 1 else paragraph
        # A name in a cref is not broken.
        lines = textwrap.wrap(marked.replace("<see cref", "<see\0cref"), _WIDTH - 8, break_long_words=False)
        yield from ("/// " + line.replace("\0", " ") for line in lines)
    yield "/// </summary>"


def _enum(enum: Enum, translator: Translator) -> Iterator[str]:
    yield from _summary(translator.enum(enum))
    yield f"{'internal' if enum.c_name in _INTERNAL else 'public'} enum {_type_name(enum.c_name)} {{"
    if enum.c_name in _ADDED:
        name, doc = _ADDED[enum.c_name]
        yield from (f"  {line}" for line in _summary(doc))
        yield f"  {name} = 0,"
    for e in enum.enumerators:
        yield from (f"  {line}" for line in _summary(translator.enumerator(e, enum)))
        yield f"  {_enumerator_name(e)} = Raw.{e.c_name}{',' if e is not enum.enumerators[-1] else ''}"
    yield from ["}", ""]


def _kind(f: Field) -> str:
    if f.enum is not None:
        return _type_name(f.enum.c_name)
    if f.kind == "int":
        return {(32, True): "int", (32, False): "uint", (64, True): "long", (64, False): "ulong"}[f.bits, f.is_signed]
    return {"bool": "bool", "double": "double", "string": "string", "address": "IntPtr"}[f.kind]


def _from_c(f: Field, value: str) -> str:
    if f.enum is not None:
        return f"({_kind(f)}){value}"
    return f"{value} != 0" if f.kind == "bool" else value


def _to_c(f: Field) -> str:
    if f.enum is not None:
        return "(int)value"
    return "value ? 1 : 0" if f.kind == "bool" else "value"


def _options(struct: Struct, translator: Translator) -> Iterator[str]:
    name = _type_name(struct.c_name)
    yield from _summary(translator.struct(struct))
    yield from [f"public sealed partial class {name} {{", f"  internal readonly {struct.c_name} Native;", ""]
    if not struct.arguments:
        yield "  /// <summary>The defaults of the library.</summary>"
        yield from [f"  public {name}() {{", f"    Native = Natives.First(() => new {struct.c_name}());", "  }", ""]
    if struct.c_name in _READ:
        yield from [f"  internal {name}({struct.c_name} native) {{", "    Native = native;", "  }", ""]
    for f in struct.fields:
        if f.kind in _KINDS_BY_HAND or (struct.c_name, f.c_name) in _FIELDS_BY_HAND:
            continue
        yield from (f"  {line}" for line in _summary(translator.field(struct, f)))
        yield f"  public {_kind(f)} {_field_name(struct.c_name, f.c_name)} {{"
        yield f"    get {{ return {_from_c(f, f'Native.{f.c_name}')}; }}"
        yield from [f"    set {{ Native.{f.c_name} = {_to_c(f)}; }}", "  }", ""]
    yield from ["}", ""]


def _result(struct: Struct, translator: Translator) -> Iterator[str]:
    name = _type_name(struct.c_name)
    yield from _summary(translator.struct(struct)) if struct.c_name not in _ALIVE else ()
    if struct.c_name in _COPIED:
        yield from _copied(struct, name, translator)
        return
    kind = "struct" if struct.c_name in _VALUES else "sealed partial class"
    yield from [f"public {kind} {name} {{", f"  internal {name}({struct.c_name} native) {{"]
    shown = [f for f in struct.fields if f.kind != "array"]
    for f in shown:
        value = f"(int)native.{f.c_name}" if f.c_name == "slot" else _from_c(f, f"native.{f.c_name}")
        yield f"    {_field_name(struct.c_name, f.c_name)} = {value};"
    if len(shown) < len(struct.fields):
        yield "    ReadArrays(native);"
    yield from ["  }", ""]
    for f in shown:
        yield from (f"  {line}" for line in _summary(translator.field(struct, f)))
        shown_kind = "int" if f.c_name == "slot" else _kind(f)
        yield from [f"  public {shown_kind} {_field_name(struct.c_name, f.c_name)} {{ get; }}", ""]
    yield from ["}", ""]


def _class(owner: str, header: Header, translator: Translator) -> Iterator[str]:
    """The half of a class that calls functions of C as they are; of an object of a context, also which one it is."""
    yield f"public sealed partial class {owner} {{"
    if what := _CLASSES[owner]:
        yield from (f"  {line}" if line else "" for line in _IDENTITY.format(name=owner, what=what).split("\n"))
    for f in header.functions:
        if f.owner == owner and f.c_name not in _MEMBERS_BY_HAND:
            yield from (f"  {line}" if line else "" for line in _member(f, header, translator))
    for layer_function in header.layer_functions:
        yield from (f"  {line}" if line else "" for line in _layer_function(layer_function, owner, translator))
    yield from ["}", ""]


def _layer_function(f: LayerFunction, owner: str, translator: Translator) -> Iterator[str]:
    """A method that calls a function of a layer with tensors."""
    its_owner, name = _MEMBERS.get(f"{f.owner}.{f.name}", f"{f.owner}.{_pascal(f.name)}").split(".")
    if its_owner != owner:
        return
    taken = [f"{'Tensor' if a in f.tensors else 'long'} {a}" for a in f.arguments]
    documented = {a: names.LAYER_ARGUMENTS[a] for a in f.arguments}
    before, begin, layer = [], "Context.Begin()", ""
    if owner == "MicroBatch":
        taken, documented = ["BatchNorm layer", *taken], {"layer": "the layer", **documented}
        before, begin, layer = ["  context.Id(layer);"], "Begin()", "layer."
    given = [f"{a}Pin.Address" if a in f.tensors else a for a in f.arguments]
    yield from _summary(translator.function(f))
    yield from (f'/// <param name="{a}">{sentence(about)}</param>' for a, about in documented.items())
    yield from (f'/// <exception cref="GradAccumException">{error}.</exception>' for error in translator.errors(f))
    yield from [f"public void {name}({', '.join(taken)}) {{", *before, f"  using (Call call = {begin}) {{"]
    yield f"    long count = {layer}Count(samples, positions);"
    yield from (f'    using (Pin {a}Pin = {layer}Borrow("{a}", {a}, count))' for a in f.tensors)
    yield from [f"    Raw.{f.c_name}(call.Context, {layer}Id, {', '.join(given)});", "  }", "}", ""]


def _member(f: Function, header: Header, translator: Translator) -> Iterator[str]:
    """A property of what a function returns; a method of what it does."""
    name = _MEMBERS.get(f"{f.owner}.{f.name}", _pascal(f.name)).rpartition(".")[2]
    begin, handle = ("", "call.Context") if f.owner == "Context" else ("Context.", "call.Context, Id")
    value = f.argument or f.result
    struct = header.structs.get(value.struct) if value else None
    yield from _summary(translator.function(f, sentence(translator.value(f)) if f.result else ""))
    if f.argument:
        yield f'/// <param name="{_camel(f.argument)}">{sentence(translator.argument(f))}</param>'
    yield from (f'/// <exception cref="GradAccumException">{error}.</exception>' for error in translator.errors(f))
    using = f"using (Call call = {begin}Begin())"
    if value is None:
        yield from [f"public void {name}() {{", f"  {using} Raw.{f.c_name}({handle});", "}", ""]
        return
    kind = "int" if value.kind == "size" else _type_name(value.struct) if struct else _kind(value)
    if f.argument:
        argument = _camel(f.argument)
        yield f"public void {name}({kind} {argument}) {{"
        given = {"bool": f"{argument} ? 1 : 0", "enum": f"(int){argument}"}.get(value.kind, argument)
        if struct and value.clears:
            given = f"{argument} == null ? null : {argument}.Native"
        elif struct:
            yield f'  if ({argument} == null) throw new ArgumentNullException("{argument}");'
            given = f"{argument}.Native"
        yield from [f"  {using} Raw.{f.c_name}({handle}, {given});", "}", ""]
        return
    copied = value.struct in _COPIED
    yield from [f"public {'unsafe ' if copied else ''}{kind} {name} {{", "  get {", f"    {using} {{"]
    if copied:
        yield from [f"      {kind} value = default({kind});", "      value.Prepare();"]
        yield from [f"      Raw.{f.c_name}({handle}, (IntPtr)(&value));", "      return value;"]
    elif struct:
        made = f"{struct.c_name} native = new {struct.c_name}({struct.zeros})"
        yield f"      using ({made}) {{" if struct.is_result else f"      {made};"
        body = [f"Raw.{f.c_name}({handle}, native);", f"return new {kind}(native);"]
        yield from [f"{'  ' if struct.is_result else ''}      {line}" for line in body]
        yield from ["      }"] if struct.is_result else []
    else:
        out = "UIntPtr" if value.kind == "size" else "int" if value.enum or value.kind == "bool" else kind
        read = "(int)value.ToUInt64()" if value.kind == "size" else _from_c(value, "value")
        yield from [f"      {out} value;", f"      Raw.{f.c_name}({handle}, out value);", f"      return {read};"]
    yield from ["    }", "  }", "}", ""]


def _copied(struct: Struct, name: str, translator: Translator) -> Iterator[str]:
    """A struct that is laid out as in C, which fills it."""
    shown = {f.c_name: f for f in struct.fields}
    yield from ["[StructLayout(LayoutKind.Sequential)]", f"public struct {name} {{", "  private UIntPtr structSize;"]
    for member in list(struct.layout)[1:]:
        f = shown.get(member)
        kind = "int" if f is None or f.enum is not None or f.kind == "bool" else _kind(f)
        yield f"  private readonly {kind} {_camel(f) if f else member};"
    yield from ["", "  internal unsafe void Prepare() {", f"    structSize = (UIntPtr)(uint)sizeof({name});", "  }"]
    for f in struct.fields:
        yield ""
        yield from (f"  {line}" for line in _summary(translator.field(struct, f)))
        yield f"  public {_kind(f)} {_field_name(struct.c_name, f.c_name)} {{"
        yield from [f"    get {{ return {_from_c(f, _camel(f))}; }}", "  }"]
    yield from ["}", ""]


def _camel(f: Field) -> str:
    name = _pascal(f.c_name)
    return name[0].lower() + name[1:]
