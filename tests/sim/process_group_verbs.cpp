// The verbs of the process group: what all members must agree on, and who computes what for whom when they have met.

#include <ATen/ops/maximum.h>
#include <ATen/ops/minimum.h>

#include <utility>

#include "tests/sim/process_group.h"

namespace tesserae::sim {
namespace {

using Offers = Communicator::Offers;
using Tensors = std::vector<at::Tensor>;
using RedOp = c10d::ReduceOp::RedOpType;

void accumulate(at::Tensor& sum, const at::Tensor& next, RedOp how) {
  switch (how) {
    case RedOp::SUM:
    case RedOp::AVG:
      sum.add_(next);
      return;
    case RedOp::PRODUCT:
      sum.mul_(next);
      return;
    case RedOp::MIN:
      sum = at::minimum(sum, next);
      return;
    case RedOp::MAX:
      sum = at::maximum(sum, next);
      return;
    case RedOp::BAND:
      sum.bitwise_and_(next);
      return;
    case RedOp::BOR:
      sum.bitwise_or_(next);
      return;
    case RedOp::BXOR:
      sum.bitwise_xor_(next);
      return;
    default:
      TORCH_CHECK(false, "[sim] reduction ", static_cast<int>(how), " is not there");
  }
}

// In the order of members, so that it is the same for all of them.
at::Tensor reduced(const Offers& offers, size_t piece, RedOp how) {
  at::Tensor sum = offers[0].inputs[piece].clone();
  for (size_t member = 1; member < offers.size(); ++member) accumulate(sum, offers[member].inputs[piece], how);
  if (how == RedOp::AVG) sum.div_(static_cast<int64_t>(offers.size()));
  return sum;
}

void gather_pieces(Offers& offers) {
  for (auto& to : offers) {
    for (size_t from = 0; from < offers.size(); ++from) to.outputs[from].copy_(offers[from].inputs[0]);
  }
}

void exchange_all(Offers& offers) {
  for (size_t to = 0; to < offers.size(); ++to) {
    for (size_t from = 0; from < offers.size(); ++from) {
      const at::Tensor& source = offers[from].inputs[to];
      const at::Tensor& target = offers[to].outputs[from];
      if (source.numel() != target.numel()) {
        throw OrderMismatch("sim", cat("all_to_all: member ", from, " sends ", source.numel(), " elements, and member ",
                                       to, " expects ", target.numel()));
      }
      target.view(-1).copy_(source.view(-1));
    }
  }
}

Tensors equal_pieces(const char* verb, const at::Tensor& whole, const at::Tensor& piece, int count) {
  TORCH_CHECK(whole.is_contiguous() && whole.numel() == piece.numel() * count, "[sim] ", verb,
              ": a contiguous tensor of ", piece.numel(), " x ", count, " elements is needed, not one of ",
              whole.numel());
  const at::Tensor flat = whole.view(-1);
  Tensors pieces;
  for (int i = 0; i < count; ++i)
    pieces.push_back(flat.narrow(0, i * piece.numel(), piece.numel()).view(piece.sizes()));
  return pieces;
}

Tensors split_rows(const at::Tensor& whole, const std::vector<int64_t>& rows, int count) {
  TORCH_CHECK(rows.empty() ? whole.size(0) % count == 0 : rows.size() == static_cast<size_t>(count),
              "[sim] all_to_all: the rows do not divide among ", count, " members");
  Tensors pieces;
  int64_t begin = 0;
  for (int i = 0; i < count; ++i) {
    const int64_t length = rows.empty() ? whole.size(0) / count : rows[static_cast<size_t>(i)];
    pieces.push_back(whole.narrow(0, begin, length));
    begin += length;
  }
  return pieces;
}

std::string elements(const at::Tensor& tensor) {
  return cat(tensor.numel(), " elements of ", tensor.scalar_type());
}

}  // namespace

const at::Tensor& ProcessGroup::only_one(const char* verb, const Tensors& tensors) {
  TORCH_CHECK(tensors.size() == 1, "[sim] ", verb, " of ", tensors.size(), " tensors: one a device");
  return tensors.front();
}

ProcessGroup::WorkPtr ProcessGroup::broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) {
  const at::Tensor& tensor = only_one("broadcast", tensors);
  const auto root = static_cast<size_t>(options.rootRank);
  return collective(c10d::OpType::BROADCAST, "broadcast", cat(" of ", elements(tensor), " from member ", root),
                    {tensor}, {tensor}, options.timeout, options.asyncOp, [root](Offers& offers) {
                      for (auto& to : offers) to.outputs[0].copy_(offers[root].inputs[0]);
                    });
}

ProcessGroup::WorkPtr ProcessGroup::allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) {
  const at::Tensor& tensor = only_one("all_reduce", tensors);
  const RedOp how = options.reduceOp;
  return collective(c10d::OpType::ALLREDUCE, "all_reduce", cat(" of ", elements(tensor), ", op ", int{how}), {tensor},
                    {tensor}, options.timeout, options.asyncOp, [how](Offers& offers) {
                      const at::Tensor sum = reduced(offers, 0, how);
                      for (auto& to : offers) to.outputs[0].copy_(sum);
                    });
}

ProcessGroup::WorkPtr ProcessGroup::allgather(std::vector<Tensors>& outputs, Tensors& inputs,
                                              const c10d::AllgatherOptions& options) {
  const at::Tensor& input = only_one("all_gather", inputs);
  return collective(c10d::OpType::ALLGATHER, "all_gather", cat(" of ", elements(input)), {input}, outputs.at(0),
                    options.timeout, options.asyncOp, &gather_pieces);
}

ProcessGroup::WorkPtr ProcessGroup::_allgather_base(at::Tensor& output, at::Tensor& input,
                                                    const c10d::AllgatherOptions& options) {
  return collective(c10d::OpType::_ALLGATHER_BASE, "all_gather", cat(" of ", elements(input)), {input},
                    equal_pieces("all_gather", output, input, getSize()), options.timeout, options.asyncOp,
                    &gather_pieces);
}

namespace {

auto scatter_sums(RedOp how) {
  return [how](Offers& offers) {
    for (size_t to = 0; to < offers.size(); ++to) offers[to].outputs[0].copy_(reduced(offers, to, how));
  };
}

}  // namespace

ProcessGroup::WorkPtr ProcessGroup::reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                                                   const c10d::ReduceScatterOptions& options) {
  const at::Tensor& output = only_one("reduce_scatter", outputs);
  const RedOp how = options.reduceOp;
  return collective(c10d::OpType::REDUCE_SCATTER, "reduce_scatter", cat(" of ", elements(output), ", op ", int{how}),
                    inputs.at(0), {output}, options.timeout, options.asyncOp, scatter_sums(how));
}

ProcessGroup::WorkPtr ProcessGroup::_reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                                         const c10d::ReduceScatterOptions& options) {
  const RedOp how = options.reduceOp;
  return collective(c10d::OpType::_REDUCE_SCATTER_BASE, "reduce_scatter",
                    cat(" of ", elements(output), ", op ", int{how}),
                    equal_pieces("reduce_scatter", input, output, getSize()), {output}, options.timeout,
                    options.asyncOp, scatter_sums(how));
}

ProcessGroup::WorkPtr ProcessGroup::gather(std::vector<Tensors>& outputs, Tensors& inputs,
                                           const c10d::GatherOptions& options) {
  const at::Tensor& input = only_one("gather", inputs);
  const auto root = static_cast<size_t>(options.rootRank);
  return collective(c10d::OpType::GATHER, "gather", cat(" of ", elements(input), " to member ", root), {input},
                    outputs.empty() ? Tensors() : outputs.front(), options.timeout, options.asyncOp,
                    [root](Offers& offers) {
                      for (size_t from = 0; from < offers.size(); ++from)
                        offers[root].outputs[from].copy_(offers[from].inputs[0]);
                    });
}

ProcessGroup::WorkPtr ProcessGroup::scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                                            const c10d::ScatterOptions& options) {
  const at::Tensor& output = only_one("scatter", outputs);
  const auto root = static_cast<size_t>(options.rootRank);
  return collective(c10d::OpType::SCATTER, "scatter", cat(" of ", elements(output), " from member ", root),
                    inputs.empty() ? Tensors() : inputs.front(), {output}, options.timeout, options.asyncOp,
                    [root](Offers& offers) {
                      for (size_t to = 0; to < offers.size(); ++to)
                        offers[to].outputs[0].copy_(offers[root].inputs[to]);
                    });
}

ProcessGroup::WorkPtr ProcessGroup::allreduce_coalesced(Tensors& tensors,
                                                        const c10d::AllreduceCoalescedOptions& options) {
  WorkPtr last;
  for (const at::Tensor& tensor : tensors) {
    Tensors one{tensor};
    last = allreduce(one, options);
  }
  return last;
}

ProcessGroup::WorkPtr ProcessGroup::allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                                    const c10d::AllgatherOptions& options) {
  WorkPtr last;
  for (size_t i = 0; i < outputs.size(); ++i) last = _allgather_base(outputs[i], inputs[i], options);
  return last;
}

ProcessGroup::WorkPtr ProcessGroup::reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                                    const c10d::ReduceScatterOptions& options) {
  WorkPtr last;
  for (size_t i = 0; i < outputs.size(); ++i) last = _reduce_scatter_base(outputs[i], inputs[i], options);
  return last;
}

ProcessGroup::WorkPtr ProcessGroup::alltoall_base(at::Tensor& output, at::Tensor& input,
                                                  std::vector<int64_t>& output_splits,
                                                  std::vector<int64_t>& input_splits,
                                                  const c10d::AllToAllOptions& options) {
  return collective(c10d::OpType::ALLTOALL_BASE, "all_to_all", cat(" of ", input.scalar_type()),
                    split_rows(input, input_splits, getSize()), split_rows(output, output_splits, getSize()),
                    options.timeout, options.asyncOp, &exchange_all);
}

ProcessGroup::WorkPtr ProcessGroup::barrier(const c10d::BarrierOptions& options) {
  return collective(
      c10d::OpType::BARRIER, "barrier", "", {}, {}, options.timeout, /*async=*/true, [](Offers& /*offers*/) {},
      /*blocks_host=*/true);
}

}  // namespace tesserae::sim
