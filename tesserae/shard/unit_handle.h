#pragma once

namespace tesserae::shard {

class ShardedUnit;

/// The module's end of a unit: it is told which ShardedUnit is its own.
class UnitHandle {
 public:
  virtual ~UnitHandle() = default;
  /// The module is that of `unit` from now on, also after it has joined another engine; nullptr: of none.
  virtual void set_unit(ShardedUnit* unit) = 0;
  virtual bool has_unit() const = 0;
};

}  // namespace tesserae::shard
