#include <CLI/CLI.hpp>
#include <cstdio>
#include <memory>
#include <string>

#include "cli/ask.h"
#include "cli/numbers.h"
#include "cli/verbs.h"
#include "tesserae/monitor/requests.h"

namespace tesserae::cli {

void add_trace(CLI::App& program, int& status) {
  struct Arguments {
    std::string folder;
    int64_t steps = 3;
    double wait_seconds = 300;
  };
  auto arguments = std::make_shared<Arguments>();
  CLI::App* verb = program.add_subcommand("trace", "Record what all ranks of a run do in its next steps");
  verb->add_option("RUN_DIR", arguments->folder, "The run folder")->required();
  verb->add_option("--steps", arguments->steps, "How many")
      ->check(CLI::Range(int64_t{1}, monitor::most_traced_steps))
      ->capture_default_str();
  verb->add_option("--wait", arguments->wait_seconds, "How long to wait for these steps")
      ->check(positive())
      ->type_name("SECONDS")
      ->capture_default_str();
  verb->footer(
      "The trace goes to RUN_DIR/monitor/trace-STEP.json, for ui.perfetto.dev or chrome://tracing: a process for each\n"
      "rank, with what its training thread, its gather lane and its reduce lane did, by unit. Training goes on at the\n"
      "same speed: ranks time their steps anyway. Clocks of ranks are not compared: each begins at 0.\n"
      "It talks to the run through RUN_DIR/monitor.sock: on the host of its rank 0, as the user that started it.");
  verb->callback([arguments, &status] {
    const dial::Json event =
        ask_monitor(arguments->folder, {{"ask", "trace"}, {"steps", arguments->steps}}, arguments->wait_seconds);
    std::printf("steps %lld to %lld: %s\n", event.at("first").get<long long>(), event.at("last").get<long long>(),
                event.at("file").get<std::string>().c_str());
    status = 0;
  });
}

}  // namespace tesserae::cli
