# Flags that every target of this project shares.
find_program(CCACHE ccache)
if(CCACHE)
  # With paths relative to the project a second build folder, a wheel's for example, finds what the first has compiled.
  set(CMAKE_CXX_COMPILER_LAUNCHER
    ${CMAKE_COMMAND} -E env CCACHE_BASEDIR=${PROJECT_SOURCE_DIR} CCACHE_NOHASHDIR=1
    CCACHE_SLOPPINESS=pch_defines,time_macros ${CCACHE})
endif()
find_program(MOLD mold)
if(MOLD AND CMAKE_CXX_COMPILER_ID STREQUAL "GNU" AND CMAKE_CXX_COMPILER_VERSION VERSION_GREATER_EQUAL 12.1)
  add_link_options(-fuse-ld=mold)
endif()

# __FILE__, of torch's headers too, names no folder of the machine that compiled: what ships is the same wherever it was
# built, and the compiler's cache serves other clones.
add_compile_options(-ffile-prefix-map=${PROJECT_SOURCE_DIR}=.)

set(TESSERAE_WARNINGS -Wall -Wextra -Wno-unused-parameter -Werror=return-type)
if(TESSERAE_SANITIZE)
  add_compile_options(-fsanitize=${TESSERAE_SANITIZE} -fno-omit-frame-pointer -g)
  add_link_options(-fsanitize=${TESSERAE_SANITIZE})
endif()
