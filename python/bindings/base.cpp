#include "python/bindings/bindings.h"
#include "python/bindings/error_class.h"
#include "tesserae/base/error.h"

namespace tesserae::bindings {

void bind_base(py::module_& module) {
  const auto builtin = [](PyObject* type) { return py::reinterpret_borrow<py::object>(type); };
  const py::object error = bind_error<Error>(module, "Error", builtin(PyExc_RuntimeError),
                                             "Base of every error of tesserae. The text reads "
                                             "\"[function] what happened, the values, what to do\".");
  bind_error<InvalidArgument>(module, "InvalidArgument", py::make_tuple(error, builtin(PyExc_ValueError)),
                              "The caller passed something that cannot work. Nothing was changed.");
  bind_error<IoError>(module, "IoError", error, "The operating system refused something: which path, and why.");
  bind_error<Corruption>(module, "Corruption", error, "Bytes were read but are not what was written.");
  bind_error<OutOfMemory>(module, "OutOfMemory", error,
                          "There is not enough memory for what was asked. Nothing was changed.");
}

}  // namespace tesserae::bindings
