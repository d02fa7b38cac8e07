# SPDX-License-Identifier: Apache-2.0
"""What the dataclasses of options.py have in common: they are structs of C, under the same names."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import fields
from enum import EnumType
from typing import Any, ClassVar, Self

from . import _raw
from .enums import Reduce

# In place of a field's value: the library's default, which the constructor puts there.
DEFAULT: Any = None


class Result:
    """A dataclass that is read from a struct of C."""

    _not_fields: ClassVar[tuple[str, ...]] = ()  # that the struct has in another form
    _types: ClassVar[dict[str, Callable[[Any], Any]]] = {}  # of fields that are not as in C

    @classmethod
    @functools.cache
    def _fields(cls) -> list[str]:
        names = [field.name for field in fields(cls)]  # type: ignore[arg-type]
        return [name for name in names if name not in cls._not_fields]

    @classmethod
    def _from_c(cls, name: str, value: Any) -> Any:
        return cls._types[name](value) if name in cls._types else value

    @classmethod
    def _read(cls, struct: Any, **others: Any) -> Self:
        names = [name for name in cls._fields() if name not in others]
        return cls(**{name: cls._from_c(name, getattr(struct, name)) for name in names}, **others)


class Struct(Result):
    """A dataclass of options. Fields that are not given are what the library's _init function writes."""

    _raw: ClassVar[str]
    _arguments: ClassVar[tuple[str, ...]] = ()  # fields that choose the defaults

    def __post_init__(self) -> None:
        defaults = self._new()
        for name in self._fields():
            if getattr(self, name) is None:
                object.__setattr__(self, name, self._from_c(name, getattr(defaults, name)))
                continue
            kind = self._types.get(name)
            if isinstance(kind, EnumType) and not isinstance(getattr(self, name), kind):
                raise TypeError(
                    f"{type(self).__name__}.{name} was {getattr(self, name)!r}, expected a {kind.__name__}"
                )
        self._write()  # refuses what C has no place for

    def _new(self) -> Any:
        return getattr(_raw, self._raw)(*(int(getattr(self, name)) for name in self._arguments))

    def _write(self) -> Any:
        """The struct of C."""
        struct = self._new()
        for name in self._fields():
            value = getattr(self, name)
            if value is None:  # has no name of its own: the struct has the default
                continue
            try:
                setattr(struct, name, value)
            except (TypeError, OverflowError):
                raise TypeError(
                    f"{type(self).__name__}.{name} was {value!r}, which has not the type or the range "
                    "of this field"
                ) from None
        return struct


class OptimizerStruct(Struct):
    """Newton-Schulz coefficients are a tuple, and a table of them one of all numbers, row after row."""

    ns_coefficients: tuple[float, float, float]
    """Has accessors in C."""
    ns_table: Sequence[float]
    """A pointer and a number of rows in C."""

    def __post_init__(self) -> None:
        if self.ns_coefficients is None:
            object.__setattr__(self, "ns_coefficients", _coefficients(self._new()))
        if len(self.ns_coefficients) != 3:
            raise ValueError(f"Optimizer.ns_coefficients was {self.ns_coefficients!r}, expected three")
        if len(self.ns_table) % 3 != 0:
            raise ValueError(f"Optimizer.ns_table had {len(self.ns_table)} numbers, expected three a row")
        super().__post_init__()

    def _write(self) -> Any:
        struct = super()._write()
        for index, value in enumerate(self.ns_coefficients):
            struct.set_ns_coefficient(index, value)
        if len(self.ns_table) > 0:
            struct.set_ns_table(self.ns_table)
        return struct

    @classmethod
    def _read(cls, struct: Any, **others: Any) -> Self:
        table = tuple(struct.ns_table_number(i) for i in range(struct.ns_table_size()))
        return super()._read(struct, ns_coefficients=_coefficients(struct), ns_table=table, **others)


def _coefficients(struct: Any) -> tuple[float, float, float]:
    return (struct.ns_coefficient(0), struct.ns_coefficient(1), struct.ns_coefficient(2))


class ScheduleStruct(Struct):
    """The table is copied into the struct."""

    table: Sequence[float]
    """A pointer and a length in C."""

    def _write(self) -> Any:
        struct = super()._write()
        if self.table:
            struct.set_table(self.table)
        return struct


class ParamOptionsStruct(Struct):
    """A reduction other than MAX is the context's."""

    reduce: Reduce | None
    """0 in C, which is also MEAN, in place of None."""

    def __post_init__(self) -> None:
        if self.reduce is not None and self.reduce is not Reduce.MAX:
            raise TypeError(
                f"ParamOptions.reduce was {self.reduce!r}, expected Reduce.MAX, or None for that of the context"
            )
        super().__post_init__()


class StateOptionsStruct(Struct):
    """The note is copied into the struct, and a function of the package calls progress."""

    progress: Callable[[int, int], object] | None
    """A function and its data in C."""
    note: str | None
    """A string in C."""

    def _write(self) -> Any:
        struct = super()._write()
        if self.note is not None:
            struct.set_note(self.note)
        if self.progress is not None:
            struct.progress = _raw.progress_function()
            struct.progress_user = id(self.progress)  # this object keeps the callable
        return struct
