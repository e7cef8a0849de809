#pragma once

#include <functional>
#include <memory>
#include <nlohmann/json_fwd.hpp>
#include <string>

#include "tesserae/comm/fabric.h"

namespace CLI {
class App;
}

namespace tesserae::bench {

/// What makes the report of a program. All ranks call it, with one thread each; rank 0's is written.
using Measure = std::function<nlohmann::json(const std::shared_ptr<comm::Fabric>& fabric)>;

/// main() of a program that measures a job of ranks; `app` has its options, and gets --nproc and --json. Ranks come
/// from a launcher's environment; with --nproc N the program starts itself again as N local ranks. The report goes to
/// the file of --json, or to standard output; --device says where it computes (device.h). Returns the exit status:
/// errors are told on standard error, after `name`. `backend`: of the fabric; read after the command line was.
int run_program(const char* name, CLI::App& app, int argc, char** argv, const Measure& measure,
                const std::string& backend = "auto");

}  // namespace tesserae::bench
