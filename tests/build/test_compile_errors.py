"""A kernel that does not compile: the first error, at the author's own line."""

from __future__ import annotations

import importlib.util
import itertools
import os
import re
import shutil
import traceback
from pathlib import Path
from typing import Literal

import pytest
import torch
from jaxtyping import Float, Float32, Int64
from syrupy.assertion import SnapshotAssertion
from torch import Tensor

from opwright import errors, operator
from opwright.build import diagnostics
from opwright.store_root import check_marker

pytestmark = pytest.mark.compiler
_numbers = itertools.count()

GOOD = """#include <opwright/kernel.h>
using opwright::View;

template <typename T>
void twice(View<const T, 1> x, View<T, 1> output) {
  for (int64_t i = 0; i < x.size(0); ++i) output(i) = T(2 * float(x(i)));
}
OPWRIGHT_KERNEL(twice, float, opwright::half)
"""


def twice(x: Float[Tensor, "*s"]) -> Float[Tensor, "*s"]:
    return x * 2


def failure(source: str, tmp_path: Path) -> str:
    path = tmp_path / "cpu.cpp"
    path.write_text(source)
    op = operator(f"compile_errors{next(_numbers)}::twice", cpu=str(path))(twice)
    with pytest.raises(errors.CompileError) as caught:
        op(torch.ones(3))
    text = str(caught.value).replace(str(tmp_path), "<folder>")
    return re.sub(r"/\S*/logs/(\w+)-\w+\.log", r"<logs>/\1.log", text)


MISTAKES = {
    "missing semicolon": (GOOD.replace("using opwright::View;", "using opwright::View"), 2),
    "unknown name": (GOOD.replace("x.size(0)", "lenght"), 6),
    "unknown member": (GOOD.replace("x.size(0)", "x.length()"), 6),
    "wrong signature": (GOOD.replace("View<const T, 1> x", "View<T, 1> x"), 5),
    "wrong rank": (
        GOOD.replace("View<T, 1> output", "View<T, 2> output").replace("output(i)", "output(i, 0)"),
        5,
    ),
    "one more parameter": (GOOD.replace("> output)", "> output, double eps)"), 5),
    "a tensor of PyTorch": (GOOD.replace("View<const T, 1> x", "torch::Tensor x"), 5),
    "unknown operator": (GOOD.replace("OPWRIGHT_KERNEL(twice", "OPWRIGHT_KERNEL(thrice"), 8),
    "two exports": (GOOD + "OPWRIGHT_KERNEL(twice, double)\n", 9),
    "another name than the operator's": (GOOD.replace("void twice", "void double_it"), 8),
    "no type": (GOOD.replace("twice, float, opwright::half)", "twice)"), 8),
    "type of PyTorch": (GOOD.replace("opwright::half)", "torch.float32)"), 8),
    "type in quotes": (GOOD.replace("float, opwright::half)", '"float")'), 8),
    "an input that is written into": (GOOD.replace("output(i) =", "output(i) = x(i) ="), 6),
    "half of PyTorch": (GOOD.replace("opwright::half)", "at::Half)"), 8),
    "too many indices": (GOOD.replace("x(i)", "x(i, 0)"), 6),
    "type outside the family": (GOOD.replace("opwright::half)", "int32_t)"), 8),
    "missing header": ('#include "nowhere.h"\n' + GOOD, 1),
    "missing header of the algorithms": (GOOD.replace("T(2 *", "std::sort(&output(0), &output(0)), T(2 *"), 6),
    "missing header of a container": (GOOD.replace("  for", "  std::unordered_set<int> seen;\n  for"), 6),
    "missing header of Opwright": (GOOD.replace("T(2 *", "T(opwright::sigmoid(2.f) *"), 6),
    "missing namespace": (GOOD.replace("  for", "  parallel_for(1, 1, [](int64_t, int64_t) {});\n  for"), 6),
    "missing namespace in a template": (GOOD.replace("  for", '  check(true, "");\n  for'), 6),
    "missing brace": (GOOD.replace("  for", "  if (true) {\n  for"), 9),
    "pytorch header": ("#include <torch/extension.h>\n" + GOOD, 1),
}


HINTS = {
    "two exports": "name all of its types in one `OPWRIGHT_KERNEL(twice, ...)`",
    "another name than the operator's": "a kernel has the name of its operator",
    "a tensor of PyTorch": "`torch::Tensor x` must be `View<const T, 1> x`; the kernel must be declared as: template",
    "no type": "the types that it is good for, as in `OPWRIGHT_KERNEL(name, float, double)`",
    "type of PyTorch": "the types are those of C++: `float`, `double`, ",
    "type in quotes": "the types are those of C++: `float`, `double`, ",
    "an input that is written into": "an input is read-only; `Mutates[...]` around the annotation of `x`",
    "half of PyTorch": "half precision is `opwright::half`",
    "missing header of the algorithms": "`#include <algorithm>`",
    "missing header of a container": "`#include <unordered_set>`",
    "missing header of Opwright": "`#include <opwright/math.h>` has `opwright::sigmoid`",
    "missing namespace": "write `opwright::parallel_for`",
    "missing namespace in a template": "write `opwright::check`",
    "missing brace": "a `}` is missing above that line",
    "pytorch header": "kernels see no PyTorch header",
    "missing header": "includes are found beside the source",
    "type outside the family": "take it out of OPWRIGHT_KERNEL",
}


@pytest.mark.parametrize("kind", MISTAKES)
def test_it_names_the_authors_line(kind: str, tmp_path: Path, snapshot: SnapshotAssertion) -> None:
    source, line = MISTAKES[kind]
    text = failure(source, tmp_path)
    assert re.search(rf"<folder>/cpu\.cpp:{line}\b", text), text
    assert f"> {line:4} | {source.splitlines()[line - 1]}" in text
    if kind in (
        "wrong signature",
        "wrong rank",
        "one more parameter",
        "unknown operator",
        "type outside the family",
    ):  # our own words, not the compiler's
        assert text == snapshot
    assert f"hint: {HINTS.get(kind, '')}" in text


FOLLOWED = (
    GOOD
    + """
// the same once more; OPWRIGHT_KERNEL(fourfold, float) is what it will be
template <typename T>
void again(View<const T, 1> x) {}
"""
)


@pytest.mark.parametrize(
    "export", ["OPWRIGHT_KERNEL(thrice, float)", "OPWRIGHT_KERNEL(\n    thrice,\n    float)", "OPWRIGHT_KERNEL(thrice)"]
)
def test_an_unknown_name_is_told_before_what_follows_from_it(export: str, tmp_path: Path) -> None:
    """g++ reports the line behind it: `expected constructor, destructor, or type conversion before 'template'`."""
    text = failure(FOLLOWED.replace("OPWRIGHT_KERNEL(twice, float, opwright::half)", export), tmp_path)
    told = "`thrice` is not an operator of this folder; there are: twice"
    assert re.search(rf"<folder>/cpu\.cpp:8: {re.escape(told)}", text), text


@pytest.mark.parametrize("is_recorded", [False, True])
def test_the_traceback_is_of_the_callers_code(is_recorded: bool, tmp_path: Path) -> None:
    """16 frames of the build stood between the call and the message. Those of a reference that calls it stay."""
    (tmp_path / "cpu.cpp").write_text(GOOD.replace("x.size(0)", "lenght"))
    inner = operator(f"compile_errors{next(_numbers)}::twice", cpu=str(tmp_path / "cpu.cpp"))(twice)

    def calls_it(x: Float[Tensor, "*s"]) -> Float[Tensor, "*s"]:
        return inner(x) if x.numel() == 3 else x * 2

    outer = operator(f"compile_errors{next(_numbers)}::calls_it")(calls_it)
    for function, expected in ((inner, []), (outer, ["calls_it"])):
        with pytest.raises(errors.CompileError) as caught:
            function(torch.ones(3, requires_grad=is_recorded))
        frames = traceback.extract_tb(caught.value.__traceback__)
        assert [f.name for f in frames if f.filename == __file__][1:] == expected
        assert [f.filename for f in frames if f"{os.sep}opwright{os.sep}" in f.filename] == []


def test_an_unknown_name_that_is_not_compiled_is_not_told(tmp_path: Path) -> None:
    source = FOLLOWED.replace("x.size(0)", "x.length()")
    source += "#if 0\nOPWRIGHT_KERNEL(thrice, float)\n#endif\n"
    text = failure(source, tmp_path)
    assert "cpu.cpp:6: " in text
    assert "thrice" not in text


def test_a_forgotten_parameter_is_named_where_it_is_used(tmp_path: Path) -> None:
    (tmp_path / "cpu.cpp").write_text(GOOD.replace("T(2 *", "T(eps *"))

    @operator(f"compile_errors{next(_numbers)}::twice", cpu=str(tmp_path / "cpu.cpp"))
    def twice(x: Float[Tensor, "n"], eps: float = 2.0) -> Float[Tensor, "n"]:
        return x * eps

    with pytest.raises(errors.CompileError) as caught:
        twice(torch.ones(3))
    assert caught.value.hint == (
        "`double eps` is missing; the kernel must be declared as: "
        "template <typename T> void twice(View<const T, 1> x, double eps, View<T, 1> output)"
    )


def test_types_under_other_names_are_no_difference(tmp_path: Path) -> None:
    """The error of the compiler is told as it is, without a hint about a signature that is right."""
    source = GOOD.replace("View<const T, 1> x", "In<T> x  // (the input,").replace(
        ", View<T, 1> output", ", View<T, 1> output"
    )
    source = source.replace("template", "template <typename T>\nusing In = View<const T, 1>;\ntemplate")
    text = failure(source.replace("x(i)", "lenght(i)"), tmp_path)
    assert "must be" not in text


@pytest.mark.parametrize(
    ("wrong", "hint"),
    [
        ("Rounding::Up", "there are `Rounding::up`, `Rounding::to_nearest`"),
        ("Roundin::up", "there are `Rounding::up`, `Rounding::to_nearest`"),
        ('"to-nearest"', "`rounding` is an enum: `Rounding::to_nearest`"),
    ],
)
def test_names_of_a_choice_are_told(wrong: str, hint: str, tmp_path: Path) -> None:
    source = GOOD.replace("View<T, 1> output)", "Rounding rounding, View<T, 1> output)").replace(
        "2 *", f"(rounding == {wrong}) *"
    )
    (tmp_path / "cpu.cpp").write_text(source)

    @operator(f"compile_errors{next(_numbers)}::twice", cpu=str(tmp_path / "cpu.cpp"))
    def twice(x: Float[Tensor, "n"], rounding: Literal["up", "to-nearest"] = "up") -> Float[Tensor, "n"]:
        return x * 2

    with pytest.raises(errors.CompileError) as caught:
        twice(torch.ones(3))
    assert caught.value.hint == hint


def test_warnings_can_be_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    """g++ warns of an attribute on a definition whose declaration has none: generated entries had one."""
    monkeypatch.setenv("OPWRIGHT_CXXFLAGS", "-Wall -Wextra -Werror")
    op = operator(f"compile_errors{next(_numbers)}::twice", cpu=GOOD)(twice)
    assert op(torch.ones(3)).tolist() == [2.0] * 3


def test_the_log_has_everything(tmp_path: Path) -> None:
    path = tmp_path / "cpu.cpp"
    path.write_text(GOOD.replace("x.size(0)", "lenght").replace("2 *", "two *"))
    op = operator(f"compile_errors{next(_numbers)}::twice", cpu=str(path))(twice)
    with pytest.raises(errors.CompileError) as caught:
        op(torch.ones(3))
    (log,) = re.findall(r"/\S*opwright-\S*\.log", str(caught.value))
    text = Path(log).read_text()
    assert "lenght" in text
    assert "two" in text
    assert "1 more" in str(caught.value)


def test_inline_sources_are_shown_at_their_line_in_the_python_file() -> None:
    op = operator(
        f"compile_errors{next(_numbers)}::twice",
        cpu="""
#include <opwright/kernel.h>
template <typename T>
void twice(opwright::View<const T, 1> x, opwright::View<T, 1> output) {
  mistake_in_an_inline_source(x);
}
OPWRIGHT_KERNEL(twice, float)
""",
    )(twice)
    with pytest.raises(errors.CompileError) as caught:
        op(torch.ones(3))
    lines = Path(__file__).read_text().splitlines()
    line = next(i for i, text in enumerate(lines, 1) if text.startswith("  mistake_in_an_inline_source"))
    assert f"{__file__}:{line}" in str(caught.value)
    assert caught.value.hint == f"edit {__file__}, and start Python again"


def test_a_source_that_is_in_no_file_is_to_be_declared_again() -> None:
    """Such as a computed one, or that of a cell of a notebook: no file can be edited."""
    source = GOOD.replace("x.size(0)", "lenght")
    name = f"compile_errors{next(_numbers)}::twice"
    with pytest.raises(errors.CompileError) as caught:
        operator(name, cpu=source)(twice)(torch.ones(3))
    assert caught.value.hint == "declare it again with another source"
    assert operator(name, cpu=GOOD)(twice)(torch.ones(3)).tolist() == [2.0] * 3


def test_the_text_of_an_assertion_is_shown_to_its_end(tmp_path: Path) -> None:
    words = " ".join(f"reason{i}" for i in range(80))
    text = failure(GOOD.replace("  for", f'  static_assert(sizeof(T) > 100, "{words}");\n  for'), tmp_path)
    assert f"<folder>/cpu.cpp:6: {words}\n" in text


def test_a_source_in_another_encoding(tmp_path: Path) -> None:
    path = tmp_path / "cpu.cpp"
    path.write_text(GOOD.replace("template", "// größer\ntemplate"), encoding="latin-1")
    with pytest.raises(errors.CompileError, match=r"not in UTF-8 .*\n\n  line  4\n  byte  0xf6\n\nhint: "):
        operator(f"compile_errors{next(_numbers)}::twice", cpu=str(path))(twice)(torch.ones(3))
    (tmp_path / "latin.h").write_text("// größer\n", encoding="latin-1")
    path.write_text(f'#include "latin.h"\n{GOOD}')
    op = operator(f"compile_errors{next(_numbers)}::twice", cpu=str(path))(twice)
    assert op(torch.ones(3))[2] == 2


def test_a_failed_build_leaves_nothing_and_can_be_mended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPWRIGHT_CACHE_DIR", str(tmp_path / "store"))
    path = tmp_path / "cpu.cpp"
    path.write_text(GOOD.replace("T(2 *", "T(2 ** "))
    op = operator(f"compile_errors{next(_numbers)}::twice", cpu=str(path))(twice)
    for _ in range(2):
        with pytest.raises(errors.CompileError):
            op(torch.ones(3))
    assert not list((tmp_path / "store").glob("opwright-store/entries/*/*"))
    assert not list((tmp_path / "store").glob("opwright-store/work/*"))
    path.write_text(GOOD)
    assert op(torch.ones(3)).tolist() == [2.0] * 3


def test_an_exception_in_a_kernel_names_the_operator(tmp_path: Path) -> None:
    source = GOOD.replace("  for", '  opwright::check(x.size(0) != 7, "seven is not allowed");\n  for')
    path = tmp_path / "cpu.cpp"
    path.write_text(source)
    op = operator(f"compile_errors{next(_numbers)}::twice", cpu=str(path))(twice)
    assert op(torch.ones(6)).tolist() == [2.0] * 6
    for call in (op, op.operator.public):
        with pytest.raises(RuntimeError, match=r"twice.*seven is not allowed"):
            call(torch.ones(7))
    assert op(torch.ones(8)).tolist() == [2.0] * 8


RAISING = r"""#include <cstdint>
#include <stdexcept>
#include <string>
#include <opwright/kernel.h>
#include <opwright/scratch.h>
using namespace opwright;

struct Silent : std::exception {
  const char* what() const noexcept override { return nullptr; }
};
void raising(View<const float, 1> x, int64_t how, View<float, 1> output) {
  const std::string text = "number " + std::to_string(how);
  switch (how) {
    case 0: check(false, text.c_str());
    case 1: check(false, text);
    case 2: parallel_for(8, [&](int64_t, int64_t) { check(false, text); });
    case 3: throw std::runtime_error("a\xff b\xc3 \xed\xa0\x80 \xc3\xa9");
    case 4: throw Silent();
    case 5: throw std::runtime_error("");
    case 6: check(false, nullptr);
    case 7: parallel_for(8, [&](int64_t, int64_t) { throw Silent(); });
    case 8: throw std::runtime_error(std::string(1000, 'x'));
    case 9: throw std::runtime_error(std::string(491, 'x') + std::string(300, '\xa9'));
    case 10: { std::string e; for (int i = 0; i < 500; ++i) e += "\xc3\xa9"; throw std::runtime_error("x" + e); }
    case 11: scratch<float>(-1);
    case 12: scratch<float>(int64_t(1) << 62);
  }
}
OPWRIGHT_KERNEL(raising)
"""
SAID = [
    *("number 0", "number 1", "number 2", "a? b? ??? é"),
    *["the kernel threw an exception without a text"] * 4,
    *("x" * 499 + "...", "x" * 491 + "?" * 8 + "...", "x" + "é" * 249 + "..."),
    *("scratch: the number of elements is negative", "out of memory for scratch space"),
]


def test_the_text_of_an_exception_reaches_the_caller() -> None:
    """A text outlives the string that it was in; a null pointer ended the process."""

    @operator(f"compile_errors{next(_numbers)}::raising", cpu=RAISING)
    def raising(x: Float32[Tensor, "n"], how: int = 0) -> Float32[Tensor, "n"]:
        return x * how

    for how, text in enumerate(SAID):
        for call in (raising, raising.operator.public):
            with pytest.raises(errors.KernelError) as caught:
                call(torch.ones(3), how)
            assert caught.value.rule == text, how


def test_a_source_that_exports_nothing_is_refused(tmp_path: Path) -> None:
    """The reference would run in its place, and nobody would know."""
    text = failure(GOOD.replace("OPWRIGHT_KERNEL(twice, float, opwright::half)", ""), tmp_path)
    assert "exports no kernel" in text
    assert "OPWRIGHT_KERNEL(twice, float, double)" in text


DECLARING = '''
import torch
from jaxtyping import Float, Float32, Int64
from opwright import operator

@operator("QUALIFIED", cpu="""SOURCE""")
def twice(x: Float[torch.Tensor, "*s"]) -> Float[torch.Tensor, "*s"]:
    return x * 2
'''


@pytest.mark.parametrize("folder", ['a"b', "a\nb", "a\\b", "a\\", "a\\n b", "é %d"])
def test_a_folder_of_any_name_holds_a_declaration(folder: str, tmp_path: Path) -> None:
    """A quote or a newline in it broke the `#line` before the source."""

    def declare(source: str):
        file = tmp_path / folder / "op.py"
        file.parent.mkdir(exist_ok=True)
        name = f"compile_errors{next(_numbers)}"
        file.write_text(DECLARING.replace("QUALIFIED", f"{name}::twice").replace("SOURCE", source))
        spec = importlib.util.spec_from_file_location(name, file)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module.twice

    assert declare(GOOD)(torch.ones(3)).tolist() == [2, 2, 2]
    with pytest.raises(errors.CompileError, match=r"op\.py:11: .*lenght"):  # line 6 of the source
        declare(GOOD.replace("x.size(0)", "lenght"))(torch.ones(3))


def test_the_last_ten_logs_stay_in_the_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPWRIGHT_CACHE_DIR", str(tmp_path))
    logs = []
    for number in range(12):
        path = diagnostics._keep(f"log {number}", "twice")
        os.utime(path, (number, number))
        logs.append(path)
    folder = tmp_path / "opwright-store" / "logs"
    assert sorted(folder.iterdir()) == sorted(logs[2:])
    assert logs[-1].read_text() == "log 11"
    check_marker(folder.parent)  # what comes first into a store makes it a store
    folder.chmod(0o500)  # a store that cannot be written; root can
    if os.access(folder, os.W_OK):
        shutil.rmtree(folder)
        folder.write_text("in the way")
    elsewhere = diagnostics._keep("log 12", "twice")
    assert elsewhere.parent != folder
    assert elsewhere.read_text() == "log 12"
    elsewhere.unlink()


def test_a_template_where_no_tensor_has_more_than_one_dtype() -> None:
    @operator(f"compile_errors{next(_numbers)}::doubled", cpu="""
    #include <opwright/kernel.h>
    using opwright::View;
    template <typename T> void doubled(View<const T, 1> x, View<T, 1> y) {}
    OPWRIGHT_KERNEL(doubled, int64_t)""")  # fmt: skip
    def doubled(x: Int64[Tensor, "n"]) -> Int64[Tensor, "n"]:
        return 2 * x

    with pytest.raises(errors.CompileError, match="`doubled` must be a function, not a template") as caught:
        doubled(torch.ones(2, dtype=torch.int64))
    assert "`OPWRIGHT_KERNEL(doubled)`" in str(caught.value)


def test_an_index_in_brackets(tmp_path: Path) -> None:
    """It reads a tensor of one dimension, whatever its strides; of several, the error says what to write."""
    brackets = GOOD.replace("output(i)", "output[i]").replace("x(i)", "x[i]")
    op = operator(f"compile_errors{next(_numbers)}::twice", cpu=brackets)(twice)
    assert torch.equal(op(torch.arange(6.0)[::2]), torch.tensor([0.0, 4.0, 8.0]))

    def rows(x: Float[Tensor, "*b n"]) -> Float[Tensor, "*b n"]:
        return x * 2

    wrong = brackets.replace("twice", "rows").replace(", 1>", ", 2>")
    wide = operator(f"compile_errors{next(_numbers)}::rows", cpu=wrong)(rows)
    with pytest.raises(errors.CompileError, match=r"takes its indices in parentheses: x\(i, j\)"):
        wide(torch.ones(2, 3))
