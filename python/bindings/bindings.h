#pragma once

#include <pybind11/pybind11.h>

#include <string>

#include "tesserae/mesh/axis.h"

namespace tesserae::bindings {

namespace py = pybind11;

/// One function per layer that is exposed, in the source of that name. Each adds its classes and functions to `module`,
/// tesserae._C. module.cpp calls them in the order of the layers: a type must be there before a signature names it.
void bind_base(py::module_& module);
void bind_offload(py::module_& module);
void bind_mesh(py::module_& module);
void bind_comm(py::module_& module);
void bind_fabric(py::module_& module);
void bind_membership(py::module_& module);     // part of the layer comm
void bind_process_group(py::module_& module);  // part of the layer comm
void bind_preemption(py::module_& module);
void bind_parallel(py::module_& module);  // part of the layer tensor; a unit's options take one
void bind_shard(py::module_& module);
void bind_tensor(py::module_& module);
void bind_context(py::module_& module);
void bind_optim(py::module_& module);
void bind_experts(py::module_& module);
void bind_dial(py::module_& module);
void bind_monitor(py::module_& module);
void bind_checkpoint(py::module_& module);
void bind_saver(py::module_& module);  // part of the layer checkpoint
void bind_data(py::module_& module);
void bind_config(py::module_& module);

/// The axes that Python means by a name: of an axis, or of a set in mesh::axes. Throws InvalidArgument for another.
mesh::AxisSet axes_named(const std::string& name);

}  // namespace tesserae::bindings
