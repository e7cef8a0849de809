#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/full.h>
#include <ATen/ops/full_like.h>
#include <ATen/ops/zeros_like.h>

#include <algorithm>
#include <string>
#include <vector>

#include "tesserae/base/checked.h"
#include "tesserae/shard/shard.h"

namespace tesserae::testing {

struct NamedParameter {
  std::string name;
  at::Tensor value;
};

/// The parameters of a small model as flat buffers ("units" of so many parameters), each cut in equal chunks.
/// Parameters start at multiples of four elements; the padding of masters is filled with a number that would show if it
/// leaked.
class CutModel {
 public:
  CutModel(std::vector<NamedParameter> parameters, int chunks, size_t parameters_per_unit)
      : parameters_(std::move(parameters)),
        parameters_per_unit_(parameters_per_unit),
        ranks_(static_cast<size_t>(chunks)) {
    for (size_t first = 0; first < parameters_.size(); first += parameters_per_unit) {
      add_unit(first, std::min(first + parameters_per_unit, parameters_.size()), chunks);
    }
  }

  std::vector<shard::Shard>& rank(size_t chunk) { return ranks_[chunk]; }
  size_t ranks() const { return ranks_.size(); }
  int units() const { return static_cast<int>(ranks_[0].size()); }

  /// Gives the shards their part of these whole gradients; an undefined one leaves its whole unit without gradient.
  void set_gradients(const std::vector<at::Tensor>& gradients) {
    for (auto& shards : ranks_) {
      for (auto& shard : shards) {
        // Also undefined on ranks whose chunk holds no part of the unit's parameters, as the engine has it.
        if (!gradients[static_cast<size_t>(shard.index) * parameters_per_unit_].defined()) {
          shard.grad = at::Tensor();
          continue;
        }
        shard.grad = at::zeros_like(shard.master);
        for (const auto& slice : shard.slices) {
          const auto& whole = gradients[index_of(slice.name)];
          part(shard.grad, slice).copy_(whole.flatten().slice(0, slice.offset, slice.offset + slice.end - slice.begin));
        }
      }
    }
  }

  /// The whole parameters as the shards hold them now.
  std::vector<at::Tensor> gather() {
    std::vector<at::Tensor> wholes;
    for (const auto& parameter : parameters_) wholes.push_back(at::full_like(parameter.value, -1000.0));
    for (auto& shards : ranks_) {
      for (auto& shard : shards) {
        for (const auto& slice : shard.slices) {
          auto flat = wholes[index_of(slice.name)].view(-1);
          flat.slice(0, slice.offset, slice.offset + slice.end - slice.begin).copy_(part(shard.master, slice));
        }
      }
    }
    return wholes;
  }

 private:
  static at::Tensor part(const at::Tensor& flat, const shard::Slice& slice) {
    return flat.slice(0, slice.begin, slice.end);
  }

  size_t index_of(const std::string& name) const {
    for (size_t i = 0; i < parameters_.size(); ++i) {
      if (parameters_[i].name == name) return i;
    }
    throw InvalidArgument("CutModel", name);
  }

  void add_unit(size_t first, size_t last, int chunks) {
    int64_t elements = 0;
    std::vector<int64_t> starts;
    for (size_t i = first; i < last; ++i) {
      starts.push_back(elements);
      elements += round_up(parameters_[i].value.numel(), 4);
    }
    const int64_t chunk = round_up((elements + chunks - 1) / chunks, 4);
    for (int c = 0; c < chunks; ++c) {
      shard::Shard shard;
      shard.index = static_cast<int>(ranks_[static_cast<size_t>(c)].size());
      shard.master = at::full({chunk}, 12345.0f, parameters_[first].value.options());
      for (size_t i = first; i < last; ++i) {
        const auto& value = parameters_[i].value;
        const int64_t start = starts[i - first] - c * chunk;
        const int64_t begin = std::max<int64_t>(start, 0);
        const int64_t end = std::min(start + value.numel(), chunk);
        if (begin >= end) continue;
        shard.slices.push_back({parameters_[i].name, value.sizes().vec(), begin, end, begin - start});
        part(shard.master, shard.slices.back()).copy_(value.flatten().slice(0, begin - start, end - start));
      }
      ranks_[static_cast<size_t>(c)].push_back(std::move(shard));
    }
  }

  std::vector<NamedParameter> parameters_;
  size_t parameters_per_unit_;
  std::vector<std::vector<shard::Shard>> ranks_;  // [chunk][unit]
};

}  // namespace tesserae::testing
