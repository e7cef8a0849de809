#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

namespace tesserae::autograd {

using TensorFunction = std::function<std::vector<at::Tensor>(const std::vector<at::Tensor>&)>;

/// Activation checkpointing (Chen et al., 2016, arXiv:1604.06174): runs `compute` without keeping activations and runs
/// it again in backward. Random numbers (CPU generator and that of the inputs' device) are replayed, so dropout is
/// identical. `compute` must depend on nothing but its inputs, parameters and random numbers. Its backward throws
/// InvalidArgument with create_graph, and in torch::autograd::grad.
std::vector<at::Tensor> recompute_all_in_backward(const TensorFunction& compute, const std::vector<at::Tensor>& inputs);

namespace detail {

template <class T>
inline constexpr bool is_tensor = std::is_same_v<std::decay_t<T>, at::Tensor>;

template <class Tuple, size_t... I>
std::vector<at::Tensor> pack(const Tuple& arguments, std::index_sequence<I...>) {
  std::vector<at::Tensor> tensors;
  auto take = [&tensors](const auto& argument) {
    if constexpr (is_tensor<decltype(argument)>) tensors.push_back(argument);
  };
  (take(std::get<I>(arguments)), ...);
  return tensors;
}

template <class Tuple, size_t... I>
void unpack(Tuple& arguments, const std::vector<at::Tensor>& tensors, std::index_sequence<I...>) {
  size_t next = 0;
  auto give = [&](auto& argument) {
    if constexpr (is_tensor<decltype(argument)>) argument = tensors[next++];
  };
  (give(std::get<I>(arguments)), ...);
}

// What a forward returns, as a list and back: a tensor, or a tuple of tensors.
inline std::vector<at::Tensor> list_of(const at::Tensor& output) {
  return {output};
}
template <class... T>
std::vector<at::Tensor> list_of(const std::tuple<T...>& outputs) {
  return pack(outputs, std::index_sequence_for<T...>{});
}
inline void take_from(const std::vector<at::Tensor>& list, at::Tensor& output) {
  output = list[0];
}
template <class... T>
void take_from(const std::vector<at::Tensor>& list, std::tuple<T...>& outputs) {
  unpack(outputs, list, std::index_sequence_for<T...>{});
}

}  // namespace detail

/// The same for a callable of any arguments that returns a tensor or a tuple of tensors. Arguments that are no tensors
/// are copied.
template <class Compute, class... Args>
auto recompute_in_backward(const Compute& compute, Args&&... args) {
  using Indices = std::index_sequence_for<Args...>;
  using Arguments = std::tuple<std::decay_t<Args>...>;
  std::decay_t<decltype(std::apply(compute, std::declval<Arguments&>()))> output;
  Arguments arguments(std::forward<Args>(args)...);
  const std::vector<at::Tensor> inputs = detail::pack(arguments, Indices{});
  // What the function holds lives as long as the graph: not the tensors, which autograd saves, and which may leave.
  detail::unpack(arguments, std::vector<at::Tensor>(inputs.size()), Indices{});
  const TensorFunction function = [compute, arguments](const std::vector<at::Tensor>& tensors) {
    auto mine = arguments;
    detail::unpack(mine, tensors, Indices{});
    return detail::list_of(std::apply(compute, mine));
  };
  detail::take_from(recompute_all_in_backward(function, inputs), output);
  return output;
}

}  // namespace tesserae::autograd
