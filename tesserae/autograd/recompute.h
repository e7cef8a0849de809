#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>
#include <optional>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "tesserae/autograd/tensors.h"

namespace tesserae::autograd {

using TensorFunction = std::function<std::vector<at::Tensor>(const std::vector<at::Tensor>&)>;

/// Activation checkpointing (Chen et al., 2016, arXiv:1604.06174): runs `compute` without keeping activations and runs
/// it again in backward. Random numbers (CPU generator and that of the inputs' device) are replayed, so dropout is
/// identical. `compute` must depend on nothing but its inputs, parameters and random numbers. Its backward throws
/// InvalidArgument with create_graph, and in torch::autograd::grad.
std::vector<at::Tensor> recompute_all_in_backward(const TensorFunction& compute, const std::vector<at::Tensor>& inputs);

namespace detail {

template <class T>
void take_tensors(const T& value, std::vector<at::Tensor>& tensors) {
  if constexpr (is_visitable<T>) {
    for_each_tensor(value, [&](const at::Tensor& tensor) { tensors.push_back(tensor); });
  }
}

template <class T>
void give_tensors(T& value, const std::vector<at::Tensor>& tensors, size_t& next) {
  if constexpr (is_visitable<T>) {
    change_tensors(value, [&](const at::Tensor& /*before*/) { return tensors[next++]; });
  }
}

template <class... T>
std::vector<at::Tensor> tensors_in(const std::tuple<T...>& values) {
  std::vector<at::Tensor> tensors;
  std::apply([&](const auto&... value) { (take_tensors(value, tensors), ...); }, values);
  return tensors;
}

/// As many as tensors_in() found, in the same order.
template <class... T>
void put_tensors(std::tuple<T...>& values, const std::vector<at::Tensor>& tensors) {
  size_t next = 0;
  std::apply([&](auto&... value) { (give_tensors(value, tensors, next), ...); }, values);
}

}  // namespace detail

/// Whether recompute_in_backward() can keep these arguments, and put together what a callable returns.
template <class Output, class... Args>
inline constexpr bool can_recompute = is_visitable<Output> && (std::is_copy_constructible_v<std::decay_t<Args>> && ...);

/// The same for a callable of any arguments, which are copied; tensors are found in them and in what it returns by
/// for_each_tensor().
template <class Compute, class... Args>
auto recompute_in_backward(const Compute& compute, Args&&... args) {
  using Arguments = std::tuple<std::decay_t<Args>...>;
  using Output = std::decay_t<decltype(std::apply(compute, std::declval<Arguments&>()))>;
  static_assert(can_recompute<Output, Args...>);
  Arguments arguments(std::forward<Args>(args)...);
  const std::vector<at::Tensor> inputs = detail::tensors_in(arguments);
  // What the function holds lives as long as the graph: not the tensors, which autograd saves, and which may leave.
  detail::put_tensors(arguments, std::vector<at::Tensor>(inputs.size()));
  // What it returns at first, for as long as this call lasts: the place of its tensors.
  const auto first = std::make_shared<std::optional<std::tuple<Output>>>();
  const TensorFunction function = [compute, arguments,
                                   weak = std::weak_ptr(first)](const std::vector<at::Tensor>& tensors) {
    auto mine = arguments;
    detail::put_tensors(mine, tensors);
    std::tuple<Output> output(std::apply(compute, mine));
    std::vector<at::Tensor> list = detail::tensors_in(output);
    if (const auto place = weak.lock()) place->emplace(std::move(output));
    return list;
  };
  const std::vector<at::Tensor> outputs = recompute_all_in_backward(function, inputs);
  detail::put_tensors(**first, outputs);
  return std::get<0>(std::move(**first));
}

}  // namespace tesserae::autograd
