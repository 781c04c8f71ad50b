# find_package(opwright CONFIG), found by -Dopwright_DIR=$(opwright --cmake-dir): the folder `cmake` of the
# Python package, which may lie anywhere. OpwrightTriton.cmake and
# OpwrightOperators.cmake say what it gives.
include("${CMAKE_CURRENT_LIST_DIR}/OpwrightTriton.cmake")
