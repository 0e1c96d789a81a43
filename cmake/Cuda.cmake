# The optional module jaxcomm._cuda. JAXCOMM_CUDA=ON requires it. AUTO builds it if nvcc and NCCL's headers are
# available.
#
# nvcc comes from CMAKE_CUDA_COMPILER, CUDACXX or the system, else from the wheels nvidia-cuda-nvcc and relatives of
# this Python. NCCL's headers come from the nvidia-nccl wheel of this Python or from JAXCOMM_NCCL_INCLUDE_DIR. That may be
# a list: of the headers of the second and later folders, the module gets the kernels that use GIN, which need a libnccl
# of the same version. NCCL is never linked.
set(JAXCOMM_OLDEST_NVCC 13.0)
set(JAXCOMM_OLDEST_NCCL 22907)  # as kOldestNccl in ffi/cuda/nccl/nccl_library.h
set(JAXCOMM_CUDA AUTO CACHE STRING "Build jaxcomm._cuda: AUTO (if nvcc and NCCL's headers are found), ON or OFF")
set_property(CACHE JAXCOMM_CUDA PROPERTY STRINGS AUTO ON OFF)
if(NOT JAXCOMM_CUDA)
  return()
endif()

# Sets `var` to <a directory of the namespace package nvidia>/<path> of this Python, or to an empty string.
function(jaxcomm_find_in_wheels var path)
  execute_process(
    COMMAND ${Python_EXECUTABLE} -c "
import importlib.util, pathlib
spec = importlib.util.find_spec('nvidia')
places = [pathlib.Path(place, '${path}') for place in (spec.submodule_search_locations if spec else [])]
print(next((str(place) for place in places if place.exists()), ''))"
    OUTPUT_VARIABLE found OUTPUT_STRIP_TRAILING_WHITESPACE COMMAND_ERROR_IS_FATAL ANY)
  set(${var} "${found}" PARENT_SCOPE)
endfunction()

# Sets `version` to the version of an nvcc, and `problem` to a sentence if that nvcc cannot be used.
function(jaxcomm_check_nvcc nvcc version problem)
  execute_process(COMMAND ${nvcc} --version OUTPUT_VARIABLE text ERROR_VARIABLE text RESULT_VARIABLE result)
  set(${problem} "" PARENT_SCOPE)
  if(text MATCHES "release ([0-9]+\\.[0-9]+)")
    set(${version} ${CMAKE_MATCH_1} PARENT_SCOPE)
    if(CMAKE_MATCH_1 VERSION_LESS JAXCOMM_OLDEST_NVCC)
      set(${problem} "${nvcc} is of CUDA ${CMAKE_MATCH_1}; jaxcomm needs ${JAXCOMM_OLDEST_NVCC} or later, and a driver \
of version 580 or later" PARENT_SCOPE)
    endif()
  else()
    set(${problem} "${nvcc} --version names no release of CUDA (${result})" PARENT_SCOPE)
  endif()
endfunction()

# Sets `version` to that of the headers of NCCL in a folder, and `problem` to a sentence if they cannot be used.
function(jaxcomm_check_nccl folder version problem)
  set(code 0)
  if(EXISTS "${folder}/nccl_device.h")
    file(STRINGS "${folder}/nccl.h" code REGEX "define NCCL_VERSION_CODE")
    string(REGEX REPLACE ".*NCCL_VERSION_CODE +([0-9]+).*" "\\1" code "${code}")
  endif()
  set(${version} ${code} PARENT_SCOPE)
  set(${problem} "" PARENT_SCOPE)
  if(NOT code GREATER_EQUAL JAXCOMM_OLDEST_NCCL)
    math(EXPR minor "${code} / 100 % 100")
    math(EXPR patch "${code} % 100")
    set(${problem} "${folder} has headers of NCCL 2.${minor}.${patch}; 2.29.7 or later is needed" PARENT_SCOPE)
  endif()
endfunction()

# An nvcc or header folder that the user names is used or refused. One that is found must be suitable.
set(problem "")
if(CMAKE_CUDA_COMPILER)
  set(nvcc "${CMAKE_CUDA_COMPILER}")
  jaxcomm_check_nvcc("${nvcc}" nvcc_version problem)
elseif(DEFINED ENV{CUDACXX})
  separate_arguments(nvcc UNIX_COMMAND "$ENV{CUDACXX}")
  list(GET nvcc 0 nvcc)
  jaxcomm_check_nvcc("${nvcc}" nvcc_version problem)
else()
  find_program(JAXCOMM_NVCC nvcc HINTS ENV CUDA_HOME ENV CUDA_PATH PATHS /usr/local/cuda PATH_SUFFIXES bin)
  jaxcomm_find_in_wheels(wheel_nvcc cu13/bin/nvcc)
  set(problem "there is no nvcc: install CUDA ${JAXCOMM_OLDEST_NVCC} or later, or set CUDACXX, or see docs/guide/gpu-install.md \
for the wheels to install")
  foreach(candidate IN LISTS JAXCOMM_NVCC wheel_nvcc)
    if(EXISTS "${candidate}" AND NOT CMAKE_CUDA_COMPILER)
      jaxcomm_check_nvcc("${candidate}" nvcc_version problem)
      if(NOT problem)
        set(nvcc "${candidate}")
        set(CMAKE_CUDA_COMPILER "${candidate}")
      endif()
    endif()
  endforeach()
endif()

if(NOT problem)
  jaxcomm_find_in_wheels(wheel_nccl nccl/include)
  find_path(JAXCOMM_NCCL_INCLUDE_DIR nccl_device.h HINTS "${wheel_nccl}")
  if(NOT JAXCOMM_NCCL_INCLUDE_DIR)
    set(problem "there are no headers of NCCL 2.29.7 or later: install nvidia-nccl-cu13, or set JAXCOMM_NCCL_INCLUDE_DIR")
  else()
    set(nccl_versions "")
    foreach(folder IN LISTS JAXCOMM_NCCL_INCLUDE_DIR)
      if(NOT problem)
        jaxcomm_check_nccl("${folder}" nccl_version problem)
        list(APPEND nccl_versions ${nccl_version})
      endif()
    endforeach()
  endif()
endif()

if(problem AND JAXCOMM_CUDA STREQUAL "AUTO")
  message(STATUS "Without jaxcomm._cuda: ${problem}")
  return()
elseif(problem)
  message(FATAL_ERROR "JAXCOMM_CUDA=${JAXCOMM_CUDA}, but ${problem}")
endif()

# The wheels keep libraries in lib/, but nvcc.profile names lib64/. Without -L, not even the compiler check links.
get_filename_component(toolkit "${nvcc}" REALPATH)
get_filename_component(toolkit "${toolkit}/../.." ABSOLUTE)
if(EXISTS "${toolkit}/lib/libcudart_static.a" AND NOT EXISTS "${toolkit}/lib64")
  set(CMAKE_CUDA_FLAGS_INIT "-L${toolkit}/lib")
endif()
# Machine code for each generation, and PTX of the newest one for future generations. The kernels with GIN for one further
# version of NCCL take two fifths as long to compile as the rest of the module, so their machine code is that of two
# generations. For later ones, the driver compiles PTX.
if(NOT DEFINED CMAKE_CUDA_ARCHITECTURES)
  set(gin_architectures 80-real 90)
  set(CMAKE_CUDA_ARCHITECTURES 80-real 90-real 100-real 120)
endif()
message(STATUS "With jaxcomm._cuda: ${nvcc} ${nvcc_version} for ${CMAKE_CUDA_ARCHITECTURES}; headers of NCCL \
${nccl_versions} in ${JAXCOMM_NCCL_INCLUDE_DIR}")
set(CMAKE_CUDA_STANDARD 17)
set(CMAKE_CUDA_STANDARD_REQUIRED ON)
set(CMAKE_CUDA_VISIBILITY_PRESET hidden)
enable_language(CUDA)  # find_package(CUDAToolkit) requires an unversioned libcudart.so, which the wheels lack

set(toolkit_headers ${CMAKE_CUDA_TOOLKIT_INCLUDE_DIRECTORIES})
list(FILTER toolkit_headers EXCLUDE REGEX "/cccl$")  # for kernels only; nvcc finds it
list(GET JAXCOMM_NCCL_INCLUDE_DIR 0 nccl_headers)
set(JAXCOMM_CUDA_HEADERS ${nccl_headers} ${toolkit_headers})
include(cmake/CudaHost.cmake)
set(kernels_with_gin ffi/cuda/kernels/executor_gin.cu ffi/cuda/kernels/inter_node_rows.cu)
nanobind_add_module(_cuda STABLE_ABI NB_STATIC
  ffi/cuda/module.cc
  ffi/cuda/kernels/executor.cu
  ${kernels_with_gin}
  ffi/cuda/kernels/ll.cu
  ffi/cuda/kernels/exchange_offsets.cu
  ffi/cuda/kernels/route_and_dispatch.cu
  ffi/cuda/kernels/multimem.cu
  ffi/cuda/kernels/rows.cu
  ffi/cuda/kernels/slices.cu)
target_include_directories(_cuda SYSTEM PRIVATE ${JAXLIB_INCLUDE_DIR} ${JAXCOMM_CUDA_HEADERS})
list(JOIN CMAKE_CUDA_ARCHITECTURES " " architectures)
set_source_files_properties(ffi/cuda/module.cc PROPERTIES
  COMPILE_DEFINITIONS "JAXCOMM_CUDA_ARCHITECTURES=\"${architectures}\"")
function(jaxcomm_set_kernels target)
  target_compile_options(${target} PRIVATE
    $<$<COMPILE_LANGUAGE:CXX>:-Wall -Wextra $<$<BOOL:${JAXCOMM_WERROR}>:-Werror>>
    $<$<COMPILE_LANGUAGE:CUDA>:-Xptxas=-v --threads=0 -Xcompiler=-Wall,-Wextra $<$<BOOL:${JAXCOMM_WERROR}>:-Werror=all-warnings>>)
  set_target_properties(${target} PROPERTIES
    CUDA_COMPILER_LAUNCHER "${Python_EXECUTABLE};${CMAKE_CURRENT_SOURCE_DIR}/cmake/keep_ptxas.py"
    CUDA_RUNTIME_LIBRARY Static POSITION_INDEPENDENT_CODE ON)
endfunction()
jaxcomm_set_kernels(_cuda)
set(other_gin "")
foreach(folder version IN ZIP_LISTS JAXCOMM_NCCL_INCLUDE_DIR nccl_versions)
  if(folder STREQUAL nccl_headers)
    continue()
  endif()
  set(name gin_${version})
  add_library(${name} OBJECT ${kernels_with_gin} ffi/cuda/nccl/gin_version.cc)
  jaxcomm_set_kernels(${name})
  if(gin_architectures)
    set_target_properties(${name} PROPERTIES CUDA_ARCHITECTURES "${gin_architectures}")
  endif()
  target_compile_definitions(${name} PRIVATE JAXCOMM_GIN_NAMESPACE=${name})
  target_include_directories(${name} PRIVATE ffi/include)
  target_include_directories(${name} SYSTEM PRIVATE ${folder} ${toolkit_headers})
  target_link_libraries(${name} PRIVATE jaxcomm_plans)
  target_link_libraries(_cuda PRIVATE ${name})
  string(APPEND other_gin "JAXCOMM_GIN(${name}) ")
endforeach()
set_source_files_properties(ffi/cuda/nccl/gin.cc PROPERTIES COMPILE_DEFINITIONS "JAXCOMM_OTHER_GIN=${other_gin}")
target_link_libraries(_cuda PRIVATE ${JAXCOMM_CUDA_HOST} jaxcomm_attributes jaxcomm_plans)
target_link_options(_cuda PRIVATE ${portable})
set(JAXCOMM_CUDA_DESTINATION jaxcomm CACHE STRING "Python package that gets the module _cuda")
install(TARGETS _cuda LIBRARY DESTINATION ${JAXCOMM_CUDA_DESTINATION} COMPONENT cuda)
