# The version of the Python package around this file. Before 1.0 a minor version may change the API.
file(STRINGS "${CMAKE_CURRENT_LIST_DIR}/../__init__.py" _opwright_line REGEX "^__version__ = ")
string(REGEX REPLACE "^__version__ = \"([0-9.]+).*" "\\1" PACKAGE_VERSION "${_opwright_line}")
string(REGEX MATCH "^[0-9]+\\.[0-9]+" _opwright_minor "${PACKAGE_VERSION}")
string(REGEX MATCH "^[0-9]+\\.[0-9]+" _opwright_wanted "${PACKAGE_FIND_VERSION}")

set(PACKAGE_VERSION_COMPATIBLE FALSE)
if(PACKAGE_VERSION VERSION_GREATER_EQUAL PACKAGE_FIND_VERSION
   AND (PACKAGE_FIND_VERSION_COUNT LESS 2 OR _opwright_wanted STREQUAL _opwright_minor))
  set(PACKAGE_VERSION_COMPATIBLE TRUE)
endif()
if(PACKAGE_VERSION VERSION_EQUAL PACKAGE_FIND_VERSION)
  set(PACKAGE_VERSION_EXACT TRUE)
endif()
