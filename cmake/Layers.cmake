# tesserae_layer(NAME SOURCES a.cpp ... LINK target ...): one folder of tesserae/ as the static library tesserae::NAME.
function(tesserae_layer name)
  cmake_parse_arguments(LAYER "" "" "SOURCES;LINK" ${ARGN})
  add_library(tesserae_${name} STATIC ${LAYER_SOURCES})
  add_library(tesserae::${name} ALIAS tesserae_${name})
  target_include_directories(tesserae_${name} PUBLIC ${PROJECT_SOURCE_DIR} ${PROJECT_BINARY_DIR})
  target_compile_options(tesserae_${name} PRIVATE ${TESSERAE_WARNINGS})
  target_link_libraries(tesserae_${name} PUBLIC ${LAYER_LINK})
endfunction()

# tesserae_test(NAME SOURCES a_test.cpp ... LINK target ... [TIMEOUT seconds] [PROCESSORS n] [LABELS label ...]): one
# GoogleTest program, one ctest entry. PROCESSORS: what it keeps busy, so that ctest starts nothing else beside it. Labels
# with a meaning: `gpu` needs a CUDA GPU (tools/gpu_check.sh), `parity_full` runs under `make parity` only.
function(tesserae_test name)
  cmake_parse_arguments(TEST "" "TIMEOUT;PROCESSORS" "SOURCES;LINK;LABELS" ${ARGN})
  if(NOT TEST_TIMEOUT)
    set(TEST_TIMEOUT 300)
  endif()
  if(NOT TEST_PROCESSORS)
    set(TEST_PROCESSORS 1)
  endif()
  add_executable(test_${name} ${TEST_SOURCES})
  target_include_directories(test_${name} PRIVATE ${PROJECT_SOURCE_DIR})
  # What tests cost is compiling, not running: they are not optimised hard, whatever the build type.
  target_compile_options(test_${name} PRIVATE ${TESSERAE_WARNINGS} -O1)
  target_link_libraries(test_${name} PRIVATE ${TEST_LINK} GTest::gtest GTest::gmock)
  add_test(NAME ${name} COMMAND test_${name})
  set_tests_properties(${name} PROPERTIES
    TIMEOUT ${TEST_TIMEOUT} PROCESSORS ${TEST_PROCESSORS} LABELS "${TEST_LABELS}" ENVIRONMENT "OMP_NUM_THREADS=1")
endfunction()
