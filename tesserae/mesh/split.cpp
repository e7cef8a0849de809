#include "tesserae/mesh/split.h"

#include <algorithm>

#include "tesserae/base/error.h"
#include "tesserae/mesh/cut.h"

// Two splits are two cuts, one after the other: a part of the first, without its padding, is a tensor of its own, and
// the second cuts that. What Cut says of one is composed here.
namespace tesserae::mesh {
namespace {

/// Two cuts, checked: the second is of the first one's part.
struct Cuts {
  Cuts(const std::vector<int64_t>& whole, const Splits& splits)
      : first(whole, splits.first()), inner(first.real_shape()), second(inner, splits.second()) {
    if (splits.second().whole()) return;
    if (splits.first().axis == splits.second().axis) refuse(whole, splits, "cut it along an axis once");
    if (first.pads() && splits.second().dim == 0) {
      refuse(whole, splits,
             "the first cut pads dimension 0, so the second cannot cut it; exchange them, or let the "
             "first be one that divides its size");
    }
  }

  Cut first;
  std::vector<int64_t> inner;  // the tensor that the second one cuts
  Cut second;
};

/// The same places, whichever the part and the axis.
bool same_cut(const Split& a, const Split& b) {
  return a.whole() == b.whole() && (a.whole() || (a.dim == b.dim && a.parts == b.parts && a.blocks == b.blocks));
}

Split part_0(Split split) {
  split.index = 0;
  return split;
}

std::string text_of(const Split& split) {
  return cat("dimension ", split.dim, " cut in ", split.parts, " parts",
             split.blocks == 1 ? "" : cat(" of each of ", split.blocks, " blocks"),
             split.axis == Axis::tensor ? "" : cat(" over ", to_string(split.axis)));
}

/// From the row-major order of the whole tensor cut by `first` to that of `stored`, both cut twice perhaps.
void compose_runs(const std::vector<int64_t>& whole, const Splits& splits, const Range& elements, const Splits& stored,
                  const Cut::Visit& visit) {
  const Cuts cuts(whole, splits);
  const Cut stored_first(whole, part_0(stored.first()));
  // 1. From the part to the first cut's part; 2. from there to the stored order of the other first cut;
  cuts.second.for_each_run(elements, {}, [&](const Range& from, const Range& middle) {
    cuts.first.for_each_run(middle, stored.first(), [&](const Range& outer, Range to) {
      int64_t begin = from.begin + outer.begin - middle.begin;
      // 3. and, part by part of that, to the order of its second cut.
      while (!to.empty()) {
        const Cut part(whole, stored_first.part_at(to.begin));
        const std::vector<int64_t> inner = part.real_shape();
        const Range here{to.begin - part.begin(), std::min(to.end - part.begin(), part.elements())};
        Cut(inner, {}).for_each_run(here, stored.second(), [&](const Range& row_major, const Range& place) {
          const int64_t first = begin + row_major.begin - here.begin;
          visit({first, first + place.size()}, {part.begin() + place.begin, part.begin() + place.end});
        });
        to.begin += here.size();
        begin += here.size();
      }
    });
  });
}

}  // namespace

Splits::Splits(const Split& first, const Split& second) : first_(first), second_(second) {
  if (first_.whole()) std::swap(first_, second_);
}

const Split& Splits::along(Axis axis) const {
  static const Split none;
  if (!first_.whole() && first_.axis == axis) return first_;
  return !second_.whole() && second_.axis == axis ? second_ : none;
}

AxisSet state_axes(const Splits& splits) {
  return splits.along(Axis::expert).whole() ? axes::state : axes::expert_state;
}

std::string to_string(const Splits& splits) {
  if (splits.whole()) return "no split";
  return cat(text_of(splits.first()), splits.second().whole() ? "" : cat(", then ", text_of(splits.second())));
}

std::vector<int64_t> part_shape(const std::vector<int64_t>& whole, const Splits& splits) {
  const Cuts cuts(whole, splits);
  const std::vector<int64_t> outer = cuts.first.shape();
  return Cut(outer, splits.second()).shape();
}

int64_t part_elements(const std::vector<int64_t>& whole, const Splits& splits) {
  return Cuts(whole, splits).second.elements();
}

int64_t part_begin(const std::vector<int64_t>& whole, const Splits& splits) {
  const Cuts cuts(whole, splits);
  return cuts.first.begin() + cuts.second.begin();
}

Splits part_at(const std::vector<int64_t>& whole, const Splits& splits, int64_t element) {
  if (element < 0 || element >= product(whole)) {
    throw InvalidArgument("part_at", cat("element ", element, " of a tensor of shape ", text_of(whole)));
  }
  const Split outer = Cuts(whole, splits).first.part_at(element);
  const Cuts cuts(whole, {outer, splits.second()});
  return {outer, cuts.second.part_at(element - cuts.first.begin())};
}

Splits stored_order(const std::vector<int64_t>& whole, const Splits& splits) {
  const Split first = part_0(splits.first()), second = part_0(splits.second());
  Cuts(whole, splits);  // checks the indices
  const Cuts cuts(whole, {first, second});
  if (cuts.second.row_major()) return cuts.first.row_major() ? Split{} : first;
  return cuts.first.elements() == product(whole) ? second : Splits(first, second);
}

void for_each_run(const std::vector<int64_t>& whole, const Splits& splits, const Range& elements, const Splits& stored,
                  const std::function<void(const Range& from, const Range& to)>& visit) {
  const Cuts cuts(whole, splits);
  if (elements.begin < 0 || elements.end > product(part_shape(whole, splits))) {
    throw InvalidArgument("for_each_run", cat("elements [", elements.begin, ", ", elements.end, ") of a part of ",
                                              cuts.second.elements(), " elements"));
  }
  const Range real{elements.begin, std::min(elements.end, cuts.second.elements())};  // padding is last
  const Splits mine = stored_order(whole, splits),
               theirs = stored_order(whole, {part_0(stored.first()), part_0(stored.second())});
  if (real.empty()) return;
  if (same_cut(mine.first(), theirs.first()) && same_cut(mine.second(), theirs.second())) {
    const int64_t begin = cuts.first.begin() + cuts.second.begin();
    visit(real, {begin + real.begin, begin + real.end});
    return;
  }
  if (splits.second().whole() && theirs.second().whole()) {
    cuts.first.for_each_run(real, theirs.first(), visit);
    return;
  }
  Range from{real.begin, real.begin}, to{-1, -1};
  compose_runs(whole, splits, real, theirs, [&](const Range& next, const Range& place) {
    if (place.begin != to.end) {
      if (!from.empty()) visit(from, to);
      from = {next.begin, next.begin};
      to = {place.begin, place.begin};
    }
    from.end = next.end;
    to.end = place.end;
  });
  visit(from, to);
}

}  // namespace tesserae::mesh
