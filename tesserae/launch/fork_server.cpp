#include "tesserae/launch/fork_server.h"

#include <charconv>
#include <chrono>
#include <utility>
#include <vector>

#include "tesserae/base/error.h"
#include "tesserae/base/log.h"
#include "tesserae/launch/ending.h"
#include "tesserae/launch/launched_rank.h"
#include "tesserae/os/clock.h"
#include "tesserae/os/packet_socket.h"
#include "tesserae/os/signal_numbers.h"

// How a rank is made:
//  1. The server loads what its ranks need, and says "ready" on the connection that fork_server_variable names, or why
//     there is no server.
//  2. An order is one packet with two descriptors: where the rank writes, and a pipe for the answer. It begins with 'o'
//     if the first is the rank's standard output, else 'e': its standard error that is either way. After that
//     "NAME=VALUE" and a zero byte for each variable.
//  3. The server makes a child, which makes the rank, answers with its id and a line's end, and ends: the rank has no
//     parent then, and comes to this process, which adopts orphans as long as an order is open.
//  4. The rank sees that its parent is this process, asks to be killed with it, and adds "ok" to the answer.
//  5. Whoever cannot go on says why instead. The answer ends when nobody has the pipe any more: a rank that was killed
//     meanwhile has said nothing, and is taken away here.
//  6. The server ends when nobody has the other end of its connection.
// What a server does that is a Python: python/tesserae/launch/fork_server.py.

namespace tesserae::launch {
namespace {

constexpr const char* ready = "ready";
constexpr const char* done = "ok";

}  // namespace

void ForkServer::start() {
  if (job_.fork_server.empty()) return;
  try {
    os::PacketPair pair = os::make_packet_pair();
    std::map<std::string, std::string> environment = environment_of_all(job_);
    environment[fork_server_variable] = std::to_string(pair.theirs.get());
    process_ = os::Process::spawn({.arguments = job_.fork_server,
                                   .environment = environment,
                                   .die_with_parent = true,
                                   .new_group = true,
                                   .kept = pair.theirs.get()});
    pair.theirs.reset();
    connection_ = std::move(pair.ours);
    if (!wait(connection_.get())) return give_up("");
    const std::optional<std::string> told = os::receive_packet(connection_.get());
    if (told == ready) return;
    give_up(told ? *told : how_it_ended());
  } catch (const IoError& error) {
    give_up(error.what());
  }
}

std::optional<os::Process> ForkServer::make(const std::map<std::string, std::string>& environment, int output,
                                            bool all) {
  if (!connection_) return std::nullopt;
  try {
    return order(environment, output, all);
  } catch (const IoError& error) {
    give_up(error.what());
    return std::nullopt;
  }
}

std::optional<os::Process> ForkServer::order(const std::map<std::string, std::string>& environment, int output,
                                             bool all) {
  std::string words(1, all ? 'o' : 'e');
  for (const auto& [name, value] : environment) words += cat(name, "=", value) + '\0';
  const os::Orphans orphans;
  os::Pipe answer = os::make_pipe();
  const bool sent = os::send_packet(connection_.get(), words, {output, answer.write.get()});
  answer.write.reset();
  std::string told;
  while (sent) {
    if (!wait(answer.read.get())) break;
    const std::string some = os::read_some(answer.read.get());
    if (some.empty()) break;
    told += some;
  }
  pid_t id = 0;
  const auto [end, error] = std::from_chars(told.data(), told.data() + told.size(), id);
  std::optional<os::Process> rank;
  if (error == std::errc() && id > 0) rank = os::Process::adopt(id);
  std::string said = rank ? end : told.data();
  if (rank && said == cat("\n", done)) return rank;
  if (said.starts_with('\n')) said.erase(0, 1);
  if (told.empty()) said = how_it_ended();  // it may have had the order by then, or not
  give_up(said.empty() ? "a rank was lost before it began" : said);
  return std::nullopt;
}

std::string ForkServer::how_it_ended() {
  const auto exit = process_->wait(os::Deadline(std::chrono::seconds(1)));
  return exit ? exit->text() : "it says nothing";
}

bool ForkServer::wait(int descriptor) const {
  const int signals = ending_.descriptor();
  std::vector<int> readable;
  while (readable.empty()) readable = os::wait_readable({descriptor, signals}, os::Deadline(std::chrono::seconds(10)));
  return readable.front() == descriptor;
}

void ForkServer::give_up(const std::string& why) {
  connection_.reset();
  if (process_) process_->signal_group(os::signal_kill);  // what its imports may have started, too
  process_.reset();
  if (!why.empty()) log(LogLevel::info, cat("each rank loads what it needs, as by --cold: ", why));
}

}  // namespace tesserae::launch
