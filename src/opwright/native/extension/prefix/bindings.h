#include <torch/csrc/Exceptions.h>
#include <torch/csrc/utils/pybind.h>
