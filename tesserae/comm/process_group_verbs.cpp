// The operations of torch's process groups as verbs of a Group. All have the same three steps: 1. the caller's thread
// checks the arguments, so that a mistake is an error at once and leaves the group as it was; 2. what must not change
// until the operation runs goes into the task; 3. the task, on the lane, brings tensors in a row where they are not,
// runs the verbs, and brings results back.
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>

#include <numeric>

#include "tesserae/comm/process_group.h"

namespace tesserae::comm {

namespace {

using c10d::OpType;
using Tensors = ProcessGroup::Tensors;

std::string contents(const at::Tensor& tensor) {
  return cat(tensor.numel(), " x ", tensor.scalar_type());
}

void check_tensor(const char* title, const at::Tensor& tensor) {
  if (!tensor.defined() || !tensor.device().is_cpu() || tensor.layout() != at::kStrided) {
    throw InvalidArgument(title, "the tensors must be dense and in host memory (\"cpu:tesserae\" moves CPU tensors)");
  }
}

const at::Tensor& only(const char* title, const Tensors& tensors) {
  if (tensors.size() != 1) throw InvalidArgument(title, cat("one tensor a rank, not ", tensors.size()));
  check_tensor(title, tensors[0]);
  return tensors[0];
}

int check_rank(const char* title, int64_t rank, int size) {
  if (rank < 0 || rank >= size) {
    throw InvalidArgument(title, cat("rank ", rank, " is none of the group's ranks, 0 to ", size - 1));
  }
  return static_cast<int>(rank);
}

// `pieces` in the place of `whole`: one for each rank, like the other side.
void check_pieces(const char* title, const Tensors& pieces, const at::Tensor& like, int size) {
  if (static_cast<int>(pieces.size()) != size) {
    throw InvalidArgument(title, cat(pieces.size(), " tensors for a group of ", size, " ranks"));
  }
  for (const auto& piece : pieces) {
    check_tensor(title, piece);
    if (piece.numel() != like.numel() || piece.scalar_type() != like.scalar_type()) {
      throw InvalidArgument(
          title, cat("the tensors must be of one size and dtype, here ", contents(piece), " and ", contents(like)));
    }
  }
}

void check_whole(const char* title, const at::Tensor& whole, const at::Tensor& piece, int size) {
  check_tensor(title, whole);
  check_tensor(title, piece);
  if (whole.numel() != piece.numel() * size || whole.scalar_type() != piece.scalar_type()) {
    throw InvalidArgument(title, cat(contents(whole), " is not ", size, " times ", contents(piece)));
  }
}

bool in_a_row(const at::Tensor& tensor) {
  return tensor.is_contiguous() && !tensor.is_conj() && !tensor.is_neg();
}

// The elements in their order, one after the other; the tensor itself where they are so.
at::Tensor row_of(const at::Tensor& tensor) {
  return (in_a_row(tensor) ? tensor : tensor.resolve_conj().resolve_neg().contiguous()).view(-1);
}

// A tensor that is written: work on `row`, then settle().
struct Written {
  explicit Written(const at::Tensor& tensor, bool read = true)
      : tensor(tensor),
        row(in_a_row(tensor) ? tensor.view(-1)
            : read           ? row_of(tensor)
                             : at::empty({tensor.numel()}, tensor.options())) {}
  void settle() const {
    if (!row.is_alias_of(tensor)) tensor.copy_(row.view(tensor.sizes()));
  }
  at::Tensor tensor, row;
};

// A reduction of torch: ours, and perhaps a division at the end.
struct Reducer {
  Reducer(const char* title, const c10d::ReduceOp& op, const at::Tensor& tensor) {
    check_tensor(title, tensor);
    switch (op.op_) {
      case c10d::ReduceOp::AVG:
        average = true;
        [[fallthrough]];
      case c10d::ReduceOp::SUM:
        how = Reduction::sum;
        break;
      case c10d::ReduceOp::PRODUCT:
        how = Reduction::product;
        break;
      case c10d::ReduceOp::MIN:
        how = Reduction::minimum;
        break;
      case c10d::ReduceOp::MAX:
        how = Reduction::maximum;
        break;
      case c10d::ReduceOp::BAND:
        how = Reduction::bit_and;
        break;
      case c10d::ReduceOp::BOR:
        how = Reduction::bit_or;
        break;
      case c10d::ReduceOp::BXOR:
        how = Reduction::bit_xor;
        break;
      default:
        throw InvalidArgument(title, "this reduction is not there for CPU tensors (Gloo has the same ones)");
    }
    if (average && !tensor.is_floating_point() && !tensor.is_complex()) {
      throw InvalidArgument(title, cat("there is no average of ", tensor.scalar_type(), "; reduce the sum"));
    }
    if (!can_reduce(how, tensor.scalar_type())) {
      throw InvalidArgument(title, cat("there is no ", how, " of ", tensor.scalar_type()));
    }
  }
  void finish(const at::Tensor& sum, int size) const {
    if (average) sum.div_(size);
  }
  Reduction how = Reduction::sum;
  bool average = false;
};

void gather_into(Group& group, const at::Tensor& output, const at::Tensor& input) {
  const Written whole(output, /*read=*/false);
  const at::Tensor own = whole.row.narrow(0, group.rank() * input.numel(), input.numel());
  if (own.data_ptr() != input.data_ptr() || !in_a_row(input)) own.view(input.sizes()).copy_(input);
  group.all_gather(whole.row);
  whole.settle();
}

void gather_list(Group& group, const Tensors& outputs, const at::Tensor& input) {
  const int64_t length = input.numel();
  const at::Tensor whole = at::empty({length * group.size()}, input.options());
  gather_into(group, whole, input);
  for (size_t i = 0; i < outputs.size(); ++i) {
    outputs[i].copy_(whole.narrow(0, static_cast<int64_t>(i) * length, length).view(outputs[i].sizes()));
  }
}

void scatter_sum(Group& group, const at::Tensor& output, const at::Tensor& input, const Reducer& reducer) {
  const Written piece(output, /*read=*/false);
  group.reduce_scatter_to(piece.row, row_of(input), {}, reducer.how);
  reducer.finish(piece.row, group.size());
  piece.settle();
}

void reduce_all(Group& group, const at::Tensor& tensor, const Reducer& reducer) {
  const Written whole(tensor);
  group.all_reduce(whole.row, {}, reducer.how);
  reducer.finish(whole.row, group.size());
  whole.settle();
}

std::vector<int64_t> counts_of(const Tensors& tensors) {
  std::vector<int64_t> counts;
  for (const auto& tensor : tensors) counts.push_back(tensor.numel());
  return counts;
}

// Elements for each rank: `rows` of the first dimension, or the same for all.
std::vector<int64_t> counts_of(const char* title, const at::Tensor& tensor, const std::vector<int64_t>& rows,
                               int size) {
  check_tensor(title, tensor);
  const int64_t length = tensor.dim() == 0 ? 1 : tensor.size(0);
  const std::vector<int64_t> split =
      rows.empty() ? std::vector<int64_t>(static_cast<size_t>(size), length / size) : rows;
  const int64_t sum = std::accumulate(split.begin(), split.end(), int64_t{0});
  if (static_cast<int>(split.size()) != size || sum != length) {
    throw InvalidArgument(title, cat(length, " rows do not split over ", size, " ranks as asked: ", split.size(),
                                     " parts of ", sum, " rows together"));
  }
  std::vector<int64_t> counts;
  for (const int64_t part : split) counts.push_back(length == 0 ? 0 : part * (tensor.numel() / length));
  return counts;
}

}  // namespace

ProcessGroup::WorkPtr ProcessGroup::broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) {
  const char* const title = "tesserae:broadcast";
  const at::Tensor tensor = only(title, tensors);
  const int root = check_rank(title, options.rootRank, size_);
  return submit({OpType::BROADCAST, title, tensors, tensors, options.timeout}, [this, tensor, root] {
    const Written whole(tensor, /*read=*/rank_ == root);
    group_->broadcast(whole.row, root);
    if (rank_ != root) whole.settle();
  });
}

ProcessGroup::WorkPtr ProcessGroup::allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) {
  const char* const title = "tesserae:all_reduce";
  const at::Tensor tensor = only(title, tensors);
  const Reducer reducer(title, options.reduceOp, tensor);
  return submit({OpType::ALLREDUCE, title, tensors, tensors, options.timeout},
                [this, tensor, reducer] { reduce_all(*group_, tensor, reducer); });
}

ProcessGroup::WorkPtr ProcessGroup::allreduce_coalesced(Tensors& tensors,
                                                        const c10d::AllreduceCoalescedOptions& options) {
  const char* const title = "tesserae:all_reduce_coalesced";
  std::vector<Reducer> reducers;
  for (const auto& tensor : tensors) reducers.emplace_back(title, options.reduceOp, tensor);
  return submit({OpType::ALLREDUCE_COALESCED, title, tensors, tensors, options.timeout}, [this, tensors, reducers] {
    for (size_t i = 0; i < tensors.size(); ++i) reduce_all(*group_, tensors[i], reducers[i]);
  });
}

// The others' tensors stay as they were.
ProcessGroup::WorkPtr ProcessGroup::reduce(Tensors& tensors, const c10d::ReduceOptions& options) {
  const char* const title = "tesserae:reduce";
  const at::Tensor tensor = only(title, tensors);
  const int root = check_rank(title, options.rootRank, size_);
  const Reducer reducer(title, options.reduceOp, tensor);
  return submit({OpType::REDUCE, title, tensors, tensors, options.timeout}, [this, tensor, root, reducer] {
    group_->barrier({}, cat("reduce of ", contents(tensor), " to member ", root));
    reduce_all(*group_, rank_ == root ? tensor : row_of(tensor).clone(), reducer);
  });
}

ProcessGroup::WorkPtr ProcessGroup::allgather(TensorLists& outputs, Tensors& inputs,
                                              const c10d::AllgatherOptions& options) {
  const char* const title = "tesserae:all_gather";
  const at::Tensor input = only(title, inputs);
  if (outputs.size() != 1) throw InvalidArgument(title, cat("one list of outputs, not ", outputs.size()));
  check_pieces(title, outputs[0], input, size_);
  return submit({OpType::ALLGATHER, title, inputs, outputs[0], options.timeout},
                [this, list = outputs[0], input] { gather_list(*group_, list, input); });
}

ProcessGroup::WorkPtr ProcessGroup::_allgather_base(at::Tensor& output, at::Tensor& input,
                                                    const c10d::AllgatherOptions& options) {
  const char* const title = "tesserae:all_gather_into_tensor";
  check_whole(title, output, input, size_);
  return submit({OpType::_ALLGATHER_BASE, title, {input}, {output}, options.timeout},
                [this, output, input] { gather_into(*group_, output, input); });
}

ProcessGroup::WorkPtr ProcessGroup::allgather_coalesced(TensorLists& outputs, Tensors& inputs,
                                                        const c10d::AllgatherOptions& options) {
  const char* const title = "tesserae:all_gather_coalesced";
  if (static_cast<int>(outputs.size()) != size_) {
    throw InvalidArgument(title, cat(outputs.size(), " lists of outputs for ", size_, " ranks"));
  }
  // outputs[rank][i] is input i of that rank.
  TensorLists lists(inputs.size());
  Tensors all;
  for (const auto& list : outputs) {
    if (list.size() != inputs.size()) {
      throw InvalidArgument(title, cat(list.size(), " outputs of a rank for ", inputs.size(), " inputs"));
    }
    for (size_t i = 0; i < list.size(); ++i) lists[i].push_back(list[i]);
    all.insert(all.end(), list.begin(), list.end());
  }
  for (size_t i = 0; i < inputs.size(); ++i) {
    check_tensor(title, inputs[i]);
    check_pieces(title, lists[i], inputs[i], size_);
  }
  return submit({OpType::ALLGATHER_COALESCED, title, inputs, all, options.timeout}, [this, lists, inputs] {
    for (size_t i = 0; i < inputs.size(); ++i) gather_list(*group_, lists[i], inputs[i]);
  });
}

ProcessGroup::WorkPtr ProcessGroup::allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                                    const c10d::AllgatherOptions& options) {
  const char* const title = "tesserae:all_gather_into_tensor_coalesced";
  if (outputs.size() != inputs.size()) {
    throw InvalidArgument(title, cat(outputs.size(), " outputs for ", inputs.size(), " inputs"));
  }
  for (size_t i = 0; i < inputs.size(); ++i) check_whole(title, outputs[i], inputs[i], size_);
  return submit({OpType::COALESCED, title, inputs, outputs, options.timeout}, [this, outputs, inputs] {
    for (size_t i = 0; i < inputs.size(); ++i) gather_into(*group_, outputs[i], inputs[i]);
  });
}

ProcessGroup::WorkPtr ProcessGroup::reduce_scatter(Tensors& outputs, TensorLists& inputs,
                                                   const c10d::ReduceScatterOptions& options) {
  const char* const title = "tesserae:reduce_scatter";
  const at::Tensor output = only(title, outputs);
  if (inputs.size() != 1) throw InvalidArgument(title, cat("one list of inputs, not ", inputs.size()));
  check_pieces(title, inputs[0], output, size_);
  const Reducer reducer(title, options.reduceOp, output);
  return submit({OpType::REDUCE_SCATTER, title, inputs[0], outputs, options.timeout},
                [this, output, list = inputs[0], reducer] {
                  Tensors rows;
                  for (const auto& piece : list) rows.push_back(row_of(piece));
                  scatter_sum(*group_, output, at::cat(rows), reducer);
                });
}

ProcessGroup::WorkPtr ProcessGroup::_reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                                         const c10d::ReduceScatterOptions& options) {
  const char* const title = "tesserae:reduce_scatter_tensor";
  check_whole(title, input, output, size_);
  const Reducer reducer(title, options.reduceOp, output);
  return submit({OpType::_REDUCE_SCATTER_BASE, title, {input}, {output}, options.timeout},
                [this, output, input, reducer] { scatter_sum(*group_, output, input, reducer); });
}

ProcessGroup::WorkPtr ProcessGroup::reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                                    const c10d::ReduceScatterOptions& options) {
  const char* const title = "tesserae:reduce_scatter_tensor_coalesced";
  if (outputs.size() != inputs.size()) {
    throw InvalidArgument(title, cat(outputs.size(), " outputs for ", inputs.size(), " inputs"));
  }
  std::vector<Reducer> reducers;
  for (size_t i = 0; i < inputs.size(); ++i) {
    check_whole(title, inputs[i], outputs[i], size_);
    reducers.emplace_back(title, options.reduceOp, outputs[i]);
  }
  return submit({OpType::REDUCE_SCATTER_TENSOR_COALESCED, title, inputs, outputs, options.timeout},
                [this, outputs, inputs, reducers] {
                  for (size_t i = 0; i < inputs.size(); ++i) scatter_sum(*group_, outputs[i], inputs[i], reducers[i]);
                });
}

ProcessGroup::WorkPtr ProcessGroup::gather(TensorLists& outputs, Tensors& inputs, const c10d::GatherOptions& options) {
  const char* const title = "tesserae:gather";
  const at::Tensor input = only(title, inputs);
  const int root = check_rank(title, options.rootRank, size_);
  const Tensors list = outputs.empty() ? Tensors() : outputs[0];
  if (rank_ == root) check_pieces(title, list, input, size_);
  return submit({OpType::GATHER, title, inputs, list, options.timeout}, [this, list, input, root] {
    group_->barrier({}, cat("gather of ", contents(input), " to member ", root));
    std::vector<Written> landing;
    std::vector<Message> receives;
    if (rank_ == root) {
      for (const auto& output : list) landing.emplace_back(output, /*read=*/false);
      for (int from = 0; from < size_; ++from) receives.push_back({from, landing[static_cast<size_t>(from)].row});
    }
    group_->exchange({{root, row_of(input)}}, receives);
    for (const auto& written : landing) written.settle();
  });
}

ProcessGroup::WorkPtr ProcessGroup::scatter(Tensors& outputs, TensorLists& inputs,
                                            const c10d::ScatterOptions& options) {
  const char* const title = "tesserae:scatter";
  const at::Tensor output = only(title, outputs);
  const int root = check_rank(title, options.rootRank, size_);
  const Tensors list = inputs.empty() ? Tensors() : inputs[0];
  if (rank_ == root) check_pieces(title, list, output, size_);
  return submit({OpType::SCATTER, title, list, outputs, options.timeout}, [this, list, output, root] {
    group_->barrier({}, cat("scatter of ", contents(output), " from member ", root));
    const Written landing(output, /*read=*/false);
    std::vector<Message> sends;
    for (int to = 0; rank_ == root && to < size_; ++to) sends.push_back({to, row_of(list[static_cast<size_t>(to)])});
    group_->exchange(sends, {{root, landing.row}});
    landing.settle();
  });
}

void ProcessGroup::check_counts(const char* title, const std::vector<int64_t>& sent,
                                const std::vector<int64_t>& received) const {
  if (size_ == 1) return;
  const at::Tensor table = at::empty({size_, 2, size_}, at::kLong);
  auto counts = table.accessor<int64_t, 3>();
  for (int peer = 0; peer < size_; ++peer) {
    counts[rank_][0][peer] = sent[static_cast<size_t>(peer)];
    counts[rank_][1][peer] = received[static_cast<size_t>(peer)];
  }
  group_->all_gather(table);
  for (int from = 0; from < size_; ++from) {
    for (int to = 0; to < size_; ++to) {
      if (counts[from][0][to] == counts[to][1][from]) continue;
      throw Mismatch(title, cat("the ranks disagree: rank ", from, " sends ", counts[from][0][to], " elements to rank ",
                                to, ", which expects ", counts[to][1][from], " of it"));
    }
  }
}

ProcessGroup::WorkPtr ProcessGroup::alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& options) {
  const char* const title = "tesserae:all_to_all";
  if (static_cast<int>(outputs.size()) != size_ || static_cast<int>(inputs.size()) != size_) {
    throw InvalidArgument(title, cat(inputs.size(), " inputs and ", outputs.size(), " outputs for ", size_, " ranks"));
  }
  for (const auto* list : {&inputs, &outputs}) {
    for (const auto& tensor : *list) {
      check_tensor(title, tensor);
      if (tensor.scalar_type() != inputs[0].scalar_type()) {
        throw InvalidArgument(title, cat("the tensors must be of one dtype, here ", tensor.scalar_type(), " and ",
                                         inputs[0].scalar_type()));
      }
    }
  }
  return submit({OpType::ALLTOALL, title, inputs, outputs, options.timeout}, [this, title, inputs, outputs] {
    group_->barrier({}, cat("all_to_all of ", inputs[0].scalar_type()));
    check_counts(title, counts_of(inputs), counts_of(outputs));
    std::vector<Message> sends, receives;
    std::vector<Written> landing;
    for (int peer = 0; peer < size_; ++peer) {
      landing.emplace_back(outputs[static_cast<size_t>(peer)], /*read=*/false);
      sends.push_back({peer, row_of(inputs[static_cast<size_t>(peer)])});
      receives.push_back({peer, landing.back().row});
    }
    group_->exchange(sends, receives);
    for (const auto& written : landing) written.settle();
  });
}

ProcessGroup::WorkPtr ProcessGroup::alltoall_base(at::Tensor& output, at::Tensor& input,
                                                  std::vector<int64_t>& output_rows, std::vector<int64_t>& input_rows,
                                                  const c10d::AllToAllOptions& options) {
  const char* const title = "tesserae:all_to_all_single";
  const auto received = counts_of(title, output, output_rows, size_);
  const auto sent = counts_of(title, input, input_rows, size_);
  if (output.scalar_type() != input.scalar_type()) {
    throw InvalidArgument(title, cat("from ", input.scalar_type(), " to ", output.scalar_type()));
  }
  return submit({OpType::ALLTOALL_BASE, title, {input}, {output}, options.timeout},
                [this, title, output, input, received, sent] {
                  group_->barrier({}, cat("all_to_all_single of ", input.scalar_type()));
                  check_counts(title, sent, received);
                  const Written landing(output, /*read=*/false);
                  group_->all_to_all(landing.row, row_of(input), received, sent);
                  landing.settle();
                });
}

ProcessGroup::WorkPtr ProcessGroup::barrier(const c10d::BarrierOptions& options) {
  return submit({OpType::BARRIER, "tesserae:barrier", {}, {}, options.timeout}, [this] { group_->barrier(); });
}

ProcessGroup::WorkPtr ProcessGroup::send(Tensors& tensors, int to, int tag) {
  check_connected();
  only("tesserae:send", tensors);
  check_rank("tesserae:send", to, size_);
  return messages_->send(tensors, to, tag);
}

ProcessGroup::WorkPtr ProcessGroup::recv(Tensors& tensors, int from, int tag) {
  check_connected();
  only("tesserae:recv", tensors);
  check_rank("tesserae:recv", from, size_);
  return messages_->recv(tensors, from, tag);
}

ProcessGroup::WorkPtr ProcessGroup::recvAnysource(Tensors& tensors, int tag) {
  check_connected();
  only("tesserae:recv", tensors);
  return messages_->recvAnysource(tensors, tag);
}

}  // namespace tesserae::comm
