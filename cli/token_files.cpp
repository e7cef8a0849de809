#include "cli/token_files.h"

#include <chrono>
#include <cstdio>
#include <nlohmann/json.hpp>
#include <string>

#include "cli/checkpoints.h"
#include "cli/live_line.h"
#include "cli/verbs.h"
#include "tesserae/base/error.h"
#include "tesserae/config/json.h"
#include "tesserae/data/token_file.h"
#include "tesserae/os/clock.h"

namespace tesserae::cli {

int inspect_token_file(const os::Path& path, bool json) {
  const data::TokenFileInfo info = data::TokenFile(path).info();
  const std::string dtype = cat("uint", 8 * info.bytes_per_token);
  const uint64_t bytes = os::files().status(path).size;
  if (json) {
    nlohmann::ordered_json result = {{"path", path.native()},         {"tokens", info.tokens},   {"dtype", dtype},
                                     {"vocabulary", info.vocabulary}, {"document_end", nullptr}, {"bytes", bytes}};
    if (info.document_end) result["document_end"] = *info.document_end;
    std::printf("%s\n", result.dump(2).c_str());
    return 0;
  }
  std::printf("%s\n", path.c_str());
  std::printf("tokens    %s of %s, %s\n", grouped(static_cast<uint64_t>(info.tokens)).c_str(), dtype.c_str(),
              readable_bytes(bytes).c_str());
  std::printf("from      a vocabulary of %s\n", grouped(static_cast<uint64_t>(info.vocabulary)).c_str());
  if (info.document_end) std::printf("documents end with token %lld\n", static_cast<long long>(*info.document_end));
  return 0;
}

int verify_token_file(const os::Path& path, bool quiet) {
  const os::TimePoint begin = os::now();
  data::TokenFile file(path);
  const uint64_t bytes = os::files().status(path).size;
  try {
    LiveLine line(path.native(), bytes);
    file.verify([&line](uint64_t done) { line.update(done); });
  } catch (const Corruption& error) {
    std::printf("%s\n", config::without_function(error).c_str());
    return exit_failure;
  }
  const double seconds = std::chrono::duration<double>(os::now() - begin).count();
  if (!quiet) {
    std::printf("%s: good, %s tokens, %s in %.1f s\n", path.c_str(),
                grouped(static_cast<uint64_t>(file.info().tokens)).c_str(), readable_bytes(bytes).c_str(), seconds);
  }
  return 0;
}

}  // namespace tesserae::cli
