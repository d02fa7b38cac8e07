# SPDX-License-Identifier: Apache-2.0
"""What the generator makes of headers, and what it refuses."""

import os
import pathlib
import subprocess
import sys

import pytest

pytest.importorskip("clang.cindex", reason="libclang is not installed")
HEADER = pathlib.Path(os.environ.get("GA_HEADER", ""))
GENERATOR = HEADER.parents[2] / "bindings" / "generate" if HEADER.is_file() else None
LANGUAGES = ("csharp", "java", "python")


def generate(folder: pathlib.Path, language: str, *changes: tuple[str, str]) -> tuple[int, str]:
    """Runs the generator on the header with changes: the exit status, and the files or the message."""
    if GENERATOR is None:
        pytest.skip("GA_HEADER does not name gradaccum.h")
    found = dict.fromkeys(changes, 0)
    for part in HEADER.parent.glob("*.h"):
        text = part.read_text()
        for old, new in changes:
            found[old, new] += text.count(old)
            text = text.replace(old, new)
        (folder / part.name).write_text(text)
    assert all(count == 1 for count in found.values()), found
    out = folder / language
    header = str(folder / HEADER.name)
    command = [sys.executable, str(GENERATOR), "--language", language, "--header", header, "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        return done.returncode, done.stderr
    return 0, "\n".join(path.read_text() for path in sorted(out.iterdir()))


ROUNDING = "  GA_ROUND_NEAREST = 0,   /* to nearest, ties to even */"
BYTES = "  int64_t eager_bytes; "
MASTER = "/* How a 16-bit parameter is rounded. */"


@pytest.mark.parametrize("language", LANGUAGES)
def test_a_new_field_is_there_with_its_comment(tmp_path: pathlib.Path, language: str) -> None:
    new = "  int64_t lanes_of_glass;  /* panes a window has, for GA_ROUND_NEAREST; default 7 */\n" + BYTES
    status, text = generate(tmp_path, language, (BYTES, new))
    assert status == 0, text
    name = {"csharp": "LanesOfGlass", "java": "lanesOfGlass", "python": "lanes_of_glass"}[language]
    words = " ".join(text.replace("///", " ").replace("*", " ").split())
    assert name in words
    assert "anes a window has, for" in words
    assert "default 7" in words


@pytest.mark.parametrize("language", LANGUAGES)
def test_a_new_enumerator_is_there_with_its_comment(tmp_path: pathlib.Path, language: str) -> None:
    new = "  GA_ROUND_AWAY = 7, /* away from zero, wherever that is */\n" + ROUNDING
    status, text = generate(tmp_path, language, (ROUNDING, new))
    assert status == 0, text
    assert {"csharp": "Away", "java": "AWAY", "python": "AWAY"}[language] in text
    assert "way from zero, wherever that is" in text


SET_LR = "/* Sets the learning rate, or its peak under a schedule. "
GLASS = """\
GA_API ga_status ga_group_set_glass(ga_context* ctx, ga_group group, double glass);

/* *out: the glass of the group, once ga_step has cut it. */
GA_API ga_status ga_group_glass(const ga_context* ctx, ga_group group, double* out);

"""
CUT = "/* Cuts glass to size. glass: panes, >= 7. GA_ERROR_UNSUPPORTED: GA_ROUND_NEAREST breaks it. */\n" + GLASS


@pytest.mark.parametrize("language", LANGUAGES)
def test_new_functions_are_members_with_their_comments(tmp_path: pathlib.Path, language: str) -> None:
    status, text = generate(tmp_path, language, (SET_LR, CUT + SET_LR))
    assert status == 0, text
    words = " ".join(text.replace("///", " ").replace(" * ", " ").split())
    for part in {
        "csharp": (
            "public void SetGlass(double glass) {", "Raw.ga_group_set_glass(call.Context, Id, glass);",
            "public double Glass { get {", '<param name="glass">Panes, &gt;= 7.</param>',
        ),
        "java": (
            "public void setGlass(double glass) {", "Raw.ga_group_set_glass(c, id, glass);",
            "public double glass() {", "@param glass panes, &gt;= 7 @throws GradAccumException",
        ),
        "python": (
            "def set_glass(self, glass: float) -> None:", "_raw.ga_group_set_glass(c, self.id, glass)",
            "@property def glass(self) -> float:", "glass: panes, >= 7.",
        ),
    }[language]:  # fmt: skip
        assert part in words
    assert "Cuts glass to size." in words
    assert "he glass of the group, once" in words


INFER = "/* Normalises by the running statistics, at any time. "
PANES = """\
/* Pushes x through glass. */
GA_API ga_status ga_bn_glass(ga_context* ctx, ga_bn bn, const void* x, int64_t samples, int64_t positions, void* y);

"""


@pytest.mark.parametrize("language", ["csharp", "java"])
def test_new_functions_of_layers_take_tensors(tmp_path: pathlib.Path, language: str) -> None:
    status, text = generate(tmp_path, language, (INFER, PANES + INFER))
    assert status == 0, text
    for part in {
        "csharp": (
            "public void Glass(Tensor x, long samples, long positions, Tensor y) {", 'using (Pin yPin = Borrow("y", y, count))',
            "Raw.ga_bn_glass(call.Context, Id, xPin.Address, samples, positions, yPin.Address);",
            '<param name="y">Where the output is written; may be x.</param>',
        ),
        "java": (
            "public void glass(Tensor x, long samples, long positions, Tensor y) {", "Raw.ga_bn_glass(c, layer.id(), ",
            'layer.address(x, samples, positions, false, "x")', 'layer.address(y, samples, positions, true, "y")',
            "public void glass(Buffer x, long samples, long positions, Buffer y) {",
            "@param y a direct buffer: where the output is written; may be x",
        ),
    }[language]:  # fmt: skip
        assert part in text
    assert text.count("Pushes x through glass.") == {"csharp": 1, "java": 2}[language]


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        (ROUNDING, "  GA_ROUND_NEAREST = 0,", "GA_ROUND_NEAREST has no comment"),
        (BYTES, "  int64_t bare;\n" + BYTES, "bare has no comment"),
        (BYTES, "  /* of nothing */\n\n  /* of */ " + BYTES.lstrip(), "no member has this comment: of nothing"),
        (BYTES, "  float odd; /* of a kind */\n" + BYTES, "odd has the type float, for which no binding has one"),
        (ROUNDING, ROUNDING.replace("to nearest", "as ga_frobnicate, to nearest"), "ga_frobnicate"),
        (ROUNDING, ROUNDING.replace("to nearest", "as GA_FROBNICATE, to nearest"), "GA_FROBNICATE"),
        (BYTES, "  struct missing gone; /* of a kind */\n" + BYTES, "incomplete type"),
        (SET_LR, GLASS + SET_LR, "ga_group_set_glass has no comment"),
        (SET_LR, CUT.replace("*out: the", "The") + SET_LR, 'ga_group_glass has no sentence that begins with "*out: "'),
        (SET_LR, CUT.replace("double glass", "float glass") + SET_LR, "glass has the type float, for which no binding"),
        (SET_LR, CUT.replace("ga_group_set_glass", "ga_set_glass") + SET_LR, "ga_set_glass is a member of no class"),
        (INFER, PANES.replace("void* y", "void* z") + INFER, "ga_bn_glass has the argument z, which names.py"),
        (MASTER, "enum { GA_ODD = 3 /* odd */ };\n" + MASTER, "GA_ODD begins an enum that names.py does not name"),
    ],
)  # fmt: skip
def test_what_it_cannot_attribute_is_an_error(tmp_path: pathlib.Path, old: str, new: str, why: str) -> None:
    status, message = generate(tmp_path, "python", (old, new))
    assert status == 1
    assert why in message, message
    assert "Traceback" not in message


def test_without_a_header(tmp_path: pathlib.Path) -> None:
    generate(tmp_path, "python")
    command = [sys.executable, str(GENERATOR), "--language", "python", "--header", "/no/such.h", "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1
    assert "/no/such.h" in done.stderr and "Traceback" not in done.stderr
