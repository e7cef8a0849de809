// The cross entropy of logits whose columns are split: log(sum_j exp(l_j - m)) + m - l_target for each token, with the
// maximum m, the sum and the target's logit over all ranks. What is sent: one maximum, then two sums in one message.

#include <ATen/Parallel.h>
#include <ATen/ops/_assert_async.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/full.h>

#include <algorithm>
#include <limits>

#include "tesserae/tensor/exchange.h"
#include "tesserae/tensor/node.h"

namespace tesserae::tensor {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// The targets' columns on this rank, and where they are.
struct Targets {
  at::Tensor column;  // [tokens, 1], 0 where the target is another rank's or does not count
  at::Tensor here;    // [tokens, 1], bool
};

Targets targets_on(const at::Tensor& targets, int64_t begin, int64_t columns) {
  const at::Tensor local = targets.sub(begin).unsqueeze(-1);
  at::Tensor here = local.ge(0).logical_and_(local.lt(columns));
  return {local.masked_fill(here.logical_not(), 0), here};
}

// Logits in fp32, so many rows at a time that they stay in the cache of the host while one function after the other
// goes over them; on a device so many that their memory does not count beside that of the logits.
class Blocks {
 public:
  // `place`: where the results go, which may be formed there.
  Blocks(const at::Tensor& logits, int64_t valid, const at::Tensor& place = {}) : logits_(logits), valid_(valid) {
    const int64_t bytes = logits.is_cpu() ? int64_t{256} << 10 : int64_t{64} << 20;
    const int64_t row_bytes = std::max<int64_t>(1, logits.size(1) * static_cast<int64_t>(sizeof(float)));
    const int64_t threads = logits.is_cpu() ? at::get_num_threads() : 1;
    rows_ = std::min(logits.size(0), threads * std::max<int64_t>(1, bytes / row_bytes));
    if (place.defined() && place.scalar_type() == at::kFloat) {
      place_ = place;
    } else {
      memory_ = at::empty({rows_, logits.size(1)}, logits.options().dtype(at::kFloat));
    }
  }

  // visit(block, rows): `block` is logits less the largest of each row, no number where there is padding; rows(x) are
  // its rows of x.
  template <class Visit>
  void less(const at::Tensor& largest, const Visit& visit) const {
    for (int64_t first = 0; first < logits_.size(0); first += rows_) {
      const int64_t count = std::min(rows_, logits_.size(0) - first);
      const auto rows = [&](const at::Tensor& x) { return x.narrow(0, first, count); };
      const at::Tensor block = place_.defined() ? rows(place_) : memory_.narrow(0, 0, count);
      block.copy_(rows(logits_));
      block.narrow(1, valid_, block.size(1) - valid_).fill_(-std::numeric_limits<float>::infinity());
      block.sub_(rows(largest).unsqueeze(1));
      visit(block, rows);
    }
  }

 private:
  const at::Tensor& logits_;
  int64_t valid_;  // columns that are no padding
  int64_t rows_ = 0;
  at::Tensor place_, memory_;  // one of them
};

struct CrossEntropy : torch::autograd::Function<CrossEntropy> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& logits, const at::Tensor& targets,
                            int64_t vocabulary, const ParallelPtr& parallel, int64_t ignored) {
    keep(context, parallel);
    const int64_t width = logits.size(1), begin = parallel->index() * width;
    const int64_t valid = std::clamp<int64_t>(vocabulary - begin, 0, width);
    const auto in_fp32 = logits.options().dtype(at::kFloat);
    comm::Group& group = parallel->group();

    const at::Tensor largest = at::full({logits.size(0)}, -std::numeric_limits<float>::infinity(), in_fp32);
    if (valid > 0) largest.copy_(logits.narrow(1, 0, valid).amax(1));
    group.all_reduce(largest, {}, comm::Reduction::maximum);

    const Targets target = targets_on(targets, begin, valid);
    const at::Tensor sums = at::empty({2, logits.size(0)}, in_fp32);
    Blocks(logits, valid).less(largest, [&](const at::Tensor& block, const auto& rows) {
      rows(sums[1]).copy_(
          block.gather(1, rows(target.column)).masked_fill_(rows(target.here).logical_not(), 0).squeeze(1));
      rows(sums[0]).copy_(block.exp_().sum(1));
    });
    group.all_reduce(sums);

    const at::Tensor counted = targets.ne(ignored);
    // Not the exponentials, which are fp32 and as many as the logits: the backward forms them anew.
    context->save_for_backward({logits, largest, sums[0], target.column, target.here, counted});
    context->saved_data["valid"] = valid;
    return sums[0].log().sub_(sums[1]).masked_fill_(counted.logical_not(), 0);
  }

  // Gradient of a logit: its share of the sum, less one for the target.
  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    kept(context);
    const variable_list saved = context->get_saved_variables();
    const at::Tensor &logits = saved[0], &largest = saved[1], &sum = saved[2], &column = saved[3], &here = saved[4];
    // Not a product: where nothing counts, the gradient of a mean is not finite.
    const at::Tensor weight = gradients[0].masked_fill(saved[5].logical_not(), 0).unsqueeze(1);
    const at::Tensor of_share = weight.div(sum.unsqueeze(1)), of_target = weight.mul(here).neg_();
    at::Tensor gradient = at::empty_like(logits);
    const Blocks blocks(logits, context->saved_data["valid"].toInt(), gradient);
    blocks.less(largest, [&](const at::Tensor& block, const auto& rows) {
      block.exp_().mul_(rows(of_share)).scatter_add_(1, rows(column), rows(of_target));
      if (!block.is_alias_of(gradient)) rows(gradient).copy_(block);
    });
    return {gradient, {}, {}, {}, {}};
  }
};

}  // namespace

at::Tensor vocabulary_cross_entropy(const at::Tensor& logits, const at::Tensor& targets, int64_t vocabulary,
                                    const ParallelPtr& parallel, int64_t ignored) {
  constexpr const char* name = "vocabulary_cross_entropy";
  if (logits.dim() < 1 || logits.sizes().slice(0, static_cast<size_t>(logits.dim()) - 1) != targets.sizes()) {
    throw InvalidArgument(name, cat("logits of shape ", logits.sizes(), " and targets of shape ", targets.sizes()));
  }
  const at::Tensor wrong = targets.lt(0).logical_or_(targets.ge(vocabulary)).logical_and_(targets.ne(ignored));
  if (!targets.device().is_cpu()) {
    at::_assert_async(wrong.any().logical_not());  // the host does not wait for the device
  } else if (targets.numel() > 0 && wrong.any().item<bool>()) {
    throw InvalidArgument(name, cat("a target is ", targets.masked_select(wrong)[0].item<int64_t>(),
                                    "; it must be a token below ", vocabulary, ", or ", ignored));
  }
  const at::Tensor rows = logits.reshape({-1, logits.size(-1)});
  return CrossEntropy::apply(rows, targets.flatten(), vocabulary, parallel, ignored).view(targets.sizes());
}

}  // namespace tesserae::tensor
