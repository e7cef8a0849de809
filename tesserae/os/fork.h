#pragma once

#include <mutex>

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

/// While one lives, threads that fork this process wait: for calls that take a lock which libc leaves locked in a child
/// that is forked meanwhile. What holds one must be short, and must neither fork nor make another.
class [[nodiscard]] NoForkMeanwhile {
 public:
  NoForkMeanwhile();

 private:
  std::unique_lock<std::mutex> lock_;
};

}  // namespace tesserae::os
