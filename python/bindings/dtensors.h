#pragma once

#include <pybind11/pybind11.h>

#include <vector>

#include "tesserae/shard/user_tensor.h"

namespace tesserae::bindings {

namespace py = pybind11;

/// Parameters that are DTensors, whose local tensors show what this rank holds. `make_gradient(parameter, local)`
/// returns the DTensor of that local tensor, placed as the parameter is. Called with the GIL; what it returns takes the
/// GIL itself where it needs it.
shard::UserTensors dtensors(const std::vector<py::object>& parameters, const py::object& make_gradient);

}  // namespace tesserae::bindings
