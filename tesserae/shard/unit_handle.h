#pragma once

namespace tesserae::shard {

class Engine;

/// What a unit is to those outside: the engine tells it who it is.
class UnitHandle {
 public:
  virtual ~UnitHandle() = default;
  /// The unit is `unit` of `engine` from now on; nullptr: of none.
  virtual void attach(Engine* engine, int unit) = 0;
  virtual bool attached() const = 0;

  /// The unit's parameters are about to be read in a backward, by gradients or by a recomputed forward; and: the
  /// backward (this one or one that was cut short) is over. On the thread that runs the backward.
  virtual void begin_backward() {}
  virtual void end_backward() {}
};

}  // namespace tesserae::shard
