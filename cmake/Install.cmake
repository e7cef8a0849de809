# What is installed: libraries, headers and the CMake package Tesserae, for find_package(Tesserae). In a wheel all of it
# lies in the Python package (tsm.cmake_prefix_path says where), else below the prefix.
set(TESSERAE_PREFIX "")
if(SKBUILD)
  set(TESSERAE_PREFIX tesserae/)
endif()

install(DIRECTORY ${PROJECT_SOURCE_DIR}/tesserae DESTINATION ${TESSERAE_PREFIX}include COMPONENT development
  FILES_MATCHING PATTERN "*.h" PATTERN gloo_headers EXCLUDE)
set(package_folder ${TESSERAE_PREFIX}share/cmake/Tesserae)
install(EXPORT Tesserae NAMESPACE tesserae:: FILE TesseraeTargets.cmake DESTINATION ${package_folder}
  COMPONENT development)
include(CMakePackageConfigHelpers)
configure_package_config_file(${PROJECT_SOURCE_DIR}/cmake/TesseraeConfig.cmake.in
  ${PROJECT_BINARY_DIR}/TesseraeConfig.cmake INSTALL_DESTINATION ${package_folder})
write_basic_package_version_file(${PROJECT_BINARY_DIR}/TesseraeConfigVersion.cmake COMPATIBILITY SameMinorVersion)
install(FILES ${PROJECT_BINARY_DIR}/TesseraeConfig.cmake ${PROJECT_BINARY_DIR}/TesseraeConfigVersion.cmake
  ${PROJECT_SOURCE_DIR}/cmake/Libtorch.cmake DESTINATION ${package_folder} COMPONENT development)
