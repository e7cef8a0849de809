#include "tesserae/cost/step_time.h"

#include <algorithm>
#include <cmath>

#include "tesserae/base/checked.h"

namespace tesserae::cost {
namespace {

double side_of(double tokens, double in, double out) {
  return std::cbrt(tokens * in * out);
}

/// `times`: how often it is done forward and backward together; a product has one forward and two backward.
double product_seconds(double tokens, double in, double out, double times, const Curve& rates) {
  return 2 * tokens * in * out * times / rates.at(side_of(tokens, in, out));
}

/// What a pass over so many bytes takes, read or written.
double pass_seconds(double bytes, const Machine& machine) {
  if (bytes == 0) return 0;
  return bytes / (machine.optimizer.known() ? machine.optimizer.at(bytes) : machine.links.memory);
}

}  // namespace

double hop_seconds(const Traffic::Hop& hop, const Links& links, const Curve& inside) {
  if (hop.bytes == 0 && hop.calls == 0) return 0;
  const double latency = hop.crosses ? links.between_latency : links.inside_latency;
  const double near = hop.bytes - hop.across;
  const double rate = inside.known() && hop.calls > 0 ? inside.at(hop.bytes / hop.calls) : links.inside;
  // A curve was measured with its latency in it.
  const double waits = inside.known() && !hop.crosses && hop.bytes > 0 ? 0 : hop.calls * latency;
  return hop.across / links.between + near / rate + waits;
}

double weights_seconds(double bytes, const Machine::Compute& rates) {
  return rates.weights.known() ? bytes / rates.weights.at(bytes) : 0;
}

ComputeTime compute_time(const model::GptConfig& given, const Execution& run, const Machine& machine,
                         const std::string& dtype) {
  const model::GptConfig model = resolved(given);
  const Machine::Compute& rates = machine.of(dtype);
  const double tokens = run.tokens(), T = run.tensor;
  const auto d = static_cast<double>(model.dimension), f = static_cast<double>(model.feed_forward);
  const double kv = d / static_cast<double>(model.heads) * static_cast<double>(model.kv_heads);
  const auto layers = static_cast<double>(model.layers);
  const double passes = run.recompute ? 4 : 3, share = passes / 3;  // of a forward and a backward
  const auto product = [&](double in, double out) { return product_seconds(tokens, in, out, passes, rates.products); };

  ComputeTime time;
  const double weights = static_cast<double>(part_sizes(model, run.tensor, run.expert).total) * run.compute_bytes;
  time.products = share * weights_seconds(weights, rates) + layers * (2 * product(d, d / T) + 2 * product(d, kv / T));
  if (model.experts == 0) {
    time.products += layers * 3 * product(d, f / T);
  } else {
    const double here = static_cast<double>(model.experts) / run.expert;  // a product for each expert of this rank
    const double rows = tokens * static_cast<double>(model.experts_per_token) / here;
    time.products += layers * 3 * here * product_seconds(rows, d, f / T, passes, rates.products);
    time.products += layers * product(d, static_cast<double>(model.experts));
    const double shared = static_cast<double>(model.shared_experts) * f / T;
    if (shared > 0) time.products += layers * 3 * product(d, shared);
  }
  // Scores and their use, half of them by causality.
  const double of_attention = 2 * tokens * d / T * static_cast<double>(run.sequence);
  if (rates.attention.known()) {
    time.attention = layers * passes * of_attention / rates.attention.at(static_cast<double>(run.sequence));
  }
  const double of_block = kept_by_blocks(model, run) / layers;
  if (rates.activations.known()) time.activations = layers * share * of_block / rates.activations.at(of_block);
  const double rows = static_cast<double>(round_up(model.vocabulary, run.tensor)) / T;
  time.head = product_seconds(tokens, d, rows, 3, rates.products);
  const double of_head = activations_of(model, run).head;
  if (rates.loss.known()) time.head += of_head / rates.loss.at(of_head);
  time.more = rates.share_more * time.total();
  return time;
}

MovingTime moving_time(const Facts& facts, const Machine& machine, const mesh::Degrees& degrees) {
  const Traffic traffic = traffic_of(facts, degrees);
  const Links& links = machine.links;
  MovingTime time;
  // Where parameters are one copy, nothing is gathered: the ranks meet.
  const bool shares = traffic.gather.bytes == 0 && traffic.gather.calls > 0;
  if (!shares || machine.meeting == 0) time.gather = hop_seconds(traffic.gather, links, machine.gather);
  time.reduce = hop_seconds(traffic.first_hop, links, machine.reduce) +
                hop_seconds(traffic.second_hop, links, machine.reduce) +
                hop_seconds(traffic.third_hop, links, machine.all_reduce);
  time.refresh = hop_seconds(traffic.refresh, links, machine.gather);
  // Master and state are read and written, the gradient is read, for the norm as well.
  time.optimizer = pass_seconds(
      (4.0 * facts.master_bytes + 2 * facts.state_bytes) * facts.trained * owned_elements(facts, degrees), machine);
  // Read in one dtype and written in the other; what has come before is read, too.
  const double c = facts.compute_bytes, g = facts.reduce_bytes, times = facts.micro_batches;
  const double put = c != g ? times * (c + g) : 0, added = (times - 1) * (c != g ? g : c + 2 * g);
  const double per_element = put + (facts.two_hop ? added / degrees.gradients : added);
  time.adding = pass_seconds(per_element * facts.trained * static_cast<double>(facts.parameters), machine);
  if (facts.ranks() > 1) time.meetings = machine.meeting * (shares ? 4 : 2);
  return time;
}

double exposed_time(const MovingTime& moving, const Cover& cover, const Machine& machine) {
  constexpr double forward = 1.0 / 3, backward = 2.0 / 3;
  const double micro_batch = cover.computed / cover.micro_batches, rest = 1 - cover.root;
  const double hidden = std::min(moving.gather, cover.computed) +
                        std::min(rest * moving.reduce, cover.reducing * backward * micro_batch) +
                        std::min(rest * moving.refresh, forward * micro_batch);
  return moving.hops() - machine.overlap * std::min(hidden, cover.computed);
}

}  // namespace tesserae::cost
