#pragma once

namespace tesserae::os {

/// Tells an object with threads or connections whether it is where it was made. A child that was forked has a copy of
/// the object, but none of its threads, and connections that are still the parent's: it must neither use nor end them.
class ForkGuard {
 public:
  ForkGuard();
  /// True in a child that was forked after the guard was made. Costs a load.
  bool in_child() const;

 private:
  int depth_;
};

}  // namespace tesserae::os
