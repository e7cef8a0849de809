#include <CLI/CLI.hpp>
#include <cstdio>
#include <memory>
#include <string>
#include <vector>

#include "cli/ask.h"
#include "cli/numbers.h"
#include "cli/verbs.h"
#include "tesserae/base/error.h"
#include "tesserae/config/json.h"
#include "tesserae/dial/client.h"
#include "tesserae/os/seconds.h"

namespace tesserae::cli {
namespace {

using dial::Json;

struct DialArguments {
  std::string folder;
  int degree = 0;                    // 0: not given
  std::vector<int> degrees;          // empty: not given
  int experts = 0;                   // 0: not given
  std::vector<std::string> offload;  // STATE=TIER
  bool show = false, automatic = false;
  double wait_seconds = 300;
};

Json tiers_of(const std::vector<std::string>& assignments) {
  Json tiers = Json::object();
  for (const std::string& assignment : assignments) {
    const size_t sign = assignment.find('=');
    const std::string state = assignment.substr(0, sign);
    if (sign == std::string::npos || state.empty()) {
      throw config::ConfigError("", cat("--offload takes a state and its tier, like optimizer=disk, not '", assignment,
                                        "'; states: parameters, gradients, optimizer, all; tiers: device, host, disk"));
    }
    const std::string tier = assignment.substr(sign + 1);
    if (state != "all") {
      tiers[state] = tier;
    } else {
      for (const char* each : {"parameters", "gradients", "optimizer"}) tiers[each] = tier;
    }
  }
  return tiers;
}

Json request_of(const DialArguments& arguments) {
  if (arguments.experts > 0) return {{"ask", "experts"}, {"degree", arguments.experts}};
  const bool turns = arguments.degree > 0 || !arguments.degrees.empty() || !arguments.offload.empty();
  if (!turns) return {{"ask", arguments.automatic ? "auto" : "show"}};
  Json request = {{"ask", "turn"}};
  if (arguments.degree > 0) request["degree"] = arguments.degree;
  if (!arguments.degrees.empty()) request["degrees"] = arguments.degrees;
  if (!arguments.offload.empty()) request["offload"] = tiers_of(arguments.offload);
  return request;
}

/// "P=1 G=2 O=4, optimizer on disk", of two members of an event.
std::string setting_text(const Json& event, const char* degrees, const char* offload) {
  const auto tiers = event.contains(offload) ? dial::tiers_from(event.at(offload)) : offload::Tiers();
  return to_string(shard::Setting{dial::degrees_from(event.at(degrees)), tiers});
}

void print_status(const Json& event) {
  if (event.at("step").is_null() || event.at("step") == 0) {
    std::printf("the first step is not over yet\n");
    return;
  }
  const int experts = event.value("experts", 0);
  std::printf("step %lld: %s on %d ranks, %s%.1f ms a step, %.0f MB held by the fullest rank",
              event.at("step").get<long long>(), setting_text(event, "degrees", "offload").c_str(),
              event.at("ranks").get<int>(), experts > 0 ? cat("experts over ", experts, ", ").c_str() : "",
              1e3 * event.at("step_seconds").get<double>(), event.at("memory_bytes").get<double>() / 1e6);
  const double place = event.at("place_bytes");
  if (place > 0) std::printf(", %.0f %% of memory free", 100 * event.at("free_bytes").get<double>() / place);
  std::printf("\n");
  if (event.at("automatic").get<bool>()) {
    const Json& tuner = event.at("tuner");
    std::printf("auto: %s\n", tuner.is_string() ? tuner.get<std::string>().c_str() : "begins at the next step");
  }
  const Json& change = event.at("last_change");
  if (change.is_null()) return;
  std::printf("last change after step %lld: %s -> %s in %.3f s, %.1f MB moved (%s)\n",
              change.at("step").get<long long>(), setting_text(change, "from", "offload_from").c_str(),
              setting_text(change, "to", "offload_to").c_str(), change.at("seconds").get<double>(),
              change.at("bytes").get<double>() / 1e6, change.at("why").get<std::string>().c_str());
}

void print_event(const Json& event) {
  const std::string name = event.at("event");
  if (name == "status") {
    print_status(event);
  } else if (name == "automatic") {
    std::printf("the run chooses its degrees itself from now on\n");
  } else if (name == "unchanged") {
    std::printf("%s: as it was\n", setting_text(event, "degrees", "offload").c_str());
  } else if (name == "changed") {
    std::printf("step %lld: %s -> %s in %.3f s, %.1f MB moved\n", event.at("step").get<long long>(),
                setting_text(event, "from", "offload_from").c_str(), setting_text(event, "to", "offload_to").c_str(),
                event.at("seconds").get<double>(), event.at("bytes").get<double>() / 1e6);
  } else if (name == "shared_out") {
    std::printf("step %lld: experts over %d -> %d ranks, %s, in %.3f s\n", event.at("step").get<long long>(),
                event.at("from").get<int>(), event.at("to").get<int>(),
                to_string(dial::degrees_from(event.at("degrees"))).c_str(), event.at("seconds").get<double>());
  } else if (name == "timed") {
    std::printf("step %lld took %.1f ms; before the change %.1f ms\n", event.at("step").get<long long>(),
                1e3 * event.at("step_seconds").get<double>(), 1e3 * event.at("step_seconds_before").get<double>());
  }
  std::fflush(stdout);
}

int run_dial(const DialArguments& arguments) {
  const bool experts = arguments.experts > 0;
  const int asked =
      (arguments.degree > 0) + !arguments.degrees.empty() + arguments.automatic + arguments.show + experts;
  const bool only_shows = arguments.automatic || arguments.show || experts;
  if (asked > 1 || (only_shows && !arguments.offload.empty())) {
    throw config::ConfigError("",
                              "tesserae dial takes one of --degree, --degrees, --expert, --auto and --show; "
                              "--offload goes alone or with one of the first two");
  }
  const os::Deadline deadline(os::milliseconds(arguments.wait_seconds));
  dial::Client client(arguments.folder, request_of(arguments), deadline);
  while (true) {
    const std::optional<Json> event = client.next(deadline);
    if (!event) {
      throw IoError("dial", cat("the run in ", arguments.folder, " has not answered within ", arguments.wait_seconds,
                                " s; what it was asked for may still be done (--show tells; --wait waits longer)"));
    }
    if (event->at("event") == "error") throw InvalidArgument("dial", message_of(*event));
    try {
      print_event(*event);
    } catch (const Json::exception& error) {
      throw IoError("dial", cat("the run in ", arguments.folder, " is of another version: ", error.what()));
    }
    if (dial::is_last(*event)) return 0;
  }
}

}  // namespace

void add_dial(CLI::App& program, int& status) {
  auto arguments = std::make_shared<DialArguments>();
  CLI::App* verb = program.add_subcommand(
      "dial", "Change the sharding degree of a run while it trains, or where its state lies, or show both");
  verb->add_option("RUN_DIR", arguments->folder, "The run folder")->required();
  verb->add_option("--degree", arguments->degree, "Shard all state over D ranks; 1 replicates it")
      ->check(CLI::Range(1, 1 << 20))
      ->type_name("D");
  verb->add_option("--degrees", arguments->degrees,
                   "The three degrees, each dividing the next: of parameters, gradients and optimizer state")
      ->delimiter(',')
      ->expected(3)
      ->type_name("P,G,O");
  verb->add_option("--expert", arguments->experts,
                   "Share experts out over E ranks; their state goes through a checkpoint (docs/experts.md)")
      ->check(CLI::Range(1, 1 << 20))
      ->type_name("E");
  verb->add_option("--offload", arguments->offload,
                   "Where a part of the state lies from now on: parameters, gradients, optimizer or all; device, host "
                   "or disk")
      ->delimiter(',')
      ->type_name("STATE=TIER");
  verb->add_flag("--auto", arguments->automatic, "The run chooses by itself from now on");
  verb->add_flag("--show", arguments->show, "Show degrees, step time and memory (the default)");
  verb->add_option("--wait", arguments->wait_seconds, "How long to wait for the change and two steps after it")
      ->check(positive())
      ->type_name("SECONDS")
      ->capture_default_str();
  verb->footer(
      "It talks to the run through RUN_DIR/dial.sock: on the host of its rank 0, as the user that started it.\n"
      "The change takes place at the next step edge; training goes on with the same numbers. A change by hand takes\n"
      "the dial from an automatic choice until --auto gives it back.\n"
      "It prints how long the change took, how many bytes all ranks sent, and the step time before and after.");
  verb->callback([arguments, &status] { status = run_dial(*arguments); });
}

}  // namespace tesserae::cli
