// All keys and values before the work begins.

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include "tesserae/context/key_values.h"

namespace tesserae::context {
namespace {

constexpr int64_t time_of_both = time_dim + 1;  // [keys and values, batch, heads, time, width]

class AtOnce : public KeyValues {
 public:
  AtOnce(const Sequence& sequence, const Pair& own, const Pair& whole)
      : sequence_(sequence), dtype_(own.keys.scalar_type()), whole_(whole.keys.defined() ? whole : gather(own)) {}

  int blocks() const override { return 1; }

  Block next() override { return {whole_, in_place(std::vector<Span>{{0, sequence_.cut().pattern().length()}})}; }

  void add_gradients(const at::Tensor& both) override { sums_ = both; }

  Pair gradients() override {
    const Parallel& parallel = sequence_.parallel();
    if (parallel.size() == 1) return {sums_[0], sums_[1]};
    // Each rank's part is rounded to the dtype of the keys, and so is their sum (comm::RunningReduction).
    const at::Tensor pieces = to_pieces(sums_.to(dtype_), sequence_.cut(), time_of_both);
    sums_.reset();
    const at::Tensor own = at::empty(pieces.sizes().slice(1), pieces.options());
    parallel.group().reduce_scatter_to(own, pieces);
    const at::Tensor mine = own.narrow(time_of_both, 0, sequence_.tokens());
    return {mine[0], mine[1]};
  }

 private:
  Pair gather(const Pair& own) const {
    std::vector<int64_t> shape = own.keys.sizes().vec();
    shape[time_dim] = sequence_.cut().most_tokens();
    shape.insert(shape.begin(), {sequence_.parallel().size(), 2});
    const at::Tensor pieces = at::zeros(shape, own.keys.options());
    const at::Tensor mine = pieces[sequence_.parallel().index()].narrow(time_of_both, 0, sequence_.tokens());
    mine[0].copy_(own.keys);
    mine[1].copy_(own.values);
    sequence_.parallel().group().all_gather(pieces);
    const at::Tensor both = from_pieces(pieces, sequence_.cut(), time_of_both);
    return {both[0], both[1]};
  }

  const Sequence& sequence_;
  c10::ScalarType dtype_;
  Pair whole_;
  at::Tensor sums_;
};

}  // namespace

std::unique_ptr<KeyValues> collect_at_once(const Sequence& sequence, const Pair& own, const Pair& whole) {
  return std::make_unique<AtOnce>(sequence, own, whole);
}

}  // namespace tesserae::context
