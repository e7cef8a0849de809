#include "tesserae/context/attention.h"

#include <ATen/autocast_mode.h>
#include <ATen/ops/full.h>
#include <ATen/ops/logaddexp.h>
#include <ATen/ops/zeros.h>

#include <cmath>
#include <limits>

#include "tesserae/base/error.h"
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

at::ScalarType sum_type(const at::Tensor& x) {
  return x.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
}

at::Tensor at_place(const at::Tensor& x, const Span& part, const Placed& placed) {
  return x.narrow(time_dim, placed.at + part.begin - placed.positions.begin, part.size());
}

/// Calls visit(tile, queries' place, keys' place) for every tile of these spans.
template <class Visit>
void for_each_tile(const Pattern& pattern, const std::vector<Placed>& queries, const std::vector<Placed>& keys,
                   const Visit& visit) {
  for (const Placed& asking : queries) {
    for (const Placed& asked : keys) {
      for (const Tile& tile : tiles(pattern, asking.positions, asked.positions)) visit(tile, asking, asked);
    }
  }
}

/// The outputs of some keys after the other, joined: out = sum of exp(lse_i - lse) out_i.
class Joined {
 public:
  explicit Joined(const at::Tensor& queries)
      : out_(at::zeros(queries.sizes(), queries.options().dtype(sum_type(queries)))),
        lse_(at::full(queries.sizes().slice(0, 3), -std::numeric_limits<double>::infinity(), out_.options())) {}

  void add(const Attended& attended, const Span& queries, const Placed& placed) {
    const at::Tensor out = at_place(out_, queries, placed), lse = at_place(lse_, queries, placed);
    const at::Tensor sum = at::logaddexp(lse, attended.lse);
    out.mul_(lse.sub(sum).exp_().unsqueeze(-1));
    out.addcmul_(attended.out.to(out.scalar_type()), attended.lse.sub(sum).exp_().unsqueeze(-1));
    lse.copy_(sum);
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
    const std::vector<Placed> asking = end_to_end(call->sequence->spans());
    const auto source = collect(call->method, *call->sequence, call->pattern, keys, values);
    Joined joined(queries);
    for (int i = 0; i < source->blocks(); ++i) {
      const KeyValues::Block block = source->next();
      for_each_tile(call->pattern, asking, block.spans, [&](const Tile& tile, const Placed& q, const Placed& k) {
        joined.add(attend(at_place(queries, tile.queries, q), at_place(block.keys, tile.keys, k),
                          at_place(block.values, tile.keys, k), tile.shape, call->scale),
                   tile.queries, q);
      });
    }
    const at::Tensor out = joined.out().to(queries.scalar_type());
    context->save_for_backward({queries, keys, values, out, joined.lse()});
    return out;
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    const auto call = kept<Call>(context);
    const auto saved = context->get_saved_variables();
    const at::Tensor &queries = saved[0], &keys = saved[1], &values = saved[2], &out = saved[3], &lse = saved[4];
    const at::Tensor& gradient = gradients[0];
    const std::vector<Placed> asking = end_to_end(call->sequence->spans());
    const auto source = collect(call->method, *call->sequence, call->pattern, keys, values);
    const auto sums_like = [](const at::Tensor& x) { return at::zeros(x.sizes(), x.options().dtype(sum_type(x))); };
    const at::Tensor of_queries = sums_like(queries);
    for (int i = 0; i < source->blocks(); ++i) {
      const KeyValues::Block block = source->next();
      if (!block.keys.defined()) {
        source->add_gradients({}, {});
        continue;
      }
      const at::Tensor of_keys = sums_like(block.keys), of_values = sums_like(block.values);
      for_each_tile(call->pattern, asking, block.spans, [&](const Tile& tile, const Placed& q, const Placed& k) {
        const auto of = [&](const at::Tensor& x) { return at_place(x, tile.queries, q); };
        const auto at_keys = [&](const at::Tensor& x) { return at_place(x, tile.keys, k); };
        const TileGradients some = attend_backward(of(gradient), of(queries), at_keys(block.keys),
                                                   at_keys(block.values), of(out), of(lse), tile.shape, call->scale);
        of(of_queries).add_(some.queries);
        at_keys(of_keys).add_(some.keys);
        at_keys(of_values).add_(some.values);
      });
      source->add_gradients(of_keys, of_values);
    }
    const KeyValues::Gradients own = source->gradients();
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

// What autocast does to the arguments of torch's attention.
at::Tensor autocast(const at::Tensor& x) {
  const at::DeviceType device = x.device().type();
  if (!at::autocast::is_autocast_enabled(device)) return x;
  return x.to(at::autocast::get_autocast_dtype(device));
}

}  // namespace

at::Tensor attention(const at::Tensor& queries, const at::Tensor& keys, const at::Tensor& values,
                     const SequencePtr& sequence, const AttentionOptions& options) {
  const Pattern& pattern = options.pattern ? *options.pattern : sequence->cut().pattern();
  check(queries, keys, values, *sequence, pattern);
  const double scale = options.scale.value_or(1.0 / std::sqrt(static_cast<double>(queries.size(3))));
  const Method method = sequence->parallel().method_for(queries.size(1), keys.size(1));
  const at::Tensor q = autocast(queries), k = autocast(keys), v = autocast(values);
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
