# What compiling costs is torch's headers, read again by each source: so the sources of a target are compiled in a few units,
# each of which includes several. -DTESSERAE_UNITY=OFF compiles them one by one. What is in an anonymous namespace must
# therefore have a name of its own within its folder.
option(TESSERAE_UNITY "Compile several sources at a time" ON)
set(TESSERAE_UNITY_SOURCES 12 CACHE STRING "How many sources a unit has at most")

# tesserae_unity(TARGET): the sources of a target as units of about equal size, with what is precompiled for it.
function(tesserae_unity target)
  tesserae_precompiled(${target})
  if(NOT TESSERAE_UNITY)
    return()
  endif()
  get_target_property(sources ${target} SOURCES)
  list(LENGTH sources count)
  math(EXPR units "(${count} + ${TESSERAE_UNITY_SOURCES} - 1) / ${TESSERAE_UNITY_SOURCES}")
  math(EXPR batch "(${count} + ${units} - 1) / ${units}")
  set_target_properties(${target} PROPERTIES UNITY_BUILD ON UNITY_BUILD_BATCH_SIZE ${batch})
  # A class of one source may have members of types that are that source's own; in a unit g++ takes it for a header's.
  target_compile_options(${target} PRIVATE $<$<CXX_COMPILER_ID:GNU>:-Wno-subobject-linkage>)
endfunction()

# Layers that queue work on devices, and the lines of their instructions, by which tests/sim/waits.h names what waits. Off,
# since the wheel would then be compiled anew instead of coming from the compiler's cache.
option(TESSERAE_WAIT_LINES "test_sim_engine --without-waits can name the lines that wait" OFF)
set(TESSERAE_LAYERS_WITH_LINES offload comm tensor context shard optim checkpoint)

# tesserae_layer(NAME SOURCES a.cpp ... LINK target ...): one folder of tesserae/ as the static library tesserae::NAME.
function(tesserae_layer name)
  cmake_parse_arguments(LAYER "" "" "SOURCES;LINK" ${ARGN})
  add_library(tesserae_${name} STATIC ${LAYER_SOURCES})
  add_library(tesserae::${name} ALIAS tesserae_${name})
  target_include_directories(tesserae_${name} PUBLIC
    $<BUILD_INTERFACE:${PROJECT_SOURCE_DIR}> $<BUILD_INTERFACE:${PROJECT_BINARY_DIR}> $<INSTALL_INTERFACE:${TESSERAE_PREFIX}include>)
  target_compile_options(tesserae_${name} PRIVATE ${TESSERAE_WARNINGS})
  if(TESSERAE_WAIT_LINES AND name IN_LIST TESSERAE_LAYERS_WITH_LINES)
    target_compile_options(tesserae_${name} PRIVATE -g1)
  endif()
  target_link_libraries(tesserae_${name} PUBLIC ${LAYER_LINK})
  tesserae_unity(tesserae_${name})
  set_target_properties(tesserae_${name} PROPERTIES EXPORT_NAME ${name})
  install(TARGETS tesserae_${name} EXPORT Tesserae
    ARCHIVE DESTINATION ${TESSERAE_PREFIX}lib COMPONENT development)
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
  tesserae_unity(test_${name})
  target_sources(test_${name} PRIVATE $<TARGET_OBJECTS:tesserae_test_skips>)
  add_test(NAME ${name} COMMAND test_${name})
  set_tests_properties(${name} PROPERTIES
    TIMEOUT ${TEST_TIMEOUT} PROCESSORS ${TEST_PROCESSORS} LABELS "${TEST_LABELS}" ENVIRONMENT "OMP_NUM_THREADS=1")
endfunction()
