// The operations of torch's process groups as verbs of a Group. All have the same three steps: 1. the caller's thread
// checks the arguments, so that a mistake is an error at once and leaves the group as it was; 2. what must not change
// until the operation runs goes into the task; 3. the task, on the lane, brings tensors in a row where they are not,
// runs the verbs, and brings results back.
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>

#include "tesserae/comm/equal_pieces.h"
#include "tesserae/comm/torch_backend/process_group_arguments.h"

namespace tesserae::comm {

using namespace arguments;
using c10d::OpType;

namespace {

void gather_into(Group& group, const at::Tensor& output, const at::Tensor& input) {
  const Written whole(output, /*read=*/false);
  if (in_a_row(input) && !input.is_alias_of(whole.row)) {
    group.all_gather_to(whole.row, input);
  } else {
    const at::Tensor own = nth_piece(whole.row, group.rank(), group.size());
    if (own.data_ptr() != input.data_ptr() || !in_a_row(input)) own.view(input.sizes()).copy_(input);
    group.all_gather(whole.row);
  }
  whole.settle();
}

void gather_list(Group& group, const Tensors& outputs, const at::Tensor& input) {
  const at::Tensor whole = at::empty({input.numel() * group.size()}, input.options());
  gather_into(group, whole, input);
  for (int i = 0; i < group.size(); ++i) {
    const at::Tensor& output = outputs[static_cast<size_t>(i)];
    output.copy_(nth_piece(whole, i, group.size()).view(output.sizes()));
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
  return submit({OpType::_REDUCE_SCATTER_BASE, title, inputs, outputs, options.timeout},
                [this, outputs, inputs, reducers] {
                  for (size_t i = 0; i < inputs.size(); ++i) scatter_sum(*group_, outputs[i], inputs[i], reducers[i]);
                });
}

ProcessGroup::WorkPtr ProcessGroup::barrier(const c10d::BarrierOptions& options) {
  return submit({OpType::BARRIER, "tesserae:barrier", {}, {}, options.timeout}, [this] { group_->barrier(); });
}

}  // namespace tesserae::comm
