#include "tesserae/optim/whole_matrices.h"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <numeric>

#include "tesserae/base/error.h"

namespace tesserae::optim {
namespace {

using Shape = WholeMatrices::Shape;

double work(const Shape& shape) {
  return static_cast<double>(shape.rows) * static_cast<double>(shape.columns) *
         static_cast<double>(std::min(shape.rows, shape.columns));
}

std::string in_words(const std::vector<Shape>& shapes) {
  std::string text = cat(shapes.size(), " whole matrices:");
  for (const Shape& shape : shapes) text += cat(" ", shape.rows, "x", shape.columns);
  return text;
}

}  // namespace

WholeMatrices::WholeMatrices(comm::Group& group, std::vector<Shape> shapes)
    : group_(group), shapes_(std::move(shapes)), owners_(shapes_.size()) {
  for (const Shape& shape : shapes_) {
    if (shape.rows >= 0 && shape.columns >= 0) continue;
    throw InvalidArgument("WholeMatrices", cat("a matrix of ", shape.rows, " x ", shape.columns));
  }
  group_.barrier({}, in_words(shapes_));
  std::vector<size_t> heaviest_first(shapes_.size());
  std::iota(heaviest_first.begin(), heaviest_first.end(), size_t{0});
  std::stable_sort(heaviest_first.begin(), heaviest_first.end(),
                   [this](size_t a, size_t b) { return work(shapes_[a]) > work(shapes_[b]); });
  std::vector<double> load(static_cast<size_t>(group_.size()));
  for (const size_t matrix : heaviest_first) {
    const auto least = std::min_element(load.begin(), load.end());
    owners_[matrix] = static_cast<int>(least - load.begin());
    *least += work(shapes_[matrix]);
  }
  const double all = std::accumulate(load.begin(), load.end(), 0.0);
  if (all > 0) imbalance_ = *std::max_element(load.begin(), load.end()) * group_.size() / all;
}

WholeMatrices::Rows WholeMatrices::rows_of(size_t matrix, int member) const {
  const int64_t rows = shapes_[matrix].rows, members = group_.size();
  const int64_t most = (rows + members - 1) / members;
  const int64_t begin = std::min(rows, member * most);
  return {begin, std::min(rows, begin + most) - begin};
}

void WholeMatrices::check(const char* verb, const at::Tensor& tensor, int64_t rows, size_t matrix,
                          const at::TensorOptions& like) const {
  const int64_t columns = shapes_[matrix].columns;
  if (tensor.dim() == 2 && tensor.size(0) == rows && tensor.size(1) == columns && tensor.is_contiguous() &&
      tensor.dtype() == like.dtype() && tensor.device() == like.device()) {
    return;
  }
  throw InvalidArgument(cat("WholeMatrices::", verb),
                        cat("matrix ", matrix, ": ", tensor.is_contiguous() ? "" : "not contiguous ", tensor.sizes(),
                            " of ", tensor.dtype(), " on ", tensor.device(), "; [", rows, ", ", columns, "] of ",
                            like.dtype(), " on ", like.device(), ", contiguous, is expected"));
}

std::vector<at::Tensor> WholeMatrices::collect(const std::vector<at::Tensor>& rows) const {
  if (rows.size() != shapes_.size()) {
    throw InvalidArgument("WholeMatrices::collect",
                          cat("rows of ", rows.size(), " matrices; there are ", shapes_.size()));
  }
  std::vector<at::Tensor> whole;
  std::vector<comm::Message> sends, receives;
  for (size_t i = 0; i < shapes_.size(); ++i) {
    const Rows mine = rows_of(i, group_.rank());
    check("collect", rows[i], mine.count, i, rows.front().options());
    if (!is_mine(i)) {
      if (rows[i].numel() > 0) sends.push_back({owners_[i], rows[i]});
      continue;
    }
    at::Tensor& matrix = whole.emplace_back(at::empty({shapes_[i].rows, shapes_[i].columns}, rows[i].options()));
    matrix.narrow(0, mine.begin, mine.count).copy_(rows[i]);
    for (int member = 0; member < group_.size(); ++member) {
      const Rows theirs = rows_of(i, member);
      if (member == group_.rank() || theirs.count * shapes_[i].columns == 0) continue;
      receives.push_back({member, matrix.narrow(0, theirs.begin, theirs.count)});
    }
  }
  group_.exchange(sends, receives);
  return whole;
}

std::vector<at::Tensor> WholeMatrices::distribute(const std::vector<at::Tensor>& whole,
                                                  const at::TensorOptions& like) const {
  const auto owned = static_cast<size_t>(std::count(owners_.begin(), owners_.end(), group_.rank()));
  if (whole.size() != owned) {
    throw InvalidArgument("WholeMatrices::distribute", cat(whole.size(), " matrices; this rank owns ", owned));
  }
  std::vector<at::Tensor> rows;
  std::vector<comm::Message> sends, receives;
  for (size_t i = 0, next = 0; i < shapes_.size(); ++i) {
    const Rows mine = rows_of(i, group_.rank());
    at::Tensor& part = rows.emplace_back(at::empty({mine.count, shapes_[i].columns}, like));
    if (!is_mine(i)) {
      if (part.numel() > 0) receives.push_back({owners_[i], part});
      continue;
    }
    const at::Tensor& matrix = whole[next++];
    check("distribute", matrix, shapes_[i].rows, i, like);
    part.copy_(matrix.narrow(0, mine.begin, mine.count));
    for (int member = 0; member < group_.size(); ++member) {
      const Rows theirs = rows_of(i, member);
      if (member == group_.rank() || theirs.count * shapes_[i].columns == 0) continue;
      sends.push_back({member, matrix.narrow(0, theirs.begin, theirs.count)});
    }
  }
  group_.exchange(sends, receives);
  return rows;
}

}  // namespace tesserae::optim
