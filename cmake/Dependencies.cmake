# Libraries that do what others do well. `make setup` installs them as Debian packages; elsewhere CMAKE_PREFIX_PATH finds them.
find_package(nlohmann_json 3.11 REQUIRED)
find_package(CLI11 2.1 REQUIRED)
if(TESSERAE_TESTS)
  find_package(GTest REQUIRED)
endif()
if(TESSERAE_BENCH)
  find_package(benchmark REQUIRED)
endif()
