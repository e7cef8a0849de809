#pragma once

#include <pybind11/pybind11.h>

#include <exception>
#include <utility>

namespace tesserae::bindings {

namespace py = pybind11;

/// Adds the Python class `name` for the C++ error class `E` to `module`, derived from `bases` (a class or a tuple), and
/// has every E that leaves C++ raised as it, also where torch's own functions wait for our process groups.
/// `fill(object, error)` sets attributes of the raised object.
///
/// Base classes come before those derived from them: pybind11 asks the translator that was added last first.
template <class E, class Fill>
py::object bind_error(py::module_& module, const char* name, py::object bases, const char* doc, Fill fill) {
  const auto full_name = module.attr("__name__").cast<std::string>() + "." + name;
  static py::object* type = nullptr;  // leaked: errors may be raised while the interpreter shuts down
  type = new py::object(
      py::reinterpret_steal<py::object>(PyErr_NewExceptionWithDoc(full_name.c_str(), doc, bases.ptr(), nullptr)));
  if (!*type) throw py::error_already_set();
  module.attr(name) = *type;
  static Fill keep = std::move(fill);
  py::register_exception_translator([](std::exception_ptr pointer) {
    try {
      std::rethrow_exception(std::move(pointer));
    } catch (const E& error) {
      py::object raised = (*type)(error.what());
      keep(raised, error);
      PyErr_SetObject(type->ptr(), raised.ptr());
    }
  });
  return *type;
}

template <class E>
py::object bind_error(py::module_& module, const char* name, py::object bases, const char* doc) {
  return bind_error<E>(module, name, std::move(bases), doc, [](py::object&, const E&) {});
}

}  // namespace tesserae::bindings
