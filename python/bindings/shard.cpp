#include "tesserae/shard/statistics.h"

#include "python/bindings/bindings.h"
#include "python/bindings/unit.h"
#include "tesserae/autograd/backward.h"

namespace tesserae::bindings {

void bind_shard(py::module_& module) {
  using shard::Statistics;
  py::class_<Statistics>(module, "Statistics", "What an engine has done so far. Seconds and bytes, all of this rank.")
      .def_readonly("steps", &Statistics::steps)
      .def_readonly("exposed_gather", &Statistics::exposed_gather)
      .def_readonly("exposed_reduce", &Statistics::exposed_reduce)
      .def_readonly("gathers", &Statistics::gathers)
      .def_readonly("prefetch_hits", &Statistics::prefetch_hits)
      .def_readonly("reductions", &Statistics::reductions)
      .def_readonly("gradients_in_place", &Statistics::gradients_in_place)
      .def_readonly("departures", &Statistics::departures)
      .def_readonly("pool_reserved_bytes", &Statistics::pool_reserved_bytes)
      .def_readonly("pool_misses", &Statistics::pool_misses)
      .def_readonly("allocations", &Statistics::allocations)
      .def_readonly("state_bytes", &Statistics::state_bytes);
  module.def("in_backward", &autograd::in_backward, "Whether this thread runs a backward.");
  bind_unit(module);
  bind_unit_gathers(module);
  bind_flat(module);
  bind_reshard(module);
}

}  // namespace tesserae::bindings
