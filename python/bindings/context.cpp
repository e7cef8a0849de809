#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <ATen/ops/full.h>

#include <optional>
#include <variant>

#include "python/bindings/bindings.h"
#include "tesserae/context/attention.h"

namespace tesserae::bindings {

// Nodes run their backward in C++, on threads of autograd that hold no GIL.
void bind_context(py::module_& module) {
  using context::Parallel;
  using context::Sequence;
  const auto without_gil = py::call_guard<py::gil_scoped_release>();
  py::class_<Parallel, std::shared_ptr<Parallel>>(
      module, "ContextParallel",
      "The ranks that read the same sequences and share out their positions; see tesserae/context/parallel.h.")
      .def(py::init([](const std::shared_ptr<comm::MeshFabric>& mesh, const std::string& method) {
             return std::make_shared<Parallel>(mesh, context::method_from_name(method));
           }),
           py::arg("mesh"), py::arg("method") = "auto", without_gil,
           "This rank's context group. Collective over it. Raises InvalidArgument for a method that cannot be.")
      .def_property_readonly("index", &Parallel::index)
      .def_property_readonly("size", &Parallel::size)
      .def("require_same", &Parallel::require_same, py::arg("tokens"), without_gil,
           "Collective: raises InvalidArgument, on all ranks, unless all were given the same tokens.")
      .def(
          "method_for",
          [](const Parallel& self, int64_t heads, int64_t kv_heads) {
            return std::string(to_string(self.method_for(heads, kv_heads)));
          },
          py::arg("heads"), py::arg("kv_heads"), "How keys and values travel for an attention of so many heads.");

  py::class_<Sequence, std::shared_ptr<Sequence>>(
      module, "ContextSequence",
      "A sequence that is cut over the ranks of a ContextParallel, as this one sees it; see "
      "tesserae/context/sequence.h.")
      .def(py::init([](const std::shared_ptr<Parallel>& parallel, int64_t length, bool causal, int64_t window,
                       std::vector<int64_t> documents) {
             return std::make_shared<Sequence>(parallel,
                                               context::Pattern(length, causal, window, std::move(documents)));
           }),
           py::arg("parallel"), py::arg("length"), py::kw_only(), py::arg("causal") = true, py::arg("window") = 0,
           py::arg("documents") = std::vector<int64_t>{},
           "documents: where packed documents begin, the first at 0. Raises InvalidArgument.")
      .def_property_readonly(
          "length", [](const Sequence& self) { return self.cut().pattern().length(); },
          "Positions of the whole sequences.")
      .def_property_readonly("tokens", &Sequence::tokens, "Of this rank.")
      .def_property_readonly(
          "pairs", [](const Sequence& self) { return self.cut().pairs(self.parallel().index()); },
          "Of a query of this rank and a key: what its attention costs.")
      .def("positions", &Sequence::positions, py::arg("device"), "This rank's, [tokens], int64, ascending.")
      .def("own", &Sequence::own, py::arg("x"), py::arg("dim"), without_gil,
           "Of a tensor with every position along `dim`: this rank's.")
      .def("whole", &Sequence::whole, py::arg("x"), py::arg("dim"), without_gil,
           "Collective, differentiable: every position of what the ranks have. Gradients are as for what is averaged "
           "over the ranks.")
      .def(
          "mean",
          [](const Sequence& self, const at::Tensor& sum, const std::variant<at::Tensor, double>& count) {
            const auto* const tensor = std::get_if<at::Tensor>(&count);
            return self.mean(sum, tensor != nullptr ? *tensor : at::full({}, std::get<double>(count), sum.options()));
          },
          py::arg("sum"), py::arg("count"), without_gil,
          "Collective, differentiable: the sum of `sum` over the ranks, divided by `count`, that of the "
          "whole batch; the same on all ranks. "
          "Gradients are as for what is averaged over the ranks.");

  module.def(
      "context_attention",
      [](const at::Tensor& queries, const at::Tensor& keys, const at::Tensor& values,
         const std::shared_ptr<Sequence>& sequence, std::optional<double> scale, std::optional<bool> causal,
         std::optional<int64_t> window) {
        const context::Pattern& cut_for = sequence->cut().pattern();
        context::AttentionOptions options{.scale = scale};
        if (causal || window) {
          options.pattern.emplace(cut_for.length(), causal.value_or(cut_for.causal()),
                                  window.value_or(cut_for.window()), cut_for.documents());
        }
        return context::attention(queries, keys, values, sequence, options);
      },
      py::arg("queries"), py::arg("keys"), py::arg("values"), py::arg("sequence"), py::kw_only(),
      py::arg("scale") = std::nullopt, py::arg("causal") = std::nullopt, py::arg("window") = std::nullopt, without_gil,
      "Attention of this rank's queries [batch, heads, tokens, width] to the keys and values of all ranks; see "
      "tesserae/context/attention.h. causal, window: where they differ from what the sequence was cut for.");
}

}  // namespace tesserae::bindings
