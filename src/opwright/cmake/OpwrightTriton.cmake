# opwright::opwright   the headers
# opwright::triton     <opwright/triton.h> and its runtime, compiled once in this build, by its compiler
# opwright_find_operators(VARIABLE PACKAGE [PYTHON FILE]): OpwrightOperators.cmake
# opwright_add_triton_kernels(TARGET SOURCES FILE... MANIFEST FILE ARCHS 80 90... [EMBED] [PYTHON FILE]
#                             [OUTPUT FILE])
#
# The function compiles the kernels that a manifest names into a pack, at build time and without a GPU,
# and again when the manifest or one of the sources has changed.
#   SOURCES   the Python files of the kernels
#   MANIFEST  which kernels, as `opwright pack record` writes it
#   ARCHS     for which GPUs: 80 for sm_80
#   EMBED     the pack becomes a part of TARGET, which loads it before main; without it, C++ sources of
#             TARGET see its path as the macro OPWRIGHT_PACK
#   PYTHON    an interpreter that has Triton; OPWRIGHT_TRITON_PYTHON if not given
#   OUTPUT    the pack; <TARGET>.opk in the build folder if not given
#
# Settings: OPWRIGHT_EXECUTABLE, the command `opwright`; OPWRIGHT_TRITON_PYTHON.
if(TARGET opwright::triton)  # by another way: find_package in one part of a build, FetchContent in another
  return()
endif()

get_filename_component(_opwright_root "${CMAKE_CURRENT_LIST_DIR}/.." ABSOLUTE)
set_property(GLOBAL PROPERTY OPWRIGHT_FOLDER "${_opwright_root}")
set(OPWRIGHT_TRITON_PYTHON "" CACHE FILEPATH "A Python that has Triton, which compiles the kernels of packs")

include("${CMAKE_CURRENT_LIST_DIR}/OpwrightOperators.cmake")
find_package(Threads REQUIRED)

add_library(opwright_headers INTERFACE)
add_library(opwright::opwright ALIAS opwright_headers)
target_include_directories(opwright_headers SYSTEM INTERFACE "${_opwright_root}/native/include")

file(GLOB _opwright_sources CONFIGURE_DEPENDS "${_opwright_root}/native/src/triton/*.cpp")
add_library(opwright_triton STATIC EXCLUDE_FROM_ALL ${_opwright_sources})
add_library(opwright::triton ALIAS opwright_triton)
# Not Threads::Threads: an imported target is unknown in the folders above and beside this one.
target_link_libraries(opwright_triton PUBLIC opwright_headers PRIVATE ${CMAKE_DL_LIBS} ${CMAKE_THREAD_LIBS_INIT})
target_compile_features(opwright_triton PUBLIC cxx_std_20)
target_compile_definitions(opwright_triton PRIVATE "OPWRIGHT_TRITON_WORKER_DIR=\"${_opwright_root}/triton\"")
set_target_properties(opwright_triton PROPERTIES POSITION_INDEPENDENT_CODE ON CXX_EXTENSIONS OFF)
target_compile_options(opwright_triton PRIVATE -w)  # under -Werror a newer compiler's warnings would end the build
if(NOT CMAKE_BUILD_TYPE AND NOT CMAKE_CONFIGURATION_TYPES)
  # A launch is counted in nanoseconds: without a build type it is compiled with optimisation all the same.
  target_compile_options(opwright_triton PRIVATE -O2)
endif()
unset(_opwright_sources)
unset(_opwright_root)

# Sets OUT to the command line that runs `opwright`: OPWRIGHT_EXECUTABLE, else this package in the Python that
# it is installed in, else in the one that FindPython3 finds.
function(_opwright_find_command out)
  if(OPWRIGHT_EXECUTABLE)
    set(${out} "${OPWRIGHT_EXECUTABLE}" PARENT_SCOPE)
    return()
  endif()
  get_property(root GLOBAL PROPERTY OPWRIGHT_FOLDER)
  _opwright_find_python(python)
  if(NOT python)
    message(FATAL_ERROR "opwright: there is no Python to run `opwright pack` with\n"
                        "hint: -DOPWRIGHT_EXECUTABLE=/path/to/opwright")
  endif()
  set(${out} "${python}" "${root}/cmake/run_opwright.py" PARENT_SCOPE)
endfunction()

function(opwright_add_triton_kernels target)
  cmake_parse_arguments(PARSE_ARGV 1 arg "EMBED" "MANIFEST;PYTHON;OUTPUT" "SOURCES;ARCHS")
  set(usage "opwright_add_triton_kernels(TARGET SOURCES FILE... MANIFEST FILE ARCHS 80 90... [EMBED]\n"
            "                              [PYTHON FILE] [OUTPUT FILE])")
  list(JOIN usage "" usage)
  if(NOT TARGET "${target}")
    message(FATAL_ERROR "opwright_add_triton_kernels: `${target}` is not a target\nhint: ${usage}")
  endif()
  if(arg_UNPARSED_ARGUMENTS)
    message(FATAL_ERROR "opwright_add_triton_kernels: no argument is called `${arg_UNPARSED_ARGUMENTS}`\nhint: ${usage}")
  endif()
  foreach(name SOURCES MANIFEST ARCHS)
    if(NOT arg_${name})
      message(FATAL_ERROR "opwright_add_triton_kernels: `${target}` needs ${name}\nhint: ${usage}")
    endif()
  endforeach()

  set(files)
  foreach(file IN LISTS arg_MANIFEST arg_SOURCES)
    get_filename_component(path "${file}" ABSOLUTE)
    if(NOT EXISTS "${path}")
      message(FATAL_ERROR "opwright_add_triton_kernels: `${target}`: there is no file ${path}")
    endif()
    list(APPEND files "${path}")
  endforeach()
  list(GET files 0 manifest)
  if(NOT arg_OUTPUT)
    set(arg_OUTPUT "${target}.opk")
  endif()
  get_filename_component(pack "${arg_OUTPUT}" ABSOLUTE BASE_DIR "${CMAKE_CURRENT_BINARY_DIR}")
  if(NOT arg_PYTHON)
    set(arg_PYTHON "${OPWRIGHT_TRITON_PYTHON}")
  endif()
  foreach(arch IN LISTS arg_ARCHS)
    if(NOT arch MATCHES "^[0-9]+[af]?$")
      message(FATAL_ERROR "opwright_add_triton_kernels: `${target}`: `${arch}` is not an architecture; 90 is sm_90\nhint: ${usage}")
    endif()
  endforeach()
  list(JOIN arg_ARCHS "," archs)
  set(options --arch "${archs}")
  if(arg_PYTHON)
    list(APPEND options --python "${arg_PYTHON}")
  endif()

  _opwright_find_command(opwright)
  add_custom_command(
    OUTPUT "${pack}"
    COMMAND ${opwright} pack build "${manifest}" --output "${pack}" ${options}
    DEPENDS ${files}
    COMMENT "Compiling Triton kernels of ${target}"
    VERBATIM)

  get_target_property(type "${target}" TYPE)
  if(NOT arg_EMBED)
    add_custom_target("${target}_triton_kernels" DEPENDS "${pack}")
    add_dependencies("${target}" "${target}_triton_kernels")
    if(NOT type STREQUAL "INTERFACE_LIBRARY")
      target_compile_definitions("${target}" PRIVATE "$<$<COMPILE_LANGUAGE:CXX>:OPWRIGHT_PACK=\"${pack}\">")
    endif()
    return()
  endif()

  if(pack MATCHES "[\"\\\\\n]")
    message(FATAL_ERROR "opwright_add_triton_kernels: `${target}`: an assembler does not take the path ${pack}")
  endif()
  string(MAKE_C_IDENTIFIER "${target}" OPWRIGHT_NAME)
  set(OPWRIGHT_PACK_FILE "${pack}")
  set(code "${CMAKE_CURRENT_BINARY_DIR}/${target}_triton_kernels.cpp")
  get_property(root GLOBAL PROPERTY OPWRIGHT_FOLDER)
  configure_file("${root}/cmake/embedded_pack.cpp.in" "${code}" @ONLY)
  set_source_files_properties("${code}" PROPERTIES OBJECT_DEPENDS "${pack}")
  add_library("${target}_triton_kernels" OBJECT "${code}" "${pack}")
  target_link_libraries("${target}_triton_kernels" PRIVATE opwright::triton)
  set_target_properties("${target}_triton_kernels" PROPERTIES POSITION_INDEPENDENT_CODE ON)
  # Nothing refers to the object, so an archive would lose it: what links the archive gets it instead.
  set(visibility PRIVATE)
  if(type MATCHES "^(STATIC|OBJECT|INTERFACE)_LIBRARY$")
    set(visibility INTERFACE)
  endif()
  target_sources("${target}" ${visibility} "$<TARGET_OBJECTS:${target}_triton_kernels>")
endfunction()
