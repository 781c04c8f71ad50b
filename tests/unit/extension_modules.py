"""Extension modules without a header of PyTorch: a fraction of a second each, where torch/extension.h takes twenty."""

from __future__ import annotations

from types import ModuleType

from opwright.cpp_extension import load_inline

SOURCE = """
#include <Python.h>
static PyObject* value(PyObject*, PyObject*) { return PyLong_FromLong(VALUE); }
static PyMethodDef methods[] = {{"value", value, METH_NOARGS, ""}, {nullptr, nullptr, 0, nullptr}};
static PyModuleDef definition = {PyModuleDef_HEAD_INIT, "m", nullptr, -1, methods};
#define JOIN_(a, b) a##b
#define JOIN(a, b) JOIN_(a, b)
PyMODINIT_FUNC JOIN(PyInit_, TORCH_EXTENSION_NAME)(void) { return PyModule_Create(&definition); }
"""


def source(value: object) -> str:
    """Returns the source of a module whose `value()` is that."""
    return SOURCE.replace("VALUE", str(value))


def inline(name: str, value: object, **options: object) -> ModuleType:
    return load_inline(name, [source(value)], no_implicit_headers=True, **options)
