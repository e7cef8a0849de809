# Finds the libtorch that ships inside the Python package torch and offers it as the target `libtorch`.
#
# find_package(Torch) is not used: with a CUDA wheel it asks for a CUDA toolkit at configure time, while this project
# includes no CUDA header outside comm/nccl.cpp.
find_package(Python3 3.10 REQUIRED COMPONENTS Interpreter)
execute_process(
  COMMAND ${Python3_EXECUTABLE} -c
          "import torch; print(torch.__path__[0], torch.__version__, torch.version.cuda or 'none', sep=';')"
  OUTPUT_VARIABLE torch_facts OUTPUT_STRIP_TRAILING_WHITESPACE RESULT_VARIABLE torch_missing ERROR_QUIET)
if(torch_missing)
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

add_library(libtorch INTERFACE)
target_include_directories(libtorch SYSTEM INTERFACE
  ${TORCH_ROOT}/include ${TORCH_ROOT}/include/torch/csrc/api/include)
target_compile_definitions(libtorch INTERFACE USE_DISTRIBUTED USE_C10D_GLOO)
target_link_directories(libtorch INTERFACE ${TORCH_ROOT}/lib)
target_link_options(libtorch INTERFACE -Wl,-rpath,${TORCH_ROOT}/lib)
target_link_libraries(libtorch INTERFACE torch_cpu c10)
set(TESSERAE_HAS_CUDA OFF)
if(NOT TORCH_CUDA STREQUAL "none")
  set(TESSERAE_HAS_CUDA ON)
  # Nothing of ours names a symbol of these two, yet loading them is what registers the CUDA kernels.
  target_link_libraries(libtorch INTERFACE -Wl,--no-as-needed torch_cuda c10_cuda -Wl,--as-needed)
endif()
