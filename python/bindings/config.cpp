#include <pybind11/stl.h>

#include "python/bindings/bindings.h"
#include "tesserae/config/config_file.h"
#include "tesserae/config/init_config.h"
#include "tesserae/config/sagemaker.h"
#include "tesserae/config/state_ranks.h"

namespace tesserae::bindings {

// Configurations cross as JSON text: both sides read it as they read a file, and neither needs the other's types.
void bind_config(py::module_& module) {
  using namespace tesserae::config;
  module.def(
      "read_config_file", [](const std::string& path) { return read_config_file(path).dump(); }, py::arg("path"),
      "The JSON object in that file, unchecked, as JSON text. Comments are skipped; InvalidArgument names the line of "
      "what is no JSON.");
  module.def(
      "validate_init_config",
      [](const std::string& document) { return validate_init_config(Json::parse(document)).dump(); },
      py::arg("document"),
      "A configuration of tsm.init, as JSON text, checked and with every default filled in. InvalidArgument names the "
      "key that cannot work.");
  module.def(
      "sagemaker_parameters",
      []() -> std::optional<std::string> {
        const auto parameters = sagemaker_parameters(sagemaker_environment());
        return parameters ? std::optional(parameters->dump()) : std::nullopt;
      },
      "The modelparallel parameters that the estimator of a training job of SageMaker gave, as JSON text; None where "
      "there are none. InvalidArgument names what cannot work.");
  module.def(
      "check_degrees",
      [](int ranks, int tensor, int context, int expert, const std::vector<std::tuple<int, int, int>>& degrees) {
        check_state_ranks(mesh::Mesh(ranks, {.tensor = tensor, .context = context, .expert = expert}), 0,
                          [&](int state_ranks) {
                            for (const auto& [p, g, o] : degrees) mesh::Layout(state_ranks, {p, g, o});
                          });
      },
      py::arg("ranks"), py::kw_only(), py::arg("tensor"), py::arg("context"), py::arg("expert"), py::arg("degrees"),
      "Raises InvalidArgument if some degrees do not fit the ranks of a job with these tensor-, context- and "
      "expert-parallel degrees; it names what would.");
}

}  // namespace tesserae::bindings
