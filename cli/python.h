#pragma once

#include <map>
#include <string>
#include <vector>

// Verbs whose work is that of Python's libraries: they start a module of the package tesserae.
namespace tesserae::cli {

/// Starts `python -m module` with these arguments, hands on the signals that end this process, and returns its exit
/// status as a shell has it. The Python is what TESSERAE_PYTHON names, else python3. Throws InvalidArgument for one
/// that lacks the packages; `verb` is whose error that is.
int run_python(const std::string& verb, const std::string& module, const std::vector<std::string>& arguments);

/// The same, with what it writes to standard output.
struct Answer {
  int status = 0;
  std::string output;
};
Answer ask_python(const std::string& verb, const std::string& module, const std::vector<std::string>& arguments);

/// The same Python for a script of the user's: what a process is started with.
struct Script {
  std::vector<std::string> command;
  std::vector<std::string> fork_server;  ///< launch::LocalJob's for it; empty: it is no file of Python's
  std::map<std::string, std::string> environment;
};
Script python_script(const std::string& verb, const std::vector<std::string>& arguments);

}  // namespace tesserae::cli
