#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include "python/bindings/bindings.h"
#include "tesserae/base/error.h"
#include "tesserae/tensor/functions.h"
#include "tesserae/tensor/layers.h"
#include "tesserae/tensor/split_parameters.h"
#include "tesserae/tensor/split_random.h"
#include "tesserae/tensor/unsplit.h"
#include "tesserae/tensor/whole.h"

namespace tesserae::bindings {
namespace {

using Gil = py::gil_scoped_release;
using tensor::Parallel;
using Among = std::shared_ptr<Parallel>;
using MaybeTensor = std::optional<at::Tensor>;

// Backward runs these functions' nodes in C++, on threads of autograd that hold no GIL.
void bind_functions(py::module_& module) {
  const auto without_gil = py::call_guard<Gil>();
  module.def(
      "column_linear",
      [](const at::Tensor& x, const std::vector<at::Tensor>& weights, const std::vector<MaybeTensor>& biases,
         const Among& parallel) {
        std::vector<at::Tensor> all;
        for (const auto& bias : biases) {
          if (bias) all.push_back(*bias);
        }
        return tensor::column_linear(x, weights, all, parallel);
      },
      py::arg("x"), py::arg("weights"), py::arg("biases"), py::arg("parallel"), without_gil,
      "y_i = x W_i^T + b_i for weights cut by rows, which all read the same x; all have a bias or none (None).");
  module.def(
      "row_linear",
      [](const at::Tensor& x, const at::Tensor& weight, const MaybeTensor& bias, const Among& parallel,
         std::optional<int64_t> sequence) {
        return tensor::row_linear(x, weight, bias.value_or(at::Tensor()), parallel,
                                  sequence.value_or(tensor::no_sequence));
      },
      py::arg("x"), py::arg("weight"), py::arg("bias"), py::arg("parallel"), py::arg("sequence_dim") = std::nullopt,
      without_gil,
      "y = x W^T + b for a weight cut by columns and x split along its last dimension; y is repeated or split along "
      "the sequence.");
  module.def(
      "vocabulary_embedding",
      [](const at::Tensor& tokens, const at::Tensor& weight, const Among& parallel, int64_t vocabulary) {
        return tensor::vocabulary_embedding(tokens, weight, parallel, vocabulary);
      },
      py::arg("tokens"), py::arg("weight"), py::arg("parallel"), py::arg("vocabulary"), without_gil);
  module.def(
      "vocabulary_cross_entropy",
      [](const at::Tensor& logits, const at::Tensor& targets, int64_t vocabulary, const Among& parallel,
         int64_t ignored) { return tensor::vocabulary_cross_entropy(logits, targets, vocabulary, parallel, ignored); },
      py::arg("logits"), py::arg("targets"), py::arg("vocabulary"), py::arg("parallel"), py::arg("ignored") = -100,
      without_gil, "Of each token, fp32, from this rank's columns of the logits.");
  module.def(
      "gather_from",
      [](const at::Tensor& x, int64_t dim, const Among& parallel) { return tensor::gather_from(x, dim, parallel); },
      py::arg("x"), py::arg("dim"), py::arg("parallel"), without_gil, "Puts split pieces along `dim` together.");
  module.def(
      "scatter_to",
      [](const at::Tensor& x, int64_t dim, const Among& parallel) { return tensor::scatter_to(x, dim, parallel); },
      py::arg("x"), py::arg("dim"), py::arg("parallel"), without_gil, "This rank's piece of a repeated tensor.");
  module.def(
      "gather_sequence",
      [](const at::Tensor& x, int64_t dim, const Among& parallel) { return tensor::gather_sequence(x, dim, parallel); },
      py::arg("x"), py::arg("dim"), py::arg("parallel"), without_gil,
      "Puts split pieces along `dim` together for split computation: the gradient, which is partial, is summed and "
      "cut.");
  module.def(
      "copy_to_parallel",
      [](const at::Tensor& x, const Among& parallel) { return tensor::copy_to_parallel(x, parallel); }, py::arg("x"),
      py::arg("parallel"), without_gil, "The same tensor, whose gradients, which are partial, are summed.");
  module.def(
      "reduce_from", [](const at::Tensor& x, const Among& parallel) { return tensor::reduce_from(x, parallel); },
      py::arg("x"), py::arg("parallel"), without_gil, "The sum of a partial tensor; the gradient stays as it is.");
  module.def(
      "reduce_scatter_sequence",
      [](const at::Tensor& x, int64_t dim, const Among& parallel) {
        return tensor::reduce_scatter_sequence(x, dim, parallel);
      },
      py::arg("x"), py::arg("dim"), py::arg("parallel"), without_gil,
      "This rank's piece along `dim` of the sum of a partial tensor; the gradient is put together.");
}

void bind_unsplit(py::module_& module) {
  const auto without_gil = py::call_guard<Gil>();
  module.def(
      "unsplit_linear",
      [](const at::Tensor& x, const at::Tensor& weight, const MaybeTensor& bias, bool widened) {
        return tensor::unsplit_linear(x, weight, bias,
                                      widened ? tensor::Products::widened : tensor::Products::as_torch);
      },
      py::arg("x"), py::arg("weight"), py::arg("bias"), py::arg("widened") = false, without_gil,
      "torch's linear; the gradient of the weight is computed where it will be reduced. widened: bf16 and fp16 are "
      "multiplied in fp32 on CPUs without AVX-512.");
  module.def(
      "unsplit_embedding",
      [](const at::Tensor& tokens, const at::Tensor& weight, int64_t padding_index) {
        return tensor::unsplit_embedding(tokens, weight, padding_index);
      },
      py::arg("tokens"), py::arg("weight"), py::arg("padding_index") = -1, without_gil,
      "torch's embedding; the gradient of the weight is computed where it will be reduced.");
}

}  // namespace

void bind_parallel(py::module_& module) {
  const auto without_gil = py::call_guard<Gil>();
  py::class_<Parallel, Among>(module, "Parallel",
                              "The ranks among which the tensors of layers are split; see tesserae/tensor/parallel.h.")
      .def(py::init<std::shared_ptr<comm::MeshFabric>>(), py::arg("mesh"), without_gil,
           "This rank's tensor group. Collective over it.")
      .def_property_readonly("index", &Parallel::index)
      .def_property_readonly("size", &Parallel::size)
      .def("split", &Parallel::split, py::arg("dim"), py::arg("blocks") = 1,
           "This rank's part of a tensor that is cut along `dim`.")
      .def(
          "whole_of",
          [](const Among& self, const at::Tensor& part, const mesh::Splits& splits, const std::vector<int64_t>& whole) {
            return tensor::whole_of(part, splits, whole, *self->mesh());
          },
          py::arg("part"), py::arg("splits"), py::arg("whole"), without_gil,
          "Collective over the axes that cut it: the whole tensor of shape `whole`, of which each rank brings its "
          "part. "
          "No autograd.")
      .def(
          "broadcast", [](const Among& self, const at::Tensor& tensor) { self->group().broadcast(tensor, 0); },
          py::arg("tensor"), without_gil, "Collective, in place: all have what the first has; contiguous.")
      .def("require_same", &Parallel::require_same, py::arg("tensors"), without_gil,
           "Raises InvalidArgument, on all ranks, unless all were given the same. Collective.")
      .def(
          "__deepcopy__",
          [](const Parallel& /*self*/, const py::object& /*memo*/) -> Among {
            throw InvalidArgument("copy.deepcopy",
                                  "a model whose layers are split among ranks cannot be copied: build another one, "
                                  "give it to tsm.transform, and load this one's state dict");
          },
          py::arg("memo"), "Raises InvalidArgument.")
      .def("require_same_random", &Parallel::require_same_random, py::arg("state"), without_gil,
           "The same of the state of a generator.");
}

void bind_tensor(py::module_& module) {
  bind_functions(module);
  bind_unsplit(module);
  module.def(
      "part_of", [](const at::Tensor& whole, const mesh::Splits& splits) { return tensor::part_of(whole, splits); },
      py::arg("whole"), py::arg("splits"), py::call_guard<Gil>(),
      "The part of a whole tensor that `splits` mean, contiguous, padding zero.");
  module.def(
      "heads_of_rank",
      [](int64_t query, int64_t key_value, const Among& parallel) {
        const auto heads = tensor::heads_of_rank(query, key_value, *parallel);
        return std::make_pair(heads.query, heads.key_value);
      },
      py::arg("query"), py::arg("key_value"), py::arg("parallel"),
      "How many heads each rank has. Raises InvalidArgument, naming the degrees that would do.");
  module.def(
      "size_of_part",
      [](const std::string& what, int64_t size, const Among& parallel) {
        return tensor::size_of_part(what.c_str(), size, *parallel);
      },
      py::arg("what"), py::arg("size"), py::arg("parallel"),
      "Raises InvalidArgument, naming `what` and the degrees that would do, unless the ranks divide `size`.");

  using tensor::SplitRandom;
  py::class_<SplitRandom>(module, "SplitRandom", "Random numbers of split computation; tesserae/tensor/split_random.h.")
      .def(py::init([](const Among& parallel, uint64_t seed, const at::Device& device) {
             return std::make_unique<SplitRandom>(*parallel, seed, device);
           }),
           py::arg("parallel"), py::arg("seed"), py::arg("device"))
      .def("begin", &SplitRandom::begin)
      .def("end", &SplitRandom::end)
      .def_property_readonly("inside", &SplitRandom::inside);
}

}  // namespace tesserae::bindings
