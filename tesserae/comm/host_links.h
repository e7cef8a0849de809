#pragma once

#include <chrono>
#include <string>
#include <vector>

namespace tesserae::comm {

/// What the launcher that decides tells another host's to do with a process. Processes have numbers over all hosts:
/// those of the job's start have their rank's.
struct Order {
  enum class Kind { kill, start, number };
  Kind kind = Kind::kill;
  int process = 0;
  int rank = 0;  ///< which it is from now on; unused by `kill`
  // To start it: in the place of one that has ended there, in the epoch that begins.
  int local_rank = 0, ranks = 0, epoch = 0;

  bool operator==(const Order&) const = default;
};

/// A process of a rank, as its launcher tells the one that it follows from now on.
struct RankProcess {
  int number = 0, rank = 0, local_rank = 0;
  std::string name;  ///< process_variable (membership.h)

  bool operator==(const RankProcess&) const = default;
};

// What launchers tell each other as it lies in the store: host_links.cpp opens with the protocol. Keys of a host are
// told by its launcher or to it.
namespace links {

inline constexpr const char* prefix = "hosts";
inline constexpr const char* job_over = "over";    ///< the job's status
inline constexpr const char* gone_hosts = "gone";  ///< numbers of those that have no part in the job any more
std::string beats_of(int host);
std::string launchers_of(int host);  ///< how many have come
std::string exits_of(int host);      ///< "PROCESS CODE SIGNAL " of each; or one of these two in place of a process
inline constexpr int host_left = -1, host_closes = -2;
std::string order_of(int host, int number);
std::string given_up_key(int host);
std::string come_over_key(int host);

std::string text_of(const Order& order);
Order order_from(const std::string& text);
std::string text_of(const std::vector<RankProcess>& processes);
std::vector<RankProcess> processes_from(const std::string& text);
std::vector<int> numbers(const std::string& text);

inline constexpr std::chrono::milliseconds look_every(50), beat_every(250);
/// A host may come later than the first one: containers are fetched, queues are long.
inline constexpr std::chrono::milliseconds to_come(120'000);

}  // namespace links
}  // namespace tesserae::comm
