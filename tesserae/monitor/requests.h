#pragma once

#include <cstdint>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "tesserae/monitor/board.h"
#include "tesserae/monitor/run_files.h"
#include "tesserae/os/line_server.h"

namespace tesserae::monitor {

// What is asked of a job while it runs, through the socket `monitor.sock` of its run folder: a JSON object a line, one
// request a connection (os/line_server.h).
//
//  1. The client asks: {"ask": "stacks"}, or {"ask": "trace", "steps": 3}.
//  2. The job answers with events; the last one is marked (*):
//       {"event": "accepted"}                            ranks are being asked
//       {"event": "stacks", "files": [..], "silent": [ranks]} (*)
//       {"event": "trace", "file", "first", "last"} (*)  of these steps
//       {"event": "error", "message"} (*)
inline constexpr const char* socket_name = "monitor.sock";
inline constexpr int64_t most_traced_steps = 100;

/// Rank 0's: turns requests into what it wishes of all ranks, and their reports into answers. One request is worked on
/// at a time; the next ones wait.
class Requests {
 public:
  /// Throws os::AddressInUse if a live job has that folder, IoError if there can be no socket.
  explicit Requests(const os::Path& run);

  /// After a round of reports: changes `wish` if something was asked for, and writes and answers what is complete.
  /// From the thread that has the board.
  void look(Board& board, Wish& wish, RunFiles& files, const std::vector<std::string>& units, double round_seconds);
  /// As if a client had asked for stacks: a job hangs.
  void ask_for_stacks();

 private:
  struct Asked {
    int64_t client = 0;  // 0: nobody
    int64_t steps = 0;   // 0: stacks
  };
  os::LineServer::Answer answer(int64_t client, const std::string& line);
  void begin(const Board& board, Wish& wish, double round_seconds);
  bool write_stacks(Board& board, const Wish& wish, RunFiles& files);
  bool write_trace(Board& board, Wish& wish, RunFiles& files, const std::vector<std::string>& units, double round);
  void tell(const Json& event);

  std::mutex mutex_;  // of waiting_
  std::vector<Asked> waiting_;
  std::optional<Asked> at_hand_;
  os::TimePoint begun_;
  int tries_ = 0;  // of the trace at hand
  os::LineServer lines_;
};

}  // namespace tesserae::monitor
