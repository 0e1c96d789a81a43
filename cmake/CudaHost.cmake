# Host code of the CUDA module, compiled without nvcc. The module and the native tests link it. JAXCOMM_CUDA_HEADERS:
# folders with the headers of jaxlib, NCCL and CUDA.
add_library(jaxcomm_cuda_programs OBJECT EXCLUDE_FROM_ALL
  ${PROJECT_SOURCE_DIR}/ffi/cuda/program/call_program.cc
  ${PROJECT_SOURCE_DIR}/ffi/cuda/program/packing.cc
  ${PROJECT_SOURCE_DIR}/ffi/cuda/program/program.cc
  ${PROJECT_SOURCE_DIR}/ffi/cuda/program/rail_row_args.cc
  ${PROJECT_SOURCE_DIR}/ffi/cuda/program/row_args.cc
  ${PROJECT_SOURCE_DIR}/ffi/cuda/program/send_recv_schedule.cc
  ${PROJECT_SOURCE_DIR}/ffi/cuda/program/slice_args.cc)
add_library(jaxcomm_cuda_host OBJECT EXCLUDE_FROM_ALL
  ${PROJECT_SOURCE_DIR}/ffi/cuda/cublas/product.cc
  ${PROJECT_SOURCE_DIR}/ffi/cuda/nccl/bootstrap.cc
  ${PROJECT_SOURCE_DIR}/ffi/cuda/nccl/first_contact.cc
  ${PROJECT_SOURCE_DIR}/ffi/cuda/nccl/gin.cc
  ${PROJECT_SOURCE_DIR}/ffi/cuda/nccl/nccl_calls.cc
  ${PROJECT_SOURCE_DIR}/ffi/cuda/nccl/nodes.cc
  ${PROJECT_SOURCE_DIR}/ffi/cuda/nccl/symmetric_memory.cc
  ${PROJECT_SOURCE_DIR}/ffi/cuda/nccl/threads.cc
  ${PROJECT_SOURCE_DIR}/ffi/cuda/nccl/wait_for_stream.cc
  ${PROJECT_SOURCE_DIR}/ffi/cuda/runtime/call_names.cc
  ${PROJECT_SOURCE_DIR}/ffi/cuda/runtime/communicator.cc
  ${PROJECT_SOURCE_DIR}/ffi/cuda/runtime/device_call.cc
  ${PROJECT_SOURCE_DIR}/ffi/cuda/runtime/fused_matmul.cc
  ${PROJECT_SOURCE_DIR}/ffi/cuda/runtime/send_recv_proxy.cc
  ${PROJECT_SOURCE_DIR}/ffi/cuda/runtime/own_communicators.cc
  ${PROJECT_SOURCE_DIR}/ffi/cuda/runtime/abort_flag.cc
  ${PROJECT_SOURCE_DIR}/ffi/cuda/xla/call.cc
  ${PROJECT_SOURCE_DIR}/ffi/cuda/xla/call_communicator.cc
  ${PROJECT_SOURCE_DIR}/ffi/cuda/xla/call_site.cc
  ${PROJECT_SOURCE_DIR}/ffi/cuda/xla/done.cc
  ${PROJECT_SOURCE_DIR}/ffi/cuda/xla/fused_call.cc
  ${PROJECT_SOURCE_DIR}/ffi/cuda/xla/user_call.cc
  ${PROJECT_SOURCE_DIR}/ffi/cuda/xla/xla_collectives.cc)
# Some tests replace or observe these.
add_library(jaxcomm_cublaslt_library OBJECT EXCLUDE_FROM_ALL ${PROJECT_SOURCE_DIR}/ffi/cuda/cublas/cublaslt_library.cc)
add_library(jaxcomm_nccl_library OBJECT EXCLUDE_FROM_ALL ${PROJECT_SOURCE_DIR}/ffi/cuda/nccl/nccl_library.cc)
add_library(jaxcomm_nccl_capabilities OBJECT EXCLUDE_FROM_ALL ${PROJECT_SOURCE_DIR}/ffi/cuda/nccl/capabilities.cc)
set(JAXCOMM_CUDA_HOST
  jaxcomm_cuda_programs jaxcomm_cuda_host jaxcomm_cublaslt_library jaxcomm_nccl_library jaxcomm_nccl_capabilities)
foreach(library IN LISTS JAXCOMM_CUDA_HOST)
  target_link_libraries(${library} PUBLIC jaxcomm_plans)
  target_include_directories(${library} PUBLIC ${PROJECT_SOURCE_DIR}/ffi/include)
  if(NOT library STREQUAL "jaxcomm_cuda_programs")  # programs do not depend on CUDA
    target_include_directories(${library} SYSTEM PUBLIC ${JAXCOMM_CUDA_HEADERS})
  endif()
  if(JAXCOMM_NATIVE_TESTS)
    target_link_libraries(${library} PRIVATE jaxcomm_test_options)
  else()
    target_compile_options(${library} PRIVATE -Os)
  endif()
endforeach()
