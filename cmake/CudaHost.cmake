# Host code of the CUDA module, compiled without nvcc. The module and the native tests link it. JAXCOMM_CUDA_HEADERS:
# folders with the headers of NCCL and CUDA. JAXLIB_INCLUDE_DIR: that with XLA's.
set(JAXCOMM_CUDA_LIBRARIES "" CACHE PATH "Another build folder, whose host code without XLA's headers is used")
function(jaxcomm_set_cuda_host)
  foreach(library IN LISTS ARGN)
    target_link_libraries(${library} PUBLIC jaxcomm_plans)
    target_include_directories(${library} PUBLIC ${PROJECT_SOURCE_DIR}/ffi/include)
    if(NOT library STREQUAL "jaxcomm_cuda_programs")  # programs do not depend on CUDA
      target_include_directories(${library} SYSTEM PUBLIC ${JAXCOMM_CUDA_HEADERS})
    endif()
    # The tests take longer to compile than to run.
    target_compile_options(${library} PRIVATE $<IF:$<BOOL:${JAXCOMM_NATIVE_TESTS}>,-O1,-Os>)
  endforeach()
endfunction()
add_library(jaxcomm_cuda_xla OBJECT EXCLUDE_FROM_ALL
  ${PROJECT_SOURCE_DIR}/ffi/cuda/xla/call.cc
  ${PROJECT_SOURCE_DIR}/ffi/cuda/xla/call_site.cc
  ${PROJECT_SOURCE_DIR}/ffi/cuda/xla/route_and_dispatch_call.cc
  ${PROJECT_SOURCE_DIR}/ffi/cuda/xla/user_arguments.cc
  ${PROJECT_SOURCE_DIR}/ffi/cuda/xla/user_call.cc
  ${PROJECT_SOURCE_DIR}/ffi/cuda/xla/user_windows.cc
  ${PROJECT_SOURCE_DIR}/ffi/cuda/xla/xla_collectives.cc)
target_include_directories(jaxcomm_cuda_xla SYSTEM PUBLIC ${JAXLIB_INCLUDE_DIR})
jaxcomm_set_cuda_host(jaxcomm_cuda_xla)
set(without_xla
  jaxcomm_cuda_programs jaxcomm_cuda_host jaxcomm_nccl_library jaxcomm_nccl_capabilities)
set(JAXCOMM_CUDA_HOST ${without_xla} jaxcomm_cuda_xla)
if(JAXCOMM_CUDA_LIBRARIES)
  include(${JAXCOMM_CUDA_LIBRARIES}/cuda_host.cmake)
  return()
endif()

add_library(jaxcomm_cuda_programs OBJECT EXCLUDE_FROM_ALL
  ${PROJECT_SOURCE_DIR}/ffi/cuda/program/call_program.cc
  ${PROJECT_SOURCE_DIR}/ffi/cuda/program/route_and_dispatch_args.cc
  ${PROJECT_SOURCE_DIR}/ffi/cuda/program/packing.cc
  ${PROJECT_SOURCE_DIR}/ffi/cuda/program/program.cc
  ${PROJECT_SOURCE_DIR}/ffi/cuda/program/inter_node_row_args.cc
  ${PROJECT_SOURCE_DIR}/ffi/cuda/program/row_args.cc
  ${PROJECT_SOURCE_DIR}/ffi/cuda/program/slice_args.cc)
add_library(jaxcomm_cuda_host OBJECT EXCLUDE_FROM_ALL
  ${PROJECT_SOURCE_DIR}/ffi/cuda/nccl/bootstrap.cc
  ${PROJECT_SOURCE_DIR}/ffi/cuda/nccl/device_memory.cc
  ${PROJECT_SOURCE_DIR}/ffi/cuda/nccl/failed_processes.cc
  ${PROJECT_SOURCE_DIR}/ffi/cuda/nccl/first_contact.cc
  ${PROJECT_SOURCE_DIR}/ffi/cuda/nccl/gin.cc
  ${PROJECT_SOURCE_DIR}/ffi/cuda/nccl/gin_version.cc
  ${PROJECT_SOURCE_DIR}/ffi/cuda/nccl/nccl_calls.cc
  ${PROJECT_SOURCE_DIR}/ffi/cuda/nccl/symmetric_memory.cc
  ${PROJECT_SOURCE_DIR}/ffi/cuda/nccl/threads.cc
  ${PROJECT_SOURCE_DIR}/ffi/cuda/nccl/wait_for_stream.cc
  ${PROJECT_SOURCE_DIR}/ffi/cuda/runtime/call_names.cc
  ${PROJECT_SOURCE_DIR}/ffi/cuda/runtime/communicator.cc
  ${PROJECT_SOURCE_DIR}/ffi/cuda/runtime/buffer_places.cc
  ${PROJECT_SOURCE_DIR}/ffi/cuda/runtime/device_call.cc
  ${PROJECT_SOURCE_DIR}/ffi/cuda/runtime/liveness.cc
  ${PROJECT_SOURCE_DIR}/ffi/cuda/runtime/recorded_calls.cc
  ${PROJECT_SOURCE_DIR}/ffi/cuda/runtime/own_communicators.cc
  ${PROJECT_SOURCE_DIR}/ffi/cuda/runtime/watchdog.cc)
# Some tests replace or observe these.
add_library(jaxcomm_nccl_library OBJECT EXCLUDE_FROM_ALL ${PROJECT_SOURCE_DIR}/ffi/cuda/nccl/nccl_library.cc)
add_library(jaxcomm_nccl_capabilities OBJECT EXCLUDE_FROM_ALL ${PROJECT_SOURCE_DIR}/ffi/cuda/nccl/capabilities.cc)
jaxcomm_set_cuda_host(${without_xla})
export(TARGETS ${without_xla} FILE ${CMAKE_BINARY_DIR}/cuda_host.cmake)
add_custom_target(jaxcomm_cuda_objects)
add_dependencies(jaxcomm_cuda_objects ${without_xla})
