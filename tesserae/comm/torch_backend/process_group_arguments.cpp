#include "tesserae/comm/torch_backend/process_group_arguments.h"

#include <numeric>

namespace tesserae::comm::arguments {

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

at::Tensor row_of(const at::Tensor& tensor) {
  return (in_a_row(tensor) ? tensor : tensor.resolve_conj().resolve_neg().contiguous()).view(-1);
}

Reducer::Reducer(const char* title, const c10d::ReduceOp& op, const at::Tensor& tensor) {
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

std::vector<int64_t> counts_of(const Tensors& tensors) {
  std::vector<int64_t> counts;
  for (const auto& tensor : tensors) counts.push_back(tensor.numel());
  return counts;
}

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

}  // namespace tesserae::comm::arguments
