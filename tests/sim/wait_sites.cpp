#include "tests/sim/wait_sites.h"

#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <map>
#include <regex>
#include <set>
#include <sstream>
#include <string_view>

#include "tesserae/base/error.h"

extern "C" const char __executable_start;

namespace tesserae::sim {
namespace {

/// A position in a source, as addr2line prints it; of an instruction that was inlined there are several.
struct Position {
  std::string function, file;
  int line = 0;
};

enum class Owner { nobody, engine, test };

// Those that wait on behalf of their callers.
struct Helper {
  std::string_view file, function;
};
constexpr Helper helpers[] = {
    {"comm/lane.cpp", "wait"},              // Ticket::wait
    {"shard/exposed_time.cpp", "wait"},     //
    {"offload/pinned_shelf.cpp", "order"},  //
    {"offload/paged_tensor.cpp", ""},       // copy(), and what it consists of
};

// Sources of which no wait is for a device, or that other programs of the tests try.
constexpr std::pair<std::string_view, std::string_view> of_the_host[] = {
    {"comm/transports/shm_", "ranks of one host, in shared memory"},
    {"comm/transports/gloo_", "sockets"},
    {"comm/torch_backend/", "threads of a process"},
    {"comm/liveness/", "threads of a process"},
    {"comm/rendezvous", "the store"},
    {"checkpoint/saver", "the thread that writes"},
    {"offload/paged_memory", "the disk"},
    {"comm/transports/staged_group", "tests/device: ranks are processes"},
    {"shard/rejoin", "test_sim_training: ranks are lost"},
    {"shard/exposed_time", "how long others waited: without it a figure is wrong, and nothing else"},
};

// Lines in sources that do wait for devices: those that do not, and those that a device has no use for.
constexpr std::pair<std::string_view, std::string_view> lines_of_the_host[] = {
    {"ready.wait(false)", "a thread starts"},
    {"changed.wait(lock", "lanes with a thread"},
    {"state_->done.wait(", "lanes with a thread: on a stream a task is done when submit returns"},
    {"for (const auto& work : works) work->wait()", "backends that do not coalesce messages"},
    {"context_.sharding->gather_lane.submit(task).wait()", "memory that ranks of a host share"},
    {"group.barrier(label)", "the same"},
    {"state_->event->block(", "of Ticket::wait, whose callers are tried"},
    {"event.record(earlier)", "of order(), whose callers are tried"},
    {"event.block(later)", "the same"},
};

// Events here say how long others have waited; the wait itself is the callers'.
constexpr std::string_view figures = "tesserae/shard/exposed_time.cpp";

std::string under_root(const std::string& path) {
  const std::string plain = std::filesystem::path(path).lexically_normal().string();
  for (const std::string_view folder : {"/tests/", "/tesserae/"}) {
    const size_t at = plain.rfind(folder);
    if (at != std::string::npos) return plain.substr(at + 1);
  }
  return plain;
}

Owner owner_of(const Position& position) {
  constexpr std::string_view simulator[] = {"guard.cpp", "natives.cpp", "process_group", "waits.cpp"};
  if (position.file.starts_with("tesserae/")) return Owner::engine;
  if (!position.file.starts_with("tests/")) return Owner::nobody;
  for (const std::string_view file : simulator) {
    if (position.file.starts_with("tests/sim/" + std::string(file))) return Owner::nobody;
  }
  return Owner::test;
}

bool is_helper(const Position& position) {
  return std::ranges::any_of(helpers, [&](const Helper& helper) {
    return position.file == "tesserae/" + std::string(helper.file) &&
           position.function.find(helper.function) != std::string::npos;
  });
}

std::map<void*, std::vector<Position>> positions_of(const std::set<void*>& addresses) {
  std::ostringstream command;
  command << "addr2line -a -i -f -C -e /proc/" << getpid() << "/exe" << std::hex;
  std::vector<void*> asked(addresses.begin(), addresses.end());
  for (void* const address : asked) {  // of the call, not of what comes after it
    command << " 0x" << static_cast<const char*>(address) - &__executable_start - 1;
  }
  std::FILE* const pipe = popen(command.str().c_str(), "r");
  if (pipe == nullptr) throw Error("wait_sites", "addr2line cannot be run; install binutils");
  std::string text;
  char buffer[4096];
  while (const size_t count = std::fread(buffer, 1, sizeof buffer, pipe)) text.append(buffer, count);
  pclose(pipe);

  std::map<void*, std::vector<Position>> found;
  std::istringstream lines(text);
  std::string line, place;
  for (size_t next = 0; std::getline(lines, line);) {
    if (line.starts_with("0x")) {
      if (next == asked.size()) throw Error("wait_sites", cat("addr2line says more than it was asked: ", line));
      found[asked[next++]];
      continue;
    }
    if (next == 0 || !std::getline(lines, place)) break;
    const size_t colon = place.rfind(':');
    const int number = std::atoi(place.c_str() + colon + 1);
    found[asked[next - 1]].push_back({line, under_root(place.substr(0, colon)), number});
  }
  return found;
}

}  // namespace

std::string WaitSite::name() const {
  return cat(file, ":", line, " ", to_string(wait));
}

std::vector<WaitSite> wait_sites(const std::vector<WaitCall>& calls) {
  std::set<void*> addresses;
  for (const WaitCall& call : calls) addresses.insert(call.stack.begin(), call.stack.end());
  const auto positions = positions_of(addresses);
  std::map<std::string, WaitSite> sites;
  bool any_lines = false;
  for (const WaitCall& call : calls) {
    const auto measures = [&](void* address) {
      const auto at = positions.find(address);
      return at != positions.end() &&
             std::ranges::any_of(at->second, [](const Position& position) { return position.file == figures; });
    };
    if (call.wait != Wait::block && std::ranges::any_of(call.stack, measures)) continue;
    std::vector<void*> through;
    for (void* const address : call.stack) {
      const auto at = positions.find(address);
      if (at == positions.end()) throw Error("wait_sites", "addr2line does not answer; install binutils");
      const auto first = std::ranges::find_if(at->second, [](const Position& position) {
        return owner_of(position) != Owner::nobody && !is_helper(position);
      });
      if (first == at->second.end()) {
        through.push_back(address);
        continue;
      }
      any_lines = true;
      if (owner_of(*first) == Owner::test) break;
      WaitSite site{.file = first->file, .line = first->line, .wait = call.wait, .through = {}, .at = {}};
      WaitSite& known = sites.try_emplace(site.name(), site).first->second;
      known.through.insert(known.through.end(), through.begin(), through.end());
      known.at.push_back(address);
      break;
    }
  }
  if (!any_lines) throw Error("wait_sites", "this program has no line numbers; build it with -DTESSERAE_WAIT_LINES=ON");
  std::vector<WaitSite> result;
  for (auto& [name, site] : sites) result.push_back(std::move(site));
  std::ranges::sort(result, [](const WaitSite& a, const WaitSite& b) {
    return std::tie(a.file, a.line, a.wait) < std::tie(b.file, b.line, b.wait);
  });
  return result;
}

std::vector<std::string> never_met(const std::vector<WaitSite>& sites, const std::string& root) {
  static const std::regex written(R"((\.|->)(wait|block|record|query|synchronizeStream|synchronize)\(|order\(copies)");
  std::vector<std::string> missing;
  for (const std::string folder : {"comm", "offload", "tensor", "context", "shard", "optim", "checkpoint"}) {
    for (const auto& entry : std::filesystem::recursive_directory_iterator(root + "/tesserae/" + folder)) {
      const std::string file = under_root(entry.path().string());
      if (!file.ends_with(".cpp") && !file.ends_with(".h")) continue;
      const auto is_of = [&](const auto& pair) { return file.starts_with("tesserae/" + std::string(pair.first)); };
      if (std::ranges::any_of(of_the_host, is_of)) continue;
      std::ifstream source(entry.path());
      std::string line;
      for (int number = 1; std::getline(source, line); ++number) {
        if (!std::regex_search(line, written)) continue;
        const auto is_here = [&](const WaitSite& site) { return site.file == file && site.line == number; };
        const auto says = [&](const auto& pair) { return line.find(pair.first) != std::string::npos; };
        if (std::ranges::any_of(sites, is_here) || std::ranges::any_of(lines_of_the_host, says)) continue;
        missing.push_back(cat(file, ":", number, ": ", line.substr(line.find_first_not_of(' '))));
      }
    }
  }
  std::ranges::sort(missing);
  return missing;
}

}  // namespace tesserae::sim
