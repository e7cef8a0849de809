#include <CLI/CLI.hpp>
#include <cstdio>
#include <memory>
#include <string>

#include "cli/ask.h"
#include "cli/numbers.h"
#include "cli/verbs.h"
#include "tesserae/base/error.h"

namespace tesserae::cli {

void add_scale(CLI::App& program, int& status) {
  struct Arguments {
    std::string folder;
    int ranks = 0;
    double wait_seconds = 300;
  };
  auto arguments = std::make_shared<Arguments>();
  CLI::App* verb = program.add_subcommand("scale", "Change the number of ranks of a run while it trains");
  verb->add_option("RUN_DIR", arguments->folder, "The run folder")->required();
  verb->add_option("--ranks", arguments->ranks, "So many ranks from the next step edge on")->required()->type_name("N");
  verb->add_option("--wait", arguments->wait_seconds, "How long to wait until the run goes on")
      ->check(positive())
      ->type_name("SECONDS")
      ->capture_default_str();
  verb->footer(
      "For a run of `tesserae train --nproc`, or of a script inside tsm.elastic under `tesserae run`, of two or more\n"
      "ranks on one host (on several hosts only to fewer). The step at hand is finished and saved as a checkpoint;\n"
      "ranks that stay keep their processes. A step has the same samples as before, so that losses are those of a\n"
      "run that nobody scales, to rounding. Degrees that the new number does not allow become the nearest ones.\n"
      "It talks to the run through RUN_DIR/dial.sock: on the host of its rank 0, as the user that started it.");
  verb->callback([arguments, &status] {
    (void)status;
    const dial::Json event =
        ask_dial(arguments->folder, {{"ask", "scale"}, {"ranks", arguments->ranks}}, arguments->wait_seconds);
    try {
      std::printf("step %lld: %d -> %d ranks, %s, in %.3f s\n", event.at("step").get<long long>(),
                  event.at("from").get<int>(), event.at("to").get<int>(),
                  to_string(dial::degrees_from(event.at("degrees"))).c_str(), event.at("seconds").get<double>());
    } catch (const dial::Json::exception& error) {
      throw IoError("ask", cat("the run in ", arguments->folder, " is of another version: ", error.what()));
    }
  });
}

}  // namespace tesserae::cli
