#include "tesserae/launch/waiting_ranks.h"

#include <ATen/Parallel.h>

#include <cstdlib>
#include <utility>

#include "tesserae/base/error.h"
#include "tesserae/os/write_all.h"

// A copy reads its orders to their end: "NAME=VALUE" and a zero byte each. None: whoever made it is gone.

namespace tesserae::launch {
namespace {

constexpr const char* threads_variable = "OMP_NUM_THREADS";

bool take_orders(int from) {
  std::string orders;
  for (std::string part = os::read_some(from); !part.empty(); part = os::read_some(from)) orders += part;
  for (size_t at = 0, end = 0; (end = orders.find('\0', at)) != std::string::npos; at = end + 1) {
    const std::string variable = orders.substr(at, end - at);
    const size_t name = variable.find('=');
    ::setenv(variable.substr(0, name).c_str(), variable.c_str() + name + 1, 1);
    // OpenMP has read it long ago.
    if (variable.substr(0, name) == threads_variable) at::set_num_threads(std::atoi(variable.c_str() + name + 1));
  }
  return !orders.empty();
}

}  // namespace

WaitingRanks::WaitingRanks(int count, const std::function<int()>& body) {
  for (int rank = 0; rank < count; ++rank) {
    os::Pipe output = os::make_pipe(), orders = os::make_pipe();
    const os::Command command{.die_with_parent = true,
                              .new_group = true,
                              .output = rank == 0 ? -1 : output.write.get(),
                              .errors = output.write.get(),
                              .kept = orders.read.get()};
    std::optional<os::Process> process =
        os::Process::copy(command, [from = orders.read.get(), &body] { return take_orders(from) ? body() : 1; });
    if (!process) return;
    waiting_.push_back({{std::move(*process), std::move(output.read)}, std::move(orders)});
  }
}

std::optional<WaitingRanks::Rank> WaitingRanks::call(const std::map<std::string, std::string>& environment) {
  if (waiting_.empty()) return std::nullopt;
  Waiting next = std::move(waiting_.front());
  waiting_.pop_front();
  std::string orders;
  for (const auto& [name, value] : environment) orders += cat(name, "=", value) + '\0';
  os::write_all(next.orders.write.get(), orders);
  return std::move(next.rank);
}

}  // namespace tesserae::launch
