#pragma once

namespace tesserae::comm {

// Whether this process waits for other ranks, in whichever of its fabrics: who waits in one is not absent from another.
// Thread-safe.

/// One of those in which it may wait. It waits in none of them at first.
class WaitsForOthers {
 public:
  WaitsForOthers() = default;
  ~WaitsForOthers() { set(false); }
  WaitsForOthers(const WaitsForOthers&) = delete;
  WaitsForOthers& operator=(const WaitsForOthers&) = delete;

  /// From one thread at a time.
  void set(bool waits);

 private:
  bool waits_ = false;
};

/// Whether it waits in any of them. True for ever after waits_unseen().
bool process_waits();

/// The process may wait in what is none of ours: another library's group, the stream of an accelerator.
void waits_unseen();

}  // namespace tesserae::comm
