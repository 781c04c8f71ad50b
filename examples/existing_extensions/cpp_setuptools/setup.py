from setuptools import setup

from opwright.cpp_extension import BuildExtension, CppExtension

setup(
    ext_modules=[
        CppExtension(
            "matmul_cpp._C",
            ["src/matmul_cpp/matmul.cpp"],
            # The vectors of the machine that builds: leave it out for a wheel that others install.
            extra_compile_args=["-O2", "-march=native"],
        )
    ],
    cmdclass={"build_ext": BuildExtension},
)
