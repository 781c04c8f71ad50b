"""Declarations read from C++: all or nothing."""

from __future__ import annotations

import pytest

from opwright.cpp_extension.signatures import declarations


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("torch::Tensor f(torch::Tensor z) { return z; }", "at::Tensor f(at::Tensor);"),
        ("at::Tensor f(const at::Tensor& z, double a = 1e-5);", "at::Tensor f(const at::Tensor&, double);"),
        ("std::vector<torch::Tensor>\nf(int64_t n, bool b) {}", "std::vector<at::Tensor> f(int64_t, bool);"),
        ("void f() { g(1); }", "void f();"),
        ("// torch::Tensor f(int x) { }\nint f(int x) { return x; }", "int f(int);"),
        ("int f(int x);\nint g() { return f(1); }\nint f(int x) { return x; }", "int f(int);"),
        (
            "double f(c10::optional<double> a, std::string s) {}",
            "double f(std::optional<double>, std::string);",
        ),
        (
            "std::tuple<torch::Tensor, std::vector<at::Tensor>> f(torch::Tensor &x) {}",
            "std::tuple<at::Tensor, std::vector<at::Tensor>> f(at::Tensor &);",
        ),
        ('const char* s = "int f(double) {";\nint f(long long x) { return x; }', "int f(long long);"),
    ],
)
def test_what_is_certain(text: str, expected: str) -> None:
    assert declarations(text, ["f"]) == [expected]


@pytest.mark.parametrize(
    "text",
    [
        "int g(int x) { return x; }",  # another function
        "int f(int x) { return x; }\nint f(double x) { return 1; }",  # overloaded
        "static int f(int x) { return x; }",  # another translation unit cannot see it
        "inline int f(int x) { return x; }",
        "namespace a { int f(int x) { return x; } }",
        "struct S {};\nint f(S s) { return 1; }",  # a type that only the source has
        "auto f(int x) { return x; }",
        "template <typename T> T f(T x) { return x; }\nint f(int x);",
        "#define int long\nint f(int x) { return x; }",
        "#define f g\nint f(int x) { return x; }",
        "#if A\nint f(int x) { return x; }\n#else\nint f(double x) { return x; }\n#endif",
        "using torch::Tensor;\nTensor f(Tensor x) { return x; }",
        "int f(int (*callback)(int)) { return 1; }",
        'extern "C" int f(int x) { return x; }',
        "class C { int f(int x); };\nint C::f(int x) { return x; }",
        "int f(float* x) { return 1; }",
        "int f(int x) { return x; } }",
    ],
)
def test_what_is_not(text: str) -> None:
    assert declarations(text, ["f"]) is None


def test_one_doubt_is_enough() -> None:
    text = "int f(int x) { return x; }\nstruct S {};\nint g(S s) { return 1; }"
    assert declarations(text, ["f"])
    assert declarations(text, ["f", "g"]) is None
