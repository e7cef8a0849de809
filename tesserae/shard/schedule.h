#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace tesserae::shard {

/// The order in which units are used in a step (forward, then backward), recorded in one step and replayed in the next
/// to know what to gather ahead and what not to free yet. A step that departs from the record stays correct: it merely
/// finds less prefetched, and its own order is the record from then on.
class Schedule {
 public:
  struct Use {
    int unit = 0;
    bool backward = false;
    bool operator==(const Use&) const = default;
  };

  /// A forward of the root begins: the next use is the first of the record.
  void restart();
  /// A unit is about to be used. Returns false if the record says otherwise (a departure).
  bool use(Use use);
  /// The backward ended: what was used since restart() becomes the record.
  void finish();

  /// The uses that the record expects next, at most `count`.
  void upcoming(int count, std::vector<Use>& out) const;
  /// True if a use that the record expects in this step is of a unit for which `lacks(unit)` holds.
  template <class Lacks>
  bool any_ahead(const Lacks& lacks) const {
    for (size_t i = cursor_; i < record_.size(); ++i) {
      if (lacks(record_[i].unit)) return true;
    }
    return false;
  }
  /// True if one of the next `count` uses in the record is of this unit.
  bool needs_soon(int unit, int count) const;

 private:
  static constexpr size_t most = size_t{1} << 16;  // more is no step: parts of a model that are called by themselves

  std::vector<Use> record_;
  std::vector<Use> current_;
  size_t cursor_ = 0;
};

}  // namespace tesserae::shard
