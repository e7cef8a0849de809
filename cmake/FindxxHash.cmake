# Finds the header of xxHash (xxhash.h, 0.8 or later: the first with a stable XXH3) and offers it as the target
# xxHash::xxHash. The functions are compiled into the one source that includes it (XXH_INLINE_ALL): no library is linked.
find_path(xxHash_INCLUDE_DIR xxhash.h)
mark_as_advanced(xxHash_INCLUDE_DIR)
if(xxHash_INCLUDE_DIR)
  file(STRINGS ${xxHash_INCLUDE_DIR}/xxhash.h xxHash_VERSION REGEX "^#define XXH_VERSION_(MAJOR|MINOR|RELEASE) +[0-9]+")
  list(TRANSFORM xxHash_VERSION REPLACE "^#define XXH_VERSION_[A-Z]+ +([0-9]+).*" "\\1")
  list(JOIN xxHash_VERSION "." xxHash_VERSION)
endif()
include(FindPackageHandleStandardArgs)
find_package_handle_standard_args(xxHash REQUIRED_VARS xxHash_INCLUDE_DIR VERSION_VAR xxHash_VERSION
  REASON_FAILURE_MESSAGE "xxhash.h is missing or too old: install libxxhash-dev (Debian), xxhash-devel (Fedora) or xxhash (conda, Homebrew), or name its prefix in CMAKE_PREFIX_PATH.")
if(xxHash_FOUND AND NOT TARGET xxHash::xxHash)
  add_library(xxHash::xxHash INTERFACE IMPORTED)
  target_include_directories(xxHash::xxHash INTERFACE ${xxHash_INCLUDE_DIR})
endif()
