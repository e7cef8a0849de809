#include "cli/python.h"

#include <cstdlib>
#include <functional>

#include "tesserae/base/error.h"
#include "tesserae/config/json.h"
#include "tesserae/os/descriptor.h"
#include "tesserae/os/files.h"
#include "tesserae/os/process.h"
#include "tesserae/os/program.h"
#include "tesserae/os/signals.h"

namespace tesserae::cli {
namespace {

constexpr int cannot_import = 3;

std::string python_program() {
  const char* const named = std::getenv("TESSERAE_PYTHON");
  return named != nullptr ? named : "python3";
}

/// Where the package is that was built or installed beside this program.
std::vector<os::Path> package_folders() {
  const os::Path folder = os::Path(os::program_path()).parent_path();
  std::vector<os::Path> found;
  for (const os::Path& packages : {folder / "../python", folder / "../.."}) {
    if (os::files().exists(packages / "tesserae/__init__.py")) found.push_back(packages.lexically_normal());
  }
  return found;
}

/// PYTHONPATH, with the folder of the package that was built or installed beside this program in front. Without an
/// empty entry, which for Python is the folder where it is started.
std::string python_path() {
  std::string path;
  const auto add = [&path](const std::string& more) { path += (path.empty() ? "" : ":") + more; };
  for (const os::Path& packages : package_folders()) add(packages.native());
  const char* const before = std::getenv("PYTHONPATH");
  if (before != nullptr && *before != '\0') add(before);
  return path;
}

/// Nothing if the Python that would run has the package, else what is the matter.
std::string missing(const std::string& python, const std::string& path) {
  const std::string look =
      "import importlib.util, sys; "
      "sys.exit(3 * any(importlib.util.find_spec(name) is None for name in ('torch', 'tesserae')))";
  try {
    os::Process process = os::Process::spawn(
        {.arguments = {python, "-c", look}, .environment = {{"PYTHONPATH", path}}, .die_with_parent = true});
    const auto exit = process.wait(os::Deadline(std::chrono::seconds(60)));
    if (exit && exit->success()) return "";
    if (exit && exit->code == cannot_import) return cat(python, " cannot import both torch and tesserae");
    return cat(python, exit ? " " + exit->text() : " does not end");
  } catch (const IoError& error) {
    return config::without_function(error);
  }
}

void require_python(const std::string& verb, const std::string& python, const std::string& path) {
  const std::string what = missing(python, path);
  if (what.empty()) return;
  throw InvalidArgument(cat("tesserae ", verb), cat(what, "; name a Python that has them in TESSERAE_PYTHON"));
}

os::Command command_for(const std::string& verb, const std::string& module, const std::vector<std::string>& arguments) {
  const std::string python = python_program(), path = python_path();
  require_python(verb, python, path);
  // A group of its own: a Ctrl-C comes here, and is handed on once.
  os::Command command{.arguments = {python, "-m", module},
                      .environment = {{"PYTHONPATH", path}},
                      .die_with_parent = true,
                      .new_group = true};
  command.arguments.insert(command.arguments.end(), arguments.begin(), arguments.end());
  return command;
}

/// `take`: called again and again while it runs; takes in what there is, waiting a moment for it.
int run(const os::Command& command, const std::function<void()>& take) {
  const os::StopSignals signals({os::signal_interrupt, os::signal_terminate});
  os::Process process = os::Process::spawn(command);
  for (int handed = 0;;) {
    take();
    if (const auto exit = process.wait(os::Deadline(std::chrono::milliseconds(100)))) {
      return exit->signal != 0 ? 128 + exit->signal : exit->code;
    }
    if (signals.count() == handed) continue;
    handed = signals.count();
    process.signal(os::signal_interrupt);
  }
}

}  // namespace

int run_python(const std::string& verb, const std::string& module, const std::vector<std::string>& arguments) {
  return run(command_for(verb, module, arguments), [] {});
}

Script python_script(const std::string& verb, const std::vector<std::string>& arguments) {
  const std::string python = python_program(), path = python_path();
  require_python(verb, python, path);
  // Unbuffered, as by torchrun: what a rank printed before it was killed is not lost.
  Script script{.command = {python, "-u"}, .fork_server = {}, .environment = {{"PYTHONPATH", path}}};
  script.command.insert(script.command.end(), arguments.begin(), arguments.end());
  const bool is_file = arguments.front().ends_with(".py") && os::files().exists(arguments.front());
  const std::vector<os::Path> packages = package_folders();
  if ((arguments.front() != "-m" && !is_file) || packages.empty()) return script;
  script.fork_server = {python, "-u", packages.front() / "tesserae/launch/fork_server.py"};
  script.fork_server.insert(script.fork_server.end(), arguments.begin(), arguments.end());
  return script;
}

Answer ask_python(const std::string& verb, const std::string& module, const std::vector<std::string>& arguments) {
  os::Command command = command_for(verb, module, arguments);
  os::Pipe pipe = os::make_pipe();
  command.output = pipe.write.get();
  Answer answer;
  const auto take = [&] {
    while (!os::wait_readable({pipe.read.get()}, os::Deadline(std::chrono::milliseconds(0))).empty()) {
      const std::string some = os::read_some(pipe.read.get());
      if (some.empty()) return;
      answer.output += some;
    }
  };
  answer.status = run(command, take);
  take();  // what it wrote last
  return answer;
}

}  // namespace tesserae::cli
