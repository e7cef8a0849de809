#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "tesserae/mesh/split.h"

namespace tesserae::mesh {

/// One split of a tensor of one shape: what split.h composes. Keeps a reference to the shape.
class Cut {
 public:
  using Visit = std::function<void(const Range& from, const Range& to)>;

  /// Throws InvalidArgument, naming the numbers of parts that would do, where the split cannot cut the tensor.
  Cut(const std::vector<int64_t>& whole, const Split& split);

  /// The stored order is the row-major order of the whole tensor.
  bool row_major() const { return form_.strips == 1; }
  bool pads() const;
  int64_t elements() const { return form_.strips * form_.elements; }  ///< of this part, without padding
  int64_t begin() const { return form_.strips * form_.begin; }        ///< of this part in the stored order

  std::vector<int64_t> shape() const;       ///< of every part, padding included
  std::vector<int64_t> real_shape() const;  ///< of this part, without padding
  /// The part that has an element of the stored order.
  Split part_at(int64_t element) const;

  /// mesh::for_each_run for one split, of elements that are no padding.
  void for_each_run(const Range& elements, const Split& stored, const Visit& visit) const;

 private:
  /// Rows of `dim` in one block and in one part of it; the latter is rounded up where padding is allowed.
  struct Rows {
    int64_t block, part;
  };

  /// The normal form. `strip` of the last parts is shorter, or empty, where there is padding.
  struct Strips {
    int64_t strips = 1;
    int64_t block = 0;     ///< elements
    int64_t strip = 0;     ///< elements of part 0's strip
    int64_t begin = 0;     ///< of this part's strip in a block
    int64_t elements = 0;  ///< of this part's strip

    bool same_order(const Strips& other) const {
      return strips == other.strips && block == other.block && strip == other.strip;
    }
  };

  static Rows rows_of(const std::vector<int64_t>& whole, const Split& split);
  static Strips strips_of(const std::vector<int64_t>& whole, const Split& split);

  const std::vector<int64_t>& whole_;
  Split split_;
  Rows rows_;
  Strips form_;
};

/// Elements of a tensor of that shape. Throws InvalidArgument if they overflow.
int64_t product(const std::vector<int64_t>& shape);
/// "[2, 3]".
std::string text_of(const std::vector<int64_t>& shape);
[[noreturn]] void refuse(const std::vector<int64_t>& whole, const Splits& splits, const std::string& what);

}  // namespace tesserae::mesh
