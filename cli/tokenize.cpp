#include <cstdlib>
#include <memory>
#include <string>
#include <vector>

#include "cli/verbs.h"
#include "tesserae/base/error.h"
#include "tesserae/config/json.h"
#include "tesserae/os/descriptor.h"
#include "tesserae/os/files.h"
#include "tesserae/os/process.h"
#include "tesserae/os/program.h"
#include "tesserae/os/signals.h"

// Tokenizers, JSON and Parquet are the business of Python's libraries: the verb starts `python -m tesserae.tokenize`
// with what it was given, hands on the signals that end it, and ends as that does.

namespace tesserae::cli {
namespace {

constexpr int cannot_import = 3;

std::string python_program() {
  const char* const named = std::getenv("TESSERAE_PYTHON");
  return named != nullptr ? named : "python3";
}

/// PYTHONPATH, with the folder of the package that was built or installed beside this program in front.
std::string python_path() {
  const os::Path folder = os::Path(os::program_path()).parent_path();
  std::string path;
  for (const os::Path& packages : {folder / "../python", folder / "../.."}) {
    if (os::files().exists(packages / "tesserae/tokenize.py")) path += packages.lexically_normal().native() + ":";
  }
  const char* const before = std::getenv("PYTHONPATH");
  return path + (before != nullptr ? before : "");
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
    if (exit && exit->code == cannot_import) return cat(python, " has not both packages, torch and tesserae");
    return cat(python, exit ? " " + exit->text() : " does not end");
  } catch (const IoError& error) {
    return config::without_function(error);
  }
}

int run_tokenize(const std::vector<std::string>& arguments) {
  const std::string python = python_program(), path = python_path();
  if (const std::string what = missing(python, path); !what.empty()) {
    throw InvalidArgument("tesserae tokenize", cat(what, "; name a Python that has them in TESSERAE_PYTHON"));
  }
  std::vector<std::string> command = {python, "-m", "tesserae.tokenize"};
  command.insert(command.end(), arguments.begin(), arguments.end());
  // A group of its own: a Ctrl-C comes here, and is handed on once.
  const os::StopSignals signals({os::signal_interrupt, os::signal_terminate});
  os::Process process = os::Process::spawn(
      {.arguments = command, .environment = {{"PYTHONPATH", path}}, .die_with_parent = true, .new_group = true});
  for (int handed = 0;;) {
    if (const auto exit = process.wait(os::Deadline(std::chrono::milliseconds(100)))) {
      return exit->signal != 0 ? 128 + exit->signal : exit->code;
    }
    if (signals.count() == handed) continue;
    handed = signals.count();
    process.signal(os::signal_interrupt);
  }
}

}  // namespace

void add_tokenize(CLI::App& program, int& status) {
  CLI::App* verb = program.add_subcommand("tokenize", "Turn text, JSON lines and Parquet into tokens to train on");
  verb->prefix_command();
  verb->set_help_flag();  // --help is for Python, which has the options
  verb->callback([verb, &status] { status = run_tokenize(verb->remaining()); });
}

}  // namespace tesserae::cli
