#include "tesserae/context/sequence.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include "tesserae/base/error.h"
#include "tesserae/context/node.h"
#include "tesserae/context/pieces.h"

namespace tesserae::context {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

struct WholeCall : torch::CustomClassHolder {
  WholeCall(ParallelPtr among, Cut how, int64_t along) : parallel(std::move(among)), cut(std::move(how)), dim(along) {}
  ParallelPtr parallel;
  Cut cut;
  int64_t dim;
};

struct WholeFunction : torch::autograd::Function<WholeFunction> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& x, const c10::intrusive_ptr<WholeCall>& call) {
    keep(context, call);
    const Cut& cut = call->cut;
    std::vector<int64_t> shape = x.sizes().vec();
    shape[static_cast<size_t>(call->dim)] = cut.most_tokens();
    shape.insert(shape.begin(), cut.ranks());
    const at::Tensor pieces = at::zeros(shape, x.options());
    pieces[call->parallel->index()].narrow(call->dim, 0, x.size(call->dim)).copy_(x);
    call->parallel->group().all_gather(pieces);
    return from_pieces(pieces, cut, call->dim);
  }
  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    const auto call = kept<WholeCall>(context);
    const at::Tensor own = take(gradients[0], call->cut.spans(call->parallel->index()), call->dim);
    return {own.mul_(call->parallel->size()), {}};
  }
};

struct MeanCall : torch::CustomClassHolder {
  explicit MeanCall(ParallelPtr among) : parallel(std::move(among)) {}
  ParallelPtr parallel;
};

struct MeanFunction : torch::autograd::Function<MeanFunction> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& sum, const at::Tensor& count,
                            const c10::intrusive_ptr<MeanCall>& call) {
    keep(context, call);
    context->save_for_backward({count});
    const at::Tensor total = sum.clone();
    call->parallel->group().all_reduce(total);
    return total.div_(count);
  }
  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    const auto call = kept<MeanCall>(context);
    return {gradients[0].div(context->get_saved_variables()[0]).mul_(call->parallel->size()), {}, {}};
  }
};

int64_t checked(const char* function, const at::Tensor& x, int64_t dim, int64_t length) {
  const int64_t from_front = dim < 0 ? dim + x.dim() : dim;
  if (from_front < 0 || from_front >= x.dim() || x.size(from_front) != length) {
    throw InvalidArgument(
        function, cat("a tensor of shape ", x.sizes(), " does not have ", length, " positions along dimension ", dim));
  }
  return from_front;
}

at::Tensor positions_of(const std::vector<Span>& spans) {
  const auto options = at::TensorOptions().dtype(at::kLong);
  std::vector<at::Tensor> parts{at::empty({0}, options)};
  for (const Span& span : spans) parts.push_back(at::arange(span.begin, span.end, options));
  return at::cat(parts);
}

}  // namespace

Sequence::Sequence(ParallelPtr parallel, const Pattern& pattern)
    : parallel_(std::move(parallel)),
      cut_(pattern, parallel_->size()),
      positions_(positions_of(spans()).to(parallel_->mesh()->job()->device())) {}

at::Tensor Sequence::own(const at::Tensor& x, int64_t dim) const {
  const int64_t along = checked("Sequence::own", x, dim, cut_.pattern().length());
  if (parallel_->size() == 1) return x;
  std::vector<at::Tensor> parts{x.narrow(along, 0, 0)};
  for (const Span& span : spans()) parts.push_back(x.narrow(along, span.begin, span.size()));
  return at::cat(parts, along);
}

at::Tensor Sequence::whole(const at::Tensor& x, int64_t dim) const {
  const int64_t along = checked("Sequence::whole", x, dim, tokens());
  if (parallel_->size() == 1) return x;
  return WholeFunction::apply(x, c10::make_intrusive<WholeCall>(parallel_, cut_, along));
}

at::Tensor Sequence::mean(const at::Tensor& sum, const at::Tensor& count) const {
  if (parallel_->size() == 1) return sum.div(count);
  return MeanFunction::apply(sum, count.to(sum.options()), c10::make_intrusive<MeanCall>(parallel_));
}

}  // namespace tesserae::context
