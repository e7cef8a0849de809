#pragma once

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "tesserae/comm/liveness/watched.h"

namespace tesserae::comm {

/// What the ranks of a job tell each other through the store, besides data. One request each; throws what the store
/// throws. Used from one thread.
class LivenessStore {
 public:
  explicit LivenessStore(c10::intrusive_ptr<c10d::Store> store);

  /// Where a process can be watched.
  struct Identity {
    std::string host;
    int64_t process = 0;
    uint64_t started = 0;
  };
  void introduce(int rank, const Identity& identity);
  Identity identity(int rank);  ///< waits for it

  void beat(int rank);
  /// How often each of `ranks` has beaten.
  std::vector<int64_t> beats(const std::vector<int>& ranks);

  /// Both lists grow in the order in which ranks were reported; open() makes them, once in a job.
  struct Gone {
    std::vector<int> lost, left;
    bool given_up = false;  ///< some of those that left go on without the groups of before
  };
  void open();
  void report_lost(int rank);
  void report_left(int rank, bool gives_up = false);
  Gone gone();

  /// The operation that `rank` has waited in for long.
  struct Slow {
    uint64_t sequence = 0;
    std::string text;
  };
  void report_slow(const std::string& group, int rank, const Slow& operation);
  std::optional<Slow> slow(const std::string& group, int rank);

  /// Whether `rank` waits for others, and which of `ranks` do not; none while not all of them have said so.
  void report_waiting(int rank, bool waits);
  std::vector<int> not_waiting(const std::vector<int>& ranks);

  /// Why a group has failed; the first report stays, and is returned.
  Verdict report_verdict(const std::string& group, const Verdict& verdict);
  std::optional<Verdict> verdict(const std::string& group);

 private:
  std::optional<std::string> find(const std::string& key);

  c10::intrusive_ptr<c10d::Store> store_;
};

}  // namespace tesserae::comm
