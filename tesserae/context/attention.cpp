#include "tesserae/context/attention.h"

#include <ATen/OpMathType.h>
#include <ATen/autocast_mode.h>
#include <ATen/ops/full.h>
#include <ATen/ops/logaddexp.h>
#include <ATen/ops/zeros.h>

#include <cmath>
#include <limits>

#include "tesserae/autograd/backward.h"
#include "tesserae/base/error.h"
#include "tesserae/base/work.h"
#include "tesserae/context/heads.h"
#include "tesserae/context/kernel.h"
#include "tesserae/context/key_values.h"
#include "tesserae/context/node.h"

namespace tesserae::context {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

struct Call : torch::CustomClassHolder {
  Call(SequencePtr among, Pattern who, double times, Method how)
      : sequence(std::move(among)), pattern(std::move(who)), scale(times), method(how) {}
  SequencePtr sequence;
  Pattern pattern;
  double scale;
  Method method;
};

at::Tensor at_place(const at::Tensor& x, const Span& part, const Placed& placed) {
  return x.narrow(time_dim, placed.at + part.begin - placed.positions.begin, part.size());
}

/// Calls visit(tile, place of the queries, place of the keys, their place end to end) for every tile of these spans.
template <class Visit>
void for_each_tile(const Pattern& pattern, const std::vector<Placed>& queries, const std::vector<Placed>& keys,
                   c10::Device device, const Visit& visit) {
  for (const Placed& asking : queries) {
    int64_t end = 0;
    for (const Placed& asked : keys) {
      const Placed end_to_end{asked.positions, end};
      end += asked.positions.size();
      for (const Tile& tile : tiles(pattern, asking.positions, asked.positions, largest_triangle(device))) {
        visit(tile, asking, asked, end_to_end);
      }
    }
  }
}

/// [2, as the block's keys and values, of its spans].
std::vector<int64_t> shape_of_gradients(const KeyValues::Block& block) {
  std::vector<int64_t> shape = block.keys.sizes().vec();
  shape[time_dim] = 0;
  for (const Placed& placed : block.spans) shape[time_dim] += placed.positions.size();
  shape.insert(shape.begin(), 2);
  return shape;
}

/// The outputs of some keys after the other, joined: out = sum of exp(lse_i - lse) out_i, where lse is the logarithm of
/// the sum of all exp(lse_i).
class Joined {
 public:
  explicit Joined(const at::Tensor& queries)
      : out_(at::zeros(queries.sizes(), queries.options().dtype(at::toOpMathType(queries.scalar_type())))),
        lse_(at::full(queries.sizes().slice(0, 3), -std::numeric_limits<double>::infinity(), out_.options())) {}

  void add(const Attended& attended, const Span& queries, const Placed& placed) {
    const at::Tensor out = at_place(out_, queries, placed), lse = at_place(lse_, queries, placed);
    const at::Tensor share = attended.lse.sub(lse).sigmoid_();  // of the new keys: 1 where there were none before
    out.lerp_(attended.out.to(out.scalar_type()), share.unsqueeze(-1));
    lse.copy_(at::logaddexp(lse, attended.lse));
  }

  const at::Tensor& out() const { return out_; }
  const at::Tensor& lse() const { return lse_; }

 private:
  at::Tensor out_, lse_;
};

struct AttentionFunction : torch::autograd::Function<AttentionFunction> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& queries, const at::Tensor& keys,
                            const at::Tensor& values, const c10::intrusive_ptr<Call>& call) {
    keep(context, call);
    const Sequence& sequence = *call->sequence;
    const std::vector<Placed> asking = end_to_end(sequence.spans());
    const auto source = collect_for_forward(call->method, sequence, call->pattern, {keys, values});
    Joined joined(queries);
    for (int i = 0; i < source->blocks(); ++i) {
      const KeyValues::Block block = source->next();
      const auto join = [&](const Tile& tile, const Placed& q, const Placed& k, const Placed& /*in sums*/) {
        joined.add(attend(at_place(queries, tile.queries, q), at_place(block.keys, tile.keys, k),
                          at_place(block.values, tile.keys, k), tile.shape, call->scale),
                   tile.queries, q);
      };
      for_each_tile(call->pattern, asking, block.spans, queries.device(), join);
    }
    const at::Tensor out = joined.out().to(queries.scalar_type());
    context->save_for_backward({queries, keys, values, out, joined.lse()});
    return out;
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    const auto call = kept<Call>(context);
    const Sequence& sequence = *call->sequence;
    const auto saved = context->get_saved_variables();
    const at::Tensor &queries = saved[0], &out = saved[3], &lse = saved[4];
    const at::Tensor gradient = gradients[0].stride(-1) == 1 ? gradients[0] : gradients[0].contiguous();
    const std::vector<Placed> asking = end_to_end(sequence.spans());
    const auto source = collect_for_backward(call->method, sequence, call->pattern, {saved[1], saved[2]});
    const at::TensorOptions sums = queries.options().dtype(at::toOpMathType(queries.scalar_type()));
    const at::Tensor of_queries = at::zeros(queries.sizes(), sums);
    for (int i = 0; i < source->blocks(); ++i) {
      const KeyValues::Block block = source->next();
      if (!block.keys.defined()) {
        source->add_gradients(at::Tensor());
        continue;
      }
      const at::Tensor both = at::zeros(shape_of_gradients(block), sums);
      const at::Tensor of_keys = both[0], of_values = both[1];
      const auto add = [&](const Tile& tile, const Placed& q, const Placed& k, const Placed& k_sums) {
        const auto of = [&](const at::Tensor& x) { return at_place(x, tile.queries, q); };
        const TileGradients some =
            attend_backward(of(gradient), of(queries), at_place(block.keys, tile.keys, k),
                            at_place(block.values, tile.keys, k), of(out), of(lse), tile.shape, call->scale);
        of(of_queries).add_(some.queries);
        at_place(of_keys, tile.keys, k_sums).add_(some.keys);
        at_place(of_values, tile.keys, k_sums).add_(some.values);
      };
      for_each_tile(call->pattern, asking, block.spans, queries.device(), add);
      source->add_gradients(both);
    }
    const Pair own = source->gradients();
    const auto type = queries.scalar_type();
    return {of_queries.to(type), own.keys.to(type), own.values.to(type), {}};
  }
};

void check(const at::Tensor& queries, const at::Tensor& keys, const at::Tensor& values, const Sequence& sequence,
           const Pattern& pattern) {
  const auto refuse = [&](const std::string& why) {
    throw InvalidArgument("context::attention",
                          cat("queries ", queries.sizes(), ", keys ", keys.sizes(), ", values ", values.sizes(),
                              " on a rank with ", sequence.tokens(), " positions: ", why));
  };
  if (queries.dim() != 4 || keys.dim() != 4) refuse("tensors are [batch, heads, tokens, width]");
  if (keys.sizes() != values.sizes()) refuse("keys and values have one shape");
  if (queries.size(time_dim) != sequence.tokens() || keys.size(time_dim) != sequence.tokens()) {
    refuse("dimension 2 has the positions of this rank");
  }
  if (queries.size(0) != keys.size(0) || queries.size(3) != keys.size(3)) refuse("batch and width are the same");
  if (keys.size(1) == 0 || queries.size(1) % keys.size(1) != 0) {
    refuse("the heads are a multiple of those of keys and values");
  }
  if (pattern.length() != sequence.cut().pattern().length()) {
    refuse(cat("the pattern has ", pattern.length(), " positions, the sequence ", sequence.cut().pattern().length()));
  }
}

/// Pairs of the queries that this rank computes, of as many heads as it was given.
int64_t own_pairs(const Pattern& pattern, const Sequence& sequence, Method method) {
  const auto ranks = static_cast<int64_t>(sequence.parallel().size());
  if (method == Method::all_to_all) return pattern.pairs({0, pattern.length()}) / ranks;  // all, of some heads
  int64_t pairs = 0;
  for (const Span& span : sequence.spans()) pairs += pattern.pairs(span);
  return pairs;
}

// As kernels want it: in the dtype that autocast gives to the arguments of torch's attention, features side by side.
at::Tensor prepared(const at::Tensor& x) {
  const at::DeviceType device = x.device().type();
  const bool cast = at::autocast::is_autocast_enabled(device) && x.scalar_type() != at::kDouble;
  const at::Tensor y = cast ? x.to(at::autocast::get_autocast_dtype(device)) : x;
  return y.stride(-1) == 1 ? y : y.contiguous();
}

}  // namespace

at::Tensor attention(const at::Tensor& queries, const at::Tensor& keys, const at::Tensor& values,
                     const SequencePtr& sequence, const AttentionOptions& options) {
  const Pattern& pattern = options.pattern ? *options.pattern : sequence->cut().pattern();
  check(queries, keys, values, *sequence, pattern);
  const double scale = options.scale.value_or(1.0 / std::sqrt(static_cast<double>(queries.size(3))));
  const Method method = sequence->parallel().method_for(queries.size(1), keys.size(1));
  if (!autograd::in_backward()) count_work(Work::pairs, queries.size(0) * own_pairs(pattern, *sequence, method));
  const at::Tensor q = prepared(queries), k = prepared(keys), v = prepared(values);
  if (method == Method::all_to_all && sequence->parallel().size() > 1) {
    static const ParallelPtr alone = std::make_shared<const Parallel>();
    const auto whole = std::make_shared<const Sequence>(alone, sequence->cut().pattern());
    const auto call = c10::make_intrusive<Call>(whole, pattern, scale, method);
    const at::Tensor out =
        AttentionFunction::apply(positions_of_own_heads(q, sequence), positions_of_own_heads(k, sequence),
                                 positions_of_own_heads(v, sequence), call);
    return own_positions_of_heads(out, sequence);
  }
  return AttentionFunction::apply(q, k, v, c10::make_intrusive<Call>(sequence, pattern, scale, method));
}

}  // namespace tesserae::context
