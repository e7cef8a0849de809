#include <ATen/ops/ones.h>

#include <algorithm>
#include <array>
#include <vector>

#include "tesserae/os/memory.h"
#include "tesserae/probe/measure.h"
#include "tesserae/tensor/product.h"

// What a library keeps for products, by what the memory of this process has grown after some. Its buffers grow to what
// the largest product needed, so these come in ascending order:
//  1. Of more and more rows: from how many on it copies an operand.
//  2. With more and more columns: the bytes, by the elements that are copied.
//  3. A deeper one: how much of the depth it copies at once.
namespace tesserae::probe {
namespace {

constexpr std::array<int64_t, 5> rows = {64, 128, 256, 512, 1024};
constexpr std::array<int64_t, 3> columns = {512, 2048, 8192};
constexpr int64_t depth = 256, deeper = 1024;

class Growth {
 public:
  Growth(const Bench& bench, at::TensorOptions options)
      : bench_(bench),
        a_(at::ones({rows.back() * deeper}, options)),
        b_(at::ones({columns.back() * deeper}, options)),
        result_(at::ones({rows.back() * columns.back()}, options)),
        begin_(taken()) {}

  /// Bytes since the beginning, once [m, k] was multiplied by [k, n].
  double after(int64_t m, int64_t k, int64_t n) const {
    const auto matrix = [](const at::Tensor& all, int64_t height, int64_t width) {
      return all.narrow(0, 0, height * width).view({height, width});
    };
    tensor::product_to(matrix(result_, m, n), matrix(a_, m, k), matrix(b_, n, k).t());
    return std::max(mean_over_ranks(bench_.fabric, taken() - begin_), 1.0);
  }

 private:
  /// What is freed is no workspace.
  static double taken() {
    os::give_back_freed_memory();
    const os::ProcessMemory memory = os::process_memory();
    return static_cast<double>(memory.proportional) - static_cast<double>(memory.of_files);
  }

  const Bench& bench_;
  at::Tensor a_, b_, result_;
  double begin_;
};

}  // namespace

cost::Machine::Workspaces measure_workspaces(const Bench& bench, const std::string& dtype) {
  if (!bench.fabric.device().is_cpu()) return {};  // there they are part of what a process takes
  const Growth growth(bench, at::TensorOptions().dtype(scalar_type_of(dtype)));
  std::vector<double> by_rows;
  for (const int64_t m : rows) by_rows.push_back(growth.after(m, depth, columns.front()));
  const auto first = std::ranges::find_if(by_rows, [&](double bytes) { return bytes >= by_rows.back() / 2; });
  cost::Machine::Workspaces found{.rows = static_cast<double>(rows[static_cast<size_t>(first - by_rows.begin())])};

  std::vector<cost::Curve::Point> points = {{static_cast<double>(columns.front() * depth), by_rows.back()}};
  for (const int64_t n : {columns[1], columns[2]}) {
    points.push_back({static_cast<double>(n * depth), growth.after(rows.back(), depth, n)});
  }
  const double slope = (points[2].rate - points[0].rate) / (points[2].size - points[0].size);
  const double deep = growth.after(rows.back(), deeper, columns.back()), more = deep - points[2].rate;
  const double most = slope > 0 ? points[2].size + std::max(more, 0.0) / slope : points[2].size;
  found.depth = std::clamp(most / static_cast<double>(columns.back()), double{depth}, double{deeper});
  if (found.depth > depth) points.push_back({found.depth * static_cast<double>(columns.back()), deep});
  found.bytes = cost::Curve(std::move(points));
  return found;
}

}  // namespace tesserae::probe
