#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "tesserae/mesh/split.h"

namespace tesserae::shard {

/// The part of one parameter that lies in a shard.
struct Slice {
  std::string name;  ///< the parameter's name in the model
  std::vector<int64_t>
      shape;           ///< the parameter's on this rank: of its part, where it is split among tensor-parallel ranks
  int64_t begin = 0;   ///< first element in the shard
  int64_t end = 0;     ///< one past the last element in the shard
  int64_t offset = 0;  ///< which element of the (flattened) parameter `begin` is
  mesh::Splits split = {};          ///< which part of which cut the parameter is
  std::vector<int64_t> whole = {};  ///< shape of the whole tensor; `shape` where the parameter is not split
};

/// What an optimizer sees of one flat buffer on this rank: its chunk of the master parameters and of the gradient.
/// Owned by its FlatBuffer; tensors keep their addresses until degrees or the master's dtype change. Elements outside
/// every slice are padding: their gradient is zero and they may be updated freely.
struct Shard {
  int index = 0;      ///< position in Engine::shards(), the same on all ranks
  at::Tensor master;  ///< [chunk], master dtype; may have no slice at all on some ranks
  at::Tensor grad;    ///< [chunk], master dtype, averaged over all ranks; undefined: no gradient since zero_grad
  std::vector<Slice> slices;  ///< ascending, without overlap
  int replicas = 1;           ///< how many ranks hold the same chunk
};

/// The shards of a model, in an order that is the same on all ranks. Points to them.
class ShardList {
 public:
  class Iterator {
   public:
    using value_type = Shard;
    using difference_type = std::ptrdiff_t;
    Iterator() = default;
    explicit Iterator(Shard* const* at) : at_(at) {}
    Shard& operator*() const { return **at_; }
    Shard* operator->() const { return *at_; }
    Iterator& operator++() {
      ++at_;
      return *this;
    }
    Iterator operator++(int) { return Iterator(at_++); }
    bool operator==(const Iterator&) const = default;

   private:
    Shard* const* at_ = nullptr;
  };

  ShardList() = default;
  explicit ShardList(std::vector<Shard*> shards) : shards_(std::move(shards)) {}

  Iterator begin() const { return Iterator(shards_.data()); }
  Iterator end() const { return Iterator(shards_.data() + shards_.size()); }
  size_t size() const { return shards_.size(); }
  Shard& operator[](size_t index) const { return *shards_[index]; }
  Shard& back() const { return *shards_.back(); }
  void add(Shard* shard) { shards_.push_back(shard); }  ///< after all that there are

 private:
  std::vector<Shard*> shards_;
};

}  // namespace tesserae::shard
