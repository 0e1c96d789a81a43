# find_package(jaxcomm CONFIG) defines the target jaxcomm::device with the headers of the device API. There is nothing
# to link.
include_guard(GLOBAL)
add_library(jaxcomm::device INTERFACE IMPORTED)
get_filename_component(jaxcomm_INCLUDE_DIR "${CMAKE_CURRENT_LIST_DIR}/../include" ABSOLUTE)
set_target_properties(jaxcomm::device PROPERTIES
  INTERFACE_INCLUDE_DIRECTORIES "${jaxcomm_INCLUDE_DIR}"
  INTERFACE_COMPILE_FEATURES cxx_std_17)
