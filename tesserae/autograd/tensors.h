#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

namespace tesserae::autograd {

/// Calls visit(tensor) for each tensor in what a module's forward takes or returns: a tensor, and vectors, optionals,
/// pairs and tuples of such; there may be numbers and texts beside them. Overload it for your own types (found by
/// argument-dependent lookup): for a value of yours it must visit tensors that are the value's own, always in the same
/// order.
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

template <class T, class Visit>
requires(std::is_scalar_v<T>) void for_each_tensor(const T& /*value*/, const Visit& /*visit*/) {}
template <class Visit>
void for_each_tensor(const std::string& /*text*/, const Visit& /*visit*/) {}

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

namespace detail {

struct Ignore {
  void operator()(const at::Tensor& /*tensor*/) const {}
};

/// Whether for_each_tensor() takes a T, and whether there may be a tensor in it.
template <class T>
struct Visited {
  static constexpr bool visitable = requires(const T& value, const Ignore& visit) { for_each_tensor(value, visit); };
  static constexpr bool tensors = visitable && !std::is_scalar_v<T> && !std::is_same_v<T, std::string>;
};
/// Of several.
template <class... T>
struct VisitedAll {
  static constexpr bool visitable = (Visited<T>::visitable && ...);
  static constexpr bool tensors = (Visited<T>::tensors || ...);
};
template <class T>
struct Visited<std::vector<T>> : VisitedAll<T> {};
template <class T>
struct Visited<std::optional<T>> : VisitedAll<T> {};
template <class A, class B>
struct Visited<std::pair<A, B>> : VisitedAll<A, B> {};
template <class... T>
struct Visited<std::tuple<T...>> : VisitedAll<T...> {};

}  // namespace detail

/// Whether for_each_tensor() takes a T.
template <class T>
inline constexpr bool is_visitable = detail::Visited<std::decay_t<T>>::visitable;
/// Whether it may find tensors in one, which is one or holds some.
template <class T>
inline constexpr bool may_have_tensors = is_visitable<T>&& detail::Visited<std::decay_t<T>>::tensors;

/// Puts change(tensor) in the place of each tensor in `value`.
template <class T, class Change>
void change_tensors(T& value, const Change& change) {
  static_assert(!std::is_const_v<T>);
  // What is visited as const are parts of `value`, which is not.
  for_each_tensor(value, [&](const at::Tensor& tensor) { const_cast<at::Tensor&>(tensor) = change(tensor); });
}

}  // namespace tesserae::autograd
