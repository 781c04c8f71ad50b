from setuptools import setup

from opwright.cpp_extension import BuildExtension, CppExtension

setup(
    ext_modules=[CppExtension("pybind_d_sigmoid._C", ["src/pybind_d_sigmoid/d_sigmoid.cpp"])],
    cmdclass={"build_ext": BuildExtension},
)
