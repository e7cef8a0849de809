#include "tesserae/launch/fork_server.h"

#include <charconv>
#include <chrono>

#include "tesserae/base/error.h"
#include "tesserae/base/log.h"
#include "tesserae/launch/ending.h"
#include "tesserae/launch/launched_rank.h"
#include "tesserae/os/clock.h"

// How a rank is made:
//  1. The server loads what its ranks need, and reads orders from the descriptor that fork_server_variable names.
//  2. An order is one packet: 'o' if the rank's standard output is the descriptor that comes with it, else 'e': its
//     standard error is that either way. After that "NAME=VALUE" and a zero byte for each variable.
//  3. The server makes a child, which makes the rank and ends: the rank has no parent then, and comes to this process,
//     which adopts orphans as long as an order is open.
//  4. The rank sees that its parent is this process, asks to be killed with it, and answers with its id.
//  5. Any other answer, also to an order that was read, says why there is no rank. The server ends when nobody has the
//  other end of the connection.
// What a server does that is a Python: python/tesserae/fork_server.py.

namespace tesserae::launch {

std::optional<os::Process> ForkServer::make(const std::map<std::string, std::string>& environment, int output,
                                            bool all) {
  if (job_.fork_server.empty() || given_up_) return std::nullopt;
  std::string order(1, all ? 'o' : 'e');
  for (const auto& [name, value] : environment) order += cat(name, "=", value) + '\0';
  const os::Orphans orphans;
  if (!process_) start();
  if (!os::send_packet(connection_.get(), order, {output})) {
    give_up("it takes no orders");
    return std::nullopt;
  }
  const std::optional<std::string> told = answer();
  if (!told) return std::nullopt;
  pid_t id = 0;
  const auto parsed = std::from_chars(told->data(), told->data() + told->size(), id);
  if (parsed.ec == std::errc() && id > 0) return os::Process::adopt(id);
  give_up(*told);
  return std::nullopt;
}

void ForkServer::start() {
  os::PacketPair pair = os::make_packet_pair();
  std::map<std::string, std::string> environment = environment_of_all(job_);
  environment[fork_server_variable] = std::to_string(pair.theirs.get());
  process_ = os::Process::spawn({.arguments = job_.fork_server,
                                 .environment = environment,
                                 .die_with_parent = true,
                                 .new_group = true,
                                 .kept = pair.theirs.get()});
  connection_ = std::move(pair.ours);
}

std::optional<std::string> ForkServer::answer() {
  const int signals = ending_.descriptor();
  while (true) {
    for (const int ready : os::wait_readable({connection_.get(), signals}, os::Deadline(std::chrono::seconds(1)))) {
      if (ready == signals) {  // whatever starts now is asked to end; an answer that comes later is nobody's
        give_up("");
        return std::nullopt;
      }
      if (auto told = os::receive_packet(connection_.get())) return told;
      const auto exit = process_->wait(os::Deadline(std::chrono::seconds(1)));
      give_up(exit ? exit->text() : "it says nothing");
      return std::nullopt;
    }
  }
}

void ForkServer::give_up(const std::string& why) {
  given_up_ = true;
  connection_.reset();
  process_.reset();
  if (!why.empty()) log(LogLevel::info, cat("each rank loads what it needs, as by --cold: ", why));
}

}  // namespace tesserae::launch
