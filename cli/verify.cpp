#include "tesserae/checkpoint/verify.h"

#include <cstdio>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "cli/checkpoints.h"
#include "cli/live_line.h"
#include "cli/token_files.h"
#include "cli/verbs.h"
#include "tesserae/checkpoint/reader.h"
#include "tesserae/os/clock.h"

namespace tesserae::cli {
namespace {

struct VerifyArguments {
  std::string path;
  bool quiet = false;
};

/// For the progress only: what is wrong is found by verify().
uint64_t size_of(const os::Path& path) {
  try {
    return checkpoint::Checkpoint::open(path).manifest().bytes();
  } catch (const Error&) {
    return 0;
  }
}

/// True if there is no fault.
bool check(const os::Path& path, bool quiet) {
  const os::TimePoint begin = os::now();
  checkpoint::VerifyResult result;
  {
    LiveLine line(path.native(), size_of(path));
    result = checkpoint::verify(path, [&line](uint64_t bytes) { line.update(bytes); });
  }
  for (const checkpoint::Fault& fault : result.faults) std::printf("%s\n", fault.text().c_str());
  const double seconds = std::chrono::duration<double>(os::now() - begin).count();
  if (!quiet || !result.faults.empty()) {
    std::printf("%s: %s, %d files, %s in %.1f s\n", path.c_str(),
                result.faults.empty() ? "good" : cat(result.faults.size(), " faults").c_str(), result.files,
                readable_bytes(result.bytes).c_str(), seconds);
  }
  return result.faults.empty();
}

int run_verify(const VerifyArguments& arguments) {
  if (os::files().status(arguments.path).kind == os::FileKind::file) {
    return verify_token_file(arguments.path, arguments.quiet);
  }
  bool good = true;
  for (const os::Path& path : checkpoints_at(arguments.path)) good = check(path, arguments.quiet) && good;
  return good ? 0 : exit_failure;
}

}  // namespace

void add_verify(CLI::App& program, int& status) {
  auto arguments = std::make_shared<VerifyArguments>();
  CLI::App* verb =
      program.add_subcommand("verify", "Check every byte of checkpoints or of a token file against their checksums");
  verb->add_option("PATH", arguments->path, "A checkpoint, a folder of checkpoints, a run folder or a token file")
      ->required()
      ->check(CLI::ExistingPath);
  verb->add_flag("-q,--quiet", arguments->quiet, "Print faults only");
  verb->footer(
      "A line for each fault, with file, tensor and offset, then one for each checkpoint; of a token file its first "
      "fault.\n"
      "Exit status: 0 all bytes are what was written; 1 some are not, or could not be read.");
  verb->callback([arguments, &status] { status = run_verify(*arguments); });
}

}  // namespace tesserae::cli
