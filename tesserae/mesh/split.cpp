#include "tesserae/mesh/split.h"

#include <algorithm>

#include "tesserae/base/checked.h"
#include "tesserae/base/error.h"

// Every split has one normal form: the whole tensor, flattened, is `strips` equal blocks of `block` elements, and a
// part has the same stretch of each, its strip. (Dimensions before `dim` multiply the number of blocks, dimensions
// behind it the length of a strip.) The stored order is all strips of part 0, then those of part 1, ...
//
// Where there is one strip, the stored order is row-major order: such splits, padded ones among them, and whole tensors
// have the same normal form as stored orders. Two different orders with several strips never continue together over
// more than a few ends of strips, so following them strip by strip takes time in proportion to the number of runs.
namespace tesserae::mesh {
namespace {

int64_t product(const std::vector<int64_t>& shape) {
  int64_t count = 1;
  for (const int64_t size : shape) count = checked_mul(count, size);
  return count;
}

std::string text_of(const std::vector<int64_t>& shape) {
  std::string text = "[";
  for (const int64_t size : shape) text += cat(text.size() > 1 ? ", " : "", size);
  return text + "]";
}

/// Rows of `dim` in one block and in one part of it; the latter is rounded up where padding is allowed.
struct Rows {
  int64_t block, part;
};

Rows rows_of(const std::vector<int64_t>& whole, const Split& split) {
  auto refuse = [&](const std::string& what) {
    throw InvalidArgument("Split", cat("a tensor of shape ", text_of(whole), " with ", to_string(split), ": ", what));
  };
  if (split.parts < 1) refuse("a tensor has at least one part");
  if (split.blocks < 1) refuse("a dimension has at least one block");
  if (split.index < 0 || split.index >= split.parts) refuse(cat("there is no part ", split.index));
  if (std::ranges::any_of(whole, [](int64_t size) { return size < 0; })) refuse("a size is negative");
  if (split.whole()) return {1, 1};
  if (split.dim < 0 || split.dim >= static_cast<int>(whole.size())) refuse("there is no such dimension");
  const int64_t size = whole[static_cast<size_t>(split.dim)];
  if (size % split.blocks != 0) refuse(cat("the size ", size, " is no multiple of the number of blocks"));
  const int64_t block = size / split.blocks;
  const int64_t part = block / split.parts + (block % split.parts != 0);
  if (block % split.parts == 0 || (split.dim == 0 && split.blocks == 1)) return {block, part};
  std::string good = "1";
  for (int64_t parts = 2; parts <= std::min<int64_t>(block, 1024); ++parts) {
    if (block % parts == 0) good += cat(", ", parts);
  }
  refuse(cat(block, " rows of a block can not be cut equally; these numbers of parts would do: ", good));
  return {};
}

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

Strips strips_of(const std::vector<int64_t>& whole, const Split& split) {
  const Rows rows = rows_of(whole, split);
  const int64_t all = product(whole);
  if (split.whole() || all == 0) return {.strips = 1, .block = all, .strip = all, .begin = 0, .elements = all};
  Strips form;
  int64_t inner = 1;
  for (size_t dim = static_cast<size_t>(split.dim) + 1; dim < whole.size(); ++dim) inner *= whole[dim];
  form.block = rows.block * inner;
  form.strips = all / form.block;
  const int64_t first = std::min(rows.block, checked_mul(split.index, rows.part));
  form.begin = first * inner;
  form.elements = (std::min(rows.block, first + rows.part) - first) * inner;
  form.strip = form.strips == 1 ? form.block : rows.part * inner;  // one strip: stored in row-major order
  return form;
}

}  // namespace

std::string to_string(const Split& split) {
  if (split.whole()) return "no split";
  return cat("dimension ", split.dim, " cut in ", split.parts, " parts",
             split.blocks == 1 ? "" : cat(" of each of ", split.blocks, " blocks"));
}

std::vector<int64_t> part_shape(const std::vector<int64_t>& whole, const Split& split) {
  const Rows rows = rows_of(whole, split);
  std::vector<int64_t> shape = whole;
  if (!split.whole()) shape[static_cast<size_t>(split.dim)] = rows.part * split.blocks;
  return shape;
}

int64_t part_elements(const std::vector<int64_t>& whole, const Split& split) {
  const Strips form = strips_of(whole, split);
  return form.strips * form.elements;
}

int64_t part_begin(const std::vector<int64_t>& whole, const Split& split) {
  const Strips form = strips_of(whole, split);
  return form.strips * form.begin;
}

Split stored_order(const std::vector<int64_t>& whole, const Split& split) {
  if (strips_of(whole, split).strips == 1) return {};
  return {.dim = split.dim, .parts = split.parts, .index = 0, .blocks = split.blocks};
}

void for_each_run(const std::vector<int64_t>& whole, const Split& split, const Range& elements, const Split& stored,
                  const std::function<void(const Range& from, const Range& to)>& visit) {
  const Strips mine = strips_of(whole, split);
  const Strips theirs = strips_of(whole, {stored.dim, stored.parts, 0, stored.blocks});
  if (elements.begin < 0 || elements.end > product(part_shape(whole, split))) {
    throw InvalidArgument("for_each_run", cat("elements [", elements.begin, ", ", elements.end, ") of a part of ",
                                              mine.strips * mine.elements, " elements"));
  }
  const int64_t end = std::min(elements.end, mine.strips * mine.elements);  // padding is last
  if (elements.begin >= end) return;
  if (mine.same_order(theirs)) {
    const int64_t begin = mine.strips * mine.begin;
    visit({elements.begin, end}, {begin + elements.begin, begin + end});
    return;
  }
  Range from{elements.begin, elements.begin}, to{-1, -1};
  while (from.end < end) {
    const int64_t inside = from.end % mine.elements;
    const int64_t element = from.end / mine.elements * mine.block + mine.begin + inside;  // of the whole tensor
    const int64_t in_block = element % theirs.block;
    const int64_t in_strip = in_block % theirs.strip;
    const int64_t place =
        theirs.strips * (in_block - in_strip) + element / theirs.block * theirs.strip + in_strip;  // in stored order
    const int64_t count = std::min({end - from.end, mine.elements - inside, theirs.strip - in_strip});
    if (place != to.end) {
      if (!from.empty()) visit(from, to);
      from = {from.end, from.end};
      to = {place, place};
    }
    from.end += count;
    to.end += count;
  }
  visit(from, to);
}

}  // namespace tesserae::mesh
