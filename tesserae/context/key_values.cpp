#include "tesserae/context/key_values.h"

#include "tesserae/base/error.h"

namespace tesserae::context {

std::unique_ptr<KeyValues> collect_for_forward(Method method, const Sequence& sequence, const Pattern& pattern,
                                               const Pair& own) {
  if (sequence.parallel().size() == 1) return collect_at_once(sequence, own, own);
  if (method == Method::shared) return collect_at_once(sequence, own, in_shared_memory(sequence, own));
  if (method == Method::p2p) return collect_piece_by_piece(sequence, pattern, own);
  return collect_at_once(sequence, own);
}

// Gradients of all positions at once would be twice as large as all keys and values: where these are shared, that is
// what a rank would hold most of.
std::unique_ptr<KeyValues> collect_for_backward(Method method, const Sequence& sequence, const Pattern& pattern,
                                                const Pair& own) {
  if (sequence.parallel().size() == 1) return collect_at_once(sequence, own, own);
  if (method == Method::shared) {
    return collect_piece_by_piece(sequence, pattern, own, in_shared_memory(sequence, own));
  }
  if (method == Method::p2p) return collect_piece_by_piece(sequence, pattern, own);
  return collect_at_once(sequence, own);
}

Pair in_shared_memory(const Sequence& sequence, const Pair& own) {
  const at::Tensor& like = own.keys;
  std::vector<int64_t> shape = like.sizes().vec();
  shape[time_dim] = sequence.cut().pattern().length();
  const int64_t bytes = c10::multiply_integers(shape) * like.element_size();
  const at::Tensor memory = sequence.parallel().shared_memory(2 * bytes);
  const auto part = [&](int64_t begin) { return memory.narrow(0, begin, bytes).view(like.scalar_type()).view(shape); };
  const Pair whole{part(0), part(bytes)};
  put(whole.keys, own.keys, sequence.spans(), time_dim);
  put(whole.values, own.values, sequence.spans(), time_dim);
  sequence.parallel().group().barrier({"keys and values"}, cat(shape, " of ", to_string(sequence.cut().pattern())));
  return whole;
}

}  // namespace tesserae::context
