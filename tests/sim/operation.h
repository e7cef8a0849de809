#pragma once

namespace tesserae::sim {

/// What this thread is doing, for the report of a fault and for what an allocation is called. `name` lives for ever.
class Operation {
 public:
  explicit Operation(const char* name);
  ~Operation();
  Operation(const Operation&) = delete;
  Operation& operator=(const Operation&) = delete;

  /// Of this thread: what it is in ("" outside), and what it was in last ("" if nothing).
  static const char* current();
  static const char* last();

 private:
  const char* outer_;
};

}  // namespace tesserae::sim
