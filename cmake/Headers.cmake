# Installs the headers of the device API and the CMake package that finds them. Does not need CUDA.
include(CMakePackageConfigHelpers)

file(READ ffi/include/jaxcomm/version.h version_header)
set(JAXCOMM_VERSION "")
foreach(part MAJOR MINOR PATCH)
  if(NOT version_header MATCHES "define JAXCOMM_VERSION_${part} ([0-9]+)")
    message(FATAL_ERROR "ffi/include/jaxcomm/version.h has no JAXCOMM_VERSION_${part}")
  endif()
  list(APPEND JAXCOMM_VERSION ${CMAKE_MATCH_1})
endforeach()
list(JOIN JAXCOMM_VERSION "." JAXCOMM_VERSION)

write_basic_package_version_file("${CMAKE_CURRENT_BINARY_DIR}/jaxcommConfigVersion.cmake"
  VERSION ${JAXCOMM_VERSION} COMPATIBILITY SameMinorVersion ARCH_INDEPENDENT)
install(DIRECTORY ffi/include/ DESTINATION jaxcomm/include)
install(FILES cmake/jaxcommConfig.cmake "${CMAKE_CURRENT_BINARY_DIR}/jaxcommConfigVersion.cmake"
  DESTINATION jaxcomm/cmake)
