#include "bench/program.h"

#include <ATen/Parallel.h>

#include <CLI/CLI.hpp>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <nlohmann/json.hpp>

#include "bench/device.h"
#include "bench/start_ranks.h"

namespace tesserae::bench {

int run_program(const char* name, CLI::App& app, int argc, char** argv, const Measure& measure,
                const std::string& backend) {
  int ranks = 0;
  std::string file, device = "cpu";
  app.add_option("--nproc", ranks, "start so many ranks on this host");
  app.add_option("--json", file, "where rank 0 writes its report; default: standard output");
  app.add_option("--device", device)->check(CLI::IsMember(device_names));
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return app.exit(error);
  }
  try {
    if (ranks > 0 && std::getenv("RANK") == nullptr) return start_ranks(ranks, argc, argv);
    at::set_num_threads(1);
    comm::FabricOptions how;
    how.backend = device == "sim" ? "staged" : backend;
    const auto world = mesh::World::from_environment();
    how.device = device_of(device, world.launch().local_rank, backend);
    const auto fabric = comm::Fabric::connect(world, how);
    const nlohmann::json report = measure(fabric);
    if (fabric->rank() != 0) return 0;
    if (file.empty()) {
      std::printf("%s\n", report.dump(1).c_str());
    } else {
      std::ofstream(file) << report.dump(1) << "\n";
    }
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s: %s\n", name, error.what());
    return 1;
  }
  return 0;
}

}  // namespace tesserae::bench
