# Libraries that do what others do well. `make setup` installs them as Debian packages; elsewhere CMAKE_PREFIX_PATH finds them.
find_package(nlohmann_json 3.11 QUIET)
if(NOT nlohmann_json_FOUND)
  message(FATAL_ERROR "nlohmann_json 3.11 or later is missing (headers only): install nlohmann-json3-dev (Debian), "
                      "json-devel (Fedora) or nlohmann_json (conda, Homebrew), or name its prefix in CMAKE_PREFIX_PATH.")
endif()
find_package(xxHash 0.8 REQUIRED)
if(TESSERAE_PROGRAM)
  find_package(CLI11 2.1 QUIET)
  if(NOT CLI11_FOUND)
    message(FATAL_ERROR "CLI11 2.1 or later is missing (headers only), which the program needs: install libcli11-dev (Debian), "
                        "cli11-devel (Fedora) or cli11 (conda, Homebrew), or name its prefix in CMAKE_PREFIX_PATH. Without the "
                        "program: -DTESSERAE_PROGRAM=OFF (pip: -C cmake.define.TESSERAE_PROGRAM=OFF).")
  endif()
endif()
if(TESSERAE_TESTS)
  find_package(GTest REQUIRED)
endif()
if(TESSERAE_BENCH)
  find_package(benchmark REQUIRED)
endif()
