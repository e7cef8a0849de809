// The cross entropy of logits whose columns are split: log(sum_j exp(l_j - m)) + m - l_target for each token, with the
// maximum m, the sum and the target's logit over all ranks. What is sent: one maximum, then two sums in one message.

#include <ATen/Parallel.h>
#include <ATen/ops/_assert_async.h>
#include <ATen/ops/empty.h>
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

// Calls visit(first row, rows) for all rows of x: on the host, so many at a time that a block stays in the cache while
// one function after the other goes over it.
template <class Visit>
void for_blocks_of_rows(const at::Tensor& x, const Visit& visit) {
  constexpr int64_t block_bytes = 512 << 10;
  const int64_t rows = x.size(0), row_bytes = std::max<int64_t>(1, x.size(1) * x.element_size());
  const int64_t block = x.is_cpu() ? at::get_num_threads() * std::max<int64_t>(1, block_bytes / row_bytes) : rows;
  for (int64_t first = 0; first < rows; first += block) visit(first, std::min(block, rows - first));
}

struct CrossEntropy : torch::autograd::Function<CrossEntropy> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& logits, const at::Tensor& targets,
                            int64_t vocabulary, const ParallelPtr& parallel, int64_t ignored) {
    keep(context, parallel);
    const int64_t width = logits.size(1), begin = parallel->index() * width;
    const int64_t valid = std::clamp<int64_t>(vocabulary - begin, 0, width);
    const float lowest = -std::numeric_limits<float>::infinity();
    comm::Group& group = parallel->group();

    const at::Tensor shares = at::empty(logits.sizes(), logits.options().dtype(at::kFloat));
    const at::Tensor largest = at::full({logits.size(0)}, lowest, shares.options());
    if (valid > 0) largest.copy_(logits.narrow(1, 0, valid).amax(1));
    group.all_reduce(largest, {}, comm::Reduction::maximum);

    const Targets target = targets_on(targets, begin, valid);
    const at::Tensor sums = at::empty({2, logits.size(0)}, shares.options());
    for_blocks_of_rows(shares, [&](int64_t first, int64_t count) {
      const auto rows = [&](const at::Tensor& x) { return x.narrow(0, first, count); };
      const at::Tensor block = rows(shares);
      block.copy_(rows(logits));
      block.narrow(1, valid, width - valid).fill_(lowest);
      block.sub_(rows(largest).unsqueeze(1));
      rows(sums[1]).copy_(
          block.gather(1, rows(target.column)).masked_fill_(rows(target.here).logical_not(), 0).squeeze(1));
      rows(sums[0]).copy_(block.exp_().sum(1));
    });
    group.all_reduce(sums);

    const at::Tensor counted = targets.ne(ignored);
    // Gradient of a logit: its share of the sum, less one for the target.
    context->save_for_backward({shares, sums[0], target.column, target.here, counted});
    context->saved_data["dtype"] = static_cast<int64_t>(logits.scalar_type());
    return sums[0].log().sub_(sums[1]).masked_fill_(counted.logical_not(), 0);
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    kept(context);
    const variable_list saved = context->get_saved_variables();
    const auto dtype = static_cast<c10::ScalarType>(context->saved_data["dtype"].toInt());
    // Not a product: where nothing counts, the gradient of a mean is not finite.
    const at::Tensor weight = gradients[0].masked_fill(saved[4].logical_not(), 0).unsqueeze(1);
    at::Tensor gradient = saved[0].mul(weight.div(saved[1].unsqueeze(1)));
    gradient.scatter_add_(1, saved[2], weight.mul(saved[3]).neg_());
    return {gradient.to(dtype), {}, {}, {}, {}};
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
