# opwright_find_operators(VARIABLE PACKAGE [PYTHON FILE])
#
# The function sets VARIABLE to the path of library.so in a package that a wheel of `opwright wheel` has
# installed; a program gives it to opwright::load_library of <opwright/library.h>. Nothing of the package is
# imported. It is an error if there is none.
#   VARIABLE  if it is set, as by -DVARIABLE=/path/to/library.so, it stays so, and no Python is asked
#   PACKAGE   its import name
#   PYTHON    the interpreter of the environment that it is installed in; Python3_EXECUTABLE if not given, then
#             the Python that Opwright is installed in, then the one that FindPython3 finds

# Sets OUT to the Python that this package is installed in, else to the one that FindPython3 finds, else to "".
function(_opwright_find_python out)
  get_filename_component(packages "${CMAKE_CURRENT_FUNCTION_LIST_DIR}/../.." ABSOLUTE)
  get_filename_component(prefix "${packages}/../../.." ABSOLUTE)  # of <prefix>/lib/python3.12/site-packages
  if(packages MATCHES "/lib(64)?/python[0-9.]+/(site|dist)-packages$" AND EXISTS "${prefix}/bin/python3")
    set(${out} "${prefix}/bin/python3" PARENT_SCOPE)
    return()
  endif()
  find_package(Python3 COMPONENTS Interpreter QUIET)
  set(${out} "${Python3_EXECUTABLE}" PARENT_SCOPE)
endfunction()

function(opwright_find_operators variable package)
  cmake_parse_arguments(PARSE_ARGV 2 arg "" "PYTHON" "")
  set(usage "opwright_find_operators(VARIABLE PACKAGE [PYTHON FILE])")
  set(subject "opwright_find_operators: `${package}`")
  if(arg_UNPARSED_ARGUMENTS)
    message(FATAL_ERROR "${subject}: no argument is called `${arg_UNPARSED_ARGUMENTS}`\nhint: ${usage}")
  endif()

  set(path "${${variable}}")  # where the project itself has set it; the next line may take that away
  set(${variable} "" CACHE FILEPATH "library.so of ${package}; if empty, that of the package installed in Python")
  if(NOT "$CACHE{${variable}}" STREQUAL "")
    set(path "$CACHE{${variable}}")  # of this type a relative path has become an absolute one
  endif()
  if(NOT path STREQUAL "")
    if(NOT EXISTS "${path}" OR IS_DIRECTORY "${path}")
      message(FATAL_ERROR "${subject}: there is no file ${path}\n"
                          "hint: -U${variable} looks for it in Python, -D${variable}=/path/to/library.so takes another")
    endif()
    set(${variable} "${path}" PARENT_SCOPE)
    return()
  endif()

  if(NOT package MATCHES "^[A-Za-z_][A-Za-z0-9_]*$")
    message(FATAL_ERROR "${subject} is not a package name\nhint: the name after `import`")
  endif()
  set(python "${arg_PYTHON}")
  if(NOT python)
    set(python "${Python3_EXECUTABLE}")
  endif()
  if(NOT python)
    _opwright_find_python(python)
  endif()
  if(NOT python)
    message(FATAL_ERROR "${subject}: there is no Python to look for it\nhint: -DPython3_EXECUTABLE=/path/to/python3")
  endif()
  # In this folder there are no packages: Python looks into the one that it is started in, too.
  execute_process(
    COMMAND "${python}" -c [[
import importlib.util, sys
spec = importlib.util.find_spec(sys.argv[1])
if spec: print(*(spec.submodule_search_locations or [spec.origin]), sep="\n")
]] "${package}"
    WORKING_DIRECTORY "${CMAKE_CURRENT_FUNCTION_LIST_DIR}"
    RESULT_VARIABLE status OUTPUT_VARIABLE found ERROR_VARIABLE output OUTPUT_STRIP_TRAILING_WHITESPACE)
  if(NOT status EQUAL 0)
    message(FATAL_ERROR "${subject}: ${python} does not run: ${status}\n${output}\nhint: -DPython3_EXECUTABLE=/path/to/python3")
  endif()
  if(NOT found)
    string(REPLACE "_" "-" project "${package}")
    message(FATAL_ERROR "${subject} is not installed in ${python}\n"
                        "hint: ${python} -m pip install ${project}, or -DPython3_EXECUTABLE=/path/to/python3 of where it is")
  endif()
  string(REPLACE "\n" ";" folders "${found}")
  foreach(folder IN LISTS folders)
    if(EXISTS "${folder}/_opwright/library.so")
      set(${variable} "${folder}/_opwright/library.so" PARENT_SCOPE)
      return()
    endif()
  endforeach()
  message(FATAL_ERROR "${subject} in ${found} has no library: it is not from a wheel of `opwright wheel`\n"
                      "hint: ${python} -m pip install /path/to/that.whl, or -D${variable}=/path/to/library.so")
endfunction()
