#include <ATen/core/grad_mode.h>
#include <ATen/ops/zeros_like.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include "python/bindings/unit.h"
#include "tesserae/shard/whole_model.h"

namespace tesserae::bindings {
namespace {

/// One flat buffer of a unit, for state dicts and summoning.
struct FlatBuffer {
  py::object owner;  // keeps the unit alive
  Unit* unit;
  size_t index;

  shard::FlatBuffer& buffer() const { return *unit->sharded().buffers()[index]; }
  shard::FlatParameter& parameter() const { return buffer().parameter(); }
  const shard::Flat& flat() const { return buffer().flat(); }
  shard::Shard* shard() const { return buffer().shard(); }
  shard::LocalParameters& local() const { return unit->user_parameters().of(index); }
};

}  // namespace

void bind_flat(py::module_& module) {
  using Gil = py::gil_scoped_release;
  py::class_<FlatBuffer>(module, "FlatBuffer", "One flat buffer of a unit; what it holds between steps.")
      .def_property_readonly(
          "names",
          [](const FlatBuffer& self) {
            std::vector<std::vector<std::string>> names;
            for (const auto& slot : self.flat().slots()) names.push_back(slot.names);
            return names;
          },
          "For each slot all names, from the root down.")
      .def_property_readonly("shapes",
                             [](const FlatBuffer& self) {
                               std::vector<std::vector<int64_t>> shapes;
                               for (const auto& slot : self.flat().slots()) shapes.push_back(slot.shape);
                               return shapes;
                             })
      .def_property_readonly(
          "begins",
          [](const FlatBuffer& self) {
            std::vector<int64_t> begins;
            for (const auto& slot : self.flat().slots()) begins.push_back(slot.begin);
            return begins;
          },
          "For each slot its first element in the whole buffer.")
      .def_property_readonly("trainable", [](const FlatBuffer& self) { return self.flat().trainable(); })
      .def_property_readonly("total", [](const FlatBuffer& self) { return self.flat().total(); })
      .def_property_readonly(
          "local_range",
          [](const FlatBuffer& self) {
            const auto range = self.parameter().local_range();
            return std::make_pair(range.begin, range.end);
          },
          "Which elements of the whole buffer this rank holds between steps.")
      .def(
          "local", [](const FlatBuffer& self) { return self.parameter().local(); },
          "This rank's values, one dimension, padding included; the engine's own memory.")
      .def(
          "take",
          [](const FlatBuffer& self) {
            self.local().take_values();
            if (self.shard() != nullptr) self.local().take_gradients(*self.shard());
          },
          "Takes what the user did to values and gradients of their tensors, which show local().")
      .def(
          "show",
          [](const FlatBuffer& self) {
            self.local().show_values();
            if (self.shard() != nullptr) self.local().show_gradients(*self.shard());
          },
          "The user's tensors show this rank's values and gradients, whatever they were made to show before.")
      .def(
          "whole_values",
          [](const FlatBuffer& self, const at::Tensor& local) {
            const Gil release;
            return self.parameter().whole_values(local);
          },
          py::arg("local"), "Collective: the whole buffer, from what each rank holds (any dtype).")
      .def(
          "whole_gradient",
          [](const FlatBuffer& self) -> std::optional<at::Tensor> {
            if (self.shard() == nullptr) return std::nullopt;
            const at::Tensor& mine = self.shard()->grad;
            const Gil release;
            if (shard::max_over_ranks(self.unit->engine(), mine.defined() ? 1 : 0) == 0) return std::nullopt;
            return self.parameter().whole_values(mine.defined() ? mine : at::zeros_like(self.parameter().local()));
          },
          "Collective: the whole gradient, zeros where a rank has none; None if no rank has one.")
      .def(
          "set_values",
          [](const FlatBuffer& self, const at::Tensor& whole) {
            const at::NoGradGuard no_grad;
            self.parameter().set_values(whole);
          },
          py::arg("whole"), "Takes what this rank holds of a whole buffer as its new values. Then publish().")
      .def(
          "set_gradient",
          [](const FlatBuffer& self, const at::Tensor& whole) {
            const at::NoGradGuard no_grad;
            at::Tensor& grad = self.shard()->grad;
            if (!grad.defined()) grad = self.buffer().gradient()->memory();
            const auto range = self.parameter().local_range();
            grad.copy_(whole.narrow(0, range.begin, range.size()));
          },
          py::arg("whole"), "Takes what this rank holds of a whole gradient.")
      .def(
          "publish",
          [](const FlatBuffer& self) {
            const Gil release;
            self.buffer().unit().publish({&self.parameter()});
          },
          "Collective: new values are what the next forward sees.")
      .def(
          "join",
          [](const FlatBuffer& self, const std::vector<std::optional<at::Tensor>>& slices, at::ScalarType dtype) {
            std::vector<at::Tensor> defined;
            for (const auto& slice : slices) defined.push_back(slice.value_or(at::Tensor()));
            const at::NoGradGuard no_grad;
            return self.local().join(defined, dtype);
          },
          py::arg("slices"), py::arg("dtype"), "A tensor for each of the user's tensors, of its size, as one tensor.")
      .def(
          "split", [](const FlatBuffer& self, const at::Tensor& local) { return self.local().split(local); },
          py::arg("local"), "The reverse of join(): views of it.")
      .def_property_readonly(
          "shard",
          [](const FlatBuffer& self) -> std::optional<int> {
            const auto* shard = self.shard();
            return shard == nullptr ? std::nullopt : std::optional(shard->index);
          },
          "The number of its shard in the engine; None if it is frozen.");

  module.def(
      "flat_buffers",
      [](const py::object& unit) {
        auto& cpp = unit.cast<Unit&>();
        std::vector<FlatBuffer> buffers;
        for (size_t i = 0; i < cpp.sharded().buffers().size(); ++i) buffers.push_back({unit, &cpp, i});
        return buffers;
      },
      py::arg("unit"));
}

}  // namespace tesserae::bindings
