// The operations of torch's process groups in which ranks get different data (process_group_verbs.cpp says how).
#include <ATen/ops/empty.h>

#include "tesserae/comm/liveness/process_waits.h"
#include "tesserae/comm/torch_backend/process_group_arguments.h"

namespace tesserae::comm {

using namespace arguments;
using c10d::OpType;

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

ProcessGroup::WorkPtr ProcessGroup::send(Tensors& tensors, int to, int tag) {
  check_connected();
  only("tesserae:send", tensors);
  check_rank("tesserae:send", to, size_);
  waits_unseen();
  return messages_->send(tensors, to, tag);
}

ProcessGroup::WorkPtr ProcessGroup::recv(Tensors& tensors, int from, int tag) {
  check_connected();
  only("tesserae:recv", tensors);
  check_rank("tesserae:recv", from, size_);
  waits_unseen();
  return messages_->recv(tensors, from, tag);
}

ProcessGroup::WorkPtr ProcessGroup::recvAnysource(Tensors& tensors, int tag) {
  check_connected();
  only("tesserae:recv", tensors);
  waits_unseen();
  return messages_->recvAnysource(tensors, tag);
}

}  // namespace tesserae::comm
