// How a job on several hosts goes on without one of them:
//
//  1. The launcher of the first host serves the job's store and counts epochs, as on one host (membership.cpp); the
//     others start their ranks and tell it how these end. Each of these launchers beats.
//  2. Ranks whose operations failed name those for which they waited. Of such a rank on another host the first
//     launcher asks that host's to kill it, and counts it as lost once it says that it has ended. If it is replaced,
//     that host's launcher is told to start the new process.
//  3. A host whose launcher has not beaten for `patience` is given up, with all of its ranks, and for good.
//  4. A launcher that has had no answer for `patience`, counted from a beat that was answered, kills its ranks. So they
//     are gone when the others go on, whatever cut it off, since the first launcher counts from when it saw that beat,
//     and waits a little longer. One that is heard again finds that it was given up, and does the same.
//  5. A launcher that comes a second time (its host was started again) has no part in the job either, since nobody
//     knows what became of the ranks of before. It is refused, and its host given up at once.
//  6. If the first host is lost there is nobody to decide: the ranks of the others end by 4. Unless all hosts see one
//     folder: then one of the others takes over, as succession.cpp says, and who decides claims before 3. Instead of 4,
//     ranks of a host that is cut off live until it knows of a claim; without a launcher that decides they get nowhere.
//  7. A first launcher that was told that the job survives no loss takes no part: the store is its rank 0's, which has
//     none of the keys that it would make. The ranks find out and end (train/same_config.h); nobody is killed here.
//
// So at most one side goes on, that of the host that decides; and what the ranks of another one may still do until 4 is
// nothing that counts, since rank 0, which alone writes what a run says and commits checkpoints, is with the one that
// decides, as long as that has a rank.

#include "tesserae/comm/host_links.h"

#include <sstream>

#include "tesserae/base/error.h"

namespace tesserae::comm::links {

std::string beats_of(int host) {
  return cat("beats/", host);
}
std::string exits_of(int host) {
  return cat("exits/", host);
}
std::string order_of(int host, int number) {
  return cat("order/", host, "/", number);
}
std::string launchers_of(int host) {
  return cat("launchers/", host);
}
std::string given_up_key(int host) {
  return cat("given-up/", host);
}
std::string come_over_key(int host) {
  return cat("come-over/", host);
}

std::string text_of(const Order& order) {
  return cat(static_cast<int>(order.kind), " ", order.process, " ", order.rank, " ", order.local_rank, " ", order.ranks,
             " ", order.epoch);
}

Order order_from(const std::string& text) {
  std::istringstream words(text);
  int kind = 0;
  Order order;
  words >> kind >> order.process >> order.rank >> order.local_rank >> order.ranks >> order.epoch;
  order.kind = static_cast<Order::Kind>(kind);
  return order;
}

std::string text_of(const std::vector<RankProcess>& processes) {
  std::string text = " ";
  for (const RankProcess& each : processes) {
    text += cat(each.number, " ", each.rank, " ", each.local_rank, " ", each.name, " ");
  }
  return text;
}

std::vector<RankProcess> processes_from(const std::string& text) {
  std::vector<RankProcess> processes;
  std::istringstream words(text);
  for (RankProcess each; words >> each.number >> each.rank >> each.local_rank >> each.name;) processes.push_back(each);
  return processes;
}

std::vector<int> numbers(const std::string& text) {
  std::vector<int> found;
  std::istringstream words(text);
  for (int number = 0; words >> number;) found.push_back(number);
  return found;
}

}  // namespace tesserae::comm::links
