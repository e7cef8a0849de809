#include <ATen/core/grad_mode.h>
#include <ATen/ops/_fused_adamw.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <cmath>
#include <utility>
#include <vector>

#include "tesserae/comm/agree.h"
#include "tesserae/cost/measure_links.h"
#include "tesserae/probe/measure.h"

namespace tesserae::probe {
namespace {

using cost::Curve;

/// AdamW: the gradient is read once for its norm; master and two moments are read and written, the gradient read again.
constexpr double passes_of_optimizer = 8;

/// What a step comes to was used one step ago, and no cache has it any more.
constexpr int64_t more_than_caches = int64_t{64} << 20;

/// As many of `bytes` as caches do not hold.
int64_t copies_of(int64_t bytes) {
  return std::max<int64_t>(1, more_than_caches / bytes);
}

Curve optimizer(const Bench& bench) {
  const bool host = bench.fabric.device().is_cpu();
  const std::vector<int64_t> sizes = host ? std::vector<int64_t>{1 << 14, 1 << 17, 1 << 20, 1 << 23}
                                          : std::vector<int64_t>{1 << 18, 1 << 21, 1 << 24, 1 << 27};
  const auto options = at::TensorOptions(bench.fabric.device()).dtype(at::kFloat);
  std::vector<Curve::Point> points;
  for (const int64_t size : sizes) {
    const int64_t copies = copies_of(4 * 4 * size);  // of four tensors
    const at::Tensor masters = at::randn({copies, size}, options), gradients = at::randn({copies, size}, options);
    const at::Tensor first = at::zeros({copies, size}, options), second = at::zeros({copies, size}, options);
    const at::Tensor step = at::ones({}, options);
    int64_t next = 0;
    const double seconds = seconds_of(bench.fabric, bench.window, [&] {
      const int64_t i = next++ % copies;
      (void)gradients[i].norm();
      at::_fused_adamw_({masters[i]}, {gradients[i]}, {first[i]}, {second[i]}, {}, {step}, 1e-3, 0.9, 0.999, 0.01, 1e-8,
                        false, false);
    });
    const double bytes = passes_of_optimizer * 4 * static_cast<double>(size);
    points.push_back({.size = bytes, .rate = bytes / seconds});
  }
  return Curve(std::move(points));
}

/// Of the group of all ranks of this host, by the bytes that a rank sends in one call. A call is what a lane runs: with
/// the way there and back.
Curve collective(const Bench& bench, comm::Group& group, double sent_of_buffer,
                 const std::function<void(const at::Tensor&)>& call) {
  std::vector<Curve::Point> points;
  comm::Lane& lane = bench.fabric.lane(comm::Traffic::control);
  for (const int64_t bytes : {1 << 14, 1 << 17, 1 << 20, 1 << 23, 1 << 25}) {
    const int64_t elements = bytes / 4 / group.size() * group.size();
    const int64_t copies = copies_of(bytes);
    const at::Tensor buffers =
        at::zeros({copies, elements}, at::TensorOptions(bench.fabric.device()).dtype(at::kFloat));
    int64_t next = 0;
    const double seconds = seconds_together(bench.fabric, bench.window, [&] {
      const at::Tensor buffer = buffers[next++ % copies];
      lane.submit([&] { call(buffer); }).wait();
    });
    const double sent = sent_of_buffer * 4 * static_cast<double>(elements);
    points.push_back({.size = sent, .rate = sent / seconds});
  }
  return Curve(std::move(points));
}

/// What share of a reduction a product of the same length hides.
double overlap(const Bench& bench, comm::Group& group) {
  const auto options = at::TensorOptions(bench.fabric.device()).dtype(at::kFloat);
  const int64_t side = bench.fabric.device().is_cpu() ? 512 : 4096;
  const double window = 4 * bench.window;  // of times that differ little
  const at::Tensor x = at::randn({side, side}, options);
  const at::Tensor buffer = at::zeros({(8 << 20) / group.size() * group.size()}, options);
  comm::Lane& lane = bench.fabric.lane(comm::Traffic::control);
  const auto reduce = [&] { return lane.submit([&] { group.reduce_scatter(buffer); }); };
  const double reducing = seconds_together(bench.fabric, window, [&] { reduce().wait(); });
  const double once = seconds_of(bench.fabric, window, [&] { x.mm(x); });
  const auto products = std::max<int64_t>(1, std::llround(reducing / once));
  const auto multiply = [&] {
    for (int64_t i = 0; i < products; ++i) x.mm(x);
  };
  const double multiplying = seconds_of(bench.fabric, window, multiply);
  const double both = seconds_together(bench.fabric, window, [&] {
    const comm::Ticket ticket = reduce();
    multiply();
    ticket.wait();
  });
  return std::clamp((reducing + multiplying - both) / std::min(reducing, multiplying), 0.0, 1.0);
}

/// Ranks that share cores do not come at once, and who waits may have to be woken. What is computed is short, as
/// between two layers: of a long product, what varies would be more than the meeting.
double meeting(const Bench& bench, comm::Group& group) {
  const int64_t side = bench.fabric.device().is_cpu() ? 256 : 4096;
  const double window = 4 * bench.window;
  const at::Tensor x = at::randn({side, side}, at::TensorOptions(bench.fabric.device()));
  const at::Tensor one = at::zeros({1}, x.options());
  const auto multiply = [&] {
    for (int i = 0; i < 4; ++i) (void)x.mm(x);
  };
  const double alone = seconds_of(bench.fabric, window, multiply);
  const double met = seconds_together(bench.fabric, window, [&] {
    multiply();
    group.all_reduce(one);
  });
  return std::max(met - alone, 0.0);
}

}  // namespace

void measure_moving(const Bench& bench, cost::Machine& machine) {
  const at::NoGradGuard no_grad;
  bench.say("the optimizer");
  machine.optimizer = optimizer(bench);
  bench.say("links");
  machine.links = cost::measure_links(bench.fabric);
  const std::vector<int> neighbours = bench.fabric.world().host_ranks(bench.fabric.rank());
  machine.knows_network = bench.fabric.world().hosts() > 1;
  if (bench.fabric.size() > 1) {
    bench.say("computing beside a reduction");
    machine.overlap = overlap(bench, bench.fabric.everyone());
    machine.meeting = meeting(bench, bench.fabric.everyone());
  }
  const double fewest = -comm::max_over_ranks(bench.fabric, -static_cast<double>(neighbours.size()));
  if (fewest == 1) return;  // nothing goes inside that host
  bench.say("collectives inside hosts");
  comm::Group& group = bench.fabric.group(neighbours, comm::Traffic::control);
  const double share = (fewest - 1) / fewest;
  machine.gather = collective(bench, group, share, [&](const at::Tensor& buffer) { group.all_gather(buffer); });
  machine.reduce = collective(bench, group, share, [&](const at::Tensor& buffer) { group.reduce_scatter(buffer); });
  machine.all_reduce = collective(bench, group, 2 * share, [&](const at::Tensor& buffer) { group.all_reduce(buffer); });
}

}  // namespace tesserae::probe
