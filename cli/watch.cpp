#include <CLI/CLI.hpp>
#include <cstdio>
#include <memory>
#include <string>

#include "cli/verbs.h"
#include "tesserae/os/clock.h"
#include "tesserae/os/descriptor.h"
#include "tesserae/os/signals.h"
#include "tesserae/watch/server.h"

namespace tesserae::cli {
namespace {

struct WatchArguments {
  std::string folder;
  int port = 0;
  watch::ServerOptions options;
};

int run_watch(WatchArguments arguments) {
  const os::StopSignals stop({os::signal_interrupt, os::signal_terminate});
  arguments.options.port = static_cast<uint16_t>(arguments.port);
  const watch::Server server(arguments.folder, arguments.options);
  std::printf("%s\n", server.url().c_str());
  std::fflush(stdout);
  while (stop.first() == 0) {
    os::wait_readable({stop.descriptor()}, os::Deadline(std::chrono::hours(1)));
  }
  return 0;
}

}  // namespace

void add_watch(CLI::App& program, int& status) {
  auto arguments = std::make_shared<WatchArguments>();
  CLI::App* verb = program.add_subcommand("watch", "Serve a page that shows a run: what is slow, and why");
  verb->add_option("RUN_DIR", arguments->folder, "The run folder, of a run that trains or one that is over")
      ->required();
  verb->add_option("--port", arguments->port, "The port to serve at; 0: a free one")
      ->check(CLI::Range(0, 65535))
      ->capture_default_str();
  verb->add_option("--host", arguments->options.host, "Who can connect: 127.0.0.1 this host only, 0.0.0.0 the network")
      ->capture_default_str()
      ->type_name("ADDRESS");
  verb->add_option(
      "--token", arguments->options.token,
      "Who does not name it sees nothing; made at random where the network can connect, and with --allow-control");
  verb->add_flag("--allow-control", arguments->options.allow_control, "The page may turn the dial of the run");
  verb->footer(
      "Prints the address of the page on one line and serves it until Ctrl-C. It only reads RUN_DIR, so it may run on\n"
      "any host that sees the folder; to turn the dial it must run on the host of rank 0, as the run's user.\n"
      "The job is on another machine? There: tesserae watch RUN_DIR --port 8265. Here: ssh -L 8265:localhost:8265 "
      "HOST,\n"
      "then open http://localhost:8265/.\n"
      "For Prometheus the same figures are at /metrics.\n"
      "Exit status: 0 ended by Ctrl-C or SIGTERM; 1 no such folder, no run in it, or the port is in use.");
  verb->callback([arguments, &status] { status = run_watch(*arguments); });
}

}  // namespace tesserae::cli
