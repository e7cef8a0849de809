#include "tesserae/mesh/cut.h"

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

void refuse(const std::vector<int64_t>& whole, const Splits& splits, const std::string& what) {
  throw InvalidArgument("Split", cat("a tensor of shape ", text_of(whole), " with ", to_string(splits), ": ", what));
}

Cut::Rows Cut::rows_of(const std::vector<int64_t>& whole, const Split& split) {
  auto refuse = [&](const std::string& what) { mesh::refuse(whole, split, what); };
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
  refuse(cat(block, " rows of a block cannot be cut equally; these numbers of parts would do: ", good));
  return {};
}

Cut::Strips Cut::strips_of(const std::vector<int64_t>& whole, const Split& split) {
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

Cut::Cut(const std::vector<int64_t>& whole, const Split& split)
    : whole_(whole), split_(split), rows_(rows_of(whole, split)), form_(strips_of(whole, split)) {}

bool Cut::pads() const {
  return !split_.whole() && rows_.part * split_.parts * split_.blocks != whole_[static_cast<size_t>(split_.dim)];
}

std::vector<int64_t> Cut::shape() const {
  std::vector<int64_t> shape = whole_;
  if (!split_.whole()) shape[static_cast<size_t>(split_.dim)] = rows_.part * split_.blocks;
  return shape;
}

std::vector<int64_t> Cut::real_shape() const {
  std::vector<int64_t> real = shape();
  if (pads()) real[0] = std::clamp<int64_t>(whole_[0] - split_.index * rows_.part, 0, rows_.part);
  return real;
}

Split Cut::part_at(int64_t element) const {
  Split part = split_;
  part.index = 0;
  if (!part.whole()) part.index = static_cast<int>(element / Cut(whole_, part).elements());
  return part;
}

void Cut::for_each_run(const Range& elements, const Split& stored, const Visit& visit) const {
  const Strips& mine = form_;
  const Strips theirs = strips_of(whole_, {stored.dim, stored.parts, 0, stored.blocks});
  if (elements.empty()) return;
  if (mine.same_order(theirs)) {
    visit(elements, {begin() + elements.begin, begin() + elements.end});
    return;
  }
  Range from{elements.begin, elements.begin}, to{-1, -1};
  while (from.end < elements.end) {
    const int64_t inside = from.end % mine.elements;
    const int64_t element = from.end / mine.elements * mine.block + mine.begin + inside;  // of the whole tensor
    const int64_t in_block = element % theirs.block;
    const int64_t in_strip = in_block % theirs.strip;
    const int64_t place =
        theirs.strips * (in_block - in_strip) + element / theirs.block * theirs.strip + in_strip;  // in stored order
    const int64_t count = std::min({elements.end - from.end, mine.elements - inside, theirs.strip - in_strip});
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
