# Torch's headers, compiled once and not again by each unit: half of what a unit costs that includes them. Only for the
# targets listed here, since to read what is precompiled takes as long as to compile a few headers. A source includes what
# it uses all the same: -DTESSERAE_PRECOMPILED=OFF compiles without.
set(precompiled OFF)
if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
  set(precompiled ON)
endif()
option(TESSERAE_PRECOMPILED "Compile torch's headers once (g++)" ${precompiled})

# Those of whose units most include torch/nn/module.h or ATen/ATen.h, be it by way of others
# (`ninja -t deps | grep -E '^[a-z]|ATen/ATen.h'` says which).
set(TESSERAE_TARGETS_ON_TORCH
  tesserae_autograd tesserae_checkpoint tesserae_comm tesserae_context tesserae_cost tesserae_doctor tesserae_experts tesserae_model
  tesserae_optim tesserae_probe tesserae_shard tesserae_snapshot tesserae_tensor tesserae_train
  bench_checkpoint bench_dial bench_host_cost bench_phases bench_reduce_scatter bench_step cpp_recipe
  test_checkpoint test_checkpoint_processes test_comm test_context test_device test_experts test_experts_parity
  test_model test_monitor test_offload_parity test_optim test_parity test_plan test_readme test_reshard test_shard
  test_sim test_sim_engine test_sim_training test_snapshot test_tensor test_tensor_parity)

if(TESSERAE_PRECOMPILED)
  set(empty ${PROJECT_BINARY_DIR}/precompiled/torch_headers.cpp)
  if(NOT EXISTS ${empty})
    file(WRITE ${empty} "")
  endif()
  add_library(tesserae_torch_headers OBJECT EXCLUDE_FROM_ALL ${empty})
  target_link_libraries(tesserae_torch_headers PRIVATE libtorch nlohmann_json::nlohmann_json)
  target_precompile_headers(tesserae_torch_headers PRIVATE
    <torch/nn/module.h> <torch/csrc/distributed/c10d/Backend.hpp> <torch/csrc/distributed/c10d/PrefixStore.hpp>
    <nlohmann/json.hpp> <chrono> <condition_variable> <filesystem> <random> <sstream> <thread>)
  target_compile_options(tesserae_torch_headers PRIVATE -fpch-preprocess)
endif()

# tesserae_precompiled(TARGET): it is compiled with what is precompiled, if it is one of those above.
function(tesserae_precompiled target)
  if(NOT TESSERAE_PRECOMPILED OR NOT target IN_LIST TESSERAE_TARGETS_ON_TORCH)
    return()
  endif()
  target_precompile_headers(${target} REUSE_FROM tesserae_torch_headers)
  # As code of a library, which g++ asks of all that share such headers; the other is for the compiler's cache, which
  # then finds them by what they are of, wherever the clone lies.
  target_compile_options(${target} PRIVATE -fPIC -fpch-preprocess)
endfunction()
