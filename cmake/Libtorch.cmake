# Finds the libtorch that ships inside the Python package torch and offers it as the target `libtorch`. Used by the
# build, and by what is installed (TesseraeConfig.cmake.in).
#
# find_package(Torch) is not used: with a CUDA wheel it asks for a CUDA toolkit at configure time, while this project
# includes no CUDA header outside comm/transports/nccl.cpp.
find_package(Python3 3.10 REQUIRED COMPONENTS Interpreter)
# pip builds in an environment of its own that hides what is installed, by means of PYTHONPATH: -E looks past it.
foreach(flag "" -E)
  execute_process(
    COMMAND ${Python3_EXECUTABLE} ${flag} -c
            "import torch; print(torch.__path__[0], torch.__version__, torch.version.cuda or 'none', sep=';')"
    OUTPUT_VARIABLE torch_facts OUTPUT_STRIP_TRAILING_WHITESPACE RESULT_VARIABLE torch_missing ERROR_QUIET)
  if(NOT torch_missing)
    break()
  endif()
endforeach()
if(torch_missing AND CMAKE_FIND_PACKAGE_NAME STREQUAL "Tesserae")
  set(TORCH_VERSION "none")  # who asked for it may do without
  return()
elseif(torch_missing AND SKBUILD)
  message(FATAL_ERROR "torch is not installed where pip builds (${Python3_EXECUTABLE}). Install the torch that you train "
                      "with first, then `pip install --no-build-isolation .` in the same environment")
elseif(torch_missing)
  message(FATAL_ERROR "${Python3_EXECUTABLE} cannot import torch. `make setup` installs it; "
                      "or name another Python with -DPython3_EXECUTABLE=...")
endif()
list(GET torch_facts 0 TORCH_ROOT)
list(GET torch_facts 1 TORCH_VERSION)
list(GET torch_facts 2 TORCH_CUDA)
if(TORCH_VERSION VERSION_LESS 2.11)
  message(FATAL_ERROR "torch ${TORCH_VERSION} is too old: Tesserae needs 2.11 or later")
endif()
message(STATUS "torch ${TORCH_VERSION} (CUDA: ${TORCH_CUDA}) in ${TORCH_ROOT}")

# In the build tree only: what is installed must not name a folder of the machine that built it.
list(APPEND CMAKE_BUILD_RPATH ${TORCH_ROOT}/lib)
set(TESSERAE_HAS_CUDA ON)
if(TORCH_CUDA STREQUAL "none")
  set(TESSERAE_HAS_CUDA OFF)
endif()
# A project may ask for what is installed in several of its folders: the targets are those of the first time.
if(TARGET libtorch)
  return()
endif()

# Imported: what is installed names it, and finds the torch of the machine that it is on by this file.
add_library(libtorch INTERFACE IMPORTED GLOBAL)
target_include_directories(libtorch SYSTEM INTERFACE
  ${TORCH_ROOT}/include ${TORCH_ROOT}/include/torch/csrc/api/include)
target_compile_definitions(libtorch INTERFACE USE_DISTRIBUTED USE_C10D_GLOO)
target_link_directories(libtorch INTERFACE ${TORCH_ROOT}/lib)
target_link_libraries(libtorch INTERFACE torch_cpu c10)
if(TESSERAE_HAS_CUDA)
  # Nothing of ours names a symbol of these two, yet loading them is what registers the CUDA kernels. One item, so that
  # CMake cannot move the libraries away from their flags.
  target_link_libraries(libtorch INTERFACE -Wl,--push-state,--no-as-needed,-ltorch_cuda,-lc10_cuda,--pop-state)
  # What torch's own libraries need is found by their loader paths at run time; the linker need not find it too.
  target_link_options(libtorch INTERFACE -Wl,--allow-shlib-undefined)

  # The target libtorch_cuda: what comm/transports/nccl.cpp alone needs, the headers of CUDA and NCCL. They lie in the
  # wheels that torch depends on, those of the compiler (crt/, nv/) perhaps only in a toolkit. Where some are missing there
  # is no such target, and libtorch_cuda_missing names them.
  file(GLOB nvidia_wheels ${TORCH_ROOT}/../nvidia/*)
  find_program(NVCC nvcc HINTS ENV CUDA_HOME PATHS /usr/local/cuda PATH_SUFFIXES bin)
  cmake_path(GET NVCC PARENT_PATH nvcc_folder)
  set(cuda_roots ${nvidia_wheels} ${nvcc_folder}/.. $ENV{CUDA_HOME} /usr/local/cuda)
  find_path(CUDA_RUNTIME_INCLUDE cuda_runtime_api.h HINTS ${cuda_roots} PATH_SUFFIXES include)
  find_path(CUDA_COMPILER_INCLUDE crt/host_defines.h HINTS ${cuda_roots} PATH_SUFFIXES include)
  find_path(CUDA_TARGET_INCLUDE nv/target HINTS ${cuda_roots} PATH_SUFFIXES include include/cccl)
  find_path(NCCL_INCLUDE nccl.h HINTS ${cuda_roots} PATH_SUFFIXES include)
  string(REGEX MATCH "^[0-9]+" cuda_major ${TORCH_CUDA})
  find_library(CUDA_RUNTIME NAMES libcudart.so.${cuda_major} cudart HINTS ${cuda_roots} PATH_SUFFIXES lib lib64)
  set(libtorch_cuda_missing "")
  foreach(found "CUDA_RUNTIME_INCLUDE cuda_runtime_api.h" "CUDA_COMPILER_INCLUDE crt/host_defines.h"
          "CUDA_TARGET_INCLUDE nv/target" "NCCL_INCLUDE nccl.h" "CUDA_RUNTIME libcudart.so.${cuda_major}")
    string(REPLACE " " ";" found ${found})
    list(GET found 0 variable)
    list(GET found 1 file)
    if(NOT ${variable})
      list(APPEND libtorch_cuda_missing ${file})
    endif()
  endforeach()
  if(NOT libtorch_cuda_missing)
    list(TRANSFORM nvidia_wheels APPEND /include OUTPUT_VARIABLE wheel_includes)
    add_library(libtorch_cuda INTERFACE)
    target_include_directories(libtorch_cuda SYSTEM INTERFACE
      ${wheel_includes} ${CUDA_RUNTIME_INCLUDE} ${CUDA_COMPILER_INCLUDE} ${CUDA_TARGET_INCLUDE} ${NCCL_INCLUDE})
    target_compile_definitions(libtorch_cuda INTERFACE USE_C10D_NCCL)
    target_link_libraries(libtorch_cuda INTERFACE libtorch ${CUDA_RUNTIME})
  endif()
endif()
