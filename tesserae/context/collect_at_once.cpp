// All keys and values before the work begins: gathered, or written once into memory that all ranks of the host read.

#include <ATen/ops/empty.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros.h>

#include "tesserae/base/error.h"
#include "tesserae/context/key_values.h"

namespace tesserae::context {
namespace {

class Whole : public KeyValues {
 public:
  Whole(bool shared, const Sequence& sequence, const at::Tensor& keys, const at::Tensor& values)
      : sequence_(sequence), own_{keys, values} {
    const Parallel& parallel = sequence.parallel();
    if (parallel.size() == 1) {
      whole_ = own_;
    } else if (shared) {
      read_shared();
    } else {
      gather();
    }
  }

  int blocks() const override { return 1; }

  Block next() override { return {whole_.keys, whole_.values, in_place(sequence_.cut().pattern().length())}; }

  void add_gradients(const at::Tensor& keys, const at::Tensor& values) override { sums_ = {keys, values}; }

  Gradients gradients() override {
    const Parallel& parallel = sequence_.parallel();
    if (parallel.size() == 1) return sums_;
    // In the dtype of the keys: summed in fp32 and rounded once (comm::RunningReduction).
    const at::Tensor both = at::stack({sums_.keys, sums_.values}).to(own_.keys.scalar_type());
    const at::Tensor pieces = to_pieces(both, sequence_.cut(), time_dim + 1);
    const at::Tensor own = at::empty(pieces.sizes().slice(1), pieces.options());
    parallel.group().reduce_scatter_to(own, pieces);
    const at::Tensor mine = own.narrow(time_dim + 1, 0, sequence_.tokens());
    return {mine[0], mine[1]};
  }

 private:
  std::vector<int64_t> whole_shape() const {
    std::vector<int64_t> shape = own_.keys.sizes().vec();
    shape[time_dim] = sequence_.cut().pattern().length();
    return shape;
  }

  void read_shared() {
    const at::Tensor& like = own_.keys;
    const auto shape = whole_shape();
    const int64_t bytes = c10::multiply_integers(shape) * like.element_size();
    const at::Tensor memory = sequence_.parallel().shared_memory(2 * bytes);
    whole_ = {memory.narrow(0, 0, bytes).view(like.scalar_type()).view(shape),
              memory.narrow(0, bytes, bytes).view(like.scalar_type()).view(shape)};
    put(whole_.keys, own_.keys, sequence_.spans(), time_dim);
    put(whole_.values, own_.values, sequence_.spans(), time_dim);
    sequence_.parallel().group().barrier();
  }

  void gather() {
    const at::Tensor& like = own_.keys;
    std::vector<int64_t> shape = like.sizes().vec();
    shape[time_dim] = sequence_.cut().most_tokens();
    shape.insert(shape.begin(), {sequence_.parallel().size(), 2});
    const at::Tensor pieces = at::zeros(shape, like.options());
    const at::Tensor mine = pieces[sequence_.parallel().index()].narrow(time_dim + 1, 0, sequence_.tokens());
    mine[0].copy_(own_.keys);
    mine[1].copy_(own_.values);
    sequence_.parallel().group().all_gather(pieces);
    const at::Tensor both = from_pieces(pieces, sequence_.cut(), time_dim + 1);
    whole_ = {both[0], both[1]};
  }

  const Sequence& sequence_;
  Gradients own_, whole_, sums_;  // keys and values, or their gradients
};

}  // namespace

std::unique_ptr<KeyValues> collect_at_once(bool shared, const Sequence& sequence, const at::Tensor& keys,
                                           const at::Tensor& values) {
  return std::make_unique<Whole>(shared, sequence, keys, values);
}

std::unique_ptr<KeyValues> collect(Method method, const Sequence& sequence, const Pattern& pattern,
                                   const at::Tensor& keys, const at::Tensor& values) {
  if (method == Method::p2p && sequence.parallel().size() > 1) {
    return collect_piece_by_piece(sequence, pattern, keys, values);
  }
  return collect_at_once(method == Method::shared, sequence, keys, values);
}

}  // namespace tesserae::context
