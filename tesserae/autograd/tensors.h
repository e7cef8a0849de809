#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <tuple>
#include <vector>

namespace tesserae::autograd {

/// Calls visit(tensor) for each tensor in what a module's forward returns: a tensor, and vectors, optionals, pairs and
/// tuples of such. Overload it for your own output types (found by argument-dependent lookup).
template <class Visit>
void for_each_tensor(const at::Tensor& tensor, const Visit& visit);
template <class T, class Visit>
void for_each_tensor(const std::vector<T>& list, const Visit& visit);
template <class T, class Visit>
void for_each_tensor(const std::optional<T>& maybe, const Visit& visit);
template <class A, class B, class Visit>
void for_each_tensor(const std::pair<A, B>& pair, const Visit& visit);
template <class... T, class Visit>
void for_each_tensor(const std::tuple<T...>& tuple, const Visit& visit);

// Above, all are declared, so that each finds the others whatever they are nested in.

template <class Visit>
void for_each_tensor(const at::Tensor& tensor, const Visit& visit) {
  visit(tensor);
}

template <class T, class Visit>
void for_each_tensor(const std::vector<T>& list, const Visit& visit) {
  for (const auto& element : list) for_each_tensor(element, visit);
}

template <class T, class Visit>
void for_each_tensor(const std::optional<T>& maybe, const Visit& visit) {
  if (maybe.has_value()) for_each_tensor(*maybe, visit);
}

template <class A, class B, class Visit>
void for_each_tensor(const std::pair<A, B>& pair, const Visit& visit) {
  for_each_tensor(pair.first, visit);
  for_each_tensor(pair.second, visit);
}

template <class... T, class Visit>
void for_each_tensor(const std::tuple<T...>& tuple, const Visit& visit) {
  std::apply([&](const auto&... element) { (for_each_tensor(element, visit), ...); }, tuple);
}

}  // namespace tesserae::autograd
