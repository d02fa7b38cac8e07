#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Writes elementary.hpp, beside this file: exp, log and pow of arguments that are hard to round, by the module decimal
with 60 digits. Needs Python 3.11 alone. test_elementary.cpp replays the file.

Hard are results next to a midpoint of two doubles. They are the worst of as many random arguments of each range as
SAMPLES says; then come the ends of the ranges.
"""
import decimal
import math
import pathlib
import random
from decimal import Decimal

SAMPLES, KEPT = 10000, 8
decimal.getcontext().prec = 60
decimal.getcontext().Emin, decimal.getcontext().Emax = -10**6, 10**6

FUNCTIONS = {
    "exponential": lambda x, _: Decimal(x).exp(),
    "natural_log": lambda x, _: Decimal(x).ln(),
    "real_power": lambda x, y: (Decimal(y) * Decimal(x).ln()).exp(),
}


def rounded(exact: Decimal) -> tuple[float, float]:
    """The nearest double, and how much larger the exact result is, in units of its last place."""
    nearest = float(exact)
    unit = math.ulp(nearest)
    return nearest, float((exact - Decimal(nearest)) / Decimal(unit))


def uniform(low: float, high: float):
    return lambda: random.uniform(low, high)


def power(low: float, high: float):
    """An argument of any size, and an exponent for which the logarithm of the result is in [low, high]."""

    def draw() -> tuple[float, float]:
        x = 2.0 ** random.uniform(-1070, 1023)
        if random.random() < 0.5:
            x = 1 + random.choice((-1, 1)) * 2.0 ** random.uniform(-46, -1)
        return x, random.uniform(low, high) / math.log(x)

    return draw


def one(draw):
    return lambda: (draw(), 0.0)


RANGES = (
    ("exponential", one(uniform(-1, 1))),
    ("exponential", one(lambda: random.uniform(-1, 1) * 2.0 ** random.uniform(-50, 0))),
    ("exponential", one(uniform(-708, 709.7))),
    ("exponential", one(uniform(-745, -709))),
    ("natural_log", one(uniform(0.5, 2))),
    ("natural_log", one(lambda: 1 + random.uniform(-1, 1) * 2.0 ** random.uniform(-50, 0))),
    ("natural_log", one(lambda: 2.0 ** random.uniform(-1074, 1023))),
    ("real_power", lambda: (random.uniform(0.9, 1), float(random.randint(1, 10000)))),  # gamma^steps
    ("real_power", lambda: (float(random.randint(1, 10**7)), -0.8)),  # Adafactor
    ("real_power", lambda: (float(random.randint(1, 10**7)), random.uniform(0, 1))),  # ADOPT
    ("real_power", lambda: (0.96, random.uniform(0, 1))),  # NAdam
    ("real_power", lambda: (1 - 1 / random.randint(2, 10**7), random.uniform(1, 20))),  # averages
    ("real_power", lambda: (random.uniform(0, 1), random.uniform(0, 20))),  # a polynomial schedule
    ("real_power", power(-708, 709.7)),
    ("real_power", power(-745, -708.4)),
)

LEAST, NORMAL, MOST = 5e-324, 2.0**-1022, 2.0**1023 * (2 - 2.0**-52)
BELOW, ABOVE = 1 - 2.0**-53, 1 + 2.0**-52
EDGES = (
    *(("exponential", x, 0.0) for x in (
        LEAST, -LEAST, 2.0**-54, -(2.0**-54), 2.0**-53, -(2.0**-53), 1.0, -1.0, 709.782712893384, -708.3964185322641,
        -708.3964185322642, -745.1332191019411, -745.0, 0.34657359027997264, 0.34657359027997270,
        float.fromhex("0x1.9e9cbbfd6080bp-31"))),
    *(("natural_log", x, 0.0) for x in (
        LEAST, NORMAL, NORMAL - LEAST, MOST, BELOW, ABOVE, 2.0, 0.5, 3.0, 10.0, 0.96, 1.4142135623730951,
        1.4142135623730949, 0.7071067811865475, 0.7071067811865476)),
    *(("real_power", x, y) for x, y in (
        (2.0, 0.5), (2.0, -1074.0), (2.0, 1023.0), (2.0, -1022.0), (2.0, -1022.5), (2.0, -1073.5), (3.0, 2.0), (3.0, 33.0),
        (0.7, 1.0), (10.0, -308.0), (10.0, 308.0), (10.0, -323.0), (BELOW, 2.0**60), (BELOW, -(2.0**62)), (ABOVE, 2.0**61),
        (LEAST, 1.0), (LEAST, 0.5), (LEAST, -0.95), (NORMAL, 1.05), (MOST, 1.0), (MOST, -1.0), (MOST, -1.04),
        (0.5, LEAST), (1e-300, -1.0))),
)  # fmt: skip


def main() -> None:
    random.seed(1)
    rows = list(EDGES)
    for name, draw in RANGES:
        found = []
        for _ in range(SAMPLES):
            x, y = draw()
            nearest, off = rounded(FUNCTIONS[name](x, y))
            if nearest != 0 and math.isfinite(nearest) and abs(off) < 0.5:  # not a midpoint itself
                found.append((0.5 - abs(off), x, y))
        rows += [(name, x, y) for _, x, y in sorted(found)[:KEPT]]
    path = pathlib.Path(__file__).with_name("elementary.hpp")
    with path.open("w") as file:
        file.write(
            "// SPDX-License-Identifier: Apache-2.0\n"
            "// Written by make_elementary.py.\n"
            "#pragma once\n\n"
            "namespace ga::test::oracle {\n\n"
            "// The exact result is off units of the last place of nearest larger than nearest.\n"
            "struct Elementary {\n"
            "  const char* function;\n"
            "  double x, y, nearest, off;\n"
            "};\n\n"
            "// clang-format off\n"
            "constexpr Elementary kElementary[] = {\n"
        )
        for name, x, y in rows:
            nearest, off = rounded(FUNCTIONS[name](x, y))
            file.write(f'    {{"{name}", {x.hex()}, {y.hex()}, {nearest.hex()}, {off!r}}},\n')
        file.write("};\n// clang-format on\n\n}  // namespace ga::test::oracle\n")


main()
