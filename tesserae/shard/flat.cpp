#include "tesserae/shard/flat.h"

#include <algorithm>

#include "tesserae/base/checked.h"
#include "tesserae/base/error.h"

namespace tesserae::shard {
namespace {

constexpr int64_t slot_alignment = 8;  // 16 bytes in the narrowest dtype (two bytes)

// By rows what is frozen is shown as what is not: every rank has its rows.
mesh::Layout layout_of(bool trainable, const mesh::Layout& layout, CutBy cut_by) {
  if (trainable || cut_by == CutBy::rows) return layout;
  const int parameters = layout.degrees().parameters;
  return {layout.ranks(), {parameters, parameters, parameters}};
}

}  // namespace

int64_t Slot::row() const {
  int64_t elements = 1;
  for (size_t d = 0; d < shape.size(); ++d) {
    if (static_cast<int>(d) != dim) elements *= shape[d];
  }
  return std::max<int64_t>(elements, 1);
}

at::Tensor Slot::shaped(const at::Tensor& elements) const {
  if (dim == 0 && elements.numel() == this->elements) return elements.view(shape);
  std::vector<int64_t> stored = shape;
  stored.erase(stored.begin() + dim);
  stored.insert(stored.begin(), elements.numel() / row());
  return elements.view(stored).movedim(0, dim);
}

at::Tensor Slot::flattened(const at::Tensor& rows) const {
  return dim == 0 ? rows.reshape({-1}) : rows.movedim(dim, 0).reshape({-1});
}

Flat::Flat(std::string unit, std::vector<Slot> parameters, Dtypes dtypes, bool trainable, const mesh::Layout& layout,
           int rank, CutBy cut_by)
    : unit_(std::move(unit)),
      slots_(std::move(parameters)),
      dtypes_(dtypes),
      trainable_(trainable),
      layout_(layout_of(trainable, layout, cut_by)),
      rank_(rank),
      cut_by_(cut_by) {
  for (auto& slot : slots_) {
    if (slot.whole.empty()) slot.whole = slot.shape;
    const int64_t begin = round_up(elements_, slot_alignment);
    if (begin > elements_) gaps_.push_back({elements_, begin});
    slot.begin = begin;
    slot.elements = 1;
    for (const int64_t size : slot.shape) slot.elements = checked_mul(slot.elements, size);
    elements_ = checked_add(begin, slot.elements);
    parameters_ += slot.elements;
  }
  if (cut_by_ == CutBy::rows) alignment_ = slots_.at(0).row();
  chunk_ = layout_.chunk_elements(elements_, alignment_);
  if (total() > elements_) gaps_.push_back({elements_, total()});
}

Flat Flat::with(const mesh::Layout& layout) const {
  return {unit_, slots_, dtypes_, trainable_, layout, rank_, cut_by_};
}

void Flat::rename(const std::string& prefix) {
  if (prefix.empty()) return;
  unit_ = unit_ == "root" ? prefix : cat(prefix, ".", unit_);
  for (auto& slot : slots_) {
    for (auto& name : slot.names) name = cat(prefix, ".", name);
  }
}

std::vector<Slice> Flat::slices(const mesh::Range& range) const {
  std::vector<Slice> found;
  for (const auto& slot : slots_) {
    const int64_t begin = std::max(slot.begin, range.begin);
    const int64_t end = std::min(slot.end(), range.end);
    if (begin >= end) continue;
    found.push_back({slot.names.front(), slot.shape, begin - range.begin, end - range.begin, begin - slot.begin,
                     slot.split, slot.whole});
  }
  return found;
}

}  // namespace tesserae::shard
