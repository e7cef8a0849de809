#include "tesserae/context/heads.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>

#include "tesserae/context/node.h"
#include "tesserae/context/pieces.h"

namespace tesserae::context {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

struct HeadsCall : torch::CustomClassHolder {
  explicit HeadsCall(SequencePtr among) : sequence(std::move(among)) {}
  SequencePtr sequence;
};

/// parts[i] goes to rank i; what comes from rank i has shapes[i].
std::vector<at::Tensor> exchanged(const std::vector<at::Tensor>& parts, const std::vector<std::vector<int64_t>>& shapes,
                                  const Parallel& parallel) {
  std::vector<at::Tensor> flat;
  std::vector<int64_t> sent, received;
  for (const at::Tensor& part : parts) {
    flat.push_back(part.reshape({-1}));
    sent.push_back(part.numel());
  }
  for (const auto& shape : shapes) received.push_back(c10::multiply_integers(shape));
  const at::Tensor input = at::cat(flat);
  const at::Tensor output = at::empty({c10::sum_integers(received)}, input.options());
  parallel.group().all_to_all(output, input, received, sent);
  std::vector<at::Tensor> arrived = output.split_with_sizes(received);
  for (size_t i = 0; i < shapes.size(); ++i) arrived[i] = arrived[i].view(shapes[i]);
  return arrived;
}

at::Tensor to_heads(const at::Tensor& x, const Sequence& sequence) {
  const Parallel& parallel = sequence.parallel();
  const int64_t heads = x.size(1) / parallel.size();
  std::vector<std::vector<int64_t>> shapes;
  for (int rank = 0; rank < parallel.size(); ++rank) {
    shapes.push_back({x.size(0), heads, sequence.cut().tokens(rank), x.size(3)});
  }
  const auto pieces = exchanged(x.split(heads, 1), shapes, parallel);
  const at::Tensor whole = at::empty({x.size(0), heads, sequence.cut().pattern().length(), x.size(3)}, x.options());
  for (int rank = 0; rank < parallel.size(); ++rank) {
    put(whole, pieces[static_cast<size_t>(rank)], sequence.cut().spans(rank), time_dim);
  }
  return whole;
}

at::Tensor to_positions(const at::Tensor& x, const Sequence& sequence) {
  const Parallel& parallel = sequence.parallel();
  std::vector<at::Tensor> pieces;
  for (int rank = 0; rank < parallel.size(); ++rank) pieces.push_back(take(x, sequence.cut().spans(rank), time_dim));
  const std::vector<int64_t> shape{x.size(0), x.size(1), sequence.tokens(), x.size(3)};
  const std::vector<std::vector<int64_t>> shapes(static_cast<size_t>(parallel.size()), shape);
  return at::cat(exchanged(pieces, shapes, parallel), 1);
}

using Verb = at::Tensor (*)(const at::Tensor&, const Sequence&);

template <Verb forward_verb, Verb backward_verb>
struct Exchange : torch::autograd::Function<Exchange<forward_verb, backward_verb>> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& x, const c10::intrusive_ptr<HeadsCall>& call) {
    keep(context, call);
    return forward_verb(x, *call->sequence);
  }
  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    return {backward_verb(gradients[0], *kept<HeadsCall>(context)->sequence), {}};
  }
};

}  // namespace

at::Tensor positions_of_own_heads(const at::Tensor& x, const SequencePtr& sequence) {
  return Exchange<to_heads, to_positions>::apply(x, c10::make_intrusive<HeadsCall>(sequence));
}

at::Tensor own_positions_of_heads(const at::Tensor& x, const SequencePtr& sequence) {
  return Exchange<to_positions, to_heads>::apply(x, c10::make_intrusive<HeadsCall>(sequence));
}

}  // namespace tesserae::context
