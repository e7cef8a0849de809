#include <pybind11/pybind11.h>

#include "python/bindings/bindings.h"

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  using namespace tesserae::bindings;
  module.doc() = "The engine of tesserae. Everything here is private to the package; use tesserae itself.";
  // Tensors and process groups cross this border as torch's own types: torch must have registered them.
  py::module_::import("torch");
  bind_base(module);
  bind_offload(module);
  bind_mesh(module);
  bind_comm(module);
  bind_fabric(module);
  bind_membership(module);
  bind_process_group(module);
  bind_preemption(module);
  bind_parallel(module);
  bind_shard(module);
  bind_tensor(module);
  bind_context(module);
  bind_optim(module);
  bind_experts(module);
  bind_dial(module);
  bind_monitor(module);
  bind_checkpoint(module);
  bind_data(module);
  bind_config(module);
}
