#include <CLI/CLI.hpp>
#include <cstdio>
#include <memory>
#include <string>

#include "cli/ask.h"
#include "cli/numbers.h"
#include "cli/verbs.h"
#include "tesserae/comm/rank_list.h"

namespace tesserae::cli {

void add_stacks(CLI::App& program, int& status) {
  struct Arguments {
    std::string folder;
    double wait_seconds = 30;
  };
  auto arguments = std::make_shared<Arguments>();
  CLI::App* verb = program.add_subcommand("stacks", "Write down where every thread of every rank of a run is");
  verb->add_option("RUN_DIR", arguments->folder, "The run folder")->required();
  verb->add_option("--wait", arguments->wait_seconds, "How long to wait for the ranks")
      ->check(positive())
      ->type_name("SECONDS")
      ->capture_default_str();
  verb->footer(
      "For a run that hangs or is slow: the stacks of C++ and Python go to RUN_DIR/monitor/stacks-RANK.txt, whose "
      "names\n"
      "are printed. Ranks that do not answer are named. Training goes on meanwhile. A run in which no step ends for\n"
      "long writes them by itself.\n"
      "It talks to the run through RUN_DIR/monitor.sock: on the host of its rank 0, as the user that started it.");
  verb->callback([arguments, &status] {
    const dial::Json event = ask_monitor(arguments->folder, {{"ask", "stacks"}}, arguments->wait_seconds);
    for (const auto& file : event.at("files")) std::printf("%s\n", file.get<std::string>().c_str());
    const auto silent = event.at("silent").get<std::vector<int>>();
    if (silent.empty()) return;
    std::fprintf(stderr, "no answer from %s\n", comm::rank_list(silent).c_str());
    status = exit_failure;
  });
}

}  // namespace tesserae::cli
