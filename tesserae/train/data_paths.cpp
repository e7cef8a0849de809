#include "tesserae/train/data_paths.h"

#include <chrono>
#include <cstdlib>
#include <optional>
#include <set>

#include "tesserae/config/json.h"
#include "tesserae/os/descriptor.h"
#include "tesserae/os/files.h"
#include "tesserae/os/process.h"

namespace tesserae::train {
namespace {

constexpr auto python_deadline = std::chrono::seconds(30);

/// What `python -c` prints of its library's folder; nothing if it cannot be run or says nothing.
std::optional<std::string> ask_python(const std::string& python) {
  try {
    os::Pipe pipe = os::make_pipe();
    os::Process process =
        os::Process::spawn({.arguments = {python, "-c", "import sysconfig; print(sysconfig.get_path('stdlib'))"},
                            .environment = {},
                            .die_with_parent = true,
                            .new_group = false,
                            .output = pipe.write.get(),
                            .errors = -1});
    pipe.write.reset();
    const os::Deadline deadline(python_deadline);
    std::string answer;
    while (!os::wait_readable({pipe.read.get()}, deadline).empty()) {
      const std::string bytes = os::read_some(pipe.read.get());
      if (bytes.empty()) break;
      answer += bytes;
    }
    const auto exit = process.wait(deadline);
    while (!answer.empty() && answer.back() == '\n') answer.pop_back();
    if (exit && exit->success() && !answer.empty()) return answer;
  } catch (const IoError&) {
    // No such program: the caller says what to do.
  }
  return std::nullopt;
}

std::string python_library(const std::string& key) {
  const char* named = std::getenv("TESSERAE_PYTHON");
  const std::vector<std::string> candidates =
      named != nullptr ? std::vector<std::string>{named} : std::vector<std::string>{"python3", "python"};
  for (const std::string& python : candidates) {
    if (const auto folder = ask_python(python)) return *folder;
  }
  throw config::ConfigError(key,
                            cat("python:stdlib needs ", candidates[0],
                                " to say where its library lies, and it cannot be run; give a folder of text instead"));
}

std::vector<std::string> modules(const std::string& key) {
  static const std::set<std::string> others = {"site-packages", "dist-packages", "test", "__pycache__", "lib-dynload"};
  const std::string library = python_library(key);
  std::vector<std::string> found;
  for (const std::string& name : os::files().list(library)) {
    const std::string path = library + "/" + name;
    const os::FileKind kind = os::files().status(path).kind;
    if (others.contains(name)) continue;
    if (kind == os::FileKind::directory || (kind == os::FileKind::file && name.ends_with(".py"))) found.push_back(path);
  }
  if (found.empty())
    throw config::ConfigError(key, cat("python:stdlib: ", library, " holds no modules; give a folder of text instead"));
  return found;
}

}  // namespace

std::vector<std::string> resolve_data_paths(const std::vector<std::string>& paths) {
  std::vector<std::string> resolved;
  for (size_t i = 0; i < paths.size(); ++i) {
    const std::string key = paths.size() == 1 ? "data.path" : cat("data.path[", i, "]");
    try {
      if (paths[i] == "python:stdlib") {
        const std::vector<std::string> found = modules(key);
        resolved.insert(resolved.end(), found.begin(), found.end());
        continue;
      }
      if (!os::files().exists(paths[i])) throw config::ConfigError(key, cat("there is no file or folder ", paths[i]));
    } catch (const IoError& error) {
      throw config::ConfigError(key, config::without_function(error));
    }
    resolved.push_back(paths[i]);
  }
  return resolved;
}

}  // namespace tesserae::train
